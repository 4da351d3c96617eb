"""Experts of a mixture for the tokens that chose them: in C for bfloat16 on a CPU, by Triton on a GPU, else expert by
expert in torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.kernels.halves import take_products
from h2o_flexgen.kernels.layers import NATIVE_GATES
from h2o_flexgen.kernels.native import function, library, structure
from h2o_flexgen.kernels.triton_available import serves

if TYPE_CHECKING:
    from h2o_flexgen.kernels.triton_experts import TritonExpert

PLACE = "native"
"""Where the weights of an expert keep what `expert_place` made of them."""


class ExpertPlace(structure("matrices.h", "Half")):  # type: ignore[misc]
    @classmethod
    def of(cls, w: Mapping[str, Any]) -> ExpertPlace | None:
        """An expert's weights, which must outlive it, as the kernel's argument; None where it cannot take them."""
        place, parts = cls(), ["gate_up"] if "gate_up.weight" in w else ["up", "gate"]
        return place if take_products(place, w, parts, "down") else None


def expert_place(w: Mapping[str, Any]) -> ExpertPlace | TritonExpert | None:
    """An expert's weights as an argument of their device's kernels; None where these cannot take them: they know up,
    gate and down, or gate and up in turns, in C also up and gate in one matrix."""
    if "joint.weight" in w:
        return None
    if not serves(w["down.weight"].device):
        return ExpertPlace.of(w)
    from h2o_flexgen.kernels.triton_experts import TritonExpert  # imports Triton, which is not there everywhere

    return TritonExpert.of(w)


_Task = structure("experts.c", "Task")


@dataclass(frozen=True, eq=False)
class Choices:
    """Who chose which experts: `tokens` (n,) int64 and `shares` (n,) float32, those of expert `numbers[i]` from
    `starts[i]` up to `starts[i + 1]`; numbers ascend, and so do the tokens of each. `dropped`: choices of nobody."""

    tokens: Tensor
    shares: Tensor
    numbers: list[int]
    starts: list[int]
    dropped: int = 0

    @classmethod
    def of(cls, experts: Tensor, shares: Tensor) -> Choices:
        """Of (T, k) experts that T tokens chose, int64, and their weights. Who is below 0 is nobody."""
        chosen, order = experts.flatten().sort(stable=True)
        found, counts = chosen.unique_consecutive(return_counts=True)
        numbers, starts, dropped = found.tolist(), [0, *counts.cumsum(0).tolist()], 0
        while numbers and numbers[0] < 0:
            dropped, numbers, starts = starts[1], numbers[1:], starts[1:]
        order, starts = order[dropped:], [start - dropped for start in starts]
        return cls(order // experts.shape[1], shares.flatten()[order], numbers, starts, dropped)

    @cached_property
    def by_token(self) -> Tensor:
        """(n,) int64: the places in `tokens` of all choices of one token, ascending, then those of the next."""
        return self.tokens.argsort(stable=True)

    def places(self, count: int) -> Tensor:
        """(count, k) int64: `by_token` of each of so many tokens, and -1 behind where it chose nobody."""
        order = self.by_token
        if not self.dropped:
            return order.view(count, -1)
        tokens = self.tokens[order]
        begins = torch.searchsorted(tokens, torch.arange(count, device=tokens.device))
        found = order.new_full((count, (len(order) + self.dropped) // count), -1)
        found[tokens, torch.arange(len(order), device=tokens.device) - begins[tokens]] = order
        return found


class Gate(NamedTuple):
    """The step between the two projections: an activation of the gate times up; with a `clamp` that of gpt-oss."""

    activation: str
    clamp: float | None = None


def add_experts(
    x: Tensor,
    out: Tensor,
    choices: Choices,
    experts: range,
    weights: Sequence[Mapping[str, Any]],
    gate: Gate,
    most: int,
    feed_forward: Callable[[Mapping[str, Any], Tensor], Tensor],
) -> None:
    """Adds to `out` (T, H) what some experts make of their tokens' x (T, H), times their shares, expert by expert.

    experts: places in `choices.numbers`, whose `weights` these are. most: tokens that go through one at once. In C the
    sums of an expert are float32 up to the addition to `out`, which rounds, and so they are by Triton; `feed_forward`
    (weights, (n, H)) is what computes (n, H) elsewhere.
    """
    held = [w.get(PLACE) for w in weights]
    if serves(x.device) and (gate.clamp is not None or gate.activation == "silu"):
        from h2o_flexgen.kernels import triton_experts  # imports Triton, which is not there on every machine

        found = [place for place in held if isinstance(place, triton_experts.TritonExpert)]
        if len(found) == len(weights):
            ends, chosen = choices.starts[experts.start : experts.stop + 1], choices.places(len(x))
            parts = choices.tokens, choices.shares, chosen
            triton_experts.add_experts(x, out, parts, ends, found, gate.clamp, most)
            return
    places = [place for place in held if isinstance(place, ExpertPlace)]
    known = gate.clamp is not None or gate.activation in NATIVE_GATES
    if x.dtype is torch.bfloat16 and x.is_cpu and len(places) == len(weights) and known and library() is not None:
        which = (ctypes.c_void_p * len(places))(*map(ctypes.addressof, places))
        starts = (ctypes.c_int64 * (len(experts) + 1))(*choices.starts[experts.start : experts.stop + 1])
        hidden, ffn = weights[0]["down.weight"].shape
        task = _Task(starts=ctypes.addressof(starts))
        task.point(x=x, out=out, tokens=choices.tokens, shares=choices.shares)
        task.which, task.count, task.threads = ctypes.addressof(which), len(places), torch.get_num_threads()
        task.hidden, task.ffn, task.most = hidden, ffn, most
        task.interleaved, task.tanh_gelu = gate.clamp is not None, NATIVE_GATES.get(gate.activation, False)
        task.limit = gate.clamp or 0.0
        if function("experts", "P", "i")(ctypes.byref(task)):
            raise MemoryError(f"no memory for what {len(places)} experts compute")
        return
    for place, w in zip(experts, weights, strict=True):
        for start in range(choices.starts[place], choices.starts[place + 1], most):
            span = slice(start, min(start + most, choices.starts[place + 1]))
            tokens, shares = choices.tokens[span], choices.shares[span].to(x.dtype)
            out.index_add_(0, tokens, feed_forward(w, x.index_select(0, tokens)).mul_(shares.unsqueeze(1)))
