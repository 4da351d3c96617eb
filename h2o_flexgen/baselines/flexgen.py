"""Adapter of FlexGen 0.1.8: `python -m h2o_flexgen.baselines.flexgen FOLDER`. OPT only; weights of ones for measuring.

The published package, driven as its own benchmark drives it. On a GPU by a policy like its authors'
(`flexgen_placement`). Without one it runs on host memory, by replacing at run time the calls that ask for a GPU; none
of its code is copied. Its GPU becomes host memory, so a copy to it costs a copy in memory; its streams do nothing; its
float16 becomes bfloat16 or float32, as float16 on a CPU would be an order of magnitude slower and flatter the systems
beside it.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from flexgen import flex_opt, pytorch_backend, utils
from flexgen.compression import CompressionConfig
from flexgen.opt_config import OptConfig
from flexgen.timer import timers
from flexgen.utils import ExecutionEnv

from h2o_flexgen.baselines.flexgen_placement import Placed, place, place_in_memory
from h2o_flexgen.baselines.transformers import start, use_cuda
from h2o_flexgen.baselines.work import WARMUP_NEW, WARMUP_PROMPT, AdapterWork, CannotRun, Outcome, disk_bytes, run
from h2o_flexgen.cores import CoreCount

_PROCESS_BYTES = 3 << 28  # the interpreter, its libraries, and a layer or two in flight
_UNCOMPRESSED = CompressionConfig(num_bits=4, group_size=64, group_dim=0, symmetric=False)  # never used, but asked for


def prepare(folder: str) -> None:
    config, work = config_of(folder), start(folder)
    if work.folder is not None:
        converted(work, config)


def measure(folder: str) -> Outcome:
    work = start(folder)
    on_gpu, dtype = use_cuda(work), getattr(torch, work.dtype)
    config = config_of(folder)
    if on_gpu and dtype != torch.float16:
        raise CannotRun(f"FlexGen computes in float16 on a GPU, not in {work.dtype}: --dtype float16")
    placed = _placed(work, config, on_gpu, dtype)
    if placed.weights_gpu < 100 and dtype.itemsize != 2:
        raise CannotRun(f"shimmed to the CPU, FlexGen's disk holds numbers of two bytes, not {work.dtype}")
    path = "_DUMMY_" if work.folder is None else converted(work, config)
    if not on_gpu:
        without_gpu(dtype)
    started = time.perf_counter()
    gpu = pytorch_backend.TorchDevice("cuda:0") if on_gpu else gpu_in_memory()
    cpu = pytorch_backend.TorchDevice("cpu")
    disk = pytorch_backend.TorchDisk(str(Path(work.scratch) / "offloaded"))
    env = ExecutionEnv(gpu=gpu, cpu=cpu, disk=disk, mixed=pytorch_backend.TorchMixedDevice([gpu, cpu, disk]))
    try:
        model = flex_opt.OptLM(config, env, path, _policy(placed))
        load_s = time.perf_counter() - started
        detail = {"placed": asdict(placed), "gpu": "cuda" if on_gpu else "host memory", "dtype": work.dtype}
        return _timed(model, work, load_s, detail)
    finally:
        disk.close_copy_threads()


def _placed(work: AdapterWork, config: Any, on_gpu: bool, dtype: torch.dtype) -> Placed:
    """Within the caps; where a GPU has none, within what is free of it and of host memory."""
    shape = (config, len(work.prompts), len(work.prompts[0]), work.gen_len)
    if on_gpu:
        gpu, host = work.gpu_mem or torch.cuda.mem_get_info()[0], work.cpu_mem or _available()
        return place(*shape, gpu, host - _PROCESS_BYTES)
    return place_in_memory(*shape, dtype.itemsize, None if work.cpu_mem is None else work.cpu_mem - _PROCESS_BYTES)


def _available() -> int:
    """Bytes of host memory that may be taken without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


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


def _timed(model: Any, work: AdapterWork, load_s: float, detail: dict[str, Any]) -> Outcome:
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


def config_of(folder: str) -> Any:
    """FlexGen's own configuration of the model; CannotRun where FlexGen does not know the model."""
    given = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    hidden, wide = given["hidden_size"], given.get("ffn_dim")
    if given.get("model_type") != "opt":
        raise CannotRun(f"FlexGen 0.1.8 runs OPT models only, and this is a {given.get('model_type')}")
    if not given.get("do_layer_norm_before", True) or wide != 4 * hidden:
        raise CannotRun("FlexGen 0.1.8 knows OPT with norms before its blocks and 4 x hidden size in between only")
    return OptConfig(
        name="model",
        num_hidden_layers=given["num_hidden_layers"],
        max_seq_len=given["max_position_embeddings"],
        hidden_size=hidden,
        n_head=given["num_attention_heads"],
        input_dim=hidden,
        ffn_embed_dim=wide,
        vocab_size=given["vocab_size"],
        pad_token_id=given["pad_token_id"],
    )


def converted(work: AdapterWork, config: Any) -> str:
    """The folder in which FlexGen finds the checkpoint as numpy files, made from it once."""
    target = Path(work.scratch) / "numpy" / f"{config.name}-np"
    if not (target / "done").exists():
        target.mkdir(parents=True, exist_ok=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(str(work.folder), dtype=torch.float32)
        for name, tensor in model.model.named_parameters():
            stored = name.replace("decoder.final_layer_norm", "decoder.layer_norm")
            with (target / stored).open("wb") as file:  # np.save with a name would add .npy
                np.save(file, tensor.detach().numpy())
        (target / "done").touch()
    return str(target.parent)


class _Stream:
    """In the place of a CUDA stream; a type, as others name it in annotations."""


def without_gpu(dtype: torch.dtype) -> None:
    """Has FlexGen, imported already, run on host memory in `dtype`; for the whole process, before it makes anything."""
    for name in ("synchronize", "set_device"):
        setattr(torch.cuda, name, lambda *arguments: None)
    setattr(torch.cuda, "Stream", _Stream)  # noqa: B010  by name: mypy knows better what these are
    setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())  # noqa: B010
    _plain_tensors(dtype)
    utils.np_dtype_to_torch_dtype[np.float16] = dtype
    utils.torch_dtype_to_np_dtype[dtype] = np.float16
    utils.torch_dtype_to_num_bytes[dtype] = dtype.itemsize
    pytorch_backend.map_to_torch_tensor = _mapped(pytorch_backend.map_to_torch_tensor, dtype)
    _stored_tensors(dtype)


def gpu_in_memory() -> Any:
    """FlexGen's GPU, in host memory. To be made before its CPU device."""
    device = pytorch_backend.TorchDevice("cpu")
    device.name, device.device_type = "cuda:0", pytorch_backend.DeviceType.CUDA
    return device


def _plain_tensors(dtype: torch.dtype) -> None:
    """Tensors that are never pinned, answer to .cuda(), and are of `dtype` where FlexGen says half."""
    empty = torch.empty

    def made(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.float16:
            options["dtype"] = dtype
        return empty(*shape, **options)

    replaced: dict[str, Any] = {
        "is_pinned": lambda self: True,  # then nothing is copied once more on the way
        "pin_memory": lambda self: self,
        "cuda": lambda self: self,
        "half": lambda self: self.to(dtype),
        "is_cuda": property(lambda self: True),  # else attention would go through float32, as on FlexGen's CPU
    }
    setattr(torch, "empty", made)  # noqa: B010
    for name, value in replaced.items():
        setattr(torch.Tensor, name, value)


def _mapped(original: Any, dtype: torch.dtype) -> Any:
    """FlexGen's view of a stored tensor, its two bytes taken for what they are: numpy has no bfloat16."""

    def view(tensor: Any, indices: Any) -> torch.Tensor:
        if tensor.device.device_type != pytorch_backend.DeviceType.DISK or torch.is_tensor(indices):
            return original(tensor, indices)
        stored = np.lib.format.open_memmap(tensor.data)
        data = torch.from_numpy(stored)
        data = data.view(dtype) if data.dtype == torch.float16 else data
        return data[indices] if indices else data

    return view


def _stored_tensors(dtype: torch.dtype) -> None:
    """Weights written to the disk in `dtype`'s bits, under numpy's name for two bytes."""
    tensor_type = pytorch_backend.TorchTensor
    in_memory = tensor_type.load_from_np

    def load(self: Any, array: np.ndarray) -> None:
        if self.device.device_type == pytorch_backend.DeviceType.DISK and array.dtype.kind == "f":
            array = torch.from_numpy(array).to(dtype).view(torch.float16).numpy()
        in_memory(self, array)

    tensor_type.load_from_np = load
    tensor_type.load_from_np_file = lambda self, name: load(self, np.load(name))


if __name__ == "__main__":
    sys.exit(run(measure, prepare))
