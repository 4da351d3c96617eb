"""Experts in C beside the same numbers in float32, whatever their weights are kept in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.config.model.packing import groupwise
from h2o_flexgen.kernels.experts import Choices, Gate, add_experts
from h2o_flexgen.kernels.native import library
from h2o_flexgen.kernels.packed import PackedWeight
from h2o_flexgen.models.decoder import bind
from h2o_flexgen.quant.weights import pack

pytestmark = pytest.mark.skipif(library() is None, reason="no native kernels here")
HIDDEN, FFN, COUNT, ACTIVE = 192, 128, 9, 2


def weights_of(kind: str, bits: int) -> list[dict[str, Any]]:
    made = []
    for number in range(COUNT):
        shapes = {"up.weight": (FFN, HIDDEN), "gate.weight": (FFN, HIDDEN), "down.weight": (HIDDEN, FFN)}
        if kind == "gpt-oss":
            wide, out = (2 * FFN,), (HIDDEN,)
            shapes = {"gate_up.weight": (2 * FFN, HIDDEN), "gate_up.bias": wide, "down.weight": (HIDDEN, FFN)}
            shapes["down.bias"] = out
        tensors: dict[str, Any] = {name: (0.2 * torch.randn(shape)).bfloat16() for name, shape in shapes.items()}
        if kind == "adjoining":
            whole = torch.cat([tensors["up.weight"], tensors["gate.weight"]])
            tensors["up.weight"], tensors["gate.weight"] = whole[:FFN], whole[FFN:]
        for name, tensor in tensors.items():
            if bits < 16 and name.endswith("weight"):
                packed = PackedWeight.empty(groupwise(bits, 32), tuple(tensor.shape), torch.bfloat16)
                pack(tensor, packed)
                tensors[name] = packed
        made.append(bind({f"layers.0.mlp.experts.{number}.{name}": tensor for name, tensor in tensors.items()}))
    return made


def plain(w: dict[str, Any], name: str) -> Tensor:
    weight = w[name]
    return (weight.expanded(torch.float32) if isinstance(weight, PackedWeight) else weight).float()


def one(w: dict[str, Any], x: Tensor, gate: Gate) -> Tensor:
    if gate.clamp is None:
        opened = F.silu(F.linear(x, plain(w, "gate.weight"))) * F.linear(x, plain(w, "up.weight"))
        return F.linear(opened, plain(w, "down.weight"))
    wide = F.linear(x, plain(w, "gate_up.weight"), plain(w, "gate_up.bias"))
    opened, up = wide[:, ::2].clamp(max=gate.clamp), wide[:, 1::2].clamp(-gate.clamp, gate.clamp)
    opened = (up + 1) * opened * torch.sigmoid(1.702 * opened)
    return F.linear(opened, plain(w, "down.weight"), plain(w, "down.bias"))


@pytest.mark.parametrize("tokens", [1, 4, 23, 400])
@pytest.mark.parametrize(("kind", "bits"), [("apart", 16), ("adjoining", 16), ("apart", 4), ("gpt-oss", 16)])
def test_experts_of_all_kinds(kind: str, bits: int, tokens: int) -> None:
    torch.manual_seed(tokens)
    weights, gate = weights_of(kind, bits), Gate("silu", 2.0 if kind == "gpt-oss" else None)
    assert all(w["native"] is not None for w in weights)
    assert ("gate_up.weight" in weights[0]) == (kind != "apart")
    x, out = torch.randn(tokens, HIDDEN).bfloat16(), torch.randn(tokens, HIDDEN).bfloat16()
    shares, experts = torch.randn(tokens, COUNT).softmax(-1).topk(ACTIVE)
    experts[1::3, 0], experts[2::4] = -1, -1  # nobody
    wanted = out.float()
    for token, number, share in zip(
        torch.arange(tokens).repeat_interleave(ACTIVE).tolist(),
        experts.flatten().tolist(),
        shares.flatten(),
        strict=True,
    ):
        if number >= 0:
            wanted[token] += share * one(weights[number], x[token : token + 1].float(), gate)[0]
    choices = Choices.of(experts, shares)
    halves = len(choices.numbers) // 2
    for places in (range(halves), range(halves, len(choices.numbers))):
        if places:
            chosen = [weights[choices.numbers[place]] for place in places]
            add_experts(x, out, choices, places, chosen, gate, 150, lambda w, part: torch.full_like(part, torch.nan))
    assert (out.float() - wanted).norm() < 0.02 * wanted.norm()
