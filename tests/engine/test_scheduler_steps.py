"""GPU batches that rows leave and prompts enter: a sound schedule, few row-steps in vain, memory that does not grow."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.cache.lengths import slots_needed
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.batching.scheduler import WaitingQueue, in_order
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.execution import block
from h2o_flexgen.engine.execution.executor import Executor
from h2o_flexgen.engine.requests.sequence import Sequence
from h2o_flexgen.schedule.tasks import ScheduleShape, Tick
from tests.engine.ragged import LENGTHS, NEW, PROMPTS
from tests.engine.ragged import params as _params
from tests.engine.ragged import run as _run
from tests.oracles.schedule import check
from tests.seeds import python_random
from tests.tiny import prompts_of


@pytest.mark.parametrize("tier", ["cpu", "disk", "gpu"])
def test_the_schedule_that_runs_is_sound(tier: str, checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[ScheduleShape, list[Tick], list[list[int]], list[int]]] = []

    def recorded(shape: ScheduleShape, active: Any, last: Any, *others: Any) -> Any:
        ticks: list[Tick] = []
        actives: list[list[int]] = []
        ends: list[int] = []
        runs.append((shape, ticks, actives, ends))

        def note_active(step: int) -> list[int]:
            actives.append(active(step))
            return actives[-1]

        def note_last(step: int) -> bool:
            if last(step):
                ends.append(step)
            return bool(ends)

        for tick in zigzag(shape, note_active, note_last, *others):
            ticks.append(tick)
            yield tick

    zigzag = block.zigzag
    monkeypatch.setattr(block, "zigzag", recorded)
    monkeypatch.setattr(Executor, "_launcher", lambda _: None)  # steps that are done as a whole have few ticks
    with _run(checkpoint("opt")[1], EvictionConfig("h2o", ratio=0.3), (2, 3), tier) as llm:
        llm.generate(PROMPTS, _params())
        llm.generate(prompts_of([*LENGTHS, 9, 21]), max_new_tokens=5, ignore_eos=True)
    steps = []
    for shape, ticks, actives, ends in runs:
        known = replace(shape, num_steps=ends[0] + 1) if ends else shape
        report = check(ticks, known, actives)
        assert report.unused == 0, "the last step of rows that end by length is known"
        steps.append(report.steps)
    assert len(steps) == 1 + 3, "ragged work is one block; rows that end together make way for a block of their own"
    assert steps[1:] == [5, 5, 5]


def test_steps_that_move_nothing_are_computed_at_once(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host, of one GPU batch: the same tokens as unit by unit, while rows leave and prompts enter."""
    compute, by_way, units = Executor._compute, [], 0

    def count(self: Executor, task: Any) -> Any:
        nonlocal units
        units += 1
        return compute(self, task)

    monkeypatch.setattr(Executor, "_compute", count)
    for launcher in (Executor._launcher, lambda _: None):
        monkeypatch.setattr(Executor, "_launcher", launcher)
        units = 0
        with _run(checkpoint("opt")[1], EvictionConfig("h2o", ratio=0.3), (3, 1)) as llm:
            outputs = llm.generate(PROMPTS, _params())
        by_way.append((units, [output.token_ids for output in outputs]))
    (at_once, tokens), (unit_by_unit, others) = by_way
    assert tokens == others
    assert at_once < 0.8 * unit_by_unit, "steps with prompts go unit by unit, and these are many here"


@pytest.mark.slow
def test_few_row_steps_are_computed_in_vain(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs with a long tail, 200 of 1 to 100 tokens: the fewest possible row-steps are the tokens themselves."""
    computed = 0

    def count(self: Executor, gpu_batch: Any, logits: Any) -> Any:
        nonlocal computed
        computed += len(gpu_batch.rows)
        return choose(self, gpu_batch, logits)

    choose = Executor._choose
    monkeypatch.setattr(Executor, "_choose", count)
    draw = python_random(3)
    new = [min(100, 1 + int(draw.expovariate(1 / 24))) for _ in range(200)]
    lengths = [draw.randrange(3, 25) for _ in new]
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in new]
    for shape in ((16, 1), (4, 3), (32, 1)):
        computed = 0
        with _run(checkpoint("opt")[1], EvictionConfig("h2o", ratio=0.4), shape) as llm:
            llm.generate(prompts_of(lengths), params)
        assert sum(new) <= computed <= 1.25 * sum(new), shape


@pytest.fixture
def frozen() -> None:
    """Of what other tests left nothing is looked at again and again by the collector, from here to the end."""
    gc.freeze()


@pytest.mark.slow
@pytest.mark.usefixtures("frozen")
def test_memory_does_not_grow(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many changes tiers hold what they held at first, and of a layer's caches only the last ones live on."""
    living: weakref.WeakSet[KVCache] = weakref.WeakSet()
    made, layers, shape = 0, 3, (4, 2)
    original = KVCache.__init__

    def counted(self: KVCache, *args: Any, **settings: Any) -> None:
        nonlocal made
        original(self, *args, **settings)
        made += 1
        living.add(self)

    monkeypatch.setattr(KVCache, "__init__", counted)
    with _run(checkpoint("opt")[1], EvictionConfig("h2o", ratio=0.4), shape) as llm:
        held: list[dict[str, int]] = []
        for _ in llm.stream(prompts_of(LENGTHS * 6), _params() * 6):
            gc.collect()
            held.append(dict(llm._loaded.stages[0].tiers.cpu.items))
            assert all(nbytes <= held[0][what] for what, nbytes in held[-1].items())
            assert len(living) <= 2 * layers * shape[1]
        assert made > 20 * layers
        planned = llm.last_plan.footprint.total("cpu") - llm.last_plan.request.baseline
        assert llm.last_record.peak_bytes["cpu"] <= planned
    gc.collect()
    assert not living


def test_what_may_run_longest_comes_first(checkpoint) -> None:
    """And among equals the longest prompt: the end of the work, when nobody takes a place any more, is short."""
    with _run(checkpoint("opt")[1], EvictionConfig(), (3, 1)) as llm:
        rows = llm._reader().read(PROMPTS, _params())
    order = [row.index for row in in_order(rows, share_prefixes=True)]
    assert order == sorted(range(len(NEW)), key=lambda i: (-NEW[i], -LENGTHS[i], i))


def test_what_is_true_of_all_who_wait(checkpoint) -> None:
    with _run(checkpoint("opt")[1], EvictionConfig("h2o", ratio=0.3), (3, 1)) as llm:
        rows = llm._reader().read(PROMPTS, _params())
    waiting, rest = WaitingQueue(rows), list(rows)
    for count in (0, 1, 4, 2, 20):
        assert waiting.take(count) == rest[:count]
        rest = rest[count:]
        assert len(waiting) == len(rest)
        assert waiting.steps == sum(row.steps for row in rest)
        assert waiting.longest_prompt == max((len(row.prompt_ids) for row in rest), default=0)
        for window in (None, 7):
            slots = max((slots_needed([row.budget.within(window)]) for row in rest), default=0)
            assert waiting.slots(0, window) == slots


def test_progress_never_goes_back(checkpoint) -> None:
    heard: dict[str, list[tuple[int, int]]] = defaultdict(list)
    with _run(checkpoint("opt")[1], EvictionConfig(), (3, 2)) as llm:
        llm.on_progress = lambda what, done, total: heard[what].append((done, total))
        llm.generate(PROMPTS, _params())
        layers = llm.model.spec.num_layers
    for what, whole in (("prefill", sum(LENGTHS)), ("generating", sum(NEW))):
        assert {total for _, total in heard[what]} == {whole}
        assert [done for done, _ in heard[what]] == sorted(done for done, _ in heard[what])
        assert heard[what][0][0] == 0
    assert heard["generating"][-1][0] < sum(NEW) <= heard["generating"][-1][0] + 8
    assert heard["prefill"][-1][0] == sum(LENGTHS)
    first = [done for done, _ in heard["prefill"] if done <= sum(sorted(LENGTHS)[-6:])]
    assert len(set(first)) > 2 * layers, "prompts count unit by unit, before they are through"


def test_prompts_beyond_the_context_count_as_they_are_fed(checkpoint) -> None:
    heard: list[tuple[str, int, int]] = []
    eviction = EvictionConfig("streaming", budget=20, rolling_positions=True)
    with Engine(checkpoint("llama-gqa")[1], dtype="float32", eviction=eviction) as llm:
        context = llm.model.spec.max_positions
        llm.on_progress = llm.on_plan = None
        llm.generate([[5, 6]], max_new_tokens=2)
        llm.on_progress = lambda *what: heard.append(what)
        llm.generate([[3 + i % 40 for i in range(context + 9)]], max_new_tokens=3, ignore_eos=True)
    assert [entry for entry in heard if entry[0] == "prefill"][-1] == ("prefill", context, context)
    counts = [done for what, done, total in heard if what == "generating"]
    assert counts == list(range(12)), "a step each: nine tokens of the prompt, and three new ones"


def test_what_waits_is_looked_through_once(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many blocks ask: a look through half a million rows for each block took longer than the blocks."""
    with _run(checkpoint("opt")[1], EvictionConfig("h2o", ratio=0.3), (3, 1)) as llm:
        rows = llm._reader().read(PROMPTS, _params())
    asked: list[Sequence] = []
    waiting, looks = WaitingQueue(rows), Sequence.budget_in
    monkeypatch.setattr(Sequence, "budget_in", lambda row, *where: asked.append(row) or looks(row, *where))
    for _ in range(5):
        waiting.take(1)
        waiting.slots(0, None)
        waiting.slots(3, None)
    assert len(asked) == len(rows) - 1


@pytest.mark.usefixtures("frozen")
def test_sequences_that_were_given_out_are_not_held(checkpoint) -> None:
    """A call may have more of them than there is memory for all their tokens."""
    with _run(checkpoint("opt")[1], EvictionConfig("h2o", ratio=0.3), (3, 1)) as llm:
        params, given = SamplingParams(max_new_tokens=3, ignore_eos=True), list[int]()
        for row in llm._run(llm._reader().read(prompts_of([5] * 60), params)):
            given.append(row.row_id)
            del row
            gc.collect()
            held = sum(type(each) is Sequence for each in gc.get_objects())
            assert held <= 60 - len(given) + 6, "those of a block"
    assert sorted(given) == list(range(60))


def test_a_sequence_is_small(checkpoint) -> None:
    """Of a million prompts each is one."""
    with _run(checkpoint("opt")[1], EvictionConfig("h2o", ratio=0.3), (3, 1)) as llm:
        reader, prompts, params = llm._reader(), prompts_of([8] * 500), SamplingParams(max_new_tokens=4)
        reader.read(prompts[:1], params)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        rows = reader.read(prompts, params)
        taken = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    assert taken / len(rows) < 1500
