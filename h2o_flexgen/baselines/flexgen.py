"""Adapter of FlexGen 0.1.8: `python -m h2o_flexgen.baselines.flexgen FOLDER`. OPT only; weights of ones for measuring.

The published package, driven as its own benchmark drives it. On a GPU by a policy like its authors': `flexgen_gpu`.
Without one it is shimmed (`flexgen_cpu`): one GPU batch of all prompts, cache and hidden states on what stands for the
GPU, weights there as far as they fit and the rest on the disk.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flexgen import flex_opt, pytorch_backend
from flexgen.compression import CompressionConfig
from flexgen.timer import timers
from flexgen.utils import ExecutionEnv

from h2o_flexgen.baselines import flexgen_cpu
from h2o_flexgen.baselines.flexgen_gpu import Placed, place
from h2o_flexgen.baselines.flexgen_opt import config_of, converted
from h2o_flexgen.baselines.generation import start, use_cuda
from h2o_flexgen.baselines.work import WARMUP_NEW, WARMUP_PROMPT, CannotRun, Outcome, Work, disk_bytes, give, run
from h2o_flexgen.cores import CoreCount

_PROCESS_BYTES = 3 << 28  # the interpreter, its libraries, and a layer or two in flight
_UNCOMPRESSED = CompressionConfig(num_bits=4, group_size=64, group_dim=0, symmetric=False)  # never used, but asked for


def prepare(folder: str) -> None:
    """Converts the checkpoint, where there is one."""
    config, work = config_of(folder), start(folder)
    if work.folder is not None:
        converted(work, config)


def main(folder: str) -> int:
    """Runs the work in `folder`."""
    work = start(folder)
    on_gpu, dtype = use_cuda(work), getattr(torch, work.dtype)
    config = config_of(folder)
    if on_gpu and dtype != torch.float16:
        raise CannotRun(f"FlexGen computes in float16 on a GPU, not in {work.dtype}: --dtype float16")
    placed = _on_gpu(work, config) if on_gpu else _in_memory(work, config)
    if placed.weights_gpu < 100 and dtype.itemsize != 2:
        raise CannotRun(f"shimmed to the CPU, FlexGen's disk holds numbers of two bytes, not {work.dtype}")
    path = "_DUMMY_" if work.folder is None else converted(work, config)
    if not on_gpu:
        flexgen_cpu.without_gpu(dtype)
    started = time.perf_counter()
    gpu = pytorch_backend.TorchDevice("cuda:0") if on_gpu else flexgen_cpu.gpu_in_memory()
    cpu = pytorch_backend.TorchDevice("cpu")
    disk = pytorch_backend.TorchDisk(str(Path(work.scratch) / "offloaded"))
    env = ExecutionEnv(gpu=gpu, cpu=cpu, disk=disk, mixed=pytorch_backend.TorchMixedDevice([gpu, cpu, disk]))
    try:
        model = flex_opt.OptLM(config, env, path, _policy(placed))
        load_s = time.perf_counter() - started
        detail = {"placed": asdict(placed), "gpu": "cuda" if on_gpu else "host memory", "dtype": work.dtype}
        outcome = _timed(model, work, load_s, detail)
    finally:
        disk.close_copy_threads()
    return give(outcome)


def _on_gpu(work: Work, config: Any) -> Placed:
    """On a GPU: within its cap and host memory's, or what is free of them."""
    gpu = work.gpu_mem or torch.cuda.mem_get_info()[0]
    host = work.cpu_mem or _available()
    rows, prompt_len = len(work.prompts), len(work.prompts[0])
    return place(config, rows, prompt_len, work.gen_len, gpu, host - _PROCESS_BYTES)


def _available() -> int:
    """Bytes of host memory that may be taken without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _in_memory(work: Work, config: Any) -> Placed:
    """Without a GPU: all prompts at once, and the weights that host memory has no room for on the disk."""
    return Placed(len(work.prompts), 1, _share_in_memory(work, config), 0, cache_on_gpu=True)


def _share_in_memory(work: Work, config: Any) -> int:
    """Percent of the weights that host memory has room for beside the cache."""
    if work.cpu_mem is None:
        return 100
    wide, rows = getattr(torch, work.dtype).itemsize / 2, len(work.prompts)
    length = len(work.prompts[0]) + work.gen_len
    # Of a prompt's attention it holds the scores of all heads three times over, and of its output all logits.
    scores = 3 * rows * config.n_head * len(work.prompts[0]) ** 2 * 2
    logits = rows * len(work.prompts[0]) * config.vocab_size * 2
    held = config.cache_bytes(rows, length) + 8 * config.hidden_bytes(rows, length) + max(scores, logits)
    table = 2 * config.vocab_size * config.input_dim
    weights = config.model_bytes() + table  # the head is a second copy
    # Its four copy threads each keep a relay that grows to the largest tensor; two tables may be on their way at once.
    room = work.cpu_mem - _PROCESS_BYTES - int(wide * (held + 6 * table))
    return max(0, min(100, int(100 * room / (wide * weights))))


def _policy(placed: Placed) -> Any:
    there = 100 if placed.cache_on_gpu else 0
    return flex_opt.Policy(
        gpu_batch_size=placed.gpu_batch_size,
        num_gpu_batches=placed.num_gpu_batches,
        w_gpu_percent=placed.weights_gpu,
        w_cpu_percent=placed.weights_cpu,
        cache_gpu_percent=there,
        cache_cpu_percent=100 - there,
        act_gpu_percent=there,
        act_cpu_percent=100 - there,
        overlap=True,
        sep_layer=True,
        pin_weight=True,
        cpu_cache_compute=False,
        attn_sparsity=1.0,
        compress_weight=False,
        comp_weight_config=_UNCOMPRESSED,
        compress_cache=False,
        comp_cache_config=_UNCOMPRESSED,
    )


def _timed(model: Any, work: Work, load_s: float, detail: dict[str, Any]) -> Outcome:
    model.generate([prompt[:WARMUP_PROMPT] for prompt in work.prompts], max_new_tokens=WARMUP_NEW)
    timers("generate").reset()
    cores = CoreCount()
    cores.start()
    read, started = disk_bytes(), time.perf_counter()
    ids = model.generate(work.prompts, max_new_tokens=work.gen_len)
    total_s, costs = time.perf_counter() - started, timers("generate").costs
    cores.stop()
    return Outcome(
        prefill_s=costs[0],
        decode_s=sum(costs[1:]),
        total_s=total_s,
        load_s=load_s,
        token_ids=np.asarray(ids)[:, len(work.prompts[0]) :].tolist(),
        versions={"flexgen": version("flexgen"), "torch": torch.__version__},
        detail=detail,
        disk_read_bytes=disk_bytes() - read,
        shared=cores.shared,
    )


if __name__ == "__main__":
    sys.exit(run(main, prepare))
