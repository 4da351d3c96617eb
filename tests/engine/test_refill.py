"""Rows that leave a lane and prompts that take their places: the same tokens as alone, and lanes that stay full."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from h2o_flexgen.cache.clock import slots_needed
from h2o_flexgen.cache.fused import FusedStep
from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine import block
from h2o_flexgen.engine.executor import Executor
from h2o_flexgen.engine.llm import LLM
from h2o_flexgen.engine.requests import in_order
from h2o_flexgen.engine.sequence import RequestOutput
from h2o_flexgen.engine.waiting import Waiting
from h2o_flexgen.schedule.check import check
from h2o_flexgen.schedule.tasks import ScheduleShape, Tick
from tests.engine.compare import History
from tests.policy_matrix import POLICIES, PolicyRow
from tests.tiny import make_opt, prompts_of, save

CPU, DISK, GPU, THREE = {"cpu": 1.0}, {"disk": 1.0}, {"gpu": 1.0}, {"gpu": 0.3, "cpu": 0.3, "disk": 0.4}
TIERS: dict[str, tuple[dict[str, Any], str | None]] = {
    "cpu": ({"weights": CPU, "cache": CPU, "hidden": CPU}, None),
    "disk": ({"weights": DISK, "cache": DISK, "hidden": DISK}, None),
    "gpu": ({"weights": THREE, "cache": THREE, "hidden": THREE}, "1GiB"),
    "cpu beside gpu": ({"weights": GPU, "cache": CPU, "hidden": CPU, "cpu_cache_compute": True}, "1GiB"),
}
SHAPES = [(5, 1), (3, 2), (1, 3), (2, 4), (1, 5)]
LENGTHS = [23, 40, 12, 33, 31, 8, 19, 27, 5, 40, 14, 3, 29, 9, 21]
"""Of the prompts: more than any of the blocks has places for."""
NEW = [20, 3, 9, 1, 31, 2, 14, 5, 24, 4, 7, 38, 2, 11, 1]
PROMPTS = prompts_of(LENGTHS)


def _params(sampled: bool = True) -> list[SamplingParams]:
    """Every third row is sampled."""
    return [
        SamplingParams(max_new_tokens=new, ignore_eos=True, logprobs=0, do_sample=sampled and i % 3 == 1)
        for i, new in enumerate(NEW)
    ]


def _alone(folder: str, eviction: EvictionConfig, params: list[SamplingParams]) -> list[RequestOutput]:
    """Every prompt in a lane of its own that nobody shares; indices as in the call of all, so that seeds agree."""
    with LLM(folder, dtype="float32", eviction=eviction, policy={"gpu_batch_size": 1}, seed=eviction.seed) as llm:
        rows = llm._reader().read(PROMPTS, params)
        return [llm._output(row) for each in rows for row in llm._run([each])]


def _assert_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids, f"prompt {one.index}"
        assert one.finish_reason == other.finish_reason
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)


@pytest.fixture(scope="module")
def alone(checkpoint) -> Any:
    """`alone(name, policy)`: what every prompt gives by itself."""
    known: dict[tuple[str, str], list[RequestOutput]] = {}

    def run(name: str, policy: PolicyRow) -> list[RequestOutput]:
        if (name, policy.name) not in known:
            known[name, policy.name] = _alone(checkpoint(name)[1], policy.eviction(), _params())
        return known[name, policy.name]

    return run


def _run(folder: str, eviction: EvictionConfig, shape: tuple[int, int], tier: str = "cpu", **engine: Any) -> LLM:
    placement, gpu = TIERS[tier]
    policy = {**placement, "gpu_batch_size": shape[0], "num_gpu_batches": shape[1], **engine.pop("policy", {})}
    return LLM(folder, dtype="float32", eviction=eviction, policy=policy, emulate_gpu=gpu, seed=eviction.seed, **engine)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda row: row.name)
def test_neighbours_that_come_and_go_do_not_matter(policy: PolicyRow, shape, checkpoint, alone) -> None:
    with _run(checkpoint("opt")[1], policy.eviction(), shape) as llm:
        _assert_same(llm.generate(PROMPTS, _params()), alone("opt", policy))
        record = llm.last_record
    assert (record.sequences, record.prompt_tokens, record.generated_tokens) == (15, sum(LENGTHS), sum(NEW))
    assert record.computed_prompt_tokens == sum(LENGTHS)
    assert record.prefill_s > 0
    assert record.decode_s > 0


@pytest.mark.parametrize("tier", ["disk", "gpu", "cpu beside gpu"])
@pytest.mark.parametrize("shape", [(5, 1), (2, 3)], ids=str)
@pytest.mark.parametrize(
    "policy", [row for row in POLICIES if row.name in ("full", "h2o", "streaming")], ids=lambda row: row.name
)
def test_on_every_tier(policy: PolicyRow, shape, tier: str, checkpoint, alone) -> None:
    """Caches that move are written home whole in the step in which rows come or go."""
    with _run(checkpoint("opt")[1], policy.eviction(), shape, tier) as llm:
        _assert_same(llm.generate(PROMPTS, _params()), alone("opt", policy))


@pytest.mark.parametrize("tier", ["cpu", "gpu"])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "gpt-neox", "phi3-longrope", "llama-dynamic"])
@pytest.mark.parametrize("policy", [row for row in POLICIES if row.name in ("full", "h2o")], ids=lambda row: row.name)
def test_other_families(policy: PolicyRow, name: str, tier: str, checkpoint, alone) -> None:
    with _run(checkpoint(name)[1], policy.eviction(), (4, 2), tier, policy={"prefill_chunk": 33}) as llm:
        _assert_same(llm.generate(PROMPTS, _params()), alone(name, policy))


@pytest.fixture(params=["torch", "native"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps by torch, and by the kernel in C where it can be had."""
    if request.param == "torch":
        monkeypatch.setattr(FusedStep, "of", lambda *_: None)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", ["opt", "gemma3"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda row: row.name)
def test_caches_keep_what_they_keep_alone(policy: PolicyRow, name: str, checkpoint, history: History) -> None:
    folder, eviction = checkpoint(name)[1], policy.eviction()
    _alone(folder, eviction, _params(sampled=False))
    expected = {key: list(steps) for key, steps in history.items()}
    history.clear()
    with _run(folder, eviction, (4, 1)) as llm:
        llm.generate(PROMPTS, _params(sampled=False))
    compared = 0
    for key, steps in expected.items():
        found = history[key][: len(steps)]  # a finished row that stays for some steps goes on
        assert found == steps, key
        compared += len(found)
    assert compared > 300


def test_stop_tokens_at_random_places(checkpoint) -> None:
    """All rows may become long, most end early: nobody knows beforehand which."""
    folder = checkpoint("llama-gqa")[1]
    eos = tuple(random.Random(5).sample(range(3, 97), 8))
    settings = SamplingParams(max_new_tokens=60, eos_token_id=eos, do_sample=True, temperature=1.5, logprobs=0)
    eviction = EvictionConfig("h2o", ratio=0.3)
    expected = _alone(folder, eviction, [settings] * len(PROMPTS))
    lengths = [len(output.token_ids) for output in expected]
    assert max(lengths) > 4 * min(lengths)
    for shape in ((4, 1), (2, 2)):
        with _run(folder, eviction, shape) as llm:
            _assert_same(llm.generate(PROMPTS, settings), expected)


def test_positions_that_roll(checkpoint) -> None:
    """One prompt is longer than the context, and its end goes through decode steps while neighbours change."""
    folder, eviction = checkpoint("llama-gqa")[1], EvictionConfig("h2o", budget=20, rolling_positions=True)
    prompts = prompts_of([135, *LENGTHS])
    params = [SamplingParams(max_new_tokens=9, ignore_eos=True, logprobs=0), *_params(sampled=False)]
    with _run(folder, eviction, (1, 1)) as llm:
        expected = [llm.generate([prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
    for tier, shape in (("cpu", (4, 1)), ("disk", (2, 2))):
        with _run(folder, eviction, shape, tier) as llm:
            for one, other in zip(llm.generate(prompts, params), expected, strict=True):
                assert one.token_ids == other.token_ids


def test_scores_of_unequal_length(checkpoint) -> None:
    folder, eviction = checkpoint("opt")[1], EvictionConfig("h2o", ratio=0.4)
    pairs = list(zip(PROMPTS, (prompts_of([new], seed=new)[0] for new in NEW), strict=True))
    with _run(folder, eviction, (3, 2)) as llm:
        together = llm.score(pairs)
        for pair, score in zip(pairs, together, strict=True):
            alone = llm.score([pair])[0]
            assert score.token_logprobs == pytest.approx(alone.token_logprobs, abs=1e-3)
            assert score.token_is_greedy == alone.token_is_greedy


def test_samples_and_shared_prefixes_come_in_together(checkpoint) -> None:
    """A prefix is computed once for all rows that come in together, and that is worth waiting for."""
    header, *tails = prompts_of([40, *(3 + i % 5 for i in range(12))], seed=3)
    prompts = [header + tail[1:] for tail in tails]
    params = [SamplingParams(max_new_tokens=1 + 7 * (i % 3), ignore_eos=True, logprobs=0) for i in range(12)]
    outputs, computed = [], []
    for share in (True, False):
        with _run(checkpoint("opt")[1], EvictionConfig("h2o", ratio=0.4), (4, 1), share_prefixes=share) as llm:
            outputs.append(llm.generate(prompts, params))
            computed.append(llm.last_record.computed_prompt_tokens)
    _assert_same(*outputs)
    assert computed[1] == sum(map(len, prompts))
    assert computed[0] < 0.6 * computed[1]
    sampled = SamplingParams(max_new_tokens=30, do_sample=True, num_return_sequences=7, eos_token_id=tuple(range(3, 9)))
    with _run(checkpoint("opt")[1], EvictionConfig(), (3, 1)) as llm:
        many = llm.generate(PROMPTS[:3], sampled)
        with _run(checkpoint("opt")[1], EvictionConfig(), (21, 1)) as wide:
            assert [o.token_ids for o in many] == [o.token_ids for o in wide.generate(PROMPTS[:3], sampled)]


@pytest.mark.usefixtures("kernel")
def test_a_failed_row_leaves_nothing_to_those_who_take_its_place(tmp_path) -> None:
    """Its keys and values are not finite, and lie where later rows have slots that are not used yet."""
    model = make_opt("opt-untied")
    with torch.no_grad():
        model.get_input_embeddings().weight[50] = float("nan")
    folder = str(save(model, tmp_path))
    prompts = [[token for token in prompt if token != 50] for prompt in PROMPTS]
    prompts[3], prompts[9] = [2, 50, *[7] * 30], [2, 9, 50, 8]
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, suppress_tokens=(50,))
    each = [replace(params, max_new_tokens=max(4, new)) for new in NEW]
    for eviction in (EvictionConfig(), EvictionConfig("h2o", ratio=0.5)):
        with _run(folder, eviction, (1, 1)) as llm:
            expected = [llm.generate([prompt], one)[0].token_ids for prompt, one in zip(prompts, each, strict=True)]
        with _run(folder, eviction, (3, 1), check_finite=True) as llm:
            outputs = llm.generate(prompts, each)
        assert [output.token_ids for output in outputs] == expected
        assert [output.index for output in outputs if output.finish_reason == "error"] == [3, 9]
        assert all(outputs[i].error.endswith("in unit embed") for i in (3, 9))


@pytest.mark.parametrize("tier", ["cpu", "disk", "gpu"])
def test_the_schedule_that_runs_is_sound(tier: str, checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[ScheduleShape, list[Tick], list[list[int]], list[int]]] = []

    def recorded(shape: ScheduleShape, active: Any, last: Any) -> Any:
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

        for tick in zigzag(shape, note_active, note_last):
            ticks.append(tick)
            yield tick

    zigzag = block.zigzag
    monkeypatch.setattr(block, "zigzag", recorded)
    with _run(checkpoint("opt")[1], EvictionConfig("h2o", ratio=0.3), (2, 3), tier) as llm:
        llm.generate(PROMPTS, _params())
        llm.generate(PROMPTS[:13], max_new_tokens=5, ignore_eos=True)
    steps = []
    for shape, ticks, actives, ends in runs:
        known = replace(shape, num_steps=ends[0] + 1) if ends else shape
        report = check(ticks, known, actives)
        assert report.unused == 0, "the last step of rows that end by length is known"
        steps.append(report.steps)
    assert len(steps) == 1 + 3, "ragged work is one block; rows that end together make way for a block of their own"
    assert steps[1:] == [5, 5, 5]


def test_few_row_steps_are_computed_in_vain(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs with a long tail, 200 of 1 to 100 tokens: the fewest possible row-steps are the tokens themselves."""
    computed = 0

    def count(self: Executor, lane: Any, logits: Any) -> Any:
        nonlocal computed
        computed += len(lane.rows)
        return choose(self, lane, logits)

    choose = Executor._choose
    monkeypatch.setattr(Executor, "_choose", count)
    draw = random.Random(3)
    new = [min(100, 1 + int(draw.expovariate(1 / 24))) for _ in range(200)]
    lengths = [draw.randrange(3, 25) for _ in new]
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in new]
    for shape in ((16, 1), (4, 3), (1, 2), (32, 1)):
        computed = 0
        with _run(checkpoint("opt")[1], EvictionConfig("h2o", ratio=0.4), shape) as llm:
            llm.generate(prompts_of(lengths), params)
        assert sum(new) <= computed <= 1.25 * sum(new), shape


def test_memory_does_not_grow(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many refills tiers hold what they held at first, and of a layer's caches only the last ones live on."""
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
            held.append(llm._loaded.stages[0].tiers.cpu.usage())
            assert all(nbytes <= held[0][what] for what, nbytes in held[-1].items())
            assert len(living) <= 2 * layers * shape[1]
        assert made > 20 * layers
        planned = llm.last_plan.footprint.total("cpu") - llm.last_plan.request.baseline
        assert llm.last_record.peak_bytes["cpu"] <= planned
    gc.collect()
    assert not living


def test_an_end_in_the_middle_leaves_an_engine_that_works(checkpoint, alone) -> None:
    policy = next(row for row in POLICIES if row.name == "h2o")
    for tier in ("cpu", "disk"):
        with _run(checkpoint("opt")[1], policy.eviction(), (3, 1), tier) as llm:
            stream = llm.stream(PROMPTS, _params())
            for _ in range(4):
                next(stream)
            used = {"weights", "weight buffers", "staging buffers"}
            stream.close()
            assert set(llm._loaded.stages[0].tiers.cpu.usage()) <= used
            _assert_same(llm.generate(PROMPTS, _params()), alone("opt", policy))


def test_what_may_run_longest_comes_first(checkpoint) -> None:
    """And among equals the longest prompt: the end of the work, when nobody takes a place any more, is short."""
    with _run(checkpoint("opt")[1], EvictionConfig(), (3, 1)) as llm:
        rows = llm._reader().read(PROMPTS, _params())
    order = [row.index for row in in_order(rows, share_prefixes=True)]
    assert order == sorted(range(len(NEW)), key=lambda i: (-NEW[i], -LENGTHS[i], i))


def test_what_is_true_of_all_who_wait(checkpoint) -> None:
    with _run(checkpoint("opt")[1], EvictionConfig("h2o", ratio=0.3), (3, 1)) as llm:
        rows = llm._reader().read(PROMPTS, _params())
    waiting, rest = Waiting(rows), list(rows)
    for count in (0, 1, 4, 2, 20):
        assert waiting.take(count) == rest[:count]
        rest = rest[count:]
        assert len(waiting) == len(rest)
        assert waiting.steps == sum(row.steps for row in rest)
        assert waiting.longest_prompt == max((len(row.prompt_ids) for row in rest), default=0)
        for window in (None, 7):
            slots = max((slots_needed([row.budget.within(window)]) for row in rest), default=0)
            assert waiting.slots(window) == slots


def test_progress_never_goes_back(checkpoint) -> None:
    heard: list[tuple[int, int]] = []
    with _run(checkpoint("opt")[1], EvictionConfig(), (3, 2)) as llm:
        llm.on_progress = lambda what, done, total: heard.append((done, total)) if what == "generating" else None
        llm.generate(PROMPTS, _params())
    assert {total for _, total in heard} == {sum(NEW)}
    assert [done for done, _ in heard] == sorted(done for done, _ in heard)
    assert heard[-1][0] < sum(NEW) <= heard[-1][0] + 8
