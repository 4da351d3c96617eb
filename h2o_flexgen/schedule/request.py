"""The inputs of a plan: model, workload, machine, caps, and the user's own choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from h2o_flexgen.config.engine import PLANNED_FIELDS
from h2o_flexgen.config.eviction import Budget, EvictionConfig
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import dtype_bytes
from h2o_flexgen.config.offload import TIERS, Kernels, OffloadPolicy
from h2o_flexgen.config.placement import KINDS, Placement, place
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.errors import required
from h2o_flexgen.schedule.pipeline import stages_of
from h2o_flexgen.schedule.tasks import alone


@dataclass(frozen=True)
class Caps:
    """Bytes each tier may hold; None: no limit. `emulated`: the gpu is host memory, capped by --emulate-gpu. `why`: the
    origin of each tier's cap."""

    gpu: int | None = None
    cpu: int | None = None
    disk: int | None = None
    emulated: bool = False
    why: Mapping[str, str] = field(default_factory=dict, compare=False)

    def of(self, tier: str) -> int | None:
        return {"gpu": self.gpu, "cpu": self.cpu, "disk": self.disk}[tier]

    def flag(self, tier: str) -> str:
        gpu = "--emulate-gpu" if self.emulated else "--gpu-mem"
        return {"gpu": gpu, "cpu": "--cpu-mem", "disk": "--nvme-mem"}[tier]

    def origin(self, tier: str) -> str:
        """The origin of a cap that no flag gave, in brackets behind it; "" for one that a flag gave."""
        why = self.why.get(tier, "")
        return "" if not why or why.startswith("--") else f" ({why})"


@dataclass(frozen=True)
class PlanRequest:
    """The inputs of every planner, of footprints and of prices.

    compute_tier  "cpu" or "gpu"
    fixed         the user's fields of the OffloadPolicy; a planner chooses the others of PLANNED_FIELDS
    profile       the machine's rates; None: not known
    baseline      host bytes of the process before anything is placed
    prefixes      host bytes that a prefix store may take
    triton        whether Triton serves the GPU, if a real one computes
    choices       specs with weights of other bits, by the bits, most first: a search may choose one instead of `spec`
    recalled      of the most that recall may read, what it has read before: see `Reading`; None: not known
    endless       whether there are always more sequences, so that blocks are whole whatever workload.num_sequences says
    """

    spec: ModelSpec
    workload: Workload
    eviction: EvictionConfig
    dtype: str
    caps: Caps
    compute_tier: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    profile: HardwareProfile | None = None
    baseline: int = 0
    prefixes: int = 0
    num_gpus: int = 1
    triton: bool = True
    recalled: float | None = None
    endless: bool = False
    choices: Mapping[int, ModelSpec] = field(default_factory=dict)

    @cached_property
    def policy(self) -> OffloadPolicy:
        """The fixed fields, and defaults."""
        policy = OffloadPolicy(**self.fixed)
        return policy if self.compute_tier == "gpu" else policy.with_gpu_as_cpu()

    @cached_property
    def free(self) -> frozenset[str]:
        """The fields of the policy that a planner chooses."""
        return PLANNED_FIELDS - set(self.fixed)

    @cached_property
    def tiers(self) -> tuple[str, ...]:
        """Tiers that things may live on, the compute tier first."""
        return TIERS if self.compute_tier == "gpu" else TIERS[1:]

    @cached_property
    def capped(self) -> dict[str, int]:
        """The caps of the tiers that have one."""
        return {tier: cap for tier in self.tiers if (cap := self.caps.of(tier)) is not None}

    @property
    def machine(self) -> HardwareProfile:
        """The profile, which prices need."""
        return required(self.profile, "a plan has no price without the rates of a machine")

    @property
    def kernels(self) -> Kernels:
        return Kernels.of(self.compute_tier, emulated=self.caps.emulated, triton=self.triton)

    @property
    def stages(self) -> tuple[range, ...]:
        return stages_of(self.spec, self.num_gpus)

    @cached_property
    def budgets(self) -> tuple[Budget, ...]:
        """The budget of a row in each layer, within its window."""
        return self.eviction.by_layer(self.spec.windows, self.workload.prompt_len, self.workload.gen_len)

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Cache slots of a row in each layer: the budget, and one for the newest token if tokens are evicted; 0 in
        layers that read another layer's cache or have none."""
        slots = [budget.slots for budget in self.budgets]
        own = [self.spec.attends(layer) and self.spec.source_of(layer) == layer for layer in range(len(slots))]
        return tuple(count if each else 0 for count, each in zip(slots, own, strict=True))

    @cached_property
    def cache_sizes(self) -> tuple[int, ...]:
        """Relative sizes of a row's caches, layer by layer."""
        if not self.spec.has_states:
            return self.slots
        sizes = list[int]()
        for layer, count in enumerate(self.slots):
            states = sum(state.nbytes(self.dtype) for state in self.spec.states_of(layer))
            sizes.append(count * self.spec.kv_bytes_per_token_and_layer(self.dtype, layer) + states)
        return tuple(sizes)

    @cached_property
    def computed_prompt(self) -> int:
        """Tokens of a prompt that go through the layers: twice its own if it is replayed."""
        asked = self.workload.prompt_len
        return asked if all(budget.full for budget in self.budgets) else self.eviction.computed(asked)

    def tokens_of(self, policy: OffloadPolicy) -> tuple[int, int]:
        """The sequences of a block of `policy`'s shape, and the tokens of their prompts."""
        return policy.block_size, policy.block_size * self.computed_prompt

    def fixed_shares(self, policy: OffloadPolicy) -> dict[str, Mapping[str, float]]:
        """The placements that are fixed for a block of `policy`'s shape, by kind."""
        fixed: dict[str, Mapping[str, float]] = {k: getattr(self.policy, k) for k in KINDS if k in self.fixed}
        if len(alone(policy.num_gpu_batches, self.num_gpus)) == policy.num_gpu_batches:
            fixed["hidden"] = {self.compute_tier: 1.0}
        return fixed

    def with_caps(self, **caps: int) -> PlanRequest:
        changed: dict[str, Any] = dict(caps)
        return replace(self, caps=replace(self.caps, **changed))

    def with_shares(self, policy: OffloadPolicy, shares: Mapping[str, Mapping[str, float]]) -> OffloadPolicy:
        """`policy` with those of the placements `shares` that are free."""
        free: dict[str, Any] = {kind: each for kind, each in shares.items() if kind not in self.fixed}
        return replace(policy, **free)

    def place(self, policy: OffloadPolicy) -> Placement:
        """Whole units on their tiers, as the engine places them. Caches that several layers read stay on the compute
        tier."""
        placement = place(self.spec, policy, self.dtype, self.cache_sizes)
        shared = {layer for each in self.spec.last_readers.items() if each[0] != each[1] for layer in each}
        if shared:
            shared |= {layer for layer in range(self.spec.num_layers) if self.spec.source_of(layer) != layer}
            stay = {place: self.compute_tier for place in placement.cache if place[0] in shared}
            placement = replace(placement, cache={**placement.cache, **stay})
        kept = dict.fromkeys(alone(policy.num_gpu_batches, self.num_gpus), self.compute_tier)
        return replace(placement, hidden={**placement.hidden, **kept}) if kept else placement


@dataclass(frozen=True)
class BlockShape:
    """One block of `policy`'s shape, whose sequences all have the workload's lengths; symbols as in `footprint`."""

    request: PlanRequest
    policy: OffloadPolicy

    @cached_property
    def spec(self) -> ModelSpec:
        return self.request.spec

    @cached_property
    def dtype(self) -> str:
        return self.request.dtype

    @cached_property
    def compute_tier(self) -> str:
        return self.request.compute_tier

    @cached_property
    def size(self) -> int:
        """s: bytes per number."""
        return dtype_bytes(self.dtype)

    @cached_property
    def rows(self) -> int:
        """b."""
        return self.policy.gpu_batch_size

    @cached_property
    def prompt(self) -> int:
        """P: tokens of a prompt that go through the layers."""
        return self.request.computed_prompt

    @cached_property
    def tokens(self) -> int:
        """T: prompt tokens of one GPU batch."""
        return self.rows * self.prompt

    @cached_property
    def chunk(self) -> int:
        """t: prompt tokens that go through a unit at once."""
        return min(self.tokens, self.policy.chunk)

    @cached_property
    def follows(self) -> bool:
        """Whether prompts may come in parts that attend to earlier ones."""
        return self.prompt > self.chunk or self.policy.block_size > 1

    @cached_property
    def evicts(self) -> bool:
        return not all(budget.full for budget in self.request.budgets)

    @cached_property
    def rolling(self) -> bool:
        """Whether positions roll: cached keys are rotated anew in each step."""
        return self.request.eviction.rolling_positions

    @cached_property
    def most_slots(self) -> int:
        """The largest C of any layer."""
        return max(self.request.slots)

    @cached_property
    def heads(self) -> int:
        """b x kv_heads."""
        return self.rows * self.spec.num_kv_heads

    @cached_property
    def query_width(self) -> int:
        """Q: numbers of one token's queries in one layer."""
        return self.spec.num_heads * self.spec.head_dim

    @cached_property
    def kv_width(self) -> int:
        """G: numbers of one token's keys in one layer; as many of its values."""
        return self.spec.num_kv_heads * self.spec.head_dim

    @cached_property
    def rotary_dims(self) -> list[int]:
        """D of each kind of rotation."""
        return [rotary.dim for rotary in {self.spec.arch.rotary, self.spec.arch.local_rotary} if rotary is not None]

    def staged(self, tiers: set[str]) -> bool:
        """Whether something on one of `tiers` goes through the host on its way between disk and compute tier."""
        return self.compute_tier == "gpu" and "disk" in tiers
