"""Tensors by name and shape, their sizes in bytes, and how those of a weight group lie in a buffer. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import Literal, NamedTuple

from h2o_flexgen.config.model.packing import Packing
from h2o_flexgen.errors import UsageError
from h2o_flexgen.registry import suggestion

DTYPES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per number."""

TENSOR_ALIGN = 64
"""Where a tensor may start in its unit's buffer: a cache line, and any SIMD load."""
PAGE = 4096
"""Bytes that a unit's buffer is rounded up to: a memory page, and the unit of O_DIRECT."""


WEIGHT_DTYPES = ("float16", "bfloat16", "float32")
"""The dtypes in which weights that are not packed are stored."""


def dtype_bytes(dtype: str) -> int:
    """Bytes per number of `dtype`; a dtype that is not in DTYPES raises UsageError."""
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}", f"needed one of {', '.join(DTYPES)}", suggestion(dtype, DTYPES))
    return DTYPES[dtype]


def computed_dtype(wanted: str, stored: str, on_gpu: bool) -> str:
    """The dtype that a model of a `stored` one is kept in: as `wanted`, else its own on a GPU and for float32, else
    bfloat16. Kernels may multiply in another one."""
    if wanted != "auto":
        return wanted
    return stored if on_gpu or stored == "float32" else "bfloat16"


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def page_floor(value: int) -> int:
    return value - value % PAGE


def page_ceil(value: int) -> int:
    return round_up(value, PAGE)


class LayerHeads(NamedTuple):
    """Of a layer's attention: query heads, KV heads, and numbers of each. joint: a value is its key, and a cache keeps
    both once (the latents of multi-head latent attention)."""

    queries: int
    keys: int
    dim: int
    joint: bool = False


class StateSpec(NamedTuple):
    """A state that a mixer keeps of each row: of its short convolution, or of its recurrence.

    number  of several of one kind in a layer, as modules count them
    wide    whether it is float32 whatever the dtype
    """

    kind: Literal["conv", "recurrent"]
    number: int
    shape: tuple[int, ...]
    wide: bool

    def nbytes(self, dtype: str) -> int:
        """Of one row."""
        return prod(self.shape) * dtype_bytes("float32" if self.wide else dtype)


def states_bytes(states: tuple[StateSpec, ...], rows: int, dtype: str) -> int:
    """Bytes of the states of `rows` rows, one behind the other, in whole pages."""
    return page_ceil(sum(round_up(rows * state.nbytes(dtype), TENSOR_ALIGN) for state in states))


@dataclass(frozen=True)
class TensorSpec:
    """One weight by its canonical name; linear weights have the shape (out, in) of nn.Linear."""

    name: str
    shape: tuple[int, ...]
    packing: Packing | None = None
    """How a matrix of fewer bits is kept; None: as numbers of the dtype that is computed with."""
    wide: bool = False
    """Kept in float32 in any compute dtype, as small differences in it decide."""

    def dtype(self, usual: str) -> str:
        """That of its numbers, where those of others are in `usual`."""
        return "float32" if self.wide else usual

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def nbytes(self, dtype: str) -> int:
        """Its bytes in `dtype`, or packed."""
        return self.numel * dtype_bytes(self.dtype(dtype)) if self.packing is None else self.packing.nbytes(self.shape)


@dataclass(frozen=True)
class WeightGroup:
    """The tensors that are loaded at once, as one contiguous buffer, in the order of that buffer."""

    key: str
    tensors: tuple[TensorSpec, ...]

    @cached_property
    def _numels(self) -> tuple[int, ...]:
        """How many numbers each tensor holds whose bytes follow from the dtype."""
        return tuple(tensor.numel for tensor in self.tensors if tensor.packing is None and not tensor.wide)

    @cached_property
    def _fixed(self) -> tuple[int, ...]:
        """Bytes of each of the other tensors, which are packed or wide."""
        return tuple(each.nbytes("float32") for each in self.tensors if each.packing is not None or each.wide)

    @property
    def fewer_bits(self) -> bool:
        return any(tensor.packing is not None for tensor in self.tensors)

    def nbytes(self, dtype: str) -> int:
        """The bytes of the tensors alone."""
        return sum(self._numels) * dtype_bytes(dtype) + sum(self._fixed)

    def buffer_bytes(self, dtype: str) -> int:
        """The bytes of the buffer: tensors start at multiples of TENSOR_ALIGN, the whole is a multiple of PAGE."""
        return _buffer_bytes(self._numels, dtype_bytes(dtype), self._fixed)


@cache  # a search asks for the sizes of the same few shapes many thousand times
def _buffer_bytes(numels: tuple[int, ...], size: int, fixed: tuple[int, ...]) -> int:
    sizes = (*(numel * size for numel in numels), *fixed)
    return page_ceil(sum(round_up(nbytes, TENSOR_ALIGN) for nbytes in sizes))
