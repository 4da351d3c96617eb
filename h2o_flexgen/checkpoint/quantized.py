"""The tensors that other programs store quantised matrices as: their shapes and dtypes, and the way to our layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from h2o_flexgen.checkpoint.files import strict_json
from h2o_flexgen.checkpoint.matrices import (
    Array,
    Codes,
    Read,
    Rows,
    StoredMatrix,
    StoredPart,
    columns,
    packed,
    steps,
    unpacked,
)
from h2o_flexgen.config.model.packing import LEVELS, Packing
from h2o_flexgen.models.schemes import MXFP4, Scheme

PART_NAMES = (
    *("weight", "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv"),
    *("weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale", "weight_scale_2"),
    *("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
    *("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4", "SCB", "weight_format"),
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


class _Gptq(StoredMatrix):
    """Inputs side by side in words; zero points of groups side by side, by output."""

    g_idx = "g_idx"

    def parts(self) -> dict[str, StoredPart]:
        outs, ins = self.shape
        return {
            "qweight": StoredPart(((ins // self._per_word, outs),), ("int32",)),
            "qzeros": StoredPart(((self.groups, outs // self._per_word),), ("int32",)),
            "scales": StoredPart(((self.groups, outs),), _FLOATS),
            "g_idx": StoredPart(((ins,),), ("int32",), needed=self.scheme.ordered and self.groups > 1),
        }

    def misfit(self) -> str:
        uneven = any(size % self._per_word for size in self.shape)
        return f"its sizes are not multiples of {self._per_word}" if uneven else ""

    def _low(self) -> Literal["zero"]:
        return "zero"  # symmetric matrices have them too

    def codes(self, read: Read, rows: Rows) -> Codes:
        height, width = self.parts()["qweight"].shapes[0]
        for start, stop in steps(0, height, 4 * width):
            words = columns(read("qweight", start, stop), rows)
            codes = np.ascontiguousarray(words.T).view(np.uint8)
            yield slice(None), slice(4 * start, 4 * stop), self._shifted(codes)

    def zeros(self, read: Read, outputs: Array) -> Array:
        bits = self.scheme.bits
        zeros = unpacked(read("qzeros").view(np.uint8), bits)[:, outputs].T
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
        for start, stop in steps(0, height // 2, 8 * width):  # two inputs share a byte here
            numbers = columns(self._by_output(read("qweight", 2 * start, 2 * stop)), rows)
            yield slice(None), slice(start, stop), packed(numbers.T, 4)

    def zeros(self, read: Read, outputs: Array) -> Array:
        return self._by_output(read("qzeros"))[:, outputs].T

    def _by_output(self, words: Array) -> Array:
        """Numbers (rows, outs) in words (rows, outs / 8)."""
        numbers = unpacked(np.ascontiguousarray(words).view(np.uint8), 4)
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
            "weight_g_idx": StoredPart(((ins,),), ("int32",), needed=self.scheme.ordered and self.groups > 1),
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
        return self._shifted_zeros(unpacked(words.view(np.uint8), self.scheme.bits)[:, outputs].T)


class _Scaled(StoredMatrix):
    """A weight of one byte a number, an output a row, and a scale for all of it, for each output or for each block."""

    scale = "weight_scale"
    """Or the inverse by its name, which codes are multiplied by nevertheless."""
    found: tuple[int, ...] = ()
    """The shape of the scales: ModelOpt's have a 1 behind each dimension, or none at all where there is one block."""

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
            usual = (-(-outs // self.scheme.block[0]), self.groups)
            same = [size for size in self.found if size > 1] == [size for size in usual if size > 1]
            return (self.found if same else usual,)
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
        return MXFP4 if self.group == 32 else Packing("e2m1", self.group, "e4m3", "none")

    def codes(self, read: Read, rows: Rows) -> Codes:
        return self._codes_by_row(read, rows, self._codes, self.shape[1] // 2)

    def scales(self, read: Read, outputs: Array) -> Array:
        first = int(outputs.min())
        return read(self._scales, first, int(outputs.max()) + 1)[outputs - first]

    def whole_scale(self, read: Read) -> np.float32:
        whole = np.float32(read(self._whole).view(np.float32).item())
        return whole if self.scheme.layout == "modelopt" else np.float32(1 / whole)


class _Blocks4(StoredMatrix):
    """bitsandbytes' codes of 4 bits, of all rows one after another, the upper half of each byte the first of its two.
    How many share a scale is seen from the number of scales.

    Scales may be codes themselves (double quantisation): of a table, times the scale of their block, plus a number.
    These are computed in float32 and in this order, as bitsandbytes does.
    """

    _SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 32)
    _NESTED = 256

    def __init__(self, scheme: Scheme, shape: tuple[int, int], held: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(scheme, shape)
        self._state, count = f"weight.quant_state.bitsandbytes__{scheme.levels}", math.prod(shape)
        scales = math.prod(held.get("weight.absmax", ()))
        self.group = next((size for size in self._SIZES if -(-count // size) == scales), self._SIZES[0])
        self.groups = -(-count // self.group)
        self._nested = any(part.startswith("weight.nested") for part in held)
        self._length = min(math.prod(held.get(self._state, ())), 4096)
        self._offset = 0.0

    def parts(self) -> dict[str, StoredPart]:
        nested = {
            "weight.nested_absmax": StoredPart(((-(-self.groups // self._NESTED),),), ("float32",)),
            "weight.nested_quant_map": StoredPart(((256,),), ("float32",)),
        }
        return {
            "weight": StoredPart(((math.prod(self.shape) // 2, 1),), ("uint8",)),
            "weight.absmax": StoredPart(((self.groups,),), ("uint8" if self._nested else "float32",)),
            "weight.quant_map": StoredPart(((16,),), ("float32",)),
            self._state: StoredPart(((self._length,),), ("uint8",)),
            **(nested if self._nested else {}),
        }

    def misfit(self) -> str:
        ins = self.shape[1]
        return f"blocks of {self.group} numbers do not lie within its rows of {ins}" if ins % self.group else ""

    def fault(self, content: Callable[[str], Array | None]) -> str:
        levels, state = content("weight.quant_map"), content(self._state)
        if levels is None or state is None:
            return ""
        if not np.allclose(levels, np.array(LEVELS[self.scheme.levels], np.float32), rtol=0, atol=1e-6):
            return f"weight.quant_map': expected the levels of {self.scheme.levels}"
        try:
            said = strict_json(state.tobytes())
        except ValueError as error:
            return f"{self._state}': expected JSON ({error})"
        facts: dict[str, Any] = {"quant_type": self.scheme.levels, "blocksize": self.group, "shape": list(self.shape)}
        facts |= {"nested_blocksize": self._NESTED, "nested_dtype": "float32"} if self._nested else {}
        for key, fact in facts.items():
            found = said.get(key) if isinstance(said, dict) else None
            if found != fact:
                return f"{self._state}': expected {key} {fact}, found {repr(found)[:80]}"
        offset = said.get("nested_offset", None if self._nested else 0.0)
        if type(offset) not in (int, float) or not abs(offset) < 1e30:
            return f"{self._state}': expected a number as nested_offset, found {repr(offset)[:80]}"
        self._offset = float(offset)
        return ""

    def codes(self, read: Read, rows: Rows) -> Codes:
        width = self.shape[1] // 2

        def by_row(part: str, start: int = 0, stop: int | None = None) -> Array:
            return read(part, start * width, None if stop is None else stop * width).reshape(-1, width)

        for outs, places, codes in self._codes_by_row(by_row, rows, "weight", width):
            yield outs, places, codes << np.uint8(4) | codes >> np.uint8(4)

    def scales(self, read: Read, outputs: Array) -> Array:
        across = self.shape[1] // self.group
        first, stop = int(outputs.min()), int(outputs.max()) + 1
        scales = read("weight.absmax", first * across, stop * across)
        if self._nested:
            table, tops = (read(f"weight.nested_{part}").view(np.float32) for part in ("quant_map", "absmax"))
            blocks = np.arange(first * across, stop * across) // self._NESTED
            scales = (table[scales] * tops[blocks] + np.float32(self._offset)).view(np.uint32)
        return scales.reshape(-1, across)[outputs - first]


class _Int8(_Scaled):
    """bitsandbytes' int8: an output a row, and 127 times the scale of each."""

    scale = "SCB"

    def parts(self) -> dict[str, StoredPart]:
        return {
            "weight": StoredPart((self.shape,), ("int8",)),
            "SCB": StoredPart(((self.shape[0],),), ("float32",)),
            "weight_format": StoredPart(((), (1,)), ("uint8",), needed=False),
        }

    def fault(self, content: Callable[[str], Array | None]) -> str:
        order = content("weight_format")
        return "" if order is None or order[0] == 0 else f"weight_format': expected 0, rows, found {order[0]}"

    def scales(self, read: Read, outputs: Array) -> Array:
        largest = super().scales(read, outputs).view(np.float32)
        return (largest * np.float32(1 / 127)).view(np.uint32)


def stored_matrix(scheme: Scheme, shape: tuple[int, int], held: Mapping[str, tuple[int, ...]]) -> StoredMatrix:
    """The matrix that `scheme` stores as tensors of which a checkpoint has those `held`, of these shapes."""
    if scheme.layout == "bnb4":
        return _Blocks4(scheme, shape, held)
    layouts = {"gptq": _Gptq, "awq": _Awq, "packed": _Compressed, "scaled": _Scaled, "bnb8": _Int8}
    matrix = layouts.get(scheme.layout, _Floats4)(scheme, shape)
    if isinstance(matrix, _Scaled):
        if "weight_scale_inv" in held:
            matrix.scale = "weight_scale_inv"
        matrix.found = held.get(matrix.scale, ())
    return matrix
