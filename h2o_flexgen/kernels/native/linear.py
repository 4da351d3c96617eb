"""Matrix products of few rows: the steps of decoding are made of these."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.kernels.native.build import library

MOST_ROWS = 128
"""Up to so many rows a bfloat16 product is native. Measured over shapes of OPT-125M, 1.3B and 6.7B on two cores of an
AMD EPYC with AVX-512 bfloat16: torch took 1.4 to 2.3 times as long up to 8 rows, 1.05 to 1.5 times at 32, about as long
at 128, and less from 256 on for some of the shapes."""

_ARGUMENTS: tuple[Any, ...] = (*[ctypes.c_void_p] * 4, *[ctypes.c_long] * 5, *[ctypes.c_int] * 2)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> Tensor:
    """x (T, in) times weight (out, in) transposed, plus bias (out): newly made (T, out), in x's dtype.

    `wide`: in float32. A native product then keeps the sums as they are, where torch's are rounded to x's dtype first;
    so it is native for any number of rows. Sums are float32 either way. Gradients do not flow through native products.
    Shapes that do not fit together raise RuntimeError, as F.linear does.
    """
    call = _native()
    # Written out, and in this order, because it is done some fifty times per step: 2 microseconds.
    if call and x.dtype is weight.dtype is torch.bfloat16 and x.is_cpu and weight.is_cpu and x.ndim == weight.ndim == 2:
        (rows, ins), (outs, same), (stride, one) = x.shape, weight.shape, x.stride()
        fits = rows and outs and ins == same and one == 1 and weight.is_contiguous()
        if fits and ins and (wide or rows <= MOST_ROWS) and (bias is None or _adds(bias, outs)):
            y = torch.empty(rows, outs, dtype=torch.float32 if wide else torch.bfloat16)
            added = None if bias is None else bias.data_ptr()
            places = x.data_ptr(), weight.data_ptr(), added, y.data_ptr()
            call(*places, rows, outs, ins, stride, outs, wide, torch.get_num_threads())
            return y
    y = F.linear(x, weight, bias)
    return y.float() if wide else y


def _adds(bias: Tensor, outs: int) -> bool:
    """Whether this is a bias that the kernel can read."""
    return bias.dtype is torch.bfloat16 and bias.is_cpu and bias.shape == (outs,) and bias.is_contiguous()


@cache
def _native() -> Callable[..., None] | None:
    """The compiled function; None where there is none."""
    found = library("linear")
    if found is None:
        return None
    found.linear.argtypes, found.linear.restype = _ARGUMENTS, None
    return found.linear
