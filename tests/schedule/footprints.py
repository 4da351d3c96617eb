"""A tiny model's footprint, and its items by tier."""

from __future__ import annotations

from dataclasses import replace

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.offload import Kernels, OffloadPolicy
from h2o_flexgen.config.placement import place
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.schedule.footprint import Footprint, footprint
from h2o_flexgen.schedule.request import Caps, PlanRequest
from tests.cost.machines import TINY

SPEC = TINY
WORKLOAD = Workload(prompt_len=24, gen_len=8, num_sequences=100)
PAGE = 4096


def measure(
    policy: OffloadPolicy,
    eviction: EvictionConfig | None = None,
    compute: str = "gpu",
    spec: ModelSpec = SPEC,
    workload: Workload = WORKLOAD,
    kernels: Kernels = Kernels.CPU,
    baseline: int = 0,
) -> Footprint:
    caps, triton = Caps(emulated=kernels is Kernels.CPU), kernels is Kernels.TRITON
    asked = PlanRequest(spec, workload, eviction or EvictionConfig(), "float16", caps, compute, triton=triton)
    return footprint(replace(asked, baseline=baseline), policy, place(spec, policy, "float16"))


def amounts(foot: Footprint) -> dict[tuple[str, str], int]:
    found = {(item.tier, item.what): item.nbytes for item in foot.items}
    assert len(found) == len(foot.items), "an item appears twice"
    return found


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
