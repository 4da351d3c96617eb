"""Matrix products on the CPU: of few rows, which steps of decoding are made of, and of many, as prompts have them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from h2o_flexgen.kernels import torch_cpu
from h2o_flexgen.kernels.large import LARGE, LEAST
from h2o_flexgen.kernels.native.build import library

MOST_ROWS = 128
"""Up to so many rows a bfloat16 product reads its weights as they lie (`linear.c`), beyond that it packs them first
(`gemm.c`). Measured over shapes of OPT-125M and 1.3B on two cores of an AMD EPYC with AVX-512 bfloat16: torch took 1.4
to 2.3 times as long up to 8 rows, 1.05 to 1.5 times at 32, and from 64 to 2,048 rows 0.96 to 1.08 times."""

_MANY = LEAST // 4  # numbers that may be large
_ARGUMENTS: tuple[Any, ...] = (*[ctypes.c_void_p] * 4, *[ctypes.c_long] * 5, *[ctypes.c_int] * 4)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    wide: bool = False,
    relu: bool = False,
    onto: Tensor | None = None,
) -> Tensor:
    """x (T, in) times weight (out, in) transposed, plus bias (out): newly made (T, out), in x's dtype.

    `wide`: in float32. A native product then keeps the sums as they are, where torch's are rounded to x's dtype first.
    `relu`: what is negative becomes 0. `onto` (T, out), in x's dtype: the product is added to it in place, and it is
    returned; not with `wide`. Sums are float32 either way. Gradients do not flow through native products. Shapes that
    do not fit together raise RuntimeError, as F.linear does.
    """
    call = _native()
    # Written out, and in this order, because it is done some fifty times per step: 2 microseconds.
    if call and x.dtype is weight.dtype is torch.bfloat16 and x.is_cpu and weight.is_cpu and x.ndim == weight.ndim == 2:
        (rows, ins), (outs, same), (stride, one) = x.shape, weight.shape, x.stride()
        fits = rows and outs and ins == same and one == 1 and weight.is_contiguous()
        few = rows <= MOST_ROWS or ins % 2
        if fits and ins and (bias is None or _adds(bias, outs)) and (onto is None or _takes(onto, rows, outs)):
            y = _out(rows, outs, torch.float32 if wide else torch.bfloat16) if onto is None else onto
            added = None if bias is None else bias.data_ptr()
            places = x.data_ptr(), weight.data_ptr(), added, y.data_ptr()
            kind = wide, relu, onto is not None, torch.get_num_threads()
            if call[not few](*places, rows, outs, ins, stride, y.stride(0), *kind):
                raise MemoryError(f"no memory to pack weights of {ins} inputs")
            return y
    return torch_cpu.linear(x, weight, bias, wide=wide, relu=relu, onto=onto)


def _out(rows: int, outs: int, dtype: torch.dtype) -> Tensor:
    return LARGE.empty(rows, outs, dtype=dtype) if rows * outs >= _MANY else torch.empty(rows, outs, dtype=dtype)


def _adds(bias: Tensor, outs: int) -> bool:
    """Whether this is a bias that the kernels can read."""
    return bias.dtype is torch.bfloat16 and bias.is_cpu and bias.shape == (outs,) and bias.is_contiguous()


def _takes(onto: Tensor, rows: int, outs: int) -> bool:
    """Whether the kernels can add to this."""
    return onto.dtype is torch.bfloat16 and onto.is_cpu and onto.shape == (rows, outs) and onto.stride(1) == 1


@cache
def _native() -> tuple[Callable[..., int | None], Callable[..., int | None]] | None:
    """The compiled functions, for few and for many rows; None where there are none."""
    found = library()
    if found is None:
        return None
    found.linear.argtypes, found.linear.restype = _ARGUMENTS, None
    found.gemm.argtypes, found.gemm.restype = _ARGUMENTS, ctypes.c_int
    return found.linear, found.gemm
