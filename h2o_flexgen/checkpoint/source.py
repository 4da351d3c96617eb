"""What every source of weights offers, whether it reads a checkpoint or makes the weights up."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from h2o_flexgen.memory.disk import host_view
from h2o_flexgen.memory.handle import Location

WEIGHT_DTYPES = ("float16", "bfloat16", "float32")
_SERIAL = 1 << 14  # numbers; half of what torch gives to a second thread


class WeightSource(Protocol):
    """Weights by canonical name.

    `dtype` is how they are stored ("float16", "bfloat16", "float32"), `fingerprint` changes whenever their content may
    have, and `dummy` says that they are random. Any number of threads may read at once.
    """

    @property
    def dtype(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def dummy(self) -> bool: ...

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` (contiguous, of the canonical shape, any of WEIGHT_DTYPES, any device) with tensor `name`."""

    def location(self, name: str) -> Location | None:
        """The bytes of `name` on disk in the source's dtype, row-major without gaps; None where no file has them so."""

    def close(self) -> None:
        """Close the files; reading afterwards raises ValueError."""


def flat_out(name: str, shape: tuple[int, ...], out: torch.Tensor) -> torch.Tensor:
    """`out` as a flat tensor; ValueError unless it is contiguous, of `shape` and of a dtype in WEIGHT_DTYPES."""
    dtype = str(out.dtype).removeprefix("torch.")
    if tuple(out.shape) != shape or not out.is_contiguous() or dtype not in WEIGHT_DTYPES:
        raise ValueError(f"{name} needs a contiguous float tensor of shape {shape}, got {dtype} of {tuple(out.shape)}")
    return out.view(-1)


def copy(out: torch.Tensor, values: torch.Tensor) -> None:
    """Copy flat host `values` to flat `out` of the same dtype, with one thread and no lock held.

    Loading may run beside the computation: torch's copy would have all its threads wait for one another, which on busy
    cores costs a factor of ten.
    """
    if out.device.type == "cpu":
        np.copyto(np.frombuffer(host_view(out).view, np.uint8), np.frombuffer(host_view(values).view, np.uint8))
    else:
        out.copy_(values)


def convert(out: torch.Tensor, values: torch.Tensor) -> None:
    """Copy flat host `values` to flat `out` of another dtype, in pieces too small for torch to share among threads."""
    if out.device.type != "cpu":
        out.copy_(values)
        return
    for start in range(0, values.numel(), _SERIAL):
        stop = start + _SERIAL
        out[start:stop].copy_(values[start:stop])
