"""Matrices as other programs store them: how a layout describes itself, and how ours are filled from it by rows.

Their words of 32 bits hold codes from the lowest bits up, so that in memory the first two codes of 4 bits share the
first byte, the first in its lower half: as codes lie in a Packing. Everything here is numpy, which uses one thread: it
may run beside the computation. Codes and scales are moved as they are, and nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from h2o_flexgen.config.model.packing import Packing
from h2o_flexgen.models.schemes import Scheme

Array = NDArray[Any]
Rows = Sequence[tuple[int, int]]
"""[start, stop) of the outputs of a stored matrix, one after another."""
Codes = Iterator[tuple[slice, slice, Array]]
"""Which rows of codes, which bytes of these, and the bytes."""


class Read(Protocol):
    """Reads rows [start, stop) of a stored part, all of them by default. Numbers of a kind that numpy does not have are
    unsigned integers of their width."""

    def __call__(self, part: str, start: int = 0, stop: int | None = None) -> Array: ...


_BLOCK = 4 << 20  # bytes that are read and converted at once


class StoredPart(NamedTuple):
    """One tensor of a stored matrix as it must be: of one of `shapes` and of one of `dtypes`."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    needed: bool = True


class StoredMatrix:
    """A matrix of `shape` (outs, ins) as `scheme` stores it. A subclass knows one layout.

    `g_idx` is the part that says which group each input belongs to.
    """

    g_idx = ""

    def __init__(self, scheme: Scheme, shape: tuple[int, int]) -> None:
        self.scheme, self.shape = scheme, shape
        self.group = scheme.block[1] if scheme.block else 0
        self.groups = -(-shape[1] // self.group) if self.group else 1
        self._per_word = 32 // scheme.bits

    def parts(self) -> dict[str, StoredPart]:
        """The tensors of its module by name, as it is stored."""
        raise NotImplementedError

    def misfit(self) -> str:
        """Why no matrix of this shape can be stored so; empty where it can."""
        ins, bits = self.shape[1], self.scheme.bits
        return f"its {ins} inputs of {bits} bits do not end with a byte" if ins * bits % 8 else ""

    def fault(self, content: Callable[[str], Array | None]) -> str:
        """The fault in the content of a small part, behind the part's name; empty where there is none.

        `content` gives the numbers of a part as they are stored, None of one that its file lacks."""
        return ""

    def packing(self, scale: str, ordered: bool) -> Packing:
        """Its layout here, where its scales have the dtype `scale`; `ordered`: its inputs are not in order."""
        kind: Any = "e8m0" if scale == "float8_e8m0fnu" else scale
        return Packing(self.scheme.levels, self.group, kind, self._low(), ordered)

    def _low(self) -> Literal["none", "middle", "zero"]:
        if not self.scheme.symmetric:
            return "zero"
        return "middle" if self.scheme.levels == "uint4" else "none"

    def order(self, groups: Array) -> Array | None:
        """The inputs in the order of their `groups` (ins,); None where they are in order as they are.

        ValueError unless all groups are of the same size, but for a shorter last one.
        """
        ins = self.shape[1]
        natural = np.arange(ins) // (self.group or ins)
        order = np.argsort(groups, kind="stable")
        if not np.array_equal(groups[order], natural):
            raise ValueError(f"expected {self.groups} groups of {self.group or ins} inputs")
        return None if np.array_equal(groups, natural) else order

    def fill(self, read: Read, rows: Rows, out: Mapping[str, Array]) -> None:
        """Fill the parts `out` of its packing with its outputs `rows`. ValueError as `order`."""
        order = self.order(read(self.g_idx).view(np.int32)) if "order" in out else None
        codes = out["codes"] if order is None else np.empty_like(out["codes"])
        for outs, places, block in self.codes(read, rows):
            codes[outs, places] = block
        if order is not None:
            out["order"][:] = order
            for start, stop in steps(0, len(codes), 2 * self.shape[1]):
                by_input = unpacked(codes[start:stop], self.scheme.bits)
                out["codes"][start:stop] = packed(by_input[:, order], self.scheme.bits)
        outputs = np.concatenate([np.arange(start, stop) for start, stop in rows])
        out["scale"][:] = self.scales(read, outputs)
        if "super_scale" in out:
            out["super_scale"][:] = np.asarray(self.whole_scale(read)).view(out["super_scale"].dtype)
        if "low" in out:
            out["low"][:] = self.zeros(read, outputs)

    def codes(self, read: Read, rows: Rows) -> Codes:
        """Its codes (outs, bytes) of the outputs `rows`, in blocks."""
        raise NotImplementedError

    def scales(self, read: Read, outputs: Array) -> Array:
        """Its scales (outs, groups) of `outputs`, which most keep by group."""
        return read("scales")[:, outputs].T

    def whole_scale(self, read: Read) -> np.float32:
        """The number that all of its scales are times."""
        raise NotImplementedError

    def zeros(self, read: Read, outputs: Array) -> Array:
        """Its zero points (outs, groups) of `outputs`: the codes that stand for 0, as levels count."""
        raise NotImplementedError

    def _codes_by_row(self, read: Read, rows: Rows, part: str, nbytes: int) -> Codes:
        """Where `part` has an output a row and `nbytes` bytes of codes in it."""
        at = 0
        for first, last in rows:
            for start, stop in steps(first, last, nbytes):
                codes = read(part, start, stop).view(np.uint8)[:, :nbytes]
                yield slice(at, at + stop - start), slice(None), codes
                at += stop - start

    def _shifted(self, codes: Array) -> Array:
        """Unsigned codes of 8 bits as int8 has them, in bytes; codes of 4 bits are unsigned here too."""
        return codes ^ np.uint8(128) if self.scheme.levels == "int8" else codes

    def _shifted_zeros(self, zeros: Array) -> Array:
        return zeros.astype(np.int16) - (128 if self.scheme.levels == "int8" else 0)


def steps(start: int, stop: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """[start, stop) in ranges of as many rows of `nbytes` bytes as are converted at once."""
    step = max(1, _BLOCK // nbytes)
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


def columns(numbers: Array, rows: Rows) -> Array:
    found = [numbers[:, start:stop] for start, stop in rows]
    return found[0] if len(found) == 1 else np.concatenate(found, 1)


def unpacked(codes: Array, bits: int) -> Array:
    """One byte for each code of rows of bytes."""
    if bits == 8:
        return codes
    return np.stack([codes & np.uint8(15), codes >> np.uint8(4)], -1).reshape(len(codes), -1)


def packed(codes: Array, bits: int) -> Array:
    """The other way."""
    return codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
