"""The middle of a gated MLP in one pass over memory, by `gate.c`: bfloat16 on a CPU. Everything else goes to torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from h2o_flexgen.kernels import torch_cpu
from h2o_flexgen.kernels.native.build import library

_ARGUMENTS: tuple[Any, ...] = (*[ctypes.c_void_p] * 2, *[ctypes.c_long] * 4, *[ctypes.c_int] * 2)
_KINDS = {"silu": False, "gelu_tanh": True}


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) times up, both (T, n) of one dtype: `gate`, which is overwritten, in that dtype.

    activation: a key of `torch_cpu.ACTIVATIONS`, computed in float32, then rounded. RuntimeError for shapes that do
    not fit together.
    """
    call = _native()
    if call and activation in _KINDS and gate.shape == up.shape and gate.numel() and _fits(gate) and _fits(up):
        (rows, n), strides = gate.shape, (gate.stride(0), up.stride(0))
        call(gate.data_ptr(), up.data_ptr(), rows, n, *strides, _KINDS[activation], torch.get_num_threads())
        return gate
    return torch_cpu.gated(gate, up, activation)


def _fits(x: Tensor) -> bool:
    return x.dtype is torch.bfloat16 and x.is_cpu and x.ndim == 2 and x.stride(1) == 1


@cache
def _native() -> Callable[..., None] | None:
    """The compiled function; None where there is none."""
    found = library()
    if found is None:
        return None
    found.gate_up.argtypes, found.gate_up.restype = _ARGUMENTS, None
    return found.gate_up
