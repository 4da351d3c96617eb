"""The nouns of a schedule: a task, a tick (one inner iteration), the shape a schedule is made for, recorded steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TypeAlias

from h2o_flexgen.config.model.spec import UnitSpec

NO_BATCH = -1  # the batch index of tasks that move weights or compute experts: they serve every GPU batch of a pass
EXPERT_SLOTS = 4
"""Streamed experts that are on the compute tier at once: one in use, the others being read. There are more where a
layer's are read while its attention is computed, see `weight_room.expert_slots`."""


class TaskKind(StrEnum):
    """The kind of a task; the value is the word used in traces and messages."""

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
    """One thing to do. `unit` indexes `ScheduleShape.units`.

    Weight tasks have batch NO_BATCH. A load names the step and unit that use its group first, a free the step and unit
    that used it last (for a load that nobody used: that would have used it). A cache or hidden task names its compute:
    a load the one that reads, a store or pass the one that wrote.

    experts: a compute task's experts, one after another, for the tokens of all GPU batches of the pass (batch
    NO_BATCH); or the one expert that is loaded or freed.
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
    """One inner iteration of the schedule. Its fields stand in the order in which they are carried out.

    A tick belongs to a stage; "earlier", "later" and "next" below mean ticks of the same stage.

    stores  results of the tick before, issued first; they overlap this tick's compute
    loads   inputs of later ticks, most urgent first, issued after the stores. Only the first tick of a schedule, or of
            a stage that was idle, loads inputs of its own compute
    compute None only in the drain tick, which ends a schedule with its last stores and frees and loads nothing
    passes  hidden states that this compute wrote and the next stage reads; sent right after the compute
    frees   weight groups that this compute used last, freed after it; in a drain tick also loads that nobody used
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
    """All that a schedule depends on. Raises ValueError for a shape no schedule exists for.

    units         the compute positions in order: input embedding first, output head last
    num_steps     steps at most: fewer where every row finishes early, or where `LastStep` ends the schedule
    streamed      keys of the weight groups that are not resident on the compute tier
    cache_moves   (layer, batch) of the caches that are not resident on the compute tier
    hidden_moves  batches whose hidden states are parked off the compute tier while other batches are computed
    lookahead     streamed weight groups in flight beyond the one in use: at most lookahead + 1 copies are alive
    stages        the units that each device computes, in order; none given: one device computes all
    host_attends  (layer, batch) of the caches in host memory that decode steps attend to there while other batches are
                  computed, see `schedule.workspace`: the order of tasks does not depend on it, what they do does
    expert_slots  streamed experts that are on the compute tier at once, at most
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
    def groups(self) -> tuple[range, ...]:
        """The GPU batches that go through a stage together: as many groups as stages, if there are as many batches."""
        return groups_of(self.num_batches, len(self.stages))


def groups_of(num_batches: int, num_stages: int) -> tuple[range, ...]:
    """See ScheduleShape.groups."""
    count = min(num_stages, num_batches)
    cuts = [num_batches * number // count for number in range(count + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(cuts))


def alone(num_batches: int, num_stages: int = 1) -> tuple[int, ...]:
    """GPU batches that have a group for themselves. They are never parked: the very next unit wants their hidden states
    again."""
    return tuple(group[0] for group in groups_of(num_batches, num_stages) if len(group) == 1)


ActiveBatches: TypeAlias = Callable[[int], Sequence[int]]
"""Maps a step to the ascending indices of the GPU batches that still have unfinished rows; [] ends the schedule."""

LastStep: TypeAlias = Callable[[int], bool]
"""Whether this step is certainly the last; False if that is not known."""

WholeStep: TypeAlias = Callable[[int], bool]
"""Whether a GPU batch's whole step ran in the tick of its first unit; of the other units only the last is left."""

ChosenExperts: TypeAlias = Callable[[int, UnitSpec], Sequence[int]]
"""The experts of a unit that the tokens of a step chose, ascending, once all its GPU batches have been routed."""

ReadsAhead: TypeAlias = Callable[[int, UnitSpec], bool]
"""Whether the tokens of a step will choose nearly all experts of a unit, so that these can be read in advance."""

GroupBatches: TypeAlias = Callable[[int, int], Sequence[int]]
"""As ActiveBatches, but of one group: maps a step and the index of a group to its batches that go on."""

GroupLast: TypeAlias = Callable[[int, int], bool]
"""As LastStep, but of one group: whether no step of it can follow this one, given a step and the group's index."""

# Decode steps that are recorded once and launched again as a whole, as CUDA graphs: where, and from which step on.
PATIENCE = 3
"""Steps that a GPU batch has to go on without a change before one is recorded, and that no row of it may be about to
end in. Recording takes as long as a step that is launched bit by bit. A step that is launched as a whole saves nearly
all of that where the GPU waits for the host, and a seventh where it is busy: recording pays after one step in small
models, after some seven in large ones. At three, no run ever pays much more than with foresight."""
FIRST_REPLAYED = PATIENCE + 3
"""The first decode step, counted from 1, that is nothing but launched, where no row leaves or comes: of those before it
one warms up, and one is recorded."""


def recordable(*, moves: bool, elsewhere: bool, rolling: bool) -> bool:
    """Whether the decode steps of a block can be recorded, if the GPU has what it takes for that.

    moves: whether weights, caches or hidden states of the block move between tiers, or there are experts (the host must
    know which are chosen). elsewhere: whether attention over any cache is computed off the GPU. rolling: whether keys
    are rotated by their places in the cache.
    """
    return not (moves or elsewhere or rolling)
