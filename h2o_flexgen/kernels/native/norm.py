"""LayerNorm and RMSNorm in one pass over memory, by `norm.c`: bfloat16 on a CPU. Everything else goes to torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from h2o_flexgen.kernels import torch_cpu
from h2o_flexgen.kernels.large import LARGE
from h2o_flexgen.kernels.native.build import library

_ARGUMENTS: tuple[Any, ...] = (
    *[ctypes.c_void_p] * 4,
    *[ctypes.c_long] * 3,
    *[ctypes.c_double] * 2,
    *[ctypes.c_int] * 2,
)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x (T, n) less its mean over its standard deviation, row by row, times weight (n) plus bias (n): a new (T, n).

    In x's dtype; statistics and all that is between are float32. RuntimeError for shapes that do not fit together.
    """
    if x.ndim == 2 and _fits(bias, x.shape[1]):
        y = _normed(x, weight, bias, eps, 0.0, False)
        if y is not None:
            return y
    return torch_cpu.layer_norm(x, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """x (..., n) over its root mean square, times weight (n) + offset; newly made, in the dtype of x.

    Statistics are float32; with an offset, all of it is, up to the last rounding, else what is multiplied by the weight
    is rounded first, as transformers has it. Zhang and Sennrich, arXiv 1910.07467.
    """
    if x.dtype is torch.bfloat16 and x.is_cpu:
        y = _normed(x if x.ndim == 2 else x.reshape(-1, x.shape[-1]), weight, None, eps, offset, True)
        if y is not None:
            return y.view(x.shape)
    return torch_cpu.rms_norm(x, weight, eps, offset)


def _normed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, rms: bool
) -> Tensor | None:
    """None where the kernel cannot be had, or does not take this."""
    call = _native()
    if not call or not (x.dtype is torch.bfloat16 and x.is_cpu and x.stride(1) == 1 and x.numel()):
        return None
    rows, n = x.shape
    if not _fits(weight, n):
        return None
    y = LARGE.empty(rows, n, dtype=torch.bfloat16)
    scale, added = (None if each is None else each.data_ptr() for each in (weight, bias))
    places = x.data_ptr(), scale, added, y.data_ptr()
    call(*places, rows, n, x.stride(0), eps, offset, rms, torch.get_num_threads())
    return y


def _fits(vector: Tensor | None, n: int) -> bool:
    """Whether the kernel can read this weight or bias."""
    if vector is None:
        return True
    return vector.dtype is torch.bfloat16 and vector.is_cpu and vector.shape == (n,) and vector.is_contiguous()


@cache
def _native() -> Callable[..., None] | None:
    """The compiled function; None where there is none."""
    found = library()
    if found is None:
        return None
    found.norm.argtypes, found.norm.restype = _ARGUMENTS, None
    return found.norm
