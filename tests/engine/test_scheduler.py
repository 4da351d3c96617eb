"""Rows that leave a GPU batch and prompts that take their places: the same tokens as alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from h2o_flexgen.cache.fused import FusedStep
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.requests.sequence import RequestOutput
from tests.engine.compare import History
from tests.engine.ragged import LENGTHS, NEW, PROMPTS
from tests.engine.ragged import params as _params
from tests.engine.ragged import run as _run
from tests.policy_matrix import POLICIES, PolicyRow
from tests.seeds import python_random
from tests.tiny import make_opt, prompts_of, save

SHAPES = [(5, 1), (3, 2), (1, 3), (2, 4), (1, 5)]


def _alone(folder: str, eviction: EvictionConfig, params: list[SamplingParams]) -> list[RequestOutput]:
    """Every prompt in a GPU batch of its own that nobody shares; indices as in the call of all, so that seeds agree."""
    with Engine(folder, dtype="float32", eviction=eviction, policy={"gpu_batch_size": 1}, seed=eviction.seed) as llm:
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


@pytest.mark.turns
@pytest.mark.parametrize(
    ("policy", "shape"),
    [
        pytest.param(policy, shape, id=f"{policy.name}-{shape}")
        for i, policy in enumerate(POLICIES)
        for j, shape in enumerate(SHAPES)
        if i % len(SHAPES) == j
    ],
)
def test_neighbours_that_come_and_go_do_not_matter(policy: PolicyRow, shape, checkpoint, alone) -> None:
    with _run(checkpoint("opt")[1], policy.eviction(), shape) as llm:
        _assert_same(llm.generate(PROMPTS, _params()), alone("opt", policy))
        record = llm.last_record
    assert (record.sequences, record.prompt_tokens, record.generated_tokens) == (len(NEW), sum(LENGTHS), sum(NEW))
    assert record.computed_prompt_tokens == sum(LENGTHS)
    assert record.prefill_s > 0
    assert record.decode_s > 0


@pytest.mark.turns
@pytest.mark.parametrize(
    ("policy", "tier", "shape"),
    [
        pytest.param(policy, tier, ((5, 1), (2, 3))[(i + j) % 2], id=f"{policy.name}-{tier}")
        for i, policy in enumerate(row for row in POLICIES if row.name in ("full", "h2o", "streaming"))
        for j, tier in enumerate(("disk", "gpu", "cpu beside gpu"))
    ],
)
def test_on_every_tier(policy: PolicyRow, shape, tier: str, checkpoint, alone) -> None:
    """Caches that move are written home whole in the step in which rows come or go."""
    with _run(checkpoint("opt")[1], policy.eviction(), shape, tier) as llm:
        _assert_same(llm.generate(PROMPTS, _params()), alone("opt", policy))


@pytest.mark.turns
@pytest.mark.parametrize(
    ("policy", "name", "tier"),
    [
        pytest.param(policy, name, ("cpu", "gpu")[(i + j) % 2], id=f"{policy.name}-{name}")
        for i, policy in enumerate(row for row in POLICIES if row.name in ("full", "h2o"))
        for j, name in enumerate(("llama-gqa", "gemma3", "gpt-neox", "phi3-longrope", "llama-dynamic"))
        if policy.name == "h2o" or name == "gemma3"
    ],
)
def test_other_families(policy: PolicyRow, name: str, tier: str, checkpoint, alone) -> None:
    with _run(checkpoint(name)[1], policy.eviction(), (4, 2), tier, policy={"prefill_chunk": 33}) as llm:
        _assert_same(llm.generate(PROMPTS, _params()), alone(name, policy))


@pytest.fixture(params=["torch", "native"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps by torch, and by the kernel in C where it can be had."""
    if request.param == "torch":
        monkeypatch.setattr(FusedStep, "of", lambda *_: None)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("policy", "name", "kernel"),
    [
        pytest.param(policy, name, ("torch", "native")[(i // 2 + j) % 2], id=f"{policy.name}-{name}")
        for i, policy in enumerate(POLICIES)
        for j, name in enumerate(("opt", "gemma3"))
        if policy.name == "h2o" or i % 2 == j
    ],
    indirect=["kernel"],
)
def test_caches_keep_what_they_keep_alone(
    policy: PolicyRow, name: str, kernel: None, checkpoint, history: History
) -> None:
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
    assert compared > 200


@pytest.mark.slow
def test_stop_tokens_at_random_places(checkpoint) -> None:
    """All rows may become long, most end early: nobody knows beforehand which."""
    folder = checkpoint("llama-gqa")[1]
    eos = tuple(python_random(5).sample(range(3, 97), 8))
    settings = SamplingParams(max_new_tokens=60, eos_token_id=eos, do_sample=True, temperature=1.5, logprobs=0)
    eviction = EvictionConfig("h2o", ratio=0.3)
    expected = _alone(folder, eviction, [settings] * len(PROMPTS))
    lengths = [len(output.token_ids) for output in expected]
    assert max(lengths) > 4 * min(lengths)
    for shape in ((4, 1), (2, 2)):
        with _run(folder, eviction, shape) as llm:
            _assert_same(llm.generate(PROMPTS, settings), expected)


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_a_pair_that_fails_has_no_log_probability(tmp_path) -> None:
    """Neither one that fails at once, which has no token to be wrong about, nor one that fails on its way."""
    model = make_opt("opt-untied")
    with torch.no_grad():
        model.get_input_embeddings().weight[50] = float("nan")
    pairs = [([2, 50, 7], [8, 9]), ([2, 7, 9, 8], [8, 9, 10]), ([2, 7], [8, 50, 9])]
    with _run(str(save(model, tmp_path)), EvictionConfig(), (3, 1)) as llm:
        at_once, good, later = llm.score(pairs)
        (alone,) = llm.score(pairs[1:2])
    for score in (at_once, later):
        assert math.isnan(score.logprob)
        assert not score.is_greedy
        assert score.error == "the model produced logits that are not finite"
    assert [len(score.token_logprobs) for score in (at_once, later)] == [0, 2]
    assert good.logprob == pytest.approx(alone.logprob, abs=1e-3)
    assert (good.is_greedy, good.token_is_greedy, good.error) == (alone.is_greedy, alone.token_is_greedy, None)


@pytest.mark.slow
def test_an_end_in_the_middle_leaves_an_engine_that_works(checkpoint, alone) -> None:
    policy = next(row for row in POLICIES if row.name == "h2o")
    for tier in ("cpu", "disk"):
        with _run(checkpoint("opt")[1], policy.eviction(), (3, 1), tier) as llm:
            stream = llm.stream(PROMPTS, _params())
            for _ in range(4):
                next(stream)
            used = {"weights", "weight buffers", "staging buffers"}
            stream.close()
            assert set(llm._loaded.stages[0].tiers.cpu.items) <= used
            _assert_same(llm.generate(PROMPTS, _params()), alone("opt", policy))
