"""How matrices of fewer bits lie in memory: the internal layouts that every stored format is converted to. No torch.

A matrix (outs, ins) is kept row by row, and a row in groups of neighbouring inputs. A number is

    level(code) * scale + low

where code is what is stored of it, and scale and low are those of its group, both taken as float32 numbers. Sheng et
al. 2023, "FlexGen", section 5, has scale and low; GPTQ and AWQ a zero point; GGUF's "K" formats two levels of scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Literal, NamedTuple


def _signed(step: float, *sizes: float) -> tuple[float, ...]:
    """Values of `sizes` in steps: first of codes 0 to 7, then of codes 8 to 15 with the sign turned."""
    return tuple(float(sign * size * step) for sign in (1, -1) for size in sizes)


LEVELS = {
    "e2m1": _signed(0.5, 0, 1, 2, 3, 4, 6, 8, 12),
    "iq4": tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))),
    "iq3": _signed(0.25, 4, 12, 20, 28, 36, 44, 52, 62),
    "iq3s": _signed(1, 1, 3, 5, 7, 9, 11, 13, 15),
    "iq2": _signed(0.125, 1, 7, 8, 9, 25, 43, 0, 0),
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": _signed(1 / 12, 0, 0.0625, 8, 12, 4, 6, 2, 3),
}
"""The values of the 16 codes of some levels of 4 bits: of OCP's MX, of GGUF's IQ types (iq2 serves IQ1 too), and of
bitsandbytes: quantiles of a normal distribution (Dettmers et al. 2023, "QLoRA", arXiv 2305.14314), and its floats."""
LEVEL_BITS = {**dict.fromkeys(("uint4", *LEVELS), 4), "int8": 8, "e4m3": 8}
"""The bits of a code, by its kind of values: 0 to 15; one of LEVELS; -128 to 127; the floats of 8 bits of OCP's FP8."""
SUPER = 256
"""Inputs of a super-block in GGUF's K formats."""
CACHE_GROUP = 64
"""Numbers of a packed key or value that share a scale and a low, at most."""
EXPANDED = 1 << 20
"""Numbers of packed keys, and of values, that torch packs or expands at once, if those of a row are not more."""
_PART_ALIGN = 64

_SIZES = {"uint8": 1, "int8": 1, "int16": 2, "int32": 4, "float16": 2, "bfloat16": 2, "float32": 4}


class Part(NamedTuple):
    """One tensor of a packed matrix: bytes [offset, offset + nbytes) of the matrix's bytes, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Packing:
    """One layout. ValueError for one that does not exist.

    levels  a key of LEVEL_BITS. With 4 bits byte j of a row holds code 2 j in its lower, code 2 j + 1 in its upper half
    group   inputs that share a scale, a power of two from 16 on; a row's last group may be shorter. 0: the whole row
    scale   the dtype of the scales; "e8m0": uint8 e for 2 ** (e - 127); "e4m3": a float of 8 bits times the float32 of
            its row; "super": an int8 times the float16 of its super-block of 256 inputs
    low     "none": 0; "middle": -8 times the scale; "zero": -zero times the scale, zero an int16 per group; a dtype: a
            number of its own; "super": minus an int8 times a float16 per super-block
    ordered whether inputs are permuted: column j of the codes belongs to input order[j] (GPTQ's act-order)
    """

    levels: str = "uint4"
    group: int = 64
    scale: Literal["bfloat16", "float16", "float32", "e8m0", "e4m3", "super"] = "bfloat16"
    low: Literal["none", "middle", "zero", "bfloat16", "float16", "float32", "super"] = "bfloat16"
    ordered: bool = False

    def __post_init__(self) -> None:
        if self.levels not in LEVEL_BITS:
            raise ValueError(f"levels {self.levels!r}: needed one of {', '.join(LEVEL_BITS)}")
        if self.group and (self.group < 16 or self.group & (self.group - 1)):
            raise ValueError(f"groups of {self.group}: needed a power of two from 16 on, or 0 for whole rows")
        if "super" in (self.scale, self.low) and not 16 <= self.group <= SUPER:
            raise ValueError(f"groups of {self.group} in super-blocks of {SUPER}")

    @property
    def bits(self) -> int:
        """Of a code."""
        return LEVEL_BITS[self.levels]

    def groups(self, ins: int) -> int:
        return -(-ins // self.group) if self.group else 1

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """The tensors of a matrix of `shape` (outs, ins), in the order in which they lie. ValueError for no matrix, or
        an odd number of inputs with 4 bits."""
        return _parts(self, shape)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a matrix, with the gaps between its parts."""
        last = self.parts(shape)[-1]
        return last.offset + last.nbytes


def groupwise(bits: int, group: int) -> Packing:
    """How matrices are packed in 4 or 8 bits that are stored in more, `group` inputs sharing a scale."""
    return Packing("uint4", group) if bits == 4 else Packing("int8", group, low="none")


@cache
def _parts(packing: Packing, shape: tuple[int, ...]) -> tuple[Part, ...]:
    if len(shape) != 2:
        raise ValueError(f"a tensor of shape {shape} cannot be packed: needed a matrix")
    outs, ins = shape
    if ins * packing.bits % 8:
        raise ValueError(f"rows of {ins} numbers of {packing.bits} bits do not end with a byte")
    groups, blocks = (outs, packing.groups(ins)), (outs, -(-ins // SUPER))
    wanted: list[tuple[str, str, tuple[int, ...]]] = [("codes", "uint8", (outs, ins * packing.bits // 8))]
    if packing.scale == "super":
        wanted += [("scale", "int8", groups), ("super_scale", "float16", blocks)]
    elif packing.scale == "e4m3":
        wanted += [("scale", "uint8", groups), ("super_scale", "float32", (outs, 1))]
    else:
        wanted.append(("scale", "uint8" if packing.scale == "e8m0" else packing.scale, groups))
    if packing.low == "super":
        wanted += [("low", "int8", groups), ("super_low", "float16", blocks)]
    elif packing.low == "zero":
        wanted.append(("low", "int16", groups))
    elif packing.low not in ("none", "middle"):
        wanted.append(("low", packing.low, groups))
    if packing.ordered:
        wanted.append(("order", "int32", (ins,)))
    parts, offset = [], 0
    for name, dtype, size in wanted:
        nbytes = _SIZES[dtype] * size[0] * (size[1] if len(size) > 1 else 1)
        parts.append(Part(name, dtype, size, offset, nbytes))
        offset += -(-nbytes // _PART_ALIGN) * _PART_ALIGN
    return tuple(parts)


CacheBits = int | tuple[int, int]
"""Of keys and values in caches, or of keys and of values: 8 or 4, of values 3 too; 16 of both for numbers of the
computation's dtype."""


CacheRotation = Literal["centre", "scale", "rotate", "none"]
"""Before keys and values are packed both are rotated, and keys are centred and scaled by channel first
(`cache.packing.KeyScales`); only scaled first; both are rotated; or neither."""
FIRST = 1
"""First tokens of a prompt whose rounding errors are kept where keys are centred: a key that draws most of the
attention to itself is far from the mean."""


def cache_packings(
    bits: CacheBits, dim: int, rotation: CacheRotation = "scale"
) -> tuple[CachePacking, CachePacking] | None:
    """How keys and values of `dim` numbers are kept; None: as numbers. ValueError where they cannot be."""
    keys, values = bits if isinstance(bits, tuple) else (bits, bits)
    if keys == values == 16:
        return None
    return CachePacking(keys, dim, rotation != "none"), CachePacking(values, dim, rotation != "none")


def scales_keys(bits: CacheBits, rotation: CacheRotation) -> bool:
    """Whether keys are scaled before they are packed, unless they are the values as well."""
    return bits != 16 and rotation in ("centre", "scale")


def centres_keys(bits: CacheBits, rotation: CacheRotation) -> bool:
    """Whether their mean is taken from keys before they are scaled."""
    return bits != 16 and rotation == "centre"


def channel_numbers(bits: CacheBits, rotation: CacheRotation) -> int:
    """Numbers that a row keeps of each channel of its keys: a scale, and a mean."""
    return scales_keys(bits, rotation) + centres_keys(bits, rotation)


def first_tokens(bits: CacheBits, rotation: CacheRotation) -> int:
    """Tokens whose rounding errors are kept, beside those of the newest ones."""
    return FIRST if centres_keys(bits, rotation) else 0


def newest_tokens(most: int, slots: int, first: int, full: bool) -> int:
    """How many newest tokens' errors are kept: `most`, whatever else the cache holds, or all of a `full` one's."""
    return min(most, max(0, slots - 1 - first)) if full else most


@dataclass(frozen=True)
class CachePacking:
    """How a key or a value of `dim` numbers is kept in `bits` for each, in one piece of `nbytes` bytes.

    The codes, as `quant.groupwise` has them: with 4 bits two in a byte, the first in its lower half, with 3 the lower
    two of all first; then a scale for each group of neighbours; then a low for each, all bfloat16. A number is code *
    scale + low. Slots and eviction move the pieces as they are.

    With `rotation` the numbers are those of a Hadamard transform (`kernels.pieces.hadamard`) of each `block`, which
    spreads outliers over all of a group: queries are transformed alike, and what attention mixes is transformed back.
    """

    bits: int
    dim: int
    rotation: bool = True

    def __post_init__(self) -> None:
        if self.bits not in (3, 4, 8):
            raise ValueError(f"keys and values of {self.bits} bits: needed 4 or 8, or 3 for values")
        if self.dim * self.bits % 16:
            multiple = 16 // gcd(16, self.bits)
            raise ValueError(f"{self.dim} numbers of {self.bits} bits: needed a multiple of {multiple} numbers")

    @property
    def block(self) -> int:
        """Numbers that are transformed together, the largest power of two that `dim` is a multiple of; 0: none are."""
        return self.dim & -self.dim if self.rotation else 0

    @property
    def group(self) -> int:
        """Numbers that share a scale; the last group may have fewer."""
        return min(CACHE_GROUP, self.dim)

    @property
    def groups(self) -> int:
        return -(-self.dim // self.group)

    @property
    def code_bytes(self) -> int:
        return self.dim * self.bits // 8

    @property
    def nbytes(self) -> int:
        return self.code_bytes + 4 * self.groups
