"""Recordings of decode steps and the memory that they share, on a CUDA that is not there."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from h2o_flexgen.config.eviction import Budget
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.batching.gpu_batch import GpuBatch
from h2o_flexgen.engine.execution import cuda_graphs
from h2o_flexgen.engine.execution.cuda_graphs import CudaGraph, DecodeGraphs, GraphMemory
from h2o_flexgen.engine.requests.sequence import Sequence
from h2o_flexgen.schedule.tasks import PATIENCE

DEVICE = torch.device("cpu")
NEW = 40


class Pools:
    """What torch keeps of pools: one whose last graph is gone must not be recorded into again."""

    def __init__(self) -> None:
        self.users: dict[int, int] = {}
        self.emptied = self.handles = 0

    def handle(self) -> int:
        self.handles += 1
        return self.handles

    def empty(self) -> None:
        self.emptied += 1

    def graph(self) -> FakeCudaGraph:
        return FakeCudaGraph(self)


class FakeCudaGraph:
    """See torch.cuda.CUDAGraph."""

    def __init__(self, pools: Pools) -> None:
        self._pools, self._pool = pools, 0

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        assert self._pools.users.get(pool) != 0, "its last graph was reset"
        self._pool = pool
        self._pools.users[pool] = self._pools.users.get(pool, 0) + 1

    def capture_end(self) -> None: ...

    def replay(self) -> None:
        assert self._pool

    def reset(self) -> None:
        if self._pool:
            self._pools.users[self._pool] -= 1
        self._pool = 0


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    made = Pools()
    for name, stand_in in (
        ("CUDAGraph", made.graph),
        ("graph_pool_handle", made.handle),
        ("empty_cache", made.empty),
        ("stream", lambda stream: nullcontext()),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.delattr(torch.cuda, "synchronize")
    monkeypatch.setattr(cuda_graphs, "_side_stream", lambda device: None)
    monkeypatch.setattr(CudaGraph, "warm_up", lambda graph, run: run())
    monkeypatch.setattr(CudaGraph, "fetch", lambda graph, numbers: numbers.clone)
    return made


class Cache:
    """As much of a KVCache as recordings ask for."""

    def __init__(self) -> None:
        self.steps = 0

    @property
    def next_pos(self) -> list[int]:
        return [self.steps]

    def repeat(self, steps: int = 1) -> None:
        self.steps += steps


class Steps:
    """Decode steps of GPU batches over `caches`, by `graphs`."""

    def __init__(self, memory: GraphMemory) -> None:
        self.caches = [Cache()]
        self.recordings: list[CudaGraph] = []
        self.graphs = DecodeGraphs(lambda: self._make(memory), lambda gpu_batch: self.caches, self._forward)  # type: ignore

    def _make(self, memory: GraphMemory) -> CudaGraph:
        self.recordings.append(CudaGraph(DEVICE, memory))
        return self.recordings[-1]

    def _forward(self, gpu_batch: GpuBatch, tokens: Tensor, positions: Tensor) -> Tensor:
        self.caches[0].repeat()
        return torch.zeros(len(tokens), 9)

    def run(self, gpu_batch: GpuBatch, count: int) -> int:
        """How many of so many steps were not left to be done unit by unit."""
        done = 0
        for _ in range(count):
            launched = self.graphs.step(gpu_batch)
            if launched is None:
                gpu_batch.inputs()
                self.caches[0].repeat()
            elif not isinstance(launched, Tensor):
                launched()
            done += launched is not None
            for row in gpu_batch.rows:
                row.token_ids.append(0)
            gpu_batch.go_on()
        return done


def lane_of(rows: int = 2, index: int = 0, new: int = NEW) -> GpuBatch:
    """A GPU batch whose prompts are in."""
    gpu_batch, params = GpuBatch(index, 16, DEVICE), SamplingParams(max_new_tokens=new, ignore_eos=True)
    budget = Budget(100, 0, 100, 0, full=True)
    made = [Sequence(i, 0, i, [3, 4], params, budget, frozenset(), token_ids=[1], prepared=True) for i in range(rows)]
    gpu_batch.change([], made, [])
    gpu_batch.go_on()
    return gpu_batch


def changed(steps: Steps, gpu_batch: GpuBatch, kept: list[int]) -> None:
    gpu_batch.change(kept, [], [])
    steps.run(gpu_batch, 1)


def test_recordings_that_follow_one_another_share_memory(pools: Pools) -> None:
    """Without a wait or an emptied cache between them: the old one goes when the new one is there."""
    steps, gpu_batch = Steps(GraphMemory()), lane_of(rows=4)
    for kept in ([0, 1, 2], [0, 1], [0]):
        assert steps.run(gpu_batch, PATIENCE + 3) == 3
        changed(steps, gpu_batch, kept)
    assert len(steps.recordings) == 3
    assert (pools.handles, pools.emptied) == (1, 1)
    assert pools.users == {1: 1}
    steps.graphs.close()
    assert pools.users == {1: 0}


def test_a_pool_whose_last_graph_is_gone_is_not_used_again(pools: Pools) -> None:
    memory = GraphMemory()
    for block in range(2):
        steps = Steps(memory)
        for index in range(2):
            steps.run(lane_of(index=index), PATIENCE + 4)
        assert (pools.handles, pools.emptied) == (block + 1, block + 1)
        assert pools.users[block + 1] == 2
        steps.graphs.close()
    assert pools.users == {1: 0, 2: 0}


def test_nothing_is_recorded_for_steps_that_are_about_to_end(pools: Pools) -> None:
    steps = Steps(GraphMemory())
    gpu_batch = lane_of(new=2 * PATIENCE)
    steps.run(gpu_batch, 2 * PATIENCE - 1)
    assert not steps.recordings
    assert steps.run(lane_of(new=3 * PATIENCE, index=1), 3 * PATIENCE - 1) > PATIENCE


def test_caches_hear_of_every_step_when_rows_change(pools: Pools) -> None:
    """Of those that were launched ahead, too."""
    steps, gpu_batch = Steps(GraphMemory()), lane_of(rows=3)
    assert steps.run(gpu_batch, PATIENCE + 5) == 5
    assert gpu_batch.ahead
    changed(steps, gpu_batch, [0, 1])
    # the step of the change, and one more that was launched for rows that were to go on
    assert steps.caches[0].steps == PATIENCE + 5 + 1 + 1
    assert not gpu_batch.ahead


def test_a_recording_that_fails_leaves_the_caches_where_they_were(pools: Pools, monkeypatch) -> None:
    def failing(graph: FakeCudaGraph) -> None:
        raise RuntimeError("this operation is not permitted")

    monkeypatch.setattr(FakeCudaGraph, "capture_end", failing)
    steps = Steps(GraphMemory())
    assert steps.run(lane_of(), PATIENCE + 5) == 2, "the one that warms up, and the one that was to be recorded"
    assert steps.caches[0].steps == PATIENCE + 5
    assert steps.graphs.failure == "RuntimeError: this operation is not permitted"
    steps.graphs.close()
