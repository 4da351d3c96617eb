"""Tiny OPT checkpoints in every layout that the hub has, and the means to damage them."""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from h2o_flexgen.checkpoint.reader import CheckpointSource, open_checkpoint
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.families import checkpoint_names, ignored_names, spec_from_config
from tests.seeds import torch_generator

CONFIG: dict[str, Any] = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def make_spec(**changes: Any) -> ModelSpec:
    return spec_from_config(CONFIG | changes, "tiny")


def weights(
    spec: ModelSpec, prefix: str = "model.decoder.", dtype: torch.dtype = torch.float16
) -> dict[str, torch.Tensor]:
    """Random weights by their names in a checkpoint; the same for every prefix and dtype, but for rounding."""
    generator = torch_generator(7)
    shapes = {tensor.name: tensor.shape for group in spec.weight_groups for tensor in group.tensors}
    return {
        (prefix + options[0].removeprefix("model.decoder.") if "decoder" in options[0] else options[0]): torch.randn(
            shapes[name], generator=generator
        ).to(dtype)
        for name, options in checkpoint_names(spec).items()
    }


def write_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


def write_single(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    return folder / SINGLE


def write_shards(folder: Path, tensors: dict[str, torch.Tensor], count: int = 2, binary: bool = False) -> list[Path]:
    """`count` shards with neighbouring tensors, and their index."""
    stem, ending = ("pytorch_model", "bin") if binary else ("model", "safetensors")
    names = sorted(tensors)
    size = -(-len(names) // count)
    weight_map, paths = {}, []
    for number in range(count):
        held = {name: tensors[name] for name in names[number * size : (number + 1) * size]}
        path = folder / f"{stem}-{number + 1:05d}-of-{count:05d}.{ending}"
        torch.save(held, path) if binary else save_file(held, path)
        weight_map |= dict.fromkeys(held, path.name)
        paths.append(path)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps(index))
    return paths


def open_tiny(folder: Path, spec: ModelSpec | None = None) -> CheckpointSource:
    spec = spec or make_spec()
    return open_checkpoint(folder, spec, checkpoint_names(spec), ignored_names(spec))


def read_all(source: CheckpointSource, spec: ModelSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every tensor by canonical name, read into garbage."""
    out = {}
    for group in spec.weight_groups:
        for tensor in group.tensors:
            out[tensor.name] = torch.full(tensor.shape, float("nan"), dtype=dtype)
            source.read_into(tensor.name, out[tensor.name])
    return out


def raw_safetensors(path: Path, header: dict[str, Any] | bytes, data: bytes, shift: int | None = None) -> None:
    """A safetensors file as the bytes say, right or wrong; with `shift` its data start at that byte modulo 4."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if shift is not None:
        text += b" " * ((shift - len(text)) % 4)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


class Growth:
    """By how many bytes the memory of this process grew at most within."""

    nbytes = 0

    def __enter__(self) -> Growth:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed and is not given back would hide what is taken
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is that of now
        self._before = self._status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.nbytes = self._status("VmHWM") - self._before

    def _status(self, name: str) -> int:
        (line,) = re.findall(rf"^{name}:\s*(\d+) kB$", Path("/proc/self/status").read_text(encoding="ascii"), re.M)
        return int(line) << 10


def droppable_pages(path: str) -> int:
    """How many pages of the file the page cache held, and drops now; 0 on a file system that lives in memory."""
    before = _cached_pages(path)
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return before - _cached_pages(path)


def _cached_pages(path: str) -> int:
    size = Path(path).stat().st_size
    pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
    found, libc = (ctypes.c_ubyte * pages)(), ctypes.CDLL(None, use_errno=True)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        if libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), found):
            raise OSError(ctypes.get_errno(), "mincore")
        del start
    return sum(flags & 1 for flags in found)
