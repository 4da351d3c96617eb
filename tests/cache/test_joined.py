"""Rows that go on in another cache: the same outputs and the same tokens kept as in a cache of their own."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_flexgen.cache.eviction import EvictionPolicy, make_policy
from h2o_flexgen.cache.eviction.base import AttendedPrompts
from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.cache.lengths import CacheLengths, slots_needed
from h2o_flexgen.cache.shape import CacheShape
from h2o_flexgen.cache.vectors import move_down
from h2o_flexgen.config.eviction import Budget, EvictionConfig
from h2o_flexgen.kernels.prompt import prefill_attention
from h2o_flexgen.kernels.types import Logits
from tests.cache.conftest import by_torch
from tests.cache.harness import CacheRun, Stream, Turning, held_counts, make_stream
from tests.policy_matrix import LATER, POLICIES, PolicyRow
from tests.seeds import python_random

pytestmark = pytest.mark.turns

STEPS, PLACES, D = 30, 4, 4
PROMPTS = [7, 3, 12, 1, 9, 5, 12, 2]
LASTS = [30, 4, 17, 9, 30, 2, 11, 23]
"""Steps that each sequence takes."""


def _budgets(policy: PolicyRow, window: int | None) -> list[Budget]:
    """Of every kind: by ratio, so small that nothing is heavy, and full."""
    ratios = [0.3, 0.5, 0.05, 1.0, 0.4, 0.3, 0.7, 0.2]
    sinks = {"streaming": 1, "h2o": 1, "expected_attention": 1}.get(policy.name)
    ratios = [1.0] * len(ratios) if policy.name == "full" else ratios
    configs = [EvictionConfig(policy.name, ratio=max(ratio, 0.06) if sinks else ratio, sinks=sinks) for ratio in ratios]
    lengths = zip(configs, PROMPTS, LASTS, strict=True)
    return [config.resolve(prompt + 8, last).within(window) for config, prompt, last in lengths]


class GpuBatch:
    """Places in one K and V, whose rows come and go."""

    def __init__(
        self, streams: list[Stream], budgets: list[Budget], policy: EvictionPolicy, window: int | None,
        turning: Turning | None,
    ) -> None:  # fmt: skip
        self.streams, self.budgets, self.policy, self.window, self.turning = streams, budgets, policy, window, turning
        self.shape = CacheShape(PLACES, 2, D, slots_needed(budgets))
        self.k, self.v = self.shape.buffers(torch.float32)
        self.k.fill_(float("nan"))  # nobody may read what nobody has written
        self.v.fill_(float("nan"))
        self.table = None if turning is None else turning.table(self.shape.capacity)
        self.fills_gaps = False
        self.like: GpuBatch | None = None  # of a layer before this one, in which the same happens first
        self.fresh: KVCache | None = None
        self.rows: list[int] = []
        self.times: dict[int, int] = {}
        self.cache: KVCache | None = None

    def drop(self, gone: set[int]) -> None:
        kept = [place for place, row in enumerate(self.rows) if row not in gone]
        if self.fills_gaps:
            movers = iter([place for place in kept if place >= len(kept)])
            kept = [place if place in kept else next(movers) for place in range(len(kept))]
        self.rows = [self.rows[place] for place in kept]
        if self.cache is None or not kept:
            self.cache = None
            return
        self._join([(self.cache, kept)], len(kept))

    def _join(self, parts: list[tuple[KVCache, list[int]]], count: int) -> None:
        """The first `count` places; what every slot holds is what it held before, also where no step follows."""
        held = torch.cat([cache.pos[rows] for cache, rows in parts])
        self.cache = KVCache.joined(parts, self.k[:count], self.v[:count])
        assert torch.equal(self.cache.pos, held)
        assert self.cache._slots.score is None or self.cache._slots.score[held < 0].isposinf().all(), "never the lowest"

    def admit(self, rows: list[int]) -> None:
        first, count = len(self.rows), len(self.rows) + len(rows)
        shape = CacheShape(len(rows), 2, D, self.shape.capacity)
        budgets: list[Budget] | CacheLengths = [self.budgets[row] for row in rows]
        if self.like is not None:
            budgets = self.like.fresh._lengths.for_another_layer()
        fresh = self.fresh = KVCache(shape, budgets, self.policy, layer=1, row_ids=rows, window=self.window)
        fresh.attach(self.k[first:count], self.v[first:count])
        for place, row in enumerate(rows):
            length = self.streams[row].prompt
            q, k, v = (x[:, :length].unsqueeze(0) for x in self.streams[row][:3])
            seen = [x if self.turning is None else self.turning.tensor(x, torch.arange(length)) for x in (q, k)]
            sums = prefill_attention(*seen, v, Logits(D**-0.5), fresh.wants_column_sums, window=self.window).column_sums
            attended = AttendedPrompts(seen[1], v, k, Logits(D**-0.5), None, seen[0], sums)
            fresh.fill([place], k, v, fresh.scores_of([place], attended))
            self.times[row] = length
        if self.cache is None:
            self.cache = fresh
        else:
            parts = [(self.cache, list(range(first))), (fresh, list(range(len(rows))))]
            self._join(parts, count)
        self.rows += rows

    def step(self) -> dict[int, torch.Tensor]:
        q, k, v = (
            torch.stack([self.streams[row][i][:, self.times[row]] for row in self.rows]) for i in range(3)
        )  # fmt: skip
        assert self.cache is not None
        out = self.cache.attend(q, k, v, Logits(D**-0.5), self.table)
        for row in self.rows:
            self.times[row] += 1
        return dict(zip(self.rows, out, strict=True))


CASES = [
    pytest.param(policy, window, (i + j) % 2, id=f"{policy.name}-{window}")
    for (i, policy), (j, window) in product(enumerate(POLICIES), enumerate((None, 8)))
]
LATER_CASES = [
    pytest.param(row, window, 1, id=f"{row.name}-{window}")
    for row in LATER
    if row.name in ("roco", "scissorhands", "snapkv", "expected_attention")
    for window in (None, 8)
]
"""Policies and windows with one of two orders of coming and going; with rolling positions in the other one."""


@pytest.mark.parametrize(("policy", "window", "seed"), CASES + LATER_CASES)
def test_rows_do_not_notice(policy: PolicyRow, window: int | None, seed: int) -> None:
    come_and_go(policy, window, None, seed)


@by_torch
@pytest.mark.parametrize(("policy", "window", "seed"), CASES)
def test_nor_do_they_with_rolling_positions(policy: PolicyRow, window: int | None, seed: int) -> None:
    come_and_go(policy, window, Turning(2), 1 - seed)


def come_and_go(policy: PolicyRow, window: int | None, turning: Turning | None, seed: int) -> None:
    streams = [make_stream(n, 2 * STEPS, group=2, d=D, seed=10 * seed + i) for i, n in enumerate(PROMPTS)]
    budgets, chooser = _budgets(policy, window), make_policy(EvictionConfig(policy.name))
    settings = {"layer": 1, "window": window, "turning": turning}
    alone = [
        CacheRun([s], [b], chooser, row_ids=[i], **settings)
        for i, (s, b) in enumerate(zip(streams, budgets, strict=True))
    ]
    gpu_batch, draw = GpuBatch(streams, budgets, chooser, window, turning), python_random(seed)
    gpu_batch.fills_gaps = bool(seed)
    waiting, left = list(range(len(PROMPTS))), dict(enumerate(LASTS))
    joins = 0
    while waiting or gpu_batch.rows:
        done = {row for row in gpu_batch.rows if left[row] == 0}
        if len(done) == len(gpu_batch.rows) or (done and draw.random() < 0.6):
            gpu_batch.drop(done)
            room = min(PLACES - len(gpu_batch.rows), len(waiting), draw.choice([1, 2, PLACES]))
            joins += bool(room and gpu_batch.rows)
            if room:
                gpu_batch.admit([waiting.pop(0) for _ in range(room)])
        if not gpu_batch.rows:
            continue
        for row, out in gpu_batch.step().items():
            if left[row] == 0:
                continue  # finished, and still there: nobody looks
            left[row] -= 1
            assert torch.allclose(out, alone[row].step()[0], atol=1e-5), f"row {row}"
            place = gpu_batch.rows.index(row)
            for head in range(2):
                assert gpu_batch.cache.kept(place, head) == alone[row].cache.kept(0, head)
            assert held_counts(gpu_batch.cache)[place] == held_counts(alone[row].cache)[0]
            assert gpu_batch.cache.next_pos[place] == alone[row].cache.next_pos[0]
    assert joins > 1


def test_a_ring_that_fills_beside_one_that_goes_round() -> None:
    """Both write to the same slot, the tenth of twelve; their ranks are not the same."""
    streams = [make_stream(n, 20, group=2, d=D, seed=n) for n in (12, 9)]
    settings, turning, chooser = {"layer": 1, "window": None}, Turning(2), make_policy(EvictionConfig("local"))
    budgets = [Budget(11, 0, 11, 0, False)] * 2
    alone = [CacheRun([s], [budgets[0]], chooser, turning=turning, **settings) for s in streams]
    gpu_batch = GpuBatch(streams, budgets, chooser, None, turning)
    gpu_batch.admit([0])
    for step in range(18):
        if step == 10:
            gpu_batch.admit([1])
        for row, out in gpu_batch.step().items():
            assert torch.allclose(out, alone[row].step()[0], atol=1e-5), f"row {row}, step {step}"


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("name", ["full", "h2o", "streaming"])
def test_lengths_of_the_same_rows_are_worked_out_once(name: str, window: int | None, monkeypatch) -> None:
    """Three layers: the first, its twin with other keys and values, and one like the twin that shares nothing."""
    settled = 0

    def counted(self: CacheLengths) -> object:
        nonlocal settled
        settled += 1
        return settle(self)

    settle = CacheLengths._find_milestones
    monkeypatch.setattr(CacheLengths, "_find_milestones", counted)
    policy = next(row for row in POLICIES if row.name == name)
    budgets, chooser = _budgets(policy, window), make_policy(EvictionConfig(name))
    streams = [
        [make_stream(n, 2 * STEPS, group=2, d=D, seed=100 * layer + i) for i, n in enumerate(PROMPTS)]
        for layer in range(2)
    ]
    first, twin, alone = (GpuBatch(streams[i], budgets, chooser, window, None) for i in (0, 1, 1))
    twin.like = first
    for gpu_batch in (first, twin, alone):
        gpu_batch.fills_gaps = True
    for admitted, gone in (([0, 1, 2, 3], {1, 3}), ([4, 5], {0, 4}), ([6], {2}), ([7], {5})):
        for gpu_batch in (first, twin, alone):
            gpu_batch.admit(admitted)
        for _ in range(3):
            outs = [gpu_batch.step() for gpu_batch in (first, twin, alone)]
            assert all(torch.equal(outs[1][row], outs[2][row]) for row in outs[2])
            assert torch.equal(twin.cache.pos, alone.cache.pos)
        for gpu_batch in (first, twin, alone):
            gpu_batch.drop(gone)
        outs = [gpu_batch.step() for gpu_batch in (first, twin, alone)]
        assert all(torch.equal(outs[1][row], outs[2][row]) for row in outs[2])
        assert held_counts(twin.cache) == held_counts(alone.cache)
        assert twin.cache.next_pos == alone.cache.next_pos
    assert settled == 2 * 8, "once for first and twin, once for the other"


@by_torch
@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.data())
def test_rows_move_down_whole(count: int, data: st.DataObject) -> None:
    """K and V one after the other in one buffer, and closer together afterwards."""
    staying = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    kept = staying
    if data.draw(st.booleans()):  # only the last rows move
        movers = iter([row for row in staying if row >= len(staying)])
        kept = [row if row in staying else next(movers) for row in range(len(staying))]
    used = data.draw(st.integers(0, 5))
    numbers = torch.arange(2 * count * 2 * 5 * 3, dtype=torch.float32)
    numbers.view(-1, 5, 3)[:, used:] = 0  # a cache's slots that no row has used
    expected = [x[kept].clone() for x in numbers.view(2, count, 2, 5, 3)]
    for closer in (False, True):
        buffer = numbers.clone()
        size = len(kept) * 2 * 5 * 3
        second = size if closer else count * 2 * 5 * 3
        for i, (source, wanted) in enumerate(zip(buffer.view(2, count, 2, 5, 3), expected, strict=True)):
            target = buffer[i * second : i * second + size].view(len(kept), 2, 5, 3)
            move_down(source, kept, target, used)
            assert torch.equal(target, wanted)
    elsewhere = torch.full((len(kept), 2, 5, 3), torch.nan)
    move_down(numbers.view(2, count, 2, 5, 3)[0], kept, elsewhere, used)
    assert torch.equal(elsewhere, expected[0])


@by_torch
@pytest.mark.parametrize("down", [1, 29, 31])
def test_rows_move_down_by_less_than_a_row_or_more(down: int) -> None:
    """As where what lies before them has smaller rows: by no whole number of slots."""
    buffer = torch.arange(4 * 30 + down, dtype=torch.float32)
    source, target = buffer[down:].view(4, 2, 5, 3), buffer[: 3 * 30].view(3, 2, 5, 3)
    expected = source[[0, 3, 2]].clone()
    expected[:, :, 4:] = 0
    move_down(source, [0, 3, 2], target, 4)
    assert torch.equal(target, expected)


@by_torch
def test_rows_never_move_up() -> None:
    k = torch.zeros(4, 2, 5, 3)
    with pytest.raises(ValueError, match="would move up"):
        move_down(k[:2], [0, 1], k[1:3], 5)
