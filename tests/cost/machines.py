"""Profiles, models and plans for tests of prices: round numbers, so that times can be worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.config.hardware.rates import ComputeRates, Curve, LinkRate
from h2o_flexgen.config.model.arch import ArchSpec
from h2o_flexgen.config.model.known import known_config
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.placement import place
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.cost.model import CostModel
from h2o_flexgen.models.families import spec_from_config
from h2o_flexgen.schedule.request import Caps, PlanRequest

TINY = ModelSpec(
    name="tiny",
    vocab_size=1000,
    hidden_size=64,
    ffn_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    embed_dim=64,
    max_positions=128,
    arch=ArchSpec("opt", position_offset=2),
    bos_token_id=2,
    eos_token_id=2,
    pad_token_id=1,
)
LINKS = ("disk->cpu", "cpu->disk", "cpu->gpu", "gpu->cpu")
KINDS = ("embed", "attn", "mlp", "head")


def rates(**changes: Any) -> ComputeRates:
    """1 TFLOP/s, 10 GB/s of everything else, and a millisecond for each tick."""
    usual: dict[str, Any] = {
        "gemm_flops": Curve(((1, 1e12),)),
        "memory_bytes_per_s": 1e10,
        "decode_attention": {"plain": Curve(((1e6, 1e-4),)), "scored": Curve(((1e6, 2e-4),))},
        "prefill_attention": {"plain": Curve(((1, 1e12),)), "scored": Curve(((1, 5e11),))},
        "elementwise_bytes_per_s": 1e10,
        "tick_s": dict.fromkeys(KINDS, 1e-3),
        "sample_s": 1e-5,
    }
    return ComputeRates(**{**usual, **changes})


def ticking(**seconds: float) -> ComputeRates:
    """Nothing but ticks takes time: `seconds` by kind of unit, 1 where left out."""
    never = {"plain": Curve(((1e30, 1e-30),)), "scored": Curve(((1e30, 1e-30),))}
    fast = {"plain": Curve(((1, 1e40),)), "scored": Curve(((1, 1e40),))}
    return rates(
        gemm_flops=Curve(((1, 1e40),)),
        memory_bytes_per_s=1e40,
        decode_attention=never,
        prefill_attention=fast,
        elementwise_bytes_per_s=1e40,
        tick_s={**dict.fromkeys(KINDS, 1.0), **seconds},
        sample_s=0.0,
    )


def profile(compute: ComputeRates | Mapping[str, ComputeRates] | None = None, **changes: Any) -> HardwareProfile:
    """1 GB/s from and to disk, 10 GB/s between host and GPU, no latency; both devices alike, or as given."""
    speeds = dict(zip(LINKS, (1e9, 1e9, 1e10, 1e10), strict=True))
    usual: dict[str, Any] = {
        "name": "test",
        "date": "2026-01-01",
        "dtype": "float16",
        "links": {name: LinkRate(speed) for name, speed in speeds.items()},
        "compute": compute if isinstance(compute, Mapping) else dict.fromkeys(("cpu", "gpu"), compute or rates()),
    }
    return HardwareProfile(**{**usual, **changes})


def model_of(
    policy: OffloadPolicy,
    *,
    spec: ModelSpec = TINY,
    workload: Workload | None = None,
    eviction: EvictionConfig | None = None,
    machine: HardwareProfile | None = None,
    tier: str = "cpu",
) -> CostModel:
    """The model of a whole block of `policy`, 24 + 8 tokens unless said otherwise."""
    lengths = workload or Workload(24, 8)
    request = PlanRequest(
        spec,
        replace(lengths, num_sequences=policy.block_size),
        eviction or EvictionConfig(),
        "float16",
        Caps(),
        tier,
        profile=machine or profile(),
    )
    return CostModel(request, policy, place(spec, policy, "float16"))


def asked(model: CostModel, **changes: Any) -> CostModel:
    """The same plan for a request that differs."""
    return replace(model, request=replace(model.request, **changes))


@cache
def known(name: str) -> ModelSpec:
    """A model of configs/models."""
    return spec_from_config(known_config(name) or {}, name)


def on(**shares: Mapping[str, float] | str) -> dict[str, Any]:
    """Placements by kind: a tier's name, or shares; cpu where left out."""
    given = {kind: {tier: 1.0} if isinstance(tier, str) else tier for kind, tier in shares.items()}
    return {kind: given.get(kind, {"cpu": 1.0}) for kind in ("weights", "cache", "hidden")}
