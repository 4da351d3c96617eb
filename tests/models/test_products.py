"""Products of the decoder: adjoining projections are one, and passes that a product saves are not priced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.kernels.native import why_not
from h2o_flexgen.models.decoder import Decoder, bind
from h2o_flexgen.schedule.tasks import Task, TaskKind
from tests.cost.machines import model_of, profile, rates
from tests.models.reference import Reference

pytestmark = pytest.mark.usefixtures("no_gradients")


def laid_out(*names: str, gap: int = 0) -> dict[str, Tensor]:
    """Tensors of layer 0's attention in one buffer, `gap` numbers apart: weights (2, 3), biases (2,)."""
    shapes = [(2, 3) if name.endswith("weight") else (2,) for name in names]
    buffer, views, start = torch.arange(200.0), {}, 0
    for name, shape in zip(names, shapes, strict=True):
        stop = start + torch.Size(shape).numel()
        views[f"layers.0.attn.{name}"] = buffer[start:stop].view(shape)
        start = stop + gap
    return views


WEIGHTS, BIASES = ("q.weight", "k.weight", "v.weight"), ("q.bias", "k.bias", "v.bias")


def test_adjoining_projections_are_one() -> None:
    views = laid_out(*WEIGHTS, *BIASES, "up.weight", "gate.weight", "up.bias", "gate.bias")
    bound = bind(views)
    assert torch.equal(bound["qkv.weight"], torch.cat([bound[name] for name in WEIGHTS]))
    assert torch.equal(bound["qkv.bias"], torch.cat([bound[name] for name in BIASES]))
    assert torch.equal(bound["gate_up.weight"], torch.cat([bound["up.weight"], bound["gate.weight"]]))
    assert torch.equal(bound["gate_up.bias"], torch.cat([bound["up.bias"], bound["gate.bias"]]))
    assert bound["gate_up.weight"].data_ptr() == bound["up.weight"].data_ptr(), "a copy"


@pytest.mark.parametrize(
    "names",
    [
        ("gate.weight", "up.weight"),
        ("up.weight", "up.bias", "gate.weight", "gate.bias"),
        ("up.weight", "gate.weight", "up.bias", "down.bias", "gate.bias"),
        ("q.weight", "v.weight", "k.weight"),
        (*WEIGHTS, "q.bias", "o.bias", "k.bias", "v.bias"),
        ("up.weight", "up.bias"),
    ],
    ids=" ".join,
)
def test_projections_that_do_not_adjoin_stay_apart(names: tuple[str, ...]) -> None:
    bound = bind(laid_out(*names))
    assert not any(name in bound for name in ("qkv.weight", "gate_up.weight"))
    assert not any(name.startswith(("qkv", "gate_up")) for name in bind(laid_out(*names, gap=5)))


def test_neighbours_by_chance_are_no_view() -> None:
    """Two buffers may lie back to back; no view reaches from one into the other."""
    buffer = torch.arange(12.0)
    halves = [torch.frombuffer(memoryview(buffer.numpy())[6 * i : 6 * i + 6], dtype=torch.float32) for i in (0, 1)]
    up, gate = (half.view(2, 3) for half in halves)
    assert gate.data_ptr() == up.data_ptr() + 24
    assert "gate_up.weight" not in bind({"layers.0.mlp.up.weight": up, "layers.0.mlp.gate.weight": gate})


class Seen(TorchDispatchMode):
    """Names of the operations whose result has `numel` numbers."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.names = numel, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() == self.numel:
            self.names.add(func.name().removeprefix("aten::").split(".")[0])
        return result


@pytest.mark.skipif(why_not() is not None, reason="no native products here")
@pytest.mark.parametrize("name", ["opt", "opt-350m", "galactica", "llama-gqa", "gpt-neox", "gemma3"])
def test_passes_that_products_save_are_not_priced(name: str) -> None:
    """ReLU and residual are operations of their own exactly where the cost model says so, with more rows than
    take a half in one call."""
    reference, rows = Reference(name, torch.bfloat16), 33
    spec = reference.spec
    hidden = torch.ones(rows, spec.hidden_width, dtype=torch.bfloat16)
    with torch.inference_mode(), Seen(rows * spec.hidden_size) as wide, Seen(rows * spec.ffn_size) as inner:
        Decoder(spec).mlp(reference.weights("layers.0.mlp"), hidden)
    saved = 0 if wide.names & {"add", "add_"} else 2 * spec.hidden_size
    if spec.arch.activation == "relu" and not spec.arch.gated_mlp and not inner.names & {"relu", "relu_"}:
        saved += 2 * spec.ffn_size
    slow = rates(elementwise_bytes_per_s=1.0)
    apart, fused = (
        model_of(OffloadPolicy(rows), spec=spec, machine=profile(replace(slow, fused_products=fused)))
        for fused in (False, True)
    )
    task = Task(TaskKind.COMPUTE, 1, 2, 0)
    assert spec.units[2].kind == "mlp"
    assert apart.price(task).seconds - fused.price(task).seconds == pytest.approx(rows * 2 * saved)
    attn = Task(TaskKind.COMPUTE, 1, 1, 0)
    residual = apart.price(attn).seconds - fused.price(attn).seconds
    assert residual == pytest.approx(0 if wide.names & {"add", "add_"} else rows * 2 * 2 * spec.hidden_size)
