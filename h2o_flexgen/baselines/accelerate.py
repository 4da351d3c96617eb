"""Adapter of accelerate: transformers whose weights are spread over GPU, host memory and disk by `device_map="auto"`.

`python -m h2o_flexgen.baselines.accelerate FOLDER`. Offloading needs a checkpoint: random weights are saved once.
Without a GPU, weights that fit stay in host memory; the others lie on the disk, as whole layers, and are read for
every forward pass.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers

from h2o_flexgen.baselines.transformers import kv_token_bytes, prepare, saved_checkpoint, start, timed, use_cuda
from h2o_flexgen.baselines.work import AdapterWork, Outcome, run

PROCESS_BYTES = 3 << 27
"""Of host memory for the interpreter and the libraries."""


def measure(folder: str) -> Outcome:
    work = start(folder)
    checkpoint = saved_checkpoint(work, folder)
    started = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint,
        dtype=getattr(torch, work.dtype),
        attn_implementation="sdpa",
        device_map=_device_map(work, checkpoint),
        offload_folder=str(Path(work.scratch) / "offloaded"),
    ).eval()
    load_s = time.perf_counter() - started
    places = Counter(str(place) for place in getattr(model, "hf_device_map", {"": "cpu"}).values())
    return timed(model, work, load_s, {"accelerate": accelerate.__version__}, modules_by_place=dict(places))


def _device_map(work: AdapterWork, checkpoint: str) -> Any:
    """A place for every module: the GPU first, then host memory, then disk, by accelerate's own arithmetic."""
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    with accelerate.init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, work.dtype))
    model.tie_weights()
    working = _working(work, config)
    room = 1 << 62 if work.cpu_mem is None else max(1, work.cpu_mem - PROCESS_BYTES - working)
    limits: dict[int | str, int] = {"cpu": room}
    if use_cuda(work):
        free, _ = torch.cuda.mem_get_info()
        limits = {0: max(0, (work.gpu_mem or free) - working), "cpu": work.cpu_mem or room}
    kept_whole = list(model._no_split_modules)
    return accelerate.infer_auto_device_map(model, limits, no_split_module_classes=kept_whole, dtype=model.dtype)


def _working(work: AdapterWork, config: Any) -> int:
    """Bytes of KV cache, of a prompt's activations in the widest layer, of logits, and of two tables on their way."""
    wide, batch, prompt = getattr(torch, work.dtype).itemsize, len(work.prompts), len(work.prompts[0])
    tokens, layers = prompt + max(work.gen_len, work.room_len), config.num_hidden_layers
    cache = batch * tokens * kv_token_bytes(config, work.dtype) * (layers + 1) // layers  # a layer's is copied to grow
    inner = getattr(config, "ffn_dim", None) or getattr(config, "intermediate_size", 4 * config.hidden_size)
    activations = batch * prompt * wide * 4 * (config.hidden_size + inner)
    return cache + activations + config.vocab_size * (8 * batch + 2 * wide * config.hidden_size)


if __name__ == "__main__":
    sys.exit(run(measure, prepare))
