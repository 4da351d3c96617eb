"""Adapter of Hugging Face transformers, and what the adapters of systems built on it share.

`python -m h2o_flexgen.baselines.transformers FOLDER`: SDPA attention, `model.generate` with its default, dynamic KV
cache; with the `options` {"static": true} its static one. Runs in the environments of the peers too, so that it imports
nothing of this package but `work` and `cores`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from h2o_flexgen.baselines.work import WARMUP_NEW, WARMUP_PROMPT, AdapterWork, Outcome, disk_bytes, run
from h2o_flexgen.cores import CoreCount

SHARD_BYTES = 1 << 30
_SCALE = 0.02  # of random weights, as transformers initialises them
_POOL = 16_777_259
"""Random numbers that all tensors are copied from: a prime, so that no two rows of a matrix are the same of them."""
_INDEX = "model.safetensors.index.json"


class GenerationTimer(transformers.StoppingCriteria):
    """Never stops anything; notes when the first new token of every sequence was there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.read, self.cores = disk_bytes(), CoreCount()
        self.cores.start()
        self.started = self.now()
        self.first: float | None = None

    def now(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        if self.first is None:
            self.first = self.now()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]

    def outcome(self, tokens: torch.Tensor, load_s: float, versions: dict[str, str], detail: dict[str, Any]) -> Outcome:
        """The measurements from the making of this timer until now; `tokens` (n, new) are the result."""
        ended = self.now()
        self.cores.stop()
        if self.first is None:
            raise RuntimeError("generate made no token")
        return Outcome(
            prefill_s=self.first - self.started,
            decode_s=ended - self.first,
            total_s=ended - self.started,
            load_s=load_s,
            token_ids=tokens.tolist(),
            versions={**versions, "transformers": transformers.__version__, "torch": torch.__version__},
            detail=detail,
            disk_read_bytes=disk_bytes() - self.read,
            shared=self.cores.shared,
        )


def start(folder: str) -> AdapterWork:
    """The work in `folder`, with this process set up for it: threads, silence, the cap on GPU memory."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    work = AdapterWork.read(Path(folder))
    torch.set_num_threads(work.threads)
    if use_cuda(work) and work.gpu_mem is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, work.gpu_mem / total))
    return work


def use_cuda(work: AdapterWork) -> bool:
    return work.device == "cuda" or (work.device == "auto" and torch.cuda.is_available())


def model_in_memory(work: AdapterWork, folder: str, attention: str | None = None) -> Any:
    """The checkpoint, or the model of `folder`/config.json with random weights, on the device that the work is for.

    attention: None is transformers' own choice: SDPA, but for the few models that it has none for, such as Gemma 2.
    """
    dtype = getattr(torch, work.dtype)
    if work.folder is None:
        torch.manual_seed(work.seed)
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            work.folder, dtype=dtype, attn_implementation=attention
        )
    return model.to("cuda" if use_cuda(work) else "cpu").eval()


def timed(
    model: Any, work: AdapterWork, load_s: float, versions: dict[str, str], *, static: bool = False, **detail: Any
) -> Outcome:
    """A warm-up, then `model.generate` on all prompts at once, with its default cache or with a static one."""
    detail |= {"attention": model.config._attn_implementation, "threads": torch.get_num_threads()}
    # Taking eos away is cheaper than suppressing it at every step, and gives a fixed length too.
    model.generation_config.eos_token_id = None
    # Not model.device, which is "meta" where all weights are offloaded.
    prompts = torch.tensor(work.prompts, device="cuda" if use_cuda(work) else "cpu")
    cache = _static_cache(work) if static else {}
    room = None if static else _room(model.config, work, prompts.device)
    generate(model, prompts[:, :WARMUP_PROMPT], WARMUP_NEW, cache)
    timer = GenerationTimer(prompts.device)
    tokens = generate(model, prompts, work.gen_len, cache, timer)
    del room
    facts = {"dtype": str(model.dtype).removeprefix("torch."), "device": str(prompts.device), **cache}
    return timer.outcome(tokens, load_s, versions, {**facts, **detail})


def kv_token_bytes(config: Any, dtype: str) -> int:
    """Bytes of keys and values of one token in all layers of a transformers `config`."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    wide = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * wide * getattr(torch, dtype).itemsize)


def _room(config: Any, work: AdapterWork, device: torch.device) -> torch.Tensor:
    """Memory, written to, for what a full run's cache would grow by after this short run: is there that much?"""
    tokens = len(work.prompts) * max(0, work.room_len - work.gen_len)
    return torch.ones(tokens * kv_token_bytes(config, work.dtype), dtype=torch.uint8, device=device)


def _static_cache(work: AdapterWork) -> dict[str, Any]:
    """Arguments of `generate` for keys and values that are allocated whole and written in place.

    The default cache is copied to grow by a token. This one has the length of the full run in a short run, too: its
    zeros are written at once, and attention goes over all of it at every step. Compiling, which `generate` then does by
    itself on a GPU and does not on a CPU, is out: the cache alone is to make the difference.
    """
    length = len(work.prompts[0]) + max(work.gen_len, work.room_len) - 1  # nothing follows the last token
    return {"cache_implementation": "static", "max_cache_len": length, "disable_compile": True}


@torch.inference_mode()
def generate(
    model: Any, prompts: torch.Tensor, new_tokens: int, cache: dict[str, Any], timer: GenerationTimer | None = None
) -> torch.Tensor:
    """`new_tokens` greedy tokens for each row of `prompts` (n, S), as (n, new_tokens); `cache` says what holds keys."""
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new_tokens,
        do_sample=False,
        use_cache=True,
        stopping_criteria=transformers.StoppingCriteriaList([timer] if timer else []),
        **cache,
    )
    return output[:, prompts.shape[1] :]


def saved_checkpoint(work: AdapterWork, folder: str) -> str:
    """The folder of a checkpoint: the one given, or one with random weights, made in the scratch folder once.

    Made shard by shard, so that a model larger than memory can be made; its pages are dropped from the page cache.
    """
    if work.folder is not None:
        return work.folder
    target = Path(work.scratch) / f"random-{work.dtype}-{work.seed}"
    if not (target / _INDEX).is_file():
        target.mkdir(parents=True, exist_ok=True)
        (target / "config.json").write_bytes((Path(folder) / "config.json").read_bytes())
        _save_random(target, work)
    return str(target)


def _save_random(target: Path, work: AdapterWork) -> None:
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(target)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, work.dtype))
    generator = torch.Generator().manual_seed(work.seed)
    pool = torch.empty(_POOL).normal_(0, _SCALE, generator=generator).to(model.dtype)
    shapes = dict(model.named_parameters())  # tied ones once
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=SHARD_BYTES)
    drawn = 0
    for file, names in split.filename_to_tensors.items():
        tensors = {}
        for name in names:
            noise = _drawn(pool, shapes[name].shape, start=drawn * 1_000_003)
            tensors[name] = noise + 1 if "norm" in name and name.endswith("weight") else noise
            drawn += 1
        save_file(tensors, target / file, metadata={"format": "pt"})
        with (target / file).open("rb") as stored:
            os.fsync(stored.fileno())
            os.posix_fadvise(stored.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    (target / _INDEX).write_text(json.dumps(index), encoding="utf-8")


def _drawn(pool: torch.Tensor, shape: torch.Size, start: int) -> torch.Tensor:
    """The numbers of `pool` from `start` on, over and over: drawing anew for every weight takes minutes."""
    begun = pool.roll(-(start % len(pool)))
    return begun.repeat(-(-shape.numel() // len(pool)))[: shape.numel()].view(shape).clone()


def prepare(folder: str) -> None:
    """Saves random weights, where there is no checkpoint: for adapters that load one."""
    saved_checkpoint(start(folder), folder)


def measure(folder: str) -> Outcome:
    work = start(folder)
    started = time.perf_counter()
    model = model_in_memory(work, folder)
    load_s = time.perf_counter() - started
    return timed(model, work, load_s, {}, static=work.options.get("static", False))


if __name__ == "__main__":
    sys.exit(run(measure))
