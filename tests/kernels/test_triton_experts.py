"""Experts by Triton beside the same numbers in float32, whatever their weights are kept in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.triton_device import DEVICE  # isort: skip  (before Triton is imported)

from h2o_flexgen.config.model.packing import Packing, groupwise
from h2o_flexgen.kernels import experts as module
from h2o_flexgen.kernels.experts import PLACE, Choices, Gate, add_experts, expert_place
from h2o_flexgen.kernels.packed import PackedWeight
from h2o_flexgen.kernels.triton_experts import TritonExpert
from tests.kernels.test_native_experts import one
from tests.kernels.test_packed_weights import random_weight
from tests.kernels.test_triton_linear import on_device
from tests.seeds import torch_generator

HIDDEN, FFN, COUNT, ACTIVE = 96, 80, 5, 2  # more than one tile of both, and a part of one
MXFP4 = Packing("e2m1", 32, "e8m0", "none")
UNIT = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # the interpreter cuts bfloat16 off


@pytest.fixture(autouse=True)
def _served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "serves", lambda device: True)


def experts_of(clamped: bool, dtype: torch.dtype, packing: Packing | None = None) -> list[dict[str, Any]]:
    random, made = torch_generator(COUNT), []
    for _ in range(COUNT):
        shapes = {"up": (FFN, HIDDEN), "gate": (FFN, HIDDEN), "down": (HIDDEN, FFN)}
        shapes = {"gate_up": (2 * FFN, HIDDEN), "down": (HIDDEN, FFN)} if clamped else shapes
        w: dict[str, Any] = {}
        for name, shape in shapes.items():
            w[f"{name}.weight"] = (0.2 * torch.randn(shape, generator=random)).to(dtype)
            if packing is not None:
                w[f"{name}.weight"] = random_weight(packing, shape, dtype)
            if clamped:
                w[f"{name}.bias"] = torch.randn(shape[:1], generator=random).to(dtype)
        made.append(w)
    return made


def placed(weights: list[dict[str, Any]]) -> list[dict[str, Any]]:
    moved = [
        {name: on_device(each) if isinstance(each, PackedWeight) else each.to(DEVICE) for name, each in w.items()}
        for w in weights
    ]
    found = [{**w, PLACE: expert_place(w)} for w in moved]
    assert all(isinstance(w[PLACE], TritonExpert) for w in found)
    return found


def never(w: object, x: Tensor) -> Tensor:
    raise AssertionError("torch was asked")


def computed(
    weights: list[dict[str, Any]], x: Tensor, out: Tensor, chosen: Tensor, shares: Tensor, gate: Gate, **how: int
) -> Tensor:
    """All experts that were chosen, `calls` at a time, at most `most` tokens at once."""
    there, choices = placed(weights), Choices.of(chosen.to(DEVICE), shares.to(DEVICE))
    found, count = out.clone().to(DEVICE), len(choices.numbers)
    for start in range(0, count, how.get("calls", count)):
        some = range(start, min(count, start + how.get("calls", count)))
        part = [there[choices.numbers[place]] for place in some]
        add_experts(x.to(DEVICE), found, choices, some, part, gate, how.get("most", 1000), never)
    return found.cpu()


def drawn(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x and out, and the experts and shares of each token."""
    random = torch_generator(tokens)
    x, out = (torch.randn(tokens, HIDDEN, generator=random).to(dtype) for _ in range(2))
    shares, chosen = torch.randn(tokens, COUNT, generator=random).softmax(-1).topk(ACTIVE)
    return x, out, chosen, shares


@pytest.mark.turns
@pytest.mark.parametrize(
    ("clamped", "dtype", "packing", "tokens"),
    [
        (False, torch.float32, None, 3),
        (False, torch.bfloat16, None, 60),
        (True, torch.float32, None, 7),
        (True, torch.bfloat16, MXFP4, 3),
        (False, torch.float32, groupwise(4, 32), 3),
        (False, torch.float32, Packing("uint4", 32, "super", "super"), 1),
        (True, torch.float32, groupwise(8, 32), 2),
    ],
)
def test_experts_of_all_kinds(clamped: bool, dtype: torch.dtype, packing: Packing | None, tokens: int) -> None:
    weights, gate = experts_of(clamped, dtype, packing), Gate("silu", 2.0 if clamped else None)
    x, out, chosen, shares = drawn(tokens, dtype)
    wanted = out.float().clone()
    for token, (numbers, parts) in enumerate(zip(chosen.tolist(), shares, strict=True)):
        for number, share in zip(numbers, parts, strict=True):
            wanted[token] += share * one(weights[number], x[token : token + 1].float(), gate)[0]
    found = computed(weights, x, out, chosen, shares, gate).float()
    assert (found - wanted).norm() < UNIT[dtype] * wanted.norm()


def test_choices_of_nobody() -> None:
    """Below 0: tokens that chose fewer experts than others, or none."""
    weights, gate = experts_of(False, torch.float32), Gate("silu")
    x, out, chosen, shares = drawn(7, torch.float32)
    chosen[1, 0], chosen[2], chosen[4, -1], chosen[6, 0] = -1, -1, -1, -1
    wanted = out.clone()
    for token, (numbers, parts) in enumerate(zip(chosen.tolist(), shares, strict=True)):
        for number, share in zip(numbers, parts, strict=True):
            if number >= 0:
                wanted[token] += share * one(weights[number], x[token : token + 1], gate)[0]
    found = computed(weights, x, out, chosen, shares, gate)
    assert torch.equal(found[2], out[2])
    assert torch.equal(computed(weights, x, out, chosen, shares, gate, calls=1, most=2), found)
    assert (found - wanted).norm() < UNIT[torch.float32] * wanted.norm()


@pytest.mark.turns
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_do_not_depend_on_calls_or_neighbours(dtype: torch.dtype) -> None:
    """To the bit: one expert at a time, a few tokens at once, one token alone."""
    weights, gate = experts_of(False, dtype), Gate("silu")
    x, out, chosen, shares = drawn(9, dtype)
    whole = computed(weights, x, out, chosen, shares, gate)
    assert torch.equal(computed(weights, x, out, chosen, shares, gate, calls=1), whole)
    assert torch.equal(computed(weights, x, out, chosen, shares, gate, most=3), whole)
    alone = computed(weights, *(each[4:5] for each in (x, out, chosen, shares)), gate)
    assert torch.equal(alone, whole[4:5])


@pytest.mark.parametrize("clamp", [None, 2.0])
def test_what_is_no_number_stays_with_its_token(clamp: float | None) -> None:
    weights, gate = experts_of(clamp is not None, torch.float32), Gate("silu", clamp)
    x, out, chosen, shares = drawn(4, torch.float32)
    x[1, 5] = torch.nan
    found = computed(weights, x, out, chosen, shares, gate)
    assert found.isnan().any(1).tolist() == [False, True, False, False]


def test_what_the_kernels_do_not_take() -> None:
    """Inputs in another order, and rows that are apart: torch's products do these."""
    weights = placed(experts_of(False, torch.float32))[0]
    assert expert_place({**weights, "up.weight": torch.empty(2 * HIDDEN, FFN, device=DEVICE).t()[:, :HIDDEN]}) is None
    ordered = random_weight(Packing("uint4", 32, "bfloat16", "zero", ordered=True), (FFN, HIDDEN))
    assert expert_place({**weights, "up.weight": ordered, "gate.weight": ordered}) is None
    asked: list[int] = []

    def by_torch(w: object, x: Tensor) -> Tensor:
        asked.append(len(x))
        return x

    x, out, chosen, shares = (each.to(DEVICE) for each in drawn(1, torch.float32))
    some = Choices.of(chosen, shares)
    add_experts(x, out, some, range(2), [weights, {**weights, PLACE: None}], Gate("silu"), 9, by_torch)
    assert asked == [1, 1]
