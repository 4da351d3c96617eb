"""Halves of layers in one call beside the same kernels one by one: the same numbers, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_flexgen.config.model.packing import groupwise
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.kernels.halves import PLACE, HalfPlace
from h2o_flexgen.kernels.layers import linear
from h2o_flexgen.kernels.native import library
from h2o_flexgen.kernels.packed import PackedWeight
from h2o_flexgen.models.decoder import Decoder, bind
from h2o_flexgen.quant.weights import pack
from tests.models.reference import reference
from tests.tiny import FAMILIES

pytestmark = [
    pytest.mark.skipif(library() is None, reason="no native kernels here"),
    pytest.mark.usefixtures("no_gradients"),
]
ROWS = (1, 2, 3, 7, 20, 32)


def one_by_one(spec: ModelSpec) -> Decoder:
    return Decoder(spec, lambda x, weight, bias=None, **how: linear(x, weight, bias, **how))


def weights_of(name: str, kind: str, fused: bool, bits: int) -> dict[str, Any]:
    """Of the first layer, in bfloat16 or packed."""
    ref = reference(name)
    tensors = ref.weights(f"layers.0.{kind}", fused)
    found = {part: tensor.bfloat16() for part, tensor in tensors.items() if isinstance(tensor, Tensor)}
    if bits == 16:
        return found
    for part, tensor in found.items():
        if tensor.ndim == 2:
            packed = PackedWeight.empty(groupwise(bits, 32), tuple(tensor.shape), torch.bfloat16)
            pack(tensor, packed)
            found[part] = packed
    return found


@pytest.mark.parametrize(("fused", "bits"), [(True, 16), (False, 16), (False, 8), (False, 4)])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_halves_are_their_kernels(name: str, fused: bool, bits: int) -> None:
    spec = reference(name).spec
    whole, parts, width = Decoder(spec), one_by_one(spec), spec.hidden_width
    attn, mlp = (weights_of(name, kind, fused, bits) for kind in ("attn", "mlp"))
    for rows in ROWS:
        # Wider than it must be: rows need not adjoin.
        hidden = torch.randn(rows, width + 3).bfloat16()[:, :width]
        asked = whole.queries(attn, hidden)
        rotary, angles = whole.rotary_of(0), None
        if rotary is not None:
            at = torch.arange(rows) + 5
            angles = rotary.angles(at, at + 1, torch.bfloat16)
        for turned in (None, angles):
            pairs = zip(whole.queries(attn, hidden, turned), parts.queries(attn, hidden, turned), strict=True)
            assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
        left, right = hidden.clone(), hidden.clone()
        whole.output(attn, left, asked[0])
        parts.output(attn, right, asked[0])
        assert torch.equal(left, right)
        if spec.arch.experts is None or "up.weight" in mlp:
            whole.mlp(mlp, left)
            parts.mlp(mlp, right)
            assert torch.equal(left, right)


@pytest.mark.parametrize(
    ("name", "done"), [("llama", True), ("gemma3", True), ("opt", True), ("gpt-neox", False), ("granite", False)]
)
def test_which_models_have_them(name: str, done: bool) -> None:
    spec = reference(name).spec
    w = weights_of(name, "mlp", False, 16)
    hidden = torch.randn(2, spec.hidden_width).bfloat16()
    Decoder(spec).mlp(w, hidden)
    assert isinstance(w.get(PLACE), HalfPlace) == done
    many = weights_of(name, "mlp", False, 16)
    Decoder(spec).mlp(many, torch.randn(33, spec.hidden_width).bfloat16())
    assert PLACE not in many


def test_what_they_do_not_take() -> None:
    spec = reference("llama").spec
    decoder, w = Decoder(spec), bind(weights_of("llama", "mlp", False, 16))
    w["down.weight"] = w["down.weight"].t().contiguous().t()
    hidden = torch.randn(2, spec.hidden_width).bfloat16()
    expected = hidden.clone()
    decoder.mlp(w, hidden)
    assert w[PLACE] is None
    one_by_one(spec).mlp(w, expected)
    assert torch.equal(hidden, expected)
    exact = {part: tensor.float() for part, tensor in weights_of("llama", "mlp", False, 16).items()}
    decoder.mlp(exact, hidden.float())
    assert PLACE not in exact
