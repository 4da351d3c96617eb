"""Adapter of AirLLM: transformers whose modules are read from disk one after the other, for every forward pass.

`python -m h2o_flexgen.baselines.airllm FOLDER [prepare]`. It takes a checkpoint and writes it anew, a file per layer;
random weights are saved once, and their first copy is removed when it has the second. Of a mixture it reads whole
layers. It is written for one GPU and gets the CPU here, as its device; its 4 and 8 bits want CUDA.
"""

from __future__ import annotations

import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from airllm import AutoModel
from airllm.airllm_base import AirLLMBaseModel

from h2o_flexgen.baselines.transformers import saved_checkpoint, start, timed, use_cuda
from h2o_flexgen.baselines.work import AdapterWork, Outcome, run


def measure(folder: str) -> Outcome:
    work = start(folder)
    started = time.perf_counter()
    model = _opened(work, folder).model
    load_s = time.perf_counter() - started
    return timed(model, work, load_s, {"airllm": version("airllm")})


def prepare(folder: str) -> None:
    work = start(folder)
    _opened(work, folder)
    if work.folder is None:
        for shard in Path(saved_checkpoint(work, folder)).glob("model-*.safetensors"):
            shard.unlink()


def _opened(work: AdapterWork, folder: str) -> AirLLMBaseModel:
    # It is given token ids, and random weights have no tokenizer.
    AirLLMBaseModel.get_tokenizer = lambda self, hf_token=None: None
    layers = Path(work.scratch) / "layers"
    layers.mkdir(parents=True, exist_ok=True)
    return AutoModel.from_pretrained(
        saved_checkpoint(work, folder),
        device="cuda:0" if use_cuda(work) else "cpu",
        dtype=getattr(torch, work.dtype),
        layer_shards_saving_path=str(layers),
    )


if __name__ == "__main__":
    sys.exit(run(measure, prepare))
