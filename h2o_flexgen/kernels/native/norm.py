"""LayerNorm in one pass over memory, by `norm.c`: bfloat16 on a CPU. Everything else goes to torch."""

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

_ARGUMENTS: tuple[Any, ...] = (*[ctypes.c_void_p] * 4, *[ctypes.c_long] * 3, ctypes.c_double, ctypes.c_int)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x (T, n) less its mean over its standard deviation, row by row, times weight (n) plus bias (n): a new (T, n).

    In x's dtype; statistics and all that is between are float32. RuntimeError for shapes that do not fit together.
    """
    call = _native()
    if call and x.dtype is torch.bfloat16 and x.is_cpu and x.ndim == 2 and x.stride(1) == 1 and x.numel():
        rows, n = x.shape
        if _fits(weight, n) and _fits(bias, n):
            y = LARGE.empty(rows, n, dtype=torch.bfloat16)
            scale, added = (None if each is None else each.data_ptr() for each in (weight, bias))
            places = x.data_ptr(), scale, added, y.data_ptr()
            call(*places, rows, n, x.stride(0), eps, torch.get_num_threads())
            return y
    return torch_cpu.layer_norm(x, weight, bias, eps)


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
    found.layer_norm.argtypes, found.layer_norm.restype = _ARGUMENTS, None
    return found.layer_norm
