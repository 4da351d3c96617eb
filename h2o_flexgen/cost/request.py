"""What a search is asked: a model, its work, a machine and its caps, and what the user has already decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.config.kernels import Kernels
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.offload import TIERS, OffloadPolicy
from h2o_flexgen.config.placement import Placement, cache_slots, place
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.cost.terms import CostModel
from h2o_flexgen.schedule.footprint import Footprint, footprint


@dataclass(frozen=True)
class SearchRequest:
    """One question to the search.

    caps      bytes per tier that may be used; a tier without an entry has no limit
    fixed     fields of the OffloadPolicy that are not to be chosen; those left out of both choice and `fixed` (overlap,
              lookahead, prefill_chunk) keep their defaults
    baseline  host bytes that the process holds before anything is placed
    endless   whether there are always more sequences: whole blocks are compared, whatever workload.num_sequences says
    emulated  whether the gpu tier is host memory, capped by --emulate-gpu
    triton    whether it serves the GPU, if a real one computes
    """

    spec: ModelSpec
    workload: Workload
    eviction: EvictionConfig
    dtype: str
    caps: Mapping[str, int]
    compute_tier: str
    profile: HardwareProfile
    fixed: Mapping[str, Any] = field(default_factory=dict)
    baseline: int = 0
    emulated: bool = False
    endless: bool = False
    triton: bool = True

    @cached_property
    def base(self) -> OffloadPolicy:
        """A policy of the fixed fields and of defaults."""
        policy = OffloadPolicy(**self.fixed)
        return policy if self.compute_tier == "gpu" else policy.with_gpu_as_cpu()

    @property
    def kernels(self) -> Kernels:
        """Those of the compute tier."""
        return Kernels.of(self.compute_tier, emulated=self.emulated, triton=self.triton)

    @cached_property
    def tiers(self) -> tuple[str, ...]:
        """Tiers that things may live on, the compute tier first."""
        return TIERS if self.compute_tier == "gpu" else TIERS[1:]

    @cached_property
    def fixed_shares(self) -> dict[str, Mapping[str, float]]:
        """The placements that are not to be chosen, by kind."""
        return {kind: getattr(self.base, kind) for kind in ("weights", "cache", "hidden") if kind in self.fixed}

    @property
    def may_compute_on_cpu(self) -> bool:
        """Whether attention beside a GPU can be priced, so that --cpu-cache-compute is a choice."""
        return self.compute_tier == "gpu" and "cpu" in self.profile.compute

    def with_caps(self, **caps: int) -> SearchRequest:
        """The same question under other caps."""
        return replace(self, caps={**self.caps, **caps})

    def flag(self, tier: str) -> str:
        """The flag that sets the cap of `tier`."""
        gpu = "--emulate-gpu" if self.emulated else "--gpu-mem"
        return {"gpu": gpu, "cpu": "--cpu-mem", "disk": "--nvme-mem"}[tier]

    def with_shares(self, policy: OffloadPolicy, shares: Mapping[str, Mapping[str, float]]) -> OffloadPolicy:
        """`policy` with placements by kind, as far as they are free."""
        free: dict[str, Any] = {kind: each for kind, each in shares.items() if kind not in self.fixed}
        return replace(policy, **free)

    def place(self, policy: OffloadPolicy) -> Placement:
        """Whole units on their tiers, as the engine places them."""
        slots = cache_slots(self.spec, self.workload, self.eviction)
        placement = place(self.spec, policy, self.dtype, slots)
        if policy.num_gpu_batches == 1:
            # One batch alone is never parked: its hidden states are wanted again by the very next unit.
            placement = replace(placement, hidden={0: self.compute_tier})
        return placement

    def footprint(self, policy: OffloadPolicy, placement: Placement) -> Footprint:
        """What the block needs on each tier."""
        return footprint(
            self.spec,
            self.workload,
            policy,
            self.eviction,
            dtype=self.dtype,
            compute_tier=self.compute_tier,
            assignment=placement,
            baseline=self.baseline,
            kernels=self.kernels,
        )

    def model(self, policy: OffloadPolicy, placement: Placement, rows: tuple[int, ...] = ()) -> CostModel:
        """The block to be priced; without `rows`, the workload's first."""
        work = replace(self.workload, num_sequences=policy.block_size) if self.endless else self.workload
        return CostModel(
            self.spec,
            work,
            policy,
            self.eviction,
            placement,
            self.profile,
            self.dtype,
            self.compute_tier,
            rows,
            later=self.endless,
        )

    def over(self, foot: Footprint) -> dict[str, int]:
        """Bytes by which each tier's cap is exceeded; tiers that are not are left out."""
        return {tier: need - cap for tier, cap in self.caps.items() if (need := foot.total(tier)) > cap}
