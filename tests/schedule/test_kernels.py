"""What plans know of whose kernels run: how prompts are cut, and what attending to them takes, by device."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.offload import Kernels, OffloadPolicy
from h2o_flexgen.config.placement import place
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.cost.model import CostModel
from h2o_flexgen.cost.search import search
from h2o_flexgen.engine.limits.plan import Plan, by_rule, make_plan
from h2o_flexgen.kernels import prompt, torch_attention
from h2o_flexgen.kernels.types import KeysValues, Logits
from h2o_flexgen.schedule import workspace
from h2o_flexgen.schedule.footprint import footprint
from h2o_flexgen.schedule.request import BlockShape, Caps, PlanRequest
from tests.cost.machines import TINY, profile, rates
from tests.schedule.test_workspace import Live

LARGE = replace(TINY, num_heads=32, num_kv_heads=32, head_dim=64, max_positions=20_000)
LONG = Workload(5000, 8, 24)
H2O = EvictionConfig("h2o", 0.2)

DEVICES: dict[str, tuple[dict[str, Any], int, int]] = {
    "cpu": ({"compute_tier": "cpu"}, 2048, 1 << 20),
    "emulated": ({"compute_tier": "gpu", "caps": Caps(emulated=True)}, 2048, 1 << 20),
    "gpu": ({"compute_tier": "gpu"}, 8192, 1 << 20),
    "gpu without Triton": ({"compute_tier": "gpu", "triton": False}, 8192, 1 << 24),
}
"""A request's settings; the tokens of a chunk, the logits of a chunk's queries."""


def request(**changes: Any) -> PlanRequest:
    usual = {"spec": LARGE, "workload": LONG, "eviction": H2O, "dtype": "bfloat16", "caps": Caps()}
    return PlanRequest(**{**usual, **changes})


def question(asked: PlanRequest, **fixed: Any) -> PlanRequest:
    return replace(asked, profile=profile({"cpu": rates(), "gpu": rates()}), fixed=fixed)


def item(plan: Plan, what: str) -> int:
    return sum(item.nbytes for item in plan.footprint.items if item.what == what)


@pytest.mark.parametrize("device", DEVICES)
def test_prompts_are_cut_by_the_device_in_plan_footprint_and_cost(device: str) -> None:
    settings, chunk, logits = DEVICES[device]
    asked = request(**settings)
    assert (asked.kernels.chunk, asked.kernels.logits) == (chunk, logits)
    plan = make_plan(asked, OffloadPolicy(24))
    assert plan.policy.prefill_chunk == chunk
    keys = (chunk + 2 * 5000) * LARGE.kv_bytes_per_token_and_layer("bfloat16")
    assert item(plan, "prompt K and V of one layer") == keys
    assert by_rule(asked).policy.prefill_chunk == chunk
    searched = question(asked, gpu_batch_size=24, num_gpu_batches=1)
    assert search(searched).best.policy.prefill_chunk == chunk
    assert footprint(searched, plan.policy, plan.placement) == plan.footprint
    terms = CostModel(searched, plan.policy, plan.placement).terms()
    products = [term.name for term in terms if "products" in term.name]
    assert f"attn: products of {chunk} rows" in products


@pytest.mark.parametrize("device", DEVICES)
def test_what_the_user_says_is_what_counts(device: str) -> None:
    asked = request(**DEVICES[device][0])
    assert make_plan(asked, OffloadPolicy(24, prefill_chunk=100)).policy.prefill_chunk == 100
    found = search(question(asked, prefill_chunk=100, gpu_batch_size=24, num_gpu_batches=1))
    assert found.best.policy.prefill_chunk == 100


def test_where_there_is_no_room_prompts_are_cut_smaller() -> None:
    """A cap that was enough for a CPU's chunks still is: no plan is refused for a device's taste."""
    policy = OffloadPolicy(4, 1, *[{"gpu": 1.0}] * 3)
    needed = {
        size: make_plan(request(compute_tier="gpu"), replace(policy, prefill_chunk=size)) for size in (2048, 8192)
    }
    small, large = (needed[size].footprint.total("gpu") for size in (2048, 8192))
    assert large > small + (8192 - 2048) * LARGE.hidden_size
    for cap, size in ((large, 8192), (large - 1, 2048), (small, 2048)):
        plan = make_plan(request(compute_tier="gpu", caps=Caps(gpu=cap)), policy)
        assert plan.policy.prefill_chunk == size
        assert plan.shortage() is None
        both = {"gpu_batch_size": 4, "num_gpu_batches": 1, "weights": {"gpu": 1.0}, "cache": {"gpu": 1.0}}
        found = search(question(request(compute_tier="gpu", caps=Caps(gpu=cap)), **both))
        assert found.best.policy.prefill_chunk == size
        assert found.best.footprint == plan.footprint
    assert make_plan(request(compute_tier="gpu", caps=Caps(gpu=small - 1)), policy).shortage() is not None


def test_a_policy_that_leaves_it_open() -> None:
    policy = OffloadPolicy()
    assert (policy.prefill_chunk, policy.chunk) == (None, 2048)
    assert OffloadPolicy.from_json(json.loads(json.dumps(policy.to_json()))) == policy


@pytest.mark.parametrize(
    ("serves", "dim", "kernels"), [(True, 128, "triton"), (True, 512, "torch"), (False, 64, "torch")]
)
def test_an_engine_knows_whether_triton_serves_its_gpu(
    serves: bool, dim: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an old GPU nor heads that its kernels do not take."""
    monkeypatch.setattr(prompt.triton_available, "serves", lambda device: serves and device.type == "cuda")
    triton = prompt.by_triton(torch.device("cuda"), dim)
    assert request(compute_tier="gpu", triton=triton).kernels == kernels


def test_the_kernels_and_the_plans_mean_the_same_logits() -> None:
    assert Kernels.CPU.logits == torch_attention._CHUNK_ELEMENTS
    assert Kernels.TORCH.logits == torch_attention._CHUNK_ELEMENTS_ON_GPU


# ---- what prompt attention takes on a GPU, as far as it shows without one

Prefill = Callable[..., Any]
SHAPES = [(6, 2048, 0), (1, 9000, 0), (4, 500, 1500), (1, 1500, 9000), (64, 16, 0)]
"""Rows, their own tokens, and the tokens that they follow."""


def block(rows: int, length: int, before: int, kernels: Kernels) -> BlockShape:
    policy = OffloadPolicy(max(rows, 1 + bool(before)), prefill_chunk=max(16, rows * length))
    work = Workload(before + length, 1)
    asked = request(workload=work, compute_tier="gpu", triton=kernels is Kernels.TRITON)
    return BlockShape(asked, policy)


def attended(prefill: Prefill, rows: int, length: int, before: int, device: str) -> Live:
    """What was alive while `prefill` worked, its results left out."""
    size = (rows, LARGE.num_heads, length, LARGE.head_dim)
    q, k, v = (torch.empty(size, dtype=torch.bfloat16, device=device) for _ in range(3))
    shared = torch.empty(2, LARGE.num_heads, before, LARGE.head_dim, dtype=torch.bfloat16, device=device)
    with Live() as live:
        out, sums = prefill(q, k, v, Logits(0.1), True, past=KeysValues(*shared) if before else None)
    live.peak -= out.nbytes + sums.nbytes
    return live


@pytest.mark.parametrize(("rows", "length", "before"), SHAPES)
def test_torch_on_a_gpu_starts_few_kernels_within_what_is_allowed(rows: int, length: int, before: int) -> None:
    """On a device without memory, which is none of the CPU's: shapes are worked out, and nothing is computed."""
    started: list[int] = []
    softmax = torch.softmax

    def noted(logits: torch.Tensor, dim: int) -> torch.Tensor:
        started.append(logits.numel())
        return softmax(logits, dim=dim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "softmax", noted)
        live = attended(torch_attention.prefill_attention, rows, length, before, "meta")
    assert live.peak <= workspace._prompt_kernel(block(rows, length, before, Kernels.TORCH))
    largest = max(Kernels.TORCH.logits, 16 * LARGE.num_heads * (before + length))
    assert max(started) <= largest
    assert sum(started) >= 0.4 * len(started) * min(largest, started[0]), "all but the last of a row are large"


@pytest.mark.parametrize(("rows", "length", "before"), SHAPES)
def test_flash_attention_stays_within_what_is_allowed(rows: int, length: int, before: int) -> None:
    pytest.importorskip("triton")
    from h2o_flexgen.kernels import triton_prompt

    def prefill(q: Any, k: Any, v: Any, logits: Logits, sums: bool, past: KeysValues | None) -> tuple[Any, Any]:
        out, lse = triton_prompt.flash(q, k, v, logits.scale, past)
        assert out.dtype == torch.bfloat16
        return out, lse

    live = attended(prefill, rows, length, before, "meta")
    allowed = workspace._on_gpu(block(rows, length, before, Kernels.TRITON))
    assert 0.5 * allowed * bool(before) <= live.peak <= allowed


def test_where_placements_are_given_nothing_else_depends_on_the_kernels() -> None:
    """Only the workspace of prompts does, and what is recorded."""
    here = {"gpu": 1.0}
    policy = OffloadPolicy(4, 1, here, here, here, prefill_chunk=2048)
    plans = {name: make_plan(request(**DEVICES[name][0]), policy) for name in ("gpu", "gpu without Triton", "emulated")}
    for plan in plans.values():
        assert plan.placement.cache == place(LARGE, policy, "bfloat16").cache
    amounts = {name: {i.what: i.nbytes for i in plan.footprint.items} for name, plan in plans.items()}
    assert amounts["gpu"].pop("recorded steps") > 0
    spaces = {name: found.pop("workspace") for name, found in amounts.items()}
    assert amounts["gpu"] == amounts["gpu without Triton"] == amounts["emulated"]
    assert spaces["gpu without Triton"] > spaces["gpu"] >= spaces["emulated"]
    assert spaces["gpu without Triton"] - spaces["emulated"] > 12 * (2**24 - 2**20)
