"""The block formats of GGUF, and their conversion to our layouts.

A row is cut into blocks of neighbouring numbers, and a block holds its scales and codes together; the formats are
described in ggml's sources (ggml-common.h). Conversion goes through numpy, which takes one thread: loading may run
beside the computation. Every number that the converted matrix stands for is the block's own, to the bit in float32.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """All of a row, flat."""
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

    Those of the first four groups are the lower 6 bits of bytes 0 to 3 and 4 to 7, whose upper 2 bits belong to the
    last four groups; the lower 4 bits of these are the halves of bytes 8 to 11.
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
}
"""The types that are read, by ggml's name."""
