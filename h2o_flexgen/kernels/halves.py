"""Half of a decoder layer in one call of C, for a few rows of bfloat16 numbers on a CPU.

A decode step of few sequences through a small model takes longer to call its kernels one by one than they take.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.kernels.layers import MOST_ROWS
from h2o_flexgen.kernels.native import function, library, structure
from h2o_flexgen.kernels.packed import PackedWeight, give, is_plain

PLACE = "half"
"""Where a unit's weights keep what `HalfPlace.of` made of them."""
_FEW = min(32, MOST_ROWS)
_NO_GATE, _RELU, _SILU, _TANH_GELU = range(4)
_NO_NORM, _LAYER, _RMS = range(3)
"""As matrices.h counts them."""
_KINDS = {"layernorm": _LAYER, "rmsnorm": _RMS}
_GATES = {"silu": _SILU, "gelu_tanh": _TANH_GELU}


class Form(NamedTuple):
    """The form of all halves of a model. `before`, `after`: names of norms, None where there are none. `heads`: of
    queries and of keys; `normed`: both have RMS norms.
    """

    norm: str
    eps: float
    offset: float
    before: str | None
    after: str | None
    activation: str
    gated: bool
    heads: tuple[int, int]
    dim: int
    normed: bool

    def gate(self) -> int | None:
        """None where half.c does not know it."""
        return _GATES.get(self.activation) if self.gated else _RELU if self.activation == "relu" else None


def take_products(half: ctypes.Structure, w: Mapping[str, Any], parts: Sequence[str], last: str) -> bool:
    """Whether the kernels take these matrices of weights that outlive `half`, which then has them."""
    half.held = held = list[PackedWeight]()
    names = dict(zip(("first", "second", "third"), parts, strict=False), last=last)
    return all(give(getattr(half, name), w, part, held) for name, part in names.items())


class HalfPlace(structure("matrices.h", "Half")):  # type: ignore[misc]
    @classmethod
    def of(cls, w: Mapping[str, Any], form: Form) -> HalfPlace | None:
        """Of weights that outlive it; None where the kernels cannot take them."""
        attends = "o.weight" in w
        gate = _NO_GATE if attends else form.gate()
        joint, apart, last = ("qkv", "qkv", "o") if attends else ("gate_up", ("up", "gate")[: 1 + form.gated], "down")
        parts = [joint] if f"{joint}.weight" in w else [*apart]
        if library() is None or gate is None or not all(f"{part}.weight" in w for part in (*parts, last)):
            return None
        place = cls(gate=gate)
        fits = take_products(place, w, parts, last)
        place.made = place.first.outs + place.second.outs + place.third.outs
        return place if fits and place._take_norms(w, form) else None

    def _take_norms(self, w: Mapping[str, Any], form: Form) -> bool:
        """Whether all norms can be taken, which they then are."""
        kind = _KINDS[form.norm]
        norms = [("before", form.before, kind), ("after", form.after, kind)]
        if "o.weight" in w:
            (self.heads, self.kv_heads), self.dim = form.heads, form.dim
            norms += [("of_queries", "q_norm", _RMS), ("of_keys", "k_norm", _RMS)] if form.normed else []
        sizes = {"before": self.first.ins, "after": self.last.outs}
        for name, of, kind in norms:
            if of is None:
                continue
            norm, parts = getattr(self, name), [w.get(f"{of}.weight"), w.get(f"{of}.bias")]
            norm.n = sizes.get(name) or w[f"{of}.weight"].shape[0]
            norm.kind, norm.eps, norm.offset = kind, form.eps, form.offset
            norm.weight, norm.bias = (None if part is None else part.data_ptr() for part in parts)
            if not all(map(is_plain, parts)):
                return False
        return True

    @staticmethod
    def takes(x: Tensor) -> bool:
        """Whether x (T, n) are few rows of such numbers."""
        return x.dtype is torch.bfloat16 and x.is_cpu and 0 < x.shape[0] <= _FEW and x.stride(1) == 1

    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        """The norm of hidden (T, H), then the first products of that, side by side: (T, their outs), newly made.

        Queries and keys among them are normed where they have norms, then turned by cosines and sines (T, 2 m), if any,
        as by `layers.rotate_heads`.
        """
        rows = hidden.shape[0]
        out = hidden.new_empty(rows, self.made)
        turns: tuple[int | None, int | None, int, int] = None, None, 0, 0
        if angles is not None:
            cos, sin = angles
            turns = cos.data_ptr(), sin.data_ptr(), cos.stride(0), cos.shape[1] // 2
        self._run("half_forward", "PPlPPPllli", rows, hidden.data_ptr(), hidden.stride(0), out.data_ptr(), *turns)
        return out

    @staticmethod
    def turns(angles: tuple[Tensor, Tensor], rows: int) -> bool:
        """Whether `forward` takes these cosines and sines for so many rows."""
        cos, sin = angles
        same = cos.dtype is sin.dtype is torch.bfloat16 and cos.shape == sin.shape and cos.stride() == sin.stride()
        return same and cos.shape[0] == rows and cos.stride(1) == 1

    def back(self, x: Tensor, hidden: Tensor) -> None:
        """Adds the last product, of x (T, ins), and its norm, to hidden (T, H), in place."""
        places = x.data_ptr(), x.stride(0), hidden.data_ptr(), hidden.stride(0)
        self._run("half_back", "PPlPlli", hidden.shape[0], *places)

    def whole(self, hidden: Tensor) -> None:
        """Both, with the activation between them."""
        self._run("half_whole", "PPlli", hidden.shape[0], hidden.data_ptr(), hidden.stride(0))

    def _run(self, name: str, kinds: str, rows: int, *places: int | None) -> None:
        if function(name, kinds, "i")(ctypes.byref(self), *places, rows, torch.get_num_threads()):
            raise MemoryError(f"no memory for what half a layer of {self.first.ins} inputs computes")
