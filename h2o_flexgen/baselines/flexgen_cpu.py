"""Runs the published FlexGen without a GPU, by replacing at run time what asks for one; nothing of it is copied.

Its GPU becomes host memory, so a copy to it costs a copy in memory; its streams do nothing; its float16 becomes
bfloat16 or float32, as float16 on a CPU would be an order of magnitude slower and flatter whoever is beside it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
from flexgen import pytorch_backend, utils

_SHOWN = "cuda:0"


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
    device.name, device.device_type = _SHOWN, pytorch_backend.DeviceType.CUDA
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
