"""Hypothesis strategies: every block shape and placement on two tiers and on three."""

from __future__ import annotations

from hypothesis import strategies as st

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.config.hardware.rates import LinkRate
from h2o_flexgen.config.offload import OffloadPolicy
from tests.cost.machines import LINKS, profile

EVICTIONS = st.sampled_from(
    [
        EvictionConfig(),
        EvictionConfig("h2o", budget=10),
        EvictionConfig("h2o", ratio=0.5),
        EvictionConfig("streaming", budget=10),
        EvictionConfig("random", budget=10),
    ]
)


def shares(*tiers: str) -> st.SearchStrategy[dict[str, float]]:
    parts = st.lists(st.integers(0, 3), min_size=len(tiers), max_size=len(tiers)).filter(any)
    return parts.map(lambda found: {tier: n / sum(found) for tier, n in zip(tiers, found, strict=True) if n})


def machines(*, disturbed: bool = True) -> st.SearchStrategy[HardwareProfile]:
    """Links from a thousandth of what the compute needs to far more; `disturbed`: perhaps slowing each other down."""
    rate = st.sampled_from([1e6, 1e7, 1e8, 1e9]).map(lambda speed: LinkRate(speed, latency_s=1e-5))
    links = st.fixed_dictionaries(dict.fromkeys(LINKS, rate))
    factors = st.sampled_from(
        [
            {},
            {"compute": {"disk->cpu": 1.2, "cpu->disk": 1.4}, "disk->cpu": {"compute": 1.1, "cpu->disk": 1.7}},
            {"cpu->disk": {"disk->cpu": 2.0}, "gpu->cpu": {"cpu->gpu": 1.3}},
        ]
    )
    slowdown = factors if disturbed else st.just({})
    return st.builds(lambda links, slowdown: profile(links=links, slowdown=slowdown), links, slowdown)


def _policies(*tiers: str) -> st.SearchStrategy[OffloadPolicy]:
    placement = shares(*tiers)
    return st.builds(
        OffloadPolicy,
        gpu_batch_size=st.integers(1, 5),
        num_gpu_batches=st.integers(1, 4),
        weights=placement,
        cache=placement,
        hidden=placement,
        cpu_cache_compute=st.booleans(),
        lookahead=st.integers(1, 3),
        prefill_chunk=st.sampled_from([16, 50, 2048]),
    )


def cpu_plans() -> st.SearchStrategy[OffloadPolicy]:
    """On a machine without a GPU."""
    return _policies("cpu", "disk")


def plans() -> st.SearchStrategy[tuple[OffloadPolicy, str]]:
    """A policy and the tier that computes."""
    on_gpu = _policies("gpu", "cpu", "disk").map(lambda policy: (policy, "gpu"))
    return st.one_of(cpu_plans().map(lambda policy: (policy, "cpu")), on_gpu)
