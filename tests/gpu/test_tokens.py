"""Greedy tokens of tiny float32 models on a GPU are the CPU's, for every policy and wherever things live.

Where they are not, both runs are made once more and their choices compared, see `decisions`: two scores that are a
rounding apart may let another token go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.requests.sequence import RequestOutput
from tests.gpu.decisions import CLOSE, Run, fault, watched
from tests.gpu.device import CUDA, engine_settings, on_a_gpu
from tests.policy_matrix import POLICIES, PolicyRow
from tests.tiny import prompts_of

pytestmark = on_a_gpu

NEW = 18  # more than the 16 steps after which a cache on disk is rewritten
LENGTHS = [23, 40, 12, 40, 31, 8, 19]
GPU, CPU, DISK = {"gpu": 1.0}, {"cpu": 1.0}, {"disk": 1.0}
THREE = {"gpu": 0.3, "cpu": 0.3, "disk": 0.4}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "all-gpu": {"weights": GPU, "cache": GPU, "hidden": GPU},
    "weights-cpu": {"weights": CPU, "cache": GPU, "hidden": GPU},
    "cache-cpu": {"weights": GPU, "cache": CPU, "hidden": CPU},
    "weights-disk": {"weights": DISK, "cache": GPU, "hidden": GPU},
    "cpu-cache-compute": {"weights": CPU, "cache": CPU, "hidden": GPU, "cpu_cache_compute": True},
    "three-tiers": {"weights": THREE, "cache": THREE, "hidden": THREE},
}
FAMILIES = ("opt", "llama-gqa", "mistral", "qwen3", "phi3", "gemma3", "gpt-neox")
"""One of each way in which layers differ: biases, grouped heads, windows, norms of queries, partial rotary."""


LIKELIEST = 8
"""Tokens whose log-probabilities are looked at where another one was chosen."""

Expected = Callable[[str, PolicyRow], list[RequestOutput]]


@pytest.fixture(scope="module")
def expected(checkpoint) -> Expected:
    """`expected(model, eviction)`: the outputs on the CPU, everything resident, made once."""
    made: dict[tuple[str, str], list[RequestOutput]] = {}

    def make(name: str, policy: PolicyRow) -> list[RequestOutput]:
        if (name, policy.name) not in made:
            made[name, policy.name] = outputs(checkpoint(name)[1], policy.eviction(), {"device": "cpu"}, {})
        return made[name, policy.name]

    return make


def outputs(
    folder: str, eviction: EvictionConfig, machine: dict[str, Any], policy: dict[str, Any], likeliest: int = 0
) -> list[RequestOutput]:
    """Of ragged prompts, with their log-probabilities and those of the likeliest tokens."""
    with Engine(folder, dtype="float32", eviction=eviction, policy=policy, seed=eviction.seed, **machine) as llm:
        found = llm.generate(prompts_of(LENGTHS), max_new_tokens=NEW, ignore_eos=True, logprobs=likeliest)
        record = llm.last_record
    assert record is not None
    assert record.device == machine.get("device", "emulated gpu")
    return found


def assert_same(
    found: list[RequestOutput],
    wanted: list[RequestOutput],
    folder: str,
    eviction: EvictionConfig,
    policy: dict[str, Any],
) -> None:
    """The same tokens, or others only from a choice on that was close."""
    same = all(
        ours.token_ids == theirs.token_ids and ours.logprobs == pytest.approx(theirs.logprobs, abs=CLOSE)
        for ours, theirs in zip(found, wanted, strict=True)
    )
    if not same:
        again, cpu = run(folder, eviction, engine_settings(), policy), run(folder, eviction, {"device": "cpu"}, {})
        # Decode steps are not recorded now: what only recorded ones do, or chance, is no rounding.
        assert [each.token_ids for each in again.outputs] == [each.token_ids for each in found]
        assert fault(again, cpu) is None


def run(folder: str, eviction: EvictionConfig, machine: dict[str, Any], policy: dict[str, Any]) -> Run:
    """The same once more, with what the caches held."""
    made = Run([], LENGTHS, {})
    with watched(made.kept):
        made.outputs.extend(outputs(folder, eviction, machine, policy, LIKELIEST))
    return made


@pytest.mark.parametrize("shape", [(7, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda row: row.name)
def test_every_policy_and_placement(
    policy: PolicyRow, placement: str, shape: tuple[int, int], checkpoint, expected
) -> None:
    block = {"gpu_batch_size": shape[0], "num_gpu_batches": shape[1]}
    work = checkpoint("opt")[1], policy.eviction()
    places = {**PLACEMENTS[placement], **block}
    assert_same(outputs(*work, engine_settings(), places), expected("opt", policy), *work, places)


@pytest.mark.parametrize("placement", ["all-gpu", "weights-cpu"])
@pytest.mark.parametrize("policy", POLICIES[:2], ids=lambda row: row.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, policy: PolicyRow, placement: str, checkpoint, expected) -> None:
    work, places = (checkpoint(family)[1], policy.eviction()), PLACEMENTS[placement]
    assert_same(outputs(*work, engine_settings(), places), expected(family, policy), *work, places)


def test_rows_that_finish_make_room_for_others(checkpoint) -> None:
    """Lengths that differ: batches shrink and are filled again, which changes shapes between steps."""
    answers = []
    for machine in ({"device": "cpu"}, engine_settings()):
        with Engine(checkpoint("opt")[1], dtype="float32", policy={"gpu_batch_size": 3}, **machine) as llm:
            params = [SamplingParams(max_new_tokens=3 + 5 * (i % 4), ignore_eos=True) for i in range(len(LENGTHS))]
            rows = [llm.generate([p], each)[0] for p, each in zip(prompts_of(LENGTHS), params, strict=True)]
            together = llm.generate(prompts_of(LENGTHS), params)
        assert [o.token_ids for o in together] == [o.token_ids for o in rows]
        answers.append([o.token_ids for o in together])
    assert answers[0] == answers[1]


def test_an_engine_can_be_used_again(checkpoint) -> None:
    """A second call of another shape, and the first one's work once more: what was captured or kept does not leak."""
    with Engine(
        checkpoint("opt")[1], dtype="float32", eviction=EvictionConfig("h2o", ratio=0.3), **engine_settings()
    ) as llm:
        first = [o.token_ids for o in llm.generate(prompts_of(LENGTHS), max_new_tokens=NEW, ignore_eos=True)]
        llm.generate(prompts_of([50, 3]), max_new_tokens=7, ignore_eos=True)
        again = [o.token_ids for o in llm.generate(prompts_of(LENGTHS), max_new_tokens=NEW, ignore_eos=True)]
    assert again == first


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_scores_like_float32(dtype: str, checkpoint) -> None:
    """Log-probabilities of given continuations, which no rounding can lead elsewhere."""
    pairs = [(prompt, [5, 9, 40, 7]) for prompt in prompts_of(LENGTHS)]
    scores = {}
    for kind in ("float32", dtype):
        with Engine(checkpoint("opt")[1], dtype=kind, device="cuda") as llm:
            scores[kind] = [score.logprob for score in llm.score(pairs)]
    assert scores[dtype] == pytest.approx(scores["float32"], rel=0.1, abs=1.0)
