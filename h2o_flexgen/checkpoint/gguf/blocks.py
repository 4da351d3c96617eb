"""The block formats of GGUF, and their conversion to our layouts.

A row is cut into blocks of neighbouring numbers, and a block holds its scales and codes together; the formats are
described in ggml's sources (ggml-common.h). Conversion goes through numpy, which takes one thread: loading may run
beside the computation. Every number that the converted matrix stands for is the block's own, to the bit in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from h2o_flexgen.config.model.packing import Packing

TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""ggml's types by number, whether they are read here or not."""
REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8"}
REMOVED |= {38: "IQ4_NL_8_8"}
"""Types that ggml no longer has; the hub still has files of some."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Parts = dict[str, np.ndarray]
"""The parts of a packed matrix, as `Packing.parts` has them, of some of its rows."""


class Format(NamedTuple):
    """One type: `numbers` of a row in a block of `nbytes` bytes.

    dtype    of floats, which are not packed
    packing  the layout that blocks are converted to, by `convert` (rows, blocks of a row, bytes of a block)
    """

    numbers: int
    nbytes: int
    dtype: str | None = None
    packing: Packing | None = None
    convert: Callable[[Bytes], Parts] | None = None


def _half(blocks: Bytes, start: int) -> np.ndarray:
    """The float16 at byte `start` of every block, (rows, blocks)."""
    return np.ascontiguousarray(blocks[:, :, start : start + 2]).view(np.float16)[:, :, 0]


def _rows(values: np.ndarray) -> np.ndarray:
    return values.reshape(len(values), -1)


def _paired(codes: Bytes) -> Bytes:
    """Two codes of 4 bits to the byte, the first in its lower half."""
    return _rows(codes[..., 0::2] | codes[..., 1::2] << 4)


def _nibbles(packed: Bytes) -> Bytes:
    """The codes of a group from bytes whose lower halves are its first, upper halves its second half."""
    return np.concatenate([packed & 15, packed >> 4], -1)


def _q4_0(blocks: Bytes) -> Parts:
    return {"codes": _paired(_nibbles(blocks[:, :, 2:])), "scale": _half(blocks, 0)}


def _q4_1(blocks: Bytes) -> Parts:
    return {"codes": _paired(_nibbles(blocks[:, :, 4:])), "scale": _half(blocks, 0), "low": _half(blocks, 2)}


def _fives(blocks: Bytes, high: int, low: int) -> Bytes:
    """Codes of 5 bits, 32 to the block: their highest bits in 4 bytes from `high` on, the others from `low` on."""
    bits = np.unpackbits(blocks[:, :, high : high + 4], axis=-1, bitorder="little")
    return _nibbles(blocks[:, :, low:]) | bits << np.uint8(4)


def _q5_0(blocks: Bytes) -> Parts:
    return {"codes": _rows(_fives(blocks, 2, 6) - np.uint8(16)), "scale": _half(blocks, 0)}


def _q5_1(blocks: Bytes) -> Parts:
    return {"codes": _rows(_fives(blocks, 4, 8)), "scale": _half(blocks, 0), "low": _half(blocks, 2)}


def _q8_0(blocks: Bytes) -> Parts:
    return {"codes": _rows(blocks[:, :, 2:]), "scale": _half(blocks, 0)}


def _scales_and_lows(packed: Bytes) -> Parts:
    """The scales and lows of 6 bits of a block's 8 groups, in its 12 bytes of them.

    The first four groups have the lower 6 bits of bytes 0 to 3 and 4 to 7, whose upper 2 bits belong to the last four
    groups; the lower 4 bits of these are the halves of bytes 8 to 11.
    """
    first, second, third = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    scale = np.concatenate([first & 63, third & 15 | first >> 6 << 4], -1)
    low = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], -1)
    return {"scale": _rows(scale).view(np.int8), "low": _rows(low).view(np.int8)}


def _q4_k(blocks: Bytes) -> Parts:
    # 32 bytes hold two groups of 32 numbers: one in the lower halves, the next in the upper ones.
    packed = blocks[:, :, 16:].reshape(*blocks.shape[:2], 4, 32)
    supers = {"super_scale": _half(blocks, 0), "super_low": _half(blocks, 2)}
    return {"codes": _paired(_nibbles(packed)), **_scales_and_lows(blocks[:, :, 4:16]), **supers}


def _q5_k(blocks: Bytes) -> Parts:
    high, packed = blocks[:, :, None, 16:48], blocks[:, :, 48:].reshape(*blocks.shape[:2], 4, 32)
    # Bit g of byte j is the highest bit of number j of group g.
    bits = high >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _nibbles(packed).reshape(*blocks.shape[:2], 8, 32) | bits << 4
    supers = {"super_scale": _half(blocks, 0), "super_low": _half(blocks, 2)}
    return {"codes": _rows(codes), **_scales_and_lows(blocks[:, :, 4:16]), **supers}


def _q6_k(blocks: Bytes) -> Parts:
    # Each half of a block: 64 bytes of lower bits, of two times 64 numbers, and 32 bytes of upper bits, four to a byte.
    low = _nibbles(blocks[:, :, :128].reshape(*blocks.shape[:2], 2, 64)).reshape(*blocks.shape[:2], 2, 4, 32)
    high = blocks[:, :, 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    codes = low | (high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3) << 4
    scale = _rows(blocks[:, :, 192:208]).view(np.int8)
    return {"codes": _rows(codes - np.uint8(32)), "scale": scale, "super_scale": _half(blocks, 208)}


def _bits(packed: Bytes, step: int) -> Bytes:
    """The parts of `step` bits of every byte, those of 32 bytes one after another: (rows, blocks, n)."""
    runs = packed.reshape(*packed.shape[:2], -1, 1, 32)
    parts = runs >> np.arange(0, 8, step, dtype=np.uint8)[:, None] & np.uint8((1 << step) - 1)
    return parts.reshape(*packed.shape[:2], -1)


def _q2_k(blocks: Bytes) -> Parts:
    both = blocks[:, :, :16]
    scales = {"scale": _rows(both & 15).view(np.int8), "low": _rows(both >> 4).view(np.int8)}
    supers = {"super_scale": _half(blocks, 80), "super_low": _half(blocks, 82)}
    return {"codes": _rows(_paired(_bits(blocks[:, :, 16:80], 2))), **scales, **supers}


def _q3_k(blocks: Bytes) -> Parts:
    # A number is its 2 lower bits, less 4 where its upper one is 0. Scales have 32 added.
    codes = _bits(blocks[:, :, 32:96], 2) + 4 + 4 * _bits(blocks[:, :, :32], 1)
    high = blocks[:, :, None, 104:108] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    scale = _nibbles(blocks[:, :, 96:104]) | high.reshape(*blocks.shape[:2], 16) << 4
    return {
        "codes": _rows(_paired(codes)),
        "scale": _rows(scale - np.uint8(32)).view(np.int8),
        "super_scale": _half(blocks, 108),
    }


def _tq1_0(blocks: Bytes) -> Parts:
    # Bytes are fractions of 256: the digits of a fraction in base 3, from the first on, are the numbers plus 1.
    def digits(packed: Bytes, count: int) -> Bytes:
        turned = packed[:, :, None, :] * np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
        return (turned.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(*packed.shape[:2], -1)

    ends = [digits(blocks[:, :, :32], 5), digits(blocks[:, :, 32:48], 5), digits(blocks[:, :, 48:52], 4)]
    return {"codes": _rows(_paired(np.concatenate(ends, -1) + np.uint8(7))), "scale": _half(blocks, 52)}


def _tq2_0(blocks: Bytes) -> Parts:
    return {"codes": _rows(_paired(_bits(blocks[:, :, :64], 2) + np.uint8(7))), "scale": _half(blocks, 64)}


def _q8_k(blocks: Bytes) -> Parts:
    scale = np.ascontiguousarray(blocks[:, :, :4]).view(np.float32)[:, :, 0]
    return {"codes": _rows(blocks[:, :, 4:260]), "scale": scale}


def _mxfp4(blocks: Bytes) -> Parts:
    return {"codes": _paired(_nibbles(blocks[:, :, 1:])), "scale": blocks[:, :, 0]}


def _nvfp4(blocks: Bytes) -> Parts:
    # Scales are floats of 8 bits (e4m3) whose sign plays no part; the code of NaN is 0.
    size = np.arange(256, dtype=np.uint8) & 127
    size[size == 127] = 0
    packed = blocks[:, :, 4:].reshape(*blocks.shape[:2], 4, 8)
    ones = np.ones((len(blocks), 1), np.float32)
    return {"codes": _paired(_nibbles(packed)), "scale": _rows(size[blocks[:, :, :4]]), "super_scale": ones}


def _iq4_xs(blocks: Bytes) -> Parts:
    high = blocks[:, :, 2:4, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    low = np.stack([blocks[:, :, 4:8] & 15, blocks[:, :, 4:8] >> 4], -1)
    scale = low.reshape(*blocks.shape[:2], 8) | high.reshape(*blocks.shape[:2], 8) << 4
    packed = blocks[:, :, 8:].reshape(*blocks.shape[:2], 8, 16)
    codes = _paired(_nibbles(packed))
    return {"codes": codes, "scale": _rows(scale - np.uint8(32)).view(np.int8), "super_scale": _half(blocks, 0)}


@cache
def _grid(name: str) -> Bytes:
    """The points of an IQ type, (points, 8 or 4): codes of sizes; of IQ1 0, 1 and 2 for -1, 0 and 1."""
    with np.load(str(resources.files("h2o_flexgen") / "data" / "gguf" / "grids.npz")) as grids:
        return np.ascontiguousarray(grids[name])


def _points(name: str, indices: np.ndarray, signs: Bytes) -> Bytes:
    """Codes, two to the byte, of the grid's points `indices` (rows, blocks, n); a bit of `signs` turns each number."""
    turned = np.unpackbits(signs, axis=-1, bitorder="little") << np.uint8(3)
    return _paired(_grid(name)[indices].reshape(turned.shape) | turned)


def _even_signs(indices: np.ndarray) -> Bytes:
    """Signs of 8 numbers, of which 7 are stored: an even count of them is negative."""
    fours = indices ^ indices >> 4
    twos = fours ^ fours >> 2
    return (indices | ((twos ^ twos >> 1) & 1) << 7).astype(np.uint8)


def _words(blocks: Bytes, start: int, stop: int, dtype: str) -> np.ndarray:
    """Whole numbers in bytes [start, stop) of every block, (rows, blocks, n) int64."""
    return np.ascontiguousarray(blocks[:, :, start:stop]).view(dtype).astype(np.int64)


def _shifted(numbers: np.ndarray, steps: Iterable[int], mask: int) -> np.ndarray:
    """Parts of every number, from bits `steps` on: (rows, blocks, n)."""
    parts = numbers[..., None] >> np.array(list(steps)) & mask
    return parts.reshape(*numbers.shape[:2], -1)


def _odd(small: np.ndarray) -> np.ndarray:
    """Scales 2 s + 1 as the layout has them."""
    return _rows(2 * small + 1).astype(np.int8)


def _signs_and_scale(words: np.ndarray) -> tuple[Bytes, np.ndarray]:
    """From a word of 32 bits: four times 7 signs, and a scale of 4 bits."""
    return _even_signs(_shifted(words, (0, 7, 14, 21), 127)), _odd(words >> 28)


def _iq2_xxs(blocks: Bytes) -> Parts:
    indices = blocks[:, :, 2:].reshape(*blocks.shape[:2], 8, 8)[..., :4].reshape(*blocks.shape[:2], 32)
    signs, scale = _signs_and_scale(_words(blocks, 2, 66, "<u4")[:, :, 1::2])
    return {"codes": _points("IQ2_XXS", indices, signs), "scale": scale, "super_scale": _half(blocks, 0)}


def _iq2_xs(blocks: Bytes) -> Parts:
    words, small = _words(blocks, 2, 66, "<u2"), _words(blocks, 66, 74, "u1")
    codes = _points("IQ2_XS", words & 511, _even_signs(words >> 9))
    return {"codes": codes, "scale": _odd(_shifted(small, (0, 4), 15)), "super_scale": _half(blocks, 0)}


def _iq2_s(blocks: Bytes) -> Parts:
    high, small = _words(blocks, 66, 74, "u1"), _words(blocks, 74, 82, "u1")
    indices = blocks[:, :, 2:34] | _shifted(high, (0, 2, 4, 6), 3) << 8
    codes = _points("IQ2_S", indices, blocks[:, :, 34:66])
    return {"codes": codes, "scale": _odd(_shifted(small, (0, 4), 15)), "super_scale": _half(blocks, 0)}


def _iq3_xxs(blocks: Bytes) -> Parts:
    signs, scale = _signs_and_scale(_words(blocks, 66, 98, "<u4"))
    return {"codes": _points("IQ3_XXS", blocks[:, :, 2:66], signs), "scale": scale, "super_scale": _half(blocks, 0)}


def _iq3_s(blocks: Bytes) -> Parts:
    high, small = _words(blocks, 66, 74, "u1"), _words(blocks, 106, 110, "u1")
    codes = _points("IQ3_S", blocks[:, :, 2:66] | _shifted(high, range(8), 1) << 8, blocks[:, :, 74:106])
    return {"codes": codes, "scale": _odd(_shifted(small, (0, 4), 15)), "super_scale": _half(blocks, 0)}


def _moved(indices: np.ndarray, down: np.ndarray) -> Bytes:
    """Codes of IQ1's points `indices` (rows, blocks, 32), each moved by an eighth up, or `down`."""
    codes = np.array([[9, 0, 3], [11, 8, 1]], np.uint8)  # -7, 1, 9 and -9, -1, 7 eighths
    return _paired(_rows(codes[down[..., None], _grid("IQ1_S")[indices]]))


def _iq1_s(blocks: Bytes) -> Parts:
    high = _words(blocks, 34, 50, "<u2")
    indices = blocks[:, :, 2:34] | _shifted(high, (0, 3, 6, 9), 7) << 8
    codes = _moved(indices, np.repeat(high >> 15, 4, -1))
    return {"codes": codes, "scale": _odd(high >> 12 & 7), "super_scale": _half(blocks, 0)}


def _iq1_m(blocks: Bytes) -> Parts:
    high, small = _words(blocks, 32, 48, "u1"), _words(blocks, 48, 56, "<u2")
    codes = _moved(blocks[:, :, :32] | _shifted(high, (0, 4), 7) << 8, _shifted(high, (3, 7), 1))
    # The upper 4 bits of the four words are those of a float16.
    whole = ((small >> 12) << np.array([0, 4, 8, 12])).sum(-1).astype(np.uint16).view(np.float16)
    return {"codes": codes, "scale": _odd(_shifted(small, (0, 3, 6, 9), 7)), "super_scale": whole}


FORMATS = {
    "F32": Format(1, 4, "float32"),
    "F16": Format(1, 2, "float16"),
    "BF16": Format(1, 2, "bfloat16"),
    "Q4_0": Format(32, 18, None, Packing("uint4", 32, "float16", "middle"), _q4_0),
    "Q4_1": Format(32, 20, None, Packing("uint4", 32, "float16", "float16"), _q4_1),
    "Q5_0": Format(32, 22, None, Packing("int8", 32, "float16", "none"), _q5_0),
    "Q5_1": Format(32, 24, None, Packing("int8", 32, "float16", "float16"), _q5_1),
    "Q8_0": Format(32, 34, None, Packing("int8", 32, "float16", "none"), _q8_0),
    "Q4_K": Format(256, 144, None, Packing("uint4", 32, "super", "super"), _q4_k),
    "Q5_K": Format(256, 176, None, Packing("int8", 32, "super", "super"), _q5_k),
    "Q6_K": Format(256, 210, None, Packing("int8", 16, "super", "none"), _q6_k),
    "Q2_K": Format(256, 84, None, Packing("uint4", 16, "super", "super"), _q2_k),
    "Q3_K": Format(256, 110, None, Packing("uint4", 16, "super", "middle"), _q3_k),
    "Q8_K": Format(256, 292, None, Packing("int8", 256, "float32", "none"), _q8_k),
    "TQ1_0": Format(256, 54, None, Packing("uint4", 256, "float16", "middle"), _tq1_0),
    "TQ2_0": Format(256, 66, None, Packing("uint4", 256, "float16", "middle"), _tq2_0),
    "MXFP4": Format(32, 17, None, Packing("e2m1", 32, "e8m0", "none"), _mxfp4),
    "NVFP4": Format(64, 36, None, Packing("e2m1", 16, "e4m3", "none"), _nvfp4),
    "IQ4_NL": Format(32, 18, None, Packing("iq4", 32, "float16", "none"), _q4_0),
    "IQ4_XS": Format(256, 136, None, Packing("iq4", 32, "super", "none"), _iq4_xs),
    "IQ3_XXS": Format(256, 98, None, Packing("iq3", 32, "super", "none"), _iq3_xxs),
    "IQ3_S": Format(256, 110, None, Packing("iq3s", 32, "super", "none"), _iq3_s),
    "IQ2_XXS": Format(256, 66, None, Packing("iq2", 32, "super", "none"), _iq2_xxs),
    "IQ2_XS": Format(256, 74, None, Packing("iq2", 16, "super", "none"), _iq2_xs),
    "IQ2_S": Format(256, 82, None, Packing("iq2", 16, "super", "none"), _iq2_s),
    "IQ1_S": Format(256, 50, None, Packing("iq2", 32, "super", "none"), _iq1_s),
    "IQ1_M": Format(256, 56, None, Packing("iq2", 16, "super", "none"), _iq1_m),
}
"""The types that are read, by ggml's name."""
