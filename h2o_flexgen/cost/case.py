"""What is to be priced, and the sizes that all prices share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from h2o_flexgen.config.eviction import Budget, EvictionConfig
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import dtype_bytes
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.placement import Placement, cache_slots
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.schedule.recorded import recordable
from h2o_flexgen.schedule.tasks import NO_BATCH, ScheduleShape, Task, TaskKind


@dataclass(frozen=True)
class Case:
    """One block of a workload whose sequences all have its lengths, under one plan, on one machine.

    compute_tier: "cpu" or "gpu". rows: the sequences of each GPU batch; left out, those of the workload's first block.
    later: another block of the call came before it, whose memory its caches get.
    """

    spec: ModelSpec
    workload: Workload
    policy: OffloadPolicy
    eviction: EvictionConfig
    placement: Placement
    profile: HardwareProfile
    dtype: str
    compute_tier: str
    rows: tuple[int, ...] = ()
    later: bool = False

    def __post_init__(self) -> None:
        if not self.rows:
            object.__setattr__(self, "rows", block_rows(self.workload.num_sequences, self.policy)[0])

    @property
    def sequences(self) -> int:
        """Of the block."""
        return sum(self.rows)

    @property
    def steps(self) -> int:
        """Steps of the schedule; the first computes the prompts and the first new token."""
        return self.workload.gen_len

    @cached_property
    def itemsize(self) -> int:
        """Bytes per number."""
        return dtype_bytes(self.dtype)

    @property
    def query_width(self) -> int:
        """Numbers of one token's queries in one layer."""
        return self.spec.num_heads * self.spec.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers of one token's keys in one layer; as many of its values."""
        return self.spec.num_kv_heads * self.spec.head_dim

    @cached_property
    def budgets(self) -> tuple[Budget, ...]:
        """Of a row's cache, layer by layer."""
        budget = self.eviction.resolve(self.workload.prompt_len, self.workload.gen_len)
        return tuple(budget.within(self.spec.arch.window_of(layer)) for layer in range(self.spec.num_layers))

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Of a row's cache, layer by layer: the budget, and one for the newest token where something is evicted."""
        return cache_slots(self.spec, self.workload, self.eviction)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The first layer of each kind: those whose caches have a budget of their own."""
        return tuple({budget: layer for layer, budget in reversed(list(enumerate(self.budgets)))}.values())

    @cached_property
    def twins(self) -> dict[tuple[int, int], tuple[int, int]]:
        """For each unit and GPU batch the first whose tasks cost the same; with NO_BATCH the first whose weights do."""
        first: dict[object, tuple[int, int]] = {}
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for unit in self.spec.units:
            home, size = (
                self.placement.weights[unit.weights],
                self.spec.groups_by_key[unit.weights].buffer_bytes(self.dtype),
            )
            found[unit.index, NO_BATCH] = first.setdefault((unit.kind, home, size), (unit.index, NO_BATCH))
            alike: tuple[object, ...] = (unit.index,)
            if unit.layer is not None:
                last, window = unit.layer == self.spec.num_layers - 1, self.spec.arch.window_of(unit.layer)
                alike = (unit.kind, last, self.budgets[unit.layer], window)
            for batch, rows in enumerate(self.rows):
                cache = None if unit.layer is None else self.placement.cache[unit.layer, batch]
                place = (unit.index, batch)
                found[place] = first.setdefault((*alike, rows, cache, self.placement.hidden[batch]), place)
        return found

    @cached_property
    def alike(self) -> Counter[tuple[int, int]]:
        """How many computes of a step cost the same, by the first unit and GPU batch of each sort."""
        return Counter(twin for (_, batch), twin in self.twins.items() if batch != NO_BATCH)

    def held(self, layer: int, step: int) -> int:
        """Slots of a row's cache in `layer` that are in use in a decode step, the new token's included."""
        budget = self.budgets[layer]
        return min(min(self.workload.prompt_len, budget.total) + step, self.slots[layer])

    def attention_device(self, layer: int, batch: int) -> str:
        """Where the attention over a cache is computed in decode steps."""
        on_cpu = self.policy.cpu_cache_compute and self.placement.cache[layer, batch] == "cpu"
        return "cpu" if on_cpu else self.compute_tier

    @property
    def attends_on_host(self) -> bool:
        """Whether any attention may be computed elsewhere than all else, beside it."""
        return self.policy.cpu_cache_compute and self.policy.overlap and self.compute_tier != "cpu"

    def ranks(self, layer: int) -> bool:
        """Whether the caches of `layer` choose by score; else tokens go in the order in which they came."""
        budget = self.budgets[layer]
        return bool(budget.heavy) and not budget.full

    def sums_columns(self, layer: int) -> bool:
        """Whether the caches of `layer` are told how much attention the prompt's tokens received."""
        return self.ranks(layer) and self.eviction.name != "random"

    @cached_property
    def shape(self) -> ScheduleShape:
        """The shape of the schedule that the engine would run."""
        batches = range(len(self.rows))
        homes = self.placement
        # One batch alone is never parked: its hidden states are wanted again by the very next unit.
        parked = batches if len(batches) > 1 else ()
        return ScheduleShape(
            units=self.spec.units,
            num_steps=self.steps,
            num_batches=len(batches),
            streamed=frozenset(key for key, tier in homes.weights.items() if tier != self.compute_tier),
            cache_moves=frozenset(
                p for p in self._all_places() if homes.cache[p] not in (self.attention_device(*p), self.compute_tier)
            ),
            hidden_moves=frozenset(batch for batch in parked if homes.hidden[batch] != self.compute_tier),
            lookahead=self.policy.lookahead,
            host_attends=frozenset(p for p in self._all_places() if self._attends_beside(p)),
        )

    def attends_beside(self, task: Task) -> bool:
        """Whether the attention of a compute task is the host's work, while other GPU batches are computed."""
        place = self.spec.units[task.unit].layer, task.batch
        return task.step > 0 and self.spec.units[task.unit].kind == "attn" and place in self.shape.host_attends

    def fills_beside(self, task: Task) -> bool:
        """Whether the prompts of a compute task are brought into its cache by the host, while others are computed."""
        unit = self.spec.units[task.unit]
        if task.step > 0 or unit.kind != "attn" or not self.policy.overlap:
            return False
        return self.attention_device(unit.layer or 0, task.batch) != self.compute_tier

    def stays(self, task: Task) -> bool:
        """Whether a hidden task moves nothing, because attention on the host is still to be added to what it is of."""
        unit = self.spec.units[task.unit]
        halves = {TaskKind.STORE_HIDDEN: "attn", TaskKind.LOAD_HIDDEN: "mlp"}
        if task.step == 0 or halves.get(task.kind) != unit.kind:
            return False
        return (unit.layer, task.batch) in self.shape.host_attends

    def _attends_beside(self, place: tuple[int, int]) -> bool:
        beside = self.policy.overlap and len(self.rows) > 1
        return beside and self.attention_device(*place) != self.compute_tier

    def _all_places(self) -> Iterator[tuple[int, int]]:
        return ((layer, batch) for layer in range(self.spec.num_layers) for batch in range(len(self.rows)))

    @cached_property
    def recorded(self) -> bool:
        """Whether decode steps are recorded and launched again as a whole, on a machine that is known to do that."""
        shape = self.shape
        return self.profile.rates(self.compute_tier).graph_tick_s is not None and recordable(
            moves=bool(shape.streamed or shape.cache_moves or shape.hidden_moves),
            elsewhere=any(self.attention_device(*place) != self.compute_tier for place in self.placement.cache),
            rolling=self.eviction.rolling_positions,
        )

    def with_rows(self, rows: tuple[int, ...], *, later: bool = False) -> Self:
        """The same plan for a block of other GPU batches, no more of them than the policy has."""
        return replace(self, rows=rows, later=later)


def block_rows(sequences: int, policy: OffloadPolicy) -> list[tuple[int, ...]]:
    """How a call of so many sequences is divided: for each block, the rows of its GPU batches."""

    def parts(whole: int, size: int) -> tuple[int, ...]:
        return (*[size] * (whole // size), *([whole % size] if whole % size else []))

    return [parts(block, policy.gpu_batch_size) for block in parts(sequences, policy.block_size)]
