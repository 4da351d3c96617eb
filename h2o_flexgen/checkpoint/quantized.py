"""The tensors that other programs store quantised matrices as: their shapes and dtypes, and the way to our layouts.

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
from h2o_flexgen.models.schemes import MXFP4, Scheme

Array = NDArray[Any]
Rows = Sequence[tuple[int, int]]
"""[start, stop) of the outputs of a stored matrix, one after another."""
Codes = Iterator[tuple[slice, slice, Array]]
"""Which rows of codes, which bytes of these, and the bytes."""


class Read(Protocol):
    """Reads rows [start, stop) of a stored part, all of them by default. Numbers of a kind that numpy does not have are
    unsigned integers of their width."""

    def __call__(self, part: str, start: int = 0, stop: int | None = None) -> Array: ...


PART_NAMES = (
    *("weight", "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv"),
    *("weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale", "weight_scale_2"),
)
"""The names in their module of the tensors that a quantised matrix may be stored as."""
PACKED_DTYPES = ("float8_e4m3fn", "int8")
"""The dtypes of weights that are stored as codes, to be multiplied by scales."""
_FLOATS = ("float16", "bfloat16", "float32")
_WHOLE: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))
"""The shapes of one number for all of a matrix."""
_FLOATS4 = {
    "mxfp4": ("blocks", "scales", ""),
    "fp4": ("weight_packed", "weight_scale", "weight_global_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2"),
}
"""The parts of matrices of floats of 4 bits, by layout: codes, scales, and what belongs to all scales."""
_BLOCK = 4 << 20  # bytes that are read and converted at once


def _e4m3() -> Array:
    size = np.arange(128)
    floats = np.where(size < 8, size * 2.0**-9, (8 + size % 8) * 2.0 ** (size // 8 - 10.0))
    floats[127] = np.nan
    return np.concatenate([floats, -floats]).astype(np.float32)


_E4M3 = _e4m3()
"""The floats of 8 bits of OCP's FP8, by their codes."""


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
            for start, stop in _steps(0, len(codes), 2 * self.shape[1]):
                by_input = _unpacked(codes[start:stop], self.scheme.bits)
                out["codes"][start:stop] = _packed(by_input[:, order], self.scheme.bits)
        outputs = np.concatenate([np.arange(start, stop) for start, stop in rows])
        out["scale"][:] = self.scales(read, outputs)
        if "low" in out:
            out["low"][:] = self.zeros(read, outputs)

    def codes(self, read: Read, rows: Rows) -> Codes:
        """Its codes (outs, bytes) of the outputs `rows`, in blocks."""
        raise NotImplementedError

    def scales(self, read: Read, outputs: Array) -> Array:
        """Its scales (outs, groups) of `outputs`, which most keep by group."""
        return read("scales")[:, outputs].T

    def zeros(self, read: Read, outputs: Array) -> Array:
        """Its zero points (outs, groups) of `outputs`: the codes that stand for 0, as levels count."""
        raise NotImplementedError

    def _codes_by_row(self, read: Read, rows: Rows, part: str, nbytes: int) -> Codes:
        """Where `part` has an output a row and `nbytes` bytes of codes in it."""
        at = 0
        for first, last in rows:
            for start, stop in _steps(first, last, nbytes):
                codes = read(part, start, stop).view(np.uint8)[:, :nbytes]
                yield slice(at, at + stop - start), slice(None), codes
                at += stop - start

    def _shifted(self, codes: Array) -> Array:
        """Unsigned codes of 8 bits as int8 has them, in bytes; codes of 4 bits are unsigned here too."""
        return codes ^ np.uint8(128) if self.scheme.levels == "int8" else codes

    def _shifted_zeros(self, zeros: Array) -> Array:
        return zeros.astype(np.int16) - (128 if self.scheme.levels == "int8" else 0)


class _Gptq(StoredMatrix):
    """Inputs side by side in words; zero points of groups side by side, by output."""

    g_idx = "g_idx"

    def parts(self) -> dict[str, StoredPart]:
        outs, ins = self.shape
        return {
            "qweight": StoredPart(((ins // self._per_word, outs),), ("int32",)),
            "qzeros": StoredPart(((self.groups, outs // self._per_word),), ("int32",)),
            "scales": StoredPart(((self.groups, outs),), _FLOATS),
            "g_idx": StoredPart(((ins,),), ("int32",), needed=False),
        }

    def misfit(self) -> str:
        uneven = any(size % self._per_word for size in self.shape)
        return f"its sizes are not multiples of {self._per_word}" if uneven else ""

    def _low(self) -> Literal["zero"]:
        return "zero"  # symmetric matrices have them too

    def codes(self, read: Read, rows: Rows) -> Codes:
        height, width = self.parts()["qweight"].shapes[0]
        for start, stop in _steps(0, height, 4 * width):
            words = _columns(read("qweight", start, stop), rows)
            codes = np.ascontiguousarray(words.T).view(np.uint8)
            yield slice(None), slice(4 * start, 4 * stop), self._shifted(codes)

    def zeros(self, read: Read, outputs: Array) -> Array:
        bits = self.scheme.bits
        zeros = _unpacked(read("qzeros").view(np.uint8), bits)[:, outputs].T
        # Some programs say that they subtracted one and did not: zero points of symmetric matrices show it.
        if not (self.scheme.symmetric and (zeros == 1 << (bits - 1)).all()):
            zeros = (zeros + np.uint8(self.scheme.zero_step)) & np.uint8((1 << bits) - 1)
        return self._shifted_zeros(zeros)


class _Awq(StoredMatrix):
    """Outputs side by side in words, an input a row."""

    _PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
    """A word holds outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight: where each of them is."""

    def parts(self) -> dict[str, StoredPart]:
        outs, ins = self.shape
        return {
            "qweight": StoredPart(((ins, outs // self._per_word),), ("int32",)),
            "qzeros": StoredPart(((self.groups, outs // self._per_word),), ("int32",)),
            "scales": StoredPart(((self.groups, outs),), _FLOATS),
        }

    def misfit(self) -> str:
        uneven = self.shape[0] % self._per_word
        return f"its {self.shape[0]} outputs are not a multiple of {self._per_word}" if uneven else super().misfit()

    def codes(self, read: Read, rows: Rows) -> Codes:
        height, width = self.parts()["qweight"].shapes[0]
        for start, stop in _steps(0, height // 2, 8 * width):  # two inputs share a byte here
            numbers = _columns(self._by_output(read("qweight", 2 * start, 2 * stop)), rows)
            yield slice(None), slice(start, stop), _packed(numbers.T, 4)

    def zeros(self, read: Read, outputs: Array) -> Array:
        return self._by_output(read("qzeros"))[:, outputs].T

    def _by_output(self, words: Array) -> Array:
        """Numbers (rows, outs) in words (rows, outs / 8)."""
        numbers = _unpacked(np.ascontiguousarray(words).view(np.uint8), 4)
        return numbers.reshape(len(words), -1, 8)[..., self._PLACES].reshape(len(words), -1)


class _Compressed(StoredMatrix):
    """compressed-tensors' pack-quantized: inputs side by side in words, an output a row; zero points along outputs."""

    g_idx = "weight_g_idx"

    def parts(self) -> dict[str, StoredPart]:
        outs, ins = self.shape
        parts = {
            "weight_packed": StoredPart(((outs, -(-ins // self._per_word)),), ("int32",)),
            "weight_scale": StoredPart(((outs, self.groups),), _FLOATS),
            "weight_shape": StoredPart(((2,),), ("int64", "int32")),
            "weight_g_idx": StoredPart(((ins,),), ("int32",), needed=False),
        }
        if not self.scheme.symmetric:
            parts["weight_zero_point"] = StoredPart(((-(-outs // self._per_word), self.groups),), ("int32",))
        return parts

    def order(self, groups: Array) -> Array | None:
        return None if (groups == -1).all() else super().order(groups)  # -1: not used

    def codes(self, read: Read, rows: Rows) -> Codes:
        for outs, places, codes in self._codes_by_row(
            read, rows, "weight_packed", self.shape[1] * self.scheme.bits // 8
        ):
            yield outs, places, self._shifted(codes)

    def scales(self, read: Read, outputs: Array) -> Array:
        return read("weight_scale")[outputs]

    def zeros(self, read: Read, outputs: Array) -> Array:
        words = np.ascontiguousarray(read("weight_zero_point").T)
        return self._shifted_zeros(_unpacked(words.view(np.uint8), self.scheme.bits)[:, outputs].T)


class _Scaled(StoredMatrix):
    """A weight of one byte a number, an output a row, and a scale for all of it, for each output or for each block."""

    scale = "weight_scale"
    """Or the inverse by its name, which codes are multiplied by nevertheless."""
    apart = False
    """Whether the scales of blocks have a dimension of 1 behind each of their own, as ModelOpt's have."""

    def parts(self) -> dict[str, StoredPart]:
        floats = self.scheme.levels == "e4m3"
        shapes = self._scale_shapes()
        parts = {
            "weight": StoredPart((self.shape,), ("float8_e4m3fn" if floats else "int8",)),
            self.scale: StoredPart(shapes, (*_FLOATS, "float8_e8m0fnu") if floats else _FLOATS),
        }
        if not self.scheme.symmetric:
            parts["weight_zero_point"] = StoredPart(shapes, ("int8",))
        return parts

    def _scale_shapes(self) -> tuple[tuple[int, ...], ...]:
        outs = self.shape[0]
        rows = ((outs,), (outs, 1))
        if self.scheme.block is None:
            return (*_WHOLE, *rows)
        if self.group:
            tall = -(-outs // self.scheme.block[0])
            return ((tall, 1, self.groups, 1) if self.apart else (tall, self.groups),)
        return rows if self.scheme.block[0] else _WHOLE

    def codes(self, read: Read, rows: Rows) -> Codes:
        return self._codes_by_row(read, rows, "weight", self.shape[1])

    def scales(self, read: Read, outputs: Array) -> Array:
        return self._spread(read(self.scale), outputs)

    def zeros(self, read: Read, outputs: Array) -> Array:
        return self._spread(read("weight_zero_point"), outputs).view(np.int8)

    def _spread(self, numbers: Array, outputs: Array) -> Array:
        """The entries of `numbers` that belong to each block or row, for each output and group: (outs, groups)."""
        if numbers.size == 1:
            return np.broadcast_to(numbers.reshape(1, 1), (len(outputs), self.groups))
        rows = self.scheme.block[0] if self.scheme.block else 1
        return numbers.reshape(-1, self.groups)[outputs // rows]


class _Floats4(StoredMatrix):
    """Floats of 4 bits, an output a row, the lower half of each byte the first of its two. Groups of 32 have a power of
    two for a scale, groups of 16 a float of 8 bits, and all of these are divided by one number, by ModelOpt multiplied.

    The scales that come of it are rounded once, to float32, as those programs do that compute in float32.
    """

    def __init__(self, scheme: Scheme, shape: tuple[int, int]) -> None:
        super().__init__(scheme, shape)
        self._codes, self._scales, self._whole = _FLOATS4[scheme.layout]

    def parts(self) -> dict[str, StoredPart]:
        outs, ins = self.shape
        powers = self.group == 32
        kinds = ("uint8", "float8_e8m0fnu") if powers else ("float8_e4m3fn",)
        parts = {
            self._codes: StoredPart(((outs, ins // 2),), ("uint8",)),
            self._scales: StoredPart(((outs, self.groups),), kinds),
        }
        return parts if powers else {**parts, self._whole: StoredPart(_WHOLE, ("float32",))}

    def misfit(self) -> str:
        return f"its {self.shape[1]} inputs are no blocks of {self.group}" if self.shape[1] % self.group else ""

    def fault(self, content: Callable[[str], Array | None]) -> str:
        whole = None if self.group == 32 else content(self._whole)
        if whole is None or 1e-30 < whole[0] < 1e30:
            return ""
        return f"{self._whole}': expected a number above 0, found {whole[0]}"

    def packing(self, scale: str, ordered: bool) -> Packing:
        return MXFP4 if self.group == 32 else Packing("e2m1", self.group, "float32", "none")

    def codes(self, read: Read, rows: Rows) -> Codes:
        return self._codes_by_row(read, rows, self._codes, self.shape[1] // 2)

    def scales(self, read: Read, outputs: Array) -> Array:
        first = int(outputs.min())
        stored = read(self._scales, first, int(outputs.max()) + 1)[outputs - first]
        if self.group == 32:
            return stored
        floats, whole = _E4M3[stored], read(self._whole).view(np.float32).item()
        return (floats * whole if self.scheme.layout == "modelopt" else floats / whole).view(np.uint32)


def stored_matrix(scheme: Scheme, shape: tuple[int, int], held: Mapping[str, tuple[int, ...]]) -> StoredMatrix:
    """The matrix that `scheme` stores as tensors of which a checkpoint has those `held`, of these shapes."""
    layouts = {"gptq": _Gptq, "awq": _Awq, "packed": _Compressed, "scaled": _Scaled}
    matrix = layouts.get(scheme.layout, _Floats4)(scheme, shape)
    if isinstance(matrix, _Scaled):
        matrix.apart = len(held.get("weight_scale", ())) == 4
        if "weight_scale_inv" in held:
            matrix.scale = "weight_scale_inv"
    return matrix


def _steps(start: int, stop: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """[start, stop) in ranges of as many rows of `nbytes` bytes as are converted at once."""
    step = max(1, _BLOCK // nbytes)
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


def _columns(numbers: Array, rows: Rows) -> Array:
    found = [numbers[:, start:stop] for start, stop in rows]
    return found[0] if len(found) == 1 else np.concatenate(found, 1)


def _unpacked(codes: Array, bits: int) -> Array:
    """One byte for each code of rows of bytes."""
    if bits == 8:
        return codes
    return np.stack([codes & np.uint8(15), codes >> np.uint8(4)], -1).reshape(len(codes), -1)


def _packed(codes: Array, bits: int) -> Array:
    """The other way."""
    return codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
