"""The whole engine through the Triton kernels, in their interpreter, and through recorded decode steps."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.triton_device import DEVICE  # isort: skip  (before Triton is imported)

from h2o_flexgen import SamplingParams
from h2o_flexgen.cache.eviction.base import AttendedStep
from h2o_flexgen.cache.eviction.h2o import H2OPolicy
from h2o_flexgen.cache.fused import FusedStep
from h2o_flexgen.calibration import ticks
from h2o_flexgen.calibration.bench import Bench
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.engine.batching.gpu_batch import GpuBatch
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.execution import cuda_graphs, executor
from h2o_flexgen.engine.requests.sequence import RequestOutput
from h2o_flexgen.engine.sampling.sampler import Sampler
from h2o_flexgen.kernels import layers, triton_decode, triton_experts, triton_prompt, triton_rotate
from h2o_flexgen.models.decoder import Decoder
from h2o_flexgen.schedule.tasks import FIRST_REPLAYED
from tests.cost.machines import KINDS, TINY, ticking
from tests.kernels.tape import FakeGraph
from tests.tiny import make_model, prompts_of, save

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="this is the interpreter's; a GPU has tests of its own")

PROMPTS = prompts_of([14, 5])
NEW, LAYERS = 9, 1
EVICTION = {
    "full": EvictionConfig(),
    "h2o": EvictionConfig("h2o", budget=8),
    "streaming": EvictionConfig("streaming", budget=8, sinks=2),
    "random": EvictionConfig("random", budget=8, seed=3),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Where a model of one layer and few KV heads lies: the interpreter is slow."""
    made: dict[str, str] = {}

    def make(name: str) -> str:
        if name not in made:
            heads = {"num_attention_heads": 2} if name == "opt" else {}
            model = make_model(name, num_hidden_layers=LAYERS, **heads)
            made[name] = str(save(model, tmp_path_factory.mktemp(name)))
        return made[name]

    return make


@pytest.fixture
def through_triton(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are used."""
    used: list[str] = []
    step, prompt = triton_decode.TritonAttend.step, triton_prompt.prefill_attention
    rotate = triton_rotate.rotate_both

    def noted_step(*args: Any, **options: Any) -> Tensor:
        used.append("step")
        return step(*args, **options)

    def noted_prompt(*args: Any, **options: Any) -> Any:
        used.append("prompt")
        return prompt(*args, **options)

    def noted_rotate(*args: Any) -> Any:
        used.append("rotate")
        return rotate(*args)

    monkeypatch.setattr(triton_rotate, "rotate_both", noted_rotate)
    monkeypatch.setattr(triton_decode.TritonAttend, "step", noted_step)
    monkeypatch.setattr(triton_prompt, "prefill_attention", noted_prompt)
    monkeypatch.setenv("H2O_FLEXGEN_TRITON", "1")
    return used


def decayed(policy: H2OPolicy, step: AttendedStep) -> None:
    """A score rule that no kernel knows."""
    step.score.mul_(0.9).add_(step.received)


@pytest.fixture
def own_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(H2OPolicy, "update", decayed, raising=False)


def answers(model: str, eviction: EvictionConfig, prompts: list[list[int]] = PROMPTS, new: Any = NEW, **engine: Any):
    engine = {"dtype": "float32", "policy": {"gpu_batch_size": 2}, **engine}
    each = new if isinstance(new, list) else [new] * len(prompts)
    params = [SamplingParams(max_new_tokens=count, ignore_eos=True, logprobs=0) for count in each]
    with Engine(model, eviction=eviction, seed=eviction.seed, **engine) as llm:
        return llm.generate(prompts, params)


def by_torch(*args: Any, **options: Any) -> list[RequestOutput]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("H2O_FLEXGEN_TRITON", "0")
        patch.setattr(FusedStep, "of", lambda *_: None)
        return answers(*args, **options)


def assert_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("opt", "h2o"),
        ("mistral", "full"),
        ("mistral", "streaming"),
    ],
)
def test_the_same_tokens_as_torch(name: str, policy: str, folder, through_triton: list[str]) -> None:
    """Models without rotation, with it and shared KV heads, with a window; `test_recorded_steps` has other pairs."""
    args = folder(name), EVICTION[policy]
    assert_same(answers(*args), by_torch(*args))
    assert through_triton.count("step") == LAYERS * (NEW - 1)
    assert through_triton.count("prompt") == LAYERS * 2
    assert through_triton.count("rotate") == (0 if name == "opt" else LAYERS * NEW), (
        "the prompts in one, then each step"
    )


def test_experts_as_in_torch(folder, through_triton: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All GPU batches of a block in one call for each layer and step."""
    kernel, calls = triton_experts.add_experts, []

    def noted(*args: Any) -> None:
        calls.append(len(args[4]))
        kernel(*args)

    monkeypatch.setattr(triton_experts, "add_experts", noted)
    args = folder("olmoe"), EVICTION["h2o"], PROMPTS, 3
    assert_same(answers(*args, policy={"gpu_batch_size": 1, "num_gpu_batches": 2}), by_torch(*args))
    assert len(calls) == LAYERS * 3
    assert through_triton.count("step") == LAYERS * 2 * 2


@pytest.mark.slow
@pytest.mark.usefixtures("own_rule")
def test_a_policy_with_a_score_rule_of_its_own(folder, through_triton: list[str]) -> None:
    args = folder("opt"), EVICTION["h2o"]
    assert_same(answers(*args), by_torch(*args))
    assert through_triton.count("step") == LAYERS * (NEW - 1)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, through_triton: list[str]) -> list[str]:
    """What is done with the recordings of decode steps; on the CPU, where they stand in for CUDA graphs."""
    done: list[str] = []
    monkeypatch.setattr(executor, "recorder", lambda device: lambda: FakeGraph(done))
    monkeypatch.setattr(layers, "_WIDE_ROWS", 0)  # a GPU's products are torch's, and C's would not be recorded
    return done


@pytest.mark.turns
@pytest.mark.parametrize(
    ("name", "policy"),
    [("opt", "full"), ("opt", "random"), ("llama-gqa", "h2o"), ("llama-dynamic", "streaming"), ("mistral", "h2o")],
)
def test_recorded_steps(name: str, policy: str, folder, log: list[str], through_triton: list[str]) -> None:
    """Nothing that a step launches depends on its number: one that was recorded is good for all after it."""
    args = folder(name), EVICTION[policy]
    assert_same(answers(*args), by_torch(*args))
    steps = NEW - 1 - cuda_graphs.PATIENCE
    assert log == ["warm up", "record", *["replay"] * (steps - 1), "close"]
    assert through_triton.count("step") == LAYERS * (cuda_graphs.PATIENCE + 2)


@pytest.mark.slow
def test_gpu_batches_and_changes(folder, log: list[str]) -> None:
    """Two GPU batches, rows that leave and others that come: every change ends a recording, and another one is made."""
    prompts, new = prompts_of([9, 4, 7, 3, 6, 5]), [10, 10, 17, 17, 9, 9]
    policy = {"gpu_batch_size": 2, "num_gpu_batches": 2}
    args = folder("llama-gqa1"), EVICTION["h2o"], prompts, new
    assert_same(answers(*args, policy=policy), by_torch(*args, policy=policy))
    assert log.count("warm up") == 1, "what is made at its first use is there after it"
    assert log.count("record") == 3
    assert log.count("close") == 3
    again = log[log.index("close") - 2 :]
    assert again[:3] == ["replay", "record", "close"], "the old one keeps its memory until the new one has taken it"


def plain(model: str, eviction: EvictionConfig, prompts: list[list[int]], params: Any, **engine: Any) -> Any:
    """Tokens of rows of which nothing else is asked."""
    with Engine(model, eviction=eviction, dtype="float32", **engine) as llm:
        return [(each.token_ids, each.finish_reason) for each in llm.generate(prompts, params)]


def eager(*args: Any, **engine: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "recorder", lambda device: None)
        return plain(*args, **engine)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), [("opt", "full"), ("llama-dynamic", "h2o")])
def test_steps_are_launched_ahead(name: str, policy: str, folder, log: list[str], monkeypatch) -> None:
    """The next step is under way when the tokens of one are read, and has no inputs from the host: but the last."""
    args = folder(name), EVICTION[policy], PROMPTS, SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    expected = eager(*args, policy={"gpu_batch_size": 2})
    made: list[None] = []
    inputs = GpuBatch.inputs
    monkeypatch.setattr(GpuBatch, "inputs", lambda gpu_batch: made.append(None) or inputs(gpu_batch))
    assert plain(*args, policy={"gpu_batch_size": 2}) == expected
    launched = NEW - 2 - cuda_graphs.PATIENCE
    assert log == ["warm up", "record", *["replay", *["replay", "read"] * (launched - 1), "read"], "close"]
    assert len(made) == 1 + cuda_graphs.PATIENCE + 2


@pytest.fixture(scope="module")
def stopping(folder) -> tuple[tuple[Any, ...], Any]:
    """Six rows, four of which stop by themselves, one of which is sampled, and what they give by torch."""
    args = folder("llama-gqa1"), EVICTION["h2o"], prompts_of([9, 4, 7, 3, 6, 5])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("H2O_FLEXGEN_TRITON", "0")
        free = eager(*args, SamplingParams(max_new_tokens=18, ignore_eos=True))
        params = []
        for (tokens, _), wanted in zip(free, (8, 11, 18, 13, 18, 9), strict=True):
            end = max((token for token in tokens if tokens.index(token) < wanted), key=tokens.index)
            params.append(SamplingParams(max_new_tokens=18, eos_token_id=end, do_sample=len(params) == 4, seed=1))
        expected = eager(*args, params)
    assert {reason for _, reason in expected} >= {"stop"}
    return (*args, params), expected


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2), (3, 1)], ids=str)
def test_rows_that_stop_by_themselves(shape: tuple[int, int], stopping, log: list[str]) -> None:
    """A step that was launched ahead serves the rows that go on. Rows of which more is asked go step by step."""
    args, expected = stopping
    assert plain(*args, policy={"gpu_batch_size": shape[0], "num_gpu_batches": shape[1]}) == expected
    assert log.count("replay") > log.count("read") > 0


@pytest.mark.slow
def test_a_row_whose_numbers_are_not_finite(folder, log: list[str], monkeypatch) -> None:
    """It fails, its neighbour goes on; what is under way then has an input that can be looked up."""
    head, steps = Decoder.head, [0]

    def broken(decoder: Decoder, weights: Any, hidden: Tensor) -> Tensor:
        return head(decoder, weights, hidden) + bad[: len(hidden)]

    bad = torch.zeros(2, 1)
    take = Sampler.take

    def counted(sampler: Sampler, rows: Any, best: list[float], tokens: list[int]) -> Any:
        steps[0] += 1
        bad[0] = torch.nan if steps[0] == 2 else 0.0
        return take(sampler, rows, best, tokens)

    monkeypatch.setattr(Decoder, "head", broken)
    monkeypatch.setattr(Sampler, "take", counted)
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    (first, why), (second, _) = plain(folder("opt"), EVICTION["h2o"], PROMPTS, params, policy={"gpu_batch_size": 2})
    assert why == "error"
    assert 5 < len(first) < 16 == len(second)


def test_recorded_steps_are_measured(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibration times steps that are launched as a whole: those that the engine launches so."""
    steps = FIRST_REPLAYED + 2
    monkeypatch.setattr(ticks, "ROWS", (1,))
    monkeypatch.setattr(ticks, "MOST_STEPS", steps)
    rates = ticking(**dict.fromkeys(KINDS, 0.0))
    small = dataclasses.replace(TINY, num_layers=1, num_heads=1, num_kv_heads=1)
    with Bench(small, "float32", torch.device("cpu"), 1 << 20) as bench:
        curve = ticks.recorded_ticks(bench, rates, 1e-6)
        done = [what for what in log if what != "read"]
        assert done == ["warm up", "record", *["replay"] * (steps - FIRST_REPLAYED + 1), "close"]
    assert curve is not None
    assert [rows for rows, _ in curve.points] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["first", "last"])
def test_a_recording_that_fails(
    when: str, folder, log: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The step is done one launch after the other, once, and so are all after it; the record says why."""
    record = FakeGraph.record

    def failing(graph: FakeGraph, run: Callable[[], Tensor]) -> Tensor:
        if when == "last":
            record(graph, run)
        raise RuntimeError("this operation is not permitted")

    monkeypatch.setattr(FakeGraph, "record", failing)
    args = folder("llama-gqa"), EVICTION["h2o"]
    expected = by_torch(*args)
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True, logprobs=0)
    with (
        caplog.at_level(logging.WARNING, cuda_graphs.__name__),
        Engine(args[0], eviction=args[1], dtype="float32", policy={"gpu_batch_size": 2}) as llm,
    ):
        assert_same(llm.generate(PROMPTS, params), expected)
        told = [warning for warning in llm.last_record.warnings if "CUDA graphs" in warning]
    assert "replay" not in log
    assert len([record for record in caplog.records if "not permitted" in record.getMessage()]) == 1
    assert len(told) == 1
    assert told[0].endswith("RuntimeError: this operation is not permitted")


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        {"policy": {"weights": {"disk": 1.0}}},
        {"policy": {"cache": {"disk": 1.0}}},
        {"check_finite": True},
        {"trace": True},
    ],
    ids=str,
)
def test_what_is_not_recorded(engine: dict[str, Any], folder, log: list[str]) -> None:
    args = folder("opt"), EVICTION["h2o"], PROMPTS[1:], 2 * cuda_graphs.PATIENCE + 2
    assert_same(answers(*args, **engine), by_torch(*args))
    assert log == []


@pytest.mark.slow
@pytest.mark.usefixtures("own_rule")
def test_policies_that_are_not_recorded(folder, log: list[str]) -> None:
    answers(folder("opt"), EVICTION["h2o"])
    answers(folder("llama-gqa"), EvictionConfig("streaming", budget=8, rolling_positions=True))
    assert log == []


def test_on_a_cpu_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_graphs.recorder(torch.device("cpu")) is None
    monkeypatch.setattr(cuda_graphs, "interpreting", lambda: False)
    monkeypatch.setenv("H2O_FLEXGEN_GRAPHS", "0")
    assert cuda_graphs.recorder(torch.device("cuda")) is None
