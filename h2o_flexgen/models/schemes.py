"""How the matrices of a quantised checkpoint are stored, as its quantization_config says: schemes, and the modules that
each is for. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from h2o_flexgen.config.model.packing import LEVEL_BITS, Packing

Layout = Literal["gptq", "awq", "packed", "scaled", "mxfp4", "fp4", "modelopt", "bnb4", "bnb8"]

MXFP4 = Packing("e2m1", 32, "e8m0", "none")
"""The experts of gpt-oss."""


@dataclass(frozen=True)
class Scheme:
    """How one kind of matrix is stored.

    layout     gptq, awq: words of 32 bits with inputs (awq: outputs) side by side, an input a row; packed: the
               weight_packed of compressed-tensors; scaled: a weight of one byte a number, and its scale; mxfp4: the
               blocks and scales of gpt-oss's experts; fp4, modelopt: floats of 4 bits as compressed-tensors or
               NVIDIA's ModelOpt stores them; bnb4: bitsandbytes' blocks of all numbers in a row; bnb8: its int8
    levels     what a number is: uint4, int8 (stored with 128 added, but for scaled and bnb8), e2m1, nf4, fp4 or e4m3
    block      (outputs, inputs) that share a scale, 0 for all; None: all of the matrix, of a row or of a block, as the
               scale's shape says
    symmetric  whether there are no zero points; gptq has them nevertheless
    zero_step  what was subtracted from zero points when they were stored
    ordered    whether inputs are grouped in another order than theirs, which the tensors must then tell
    """

    layout: Layout
    levels: Literal["uint4", "int8", "e2m1", "nf4", "fp4", "e4m3"]
    block: tuple[int, int] | None
    symmetric: bool = True
    zero_step: int = 0
    ordered: bool = False

    @property
    def bits(self) -> int:
        return LEVEL_BITS[self.levels]


@dataclass(frozen=True)
class Quantization:
    """The schemes of a checkpoint that `method` made, by the targets of each, and the modules that are left out.

    A target is the name of a module, "re:" and a pattern that its name begins with, or "Linear" or "Embedding". Which
    matrices are really packed is seen from a checkpoint's tensors: plain ones are read as what they are. `in_order`:
    the first scheme with a target that fits is a module's, whatever kind of target that is. `static`: whether scales of
    activations stand beside matrices, which are not used: activations keep their bits. `cached`: the same of caches.
    """

    method: str
    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignore: tuple[str, ...] = ()
    in_order: bool = False
    static: bool = False
    cached: bool = False

    def scheme(self, module: str, kind: Literal["Linear", "Embedding"]) -> Scheme | None:
        """That of `module`; None where quantization_config leaves it out. Names go before patterns before kinds."""
        if any(_matches(each, module) or each == kind for each in self.ignore):
            return None
        pairs = [(target, scheme) for targets, scheme in self.schemes for target in targets]
        fitting = [pair for pair in pairs if _matches(pair[0], module) or pair[0] == kind]
        if not self.in_order:
            fitting.sort(key=lambda pair: (pair[0] != module, pair[0] == kind))
        return fitting[0][1] if fitting else None


_LONGEST = 200
_SLOW = re.compile(r"\)\s*[*+?{]|\(\?(?!:)|\\[1-9]")
"""Repeated groups, looks ahead and references back: with those a pattern may take for ever."""
_REPEATED = re.compile(r"[*+{]|(?<!\()\?")


def pattern_fault(text: str) -> str:
    """The kind of pattern that is needed instead of one behind "re:"; empty for one that is safe to search for."""
    if not text.startswith("re:"):
        return ""
    pattern = text.removeprefix("re:")
    many = len(_REPEATED.findall(pattern)) > 4 or pattern.count("(") > 3
    if many or len(pattern) > _LONGEST or _SLOW.search(pattern):
        what = "4 repetitions and 3 groups, none of them repeated"
        return f"patterns of at most {_LONGEST} characters with at most {what}"
    try:
        _compiled(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"regular expressions ({error})"
    return ""


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _matches(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return _compiled(target.removeprefix("re:")).match(module) is not None
    return target == module
