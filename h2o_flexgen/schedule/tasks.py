"""The types of a schedule: task, tick (one inner iteration) and the shape that a schedule is made for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from h2o_flexgen.config.model.spec import UnitSpec

NO_BATCH = -1  # the batch index of tasks that move weights or compute experts: they serve every GPU batch of a pass
EXPERT_SLOTS = 4
"""Streamed experts on the compute tier at once, one in use and the others being read; more by
`weight_room.expert_slots`."""
_TICKS = 8  # for as many streamed experts as there are places, or more: reads go on beside those of a tick


class TaskKind(StrEnum):
    """The kind of a task; its value appears in traces and messages."""

    LOAD_WEIGHTS = "load_weights"
    FREE_WEIGHTS = "free_weights"
    LOAD_CACHE = "load_cache"
    STORE_CACHE = "store_cache"
    LOAD_HIDDEN = "load_hidden"
    STORE_HIDDEN = "store_hidden"
    PASS_HIDDEN = "pass_hidden"
    COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Task:
    """One task. `unit` indexes `ScheduleShape.units`; weight and expert tasks have batch NO_BATCH.

    A weight load names the step and unit that use its group first, a free those that used it last (or would have). A
    cache or hidden load names the compute that reads, a store or pass the one that wrote.

    experts: the experts that a compute task computes, one after another, for the tokens of all GPU batches of the
    pass; or the one that is loaded or freed.
    """

    kind: TaskKind
    step: int
    unit: int
    batch: int
    experts: tuple[int, ...] = ()

    def __str__(self) -> str:
        batch = "" if self.batch == NO_BATCH else f" batch {self.batch}"
        experts = f" expert {', '.join(map(str, self.experts))}" if self.experts else ""
        return f"{self.kind.value} step {self.step} unit {self.unit}{batch}{experts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """One inner iteration of one stage. Fields are in order of execution.

    stores  results of the stage's tick before; they overlap this tick's compute
    loads   inputs of the stage's later ticks, most urgent first; after idling also of this tick's own compute
    compute None only in the drain tick, which ends a schedule with its last stores and frees
    passes  hidden states that this compute wrote for the next stage; sent right after the compute
    frees   weight groups that this compute used last; in a drain tick also unused loads
    stage   index into `ScheduleShape.stages`
    """

    index: int
    stores: tuple[Task, ...]
    loads: tuple[Task, ...]
    compute: Task | None
    passes: tuple[Task, ...] = ()
    frees: tuple[Task, ...]
    stage: int = 0


@dataclass(frozen=True)
class ScheduleShape:
    """The inputs of a schedule. Raises ValueError for a shape that has none.

    units         input embedding first, output head last
    num_steps     steps at most: fewer if every row finishes early, or if `last` of `zigzag` ends the schedule
    streamed      keys of the weight groups that are not resident on the compute tier
    cache_moves   (layer, batch) of the caches that are not resident on the compute tier
    hidden_moves  batches whose hidden states are parked off the compute tier while other batches are computed
    lookahead     streamed weight groups in flight beyond the one in use: at most lookahead + 1 copies are alive
    stages        the units that each device computes, in order; none given: one device computes all
    host_attends  (layer, batch) of the caches in host memory that decode steps attend to there while other batches are
                  computed; the order of tasks does not depend on it
    expert_slots  streamed experts on the compute tier at once, at most
    """

    units: tuple[UnitSpec, ...]
    num_steps: int
    num_batches: int
    streamed: frozenset[str]
    cache_moves: frozenset[tuple[int, int]]
    hidden_moves: frozenset[int]
    lookahead: int = 1
    stages: tuple[range, ...] = ()
    host_attends: frozenset[tuple[int, int]] = frozenset()
    expert_slots: int = EXPERT_SLOTS

    def __post_init__(self) -> None:
        kinds = [unit.kind for unit in self.units]
        if len(kinds) < 2 or kinds[0] != "embed" or kinds[-1] != "head" or {"embed", "head"} & set(kinds[1:-1]):
            raise ValueError(f"units are {kinds}: needed one embed, first, and one head, last")
        if [unit.index for unit in self.units] != list(range(len(kinds))):
            raise ValueError("unit indices must count from 0 in the order of the units")
        for name in ("num_steps", "num_batches", "lookahead", "expert_slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: needed at least 1")
        if unknown := self.streamed - {key for unit in self.units for key in (unit.weights, *unit.experts)}:
            raise ValueError(f"streamed weight groups {sorted(unknown)} belong to no unit")
        layers = {unit.layer for unit in self.units if unit.kind == "attn"}
        if any(layer not in layers or not 0 <= batch < self.num_batches for layer, batch in self.cache_moves):
            raise ValueError(f"cache_moves names a layer or batch that does not exist: {sorted(self.cache_moves)}")
        if any(not 0 <= batch < self.num_batches for batch in self.hidden_moves):
            raise ValueError(f"hidden_moves names a batch that does not exist: {sorted(self.hidden_moves)}")
        if not self.stages:
            object.__setattr__(self, "stages", (range(len(self.units)),))
        if [unit for stage in self.stages for unit in stage] != list(range(len(kinds))) or not all(self.stages):
            raise ValueError(f"stages are {self.stages}: needed all {len(kinds)} units, in order, at least one each")

    @property
    def experts_per_tick(self) -> int:
        """How many streamed experts a tick computes, at most."""
        return max(1, self.expert_slots // _TICKS)

    @property
    def groups(self) -> tuple[range, ...]:
        return groups_of(self.num_batches, len(self.stages))


def groups_of(num_batches: int, num_stages: int) -> tuple[range, ...]:
    """The GPU batches that go through a stage together: as many groups as stages, if there are as many batches."""
    count = min(num_stages, num_batches)
    cuts = [num_batches * number // count for number in range(count + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(cuts))


def alone(num_batches: int, num_stages: int = 1) -> tuple[int, ...]:
    """GPU batches that are a group of their own. They are never parked: the next unit needs their hidden states."""
    return tuple(group[0] for group in groups_of(num_batches, num_stages) if len(group) == 1)


# Decode steps as CUDA graphs: recorded once, then launched as a whole.
PATIENCE = 3
"""Steps without a change of rows, before and to come, that a recording needs. Recording costs as much as a step; it is
repaid after one launch in small models, where the GPU waits for the host, and after some seven in large ones."""
FIRST_REPLAYED = PATIENCE + 3
"""The first decode step, counted from 1, that is only launched if rows do not change: before it one warms up, and one
is recorded."""


def recordable(*, moves: bool, elsewhere: bool, rolling: bool) -> bool:
    """Whether a GPU can record the decode steps of a block.

    moves: weights, caches or hidden states move between tiers, or there are experts (the host must know which are
    chosen). elsewhere: attention over some cache is computed off the GPU. rolling: rolling positions.
    """
    return not (moves or elsewhere or rolling)
