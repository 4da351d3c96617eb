"""FAULTS row 23: memory that runs out anywhere in a call. Planned anew, run again: the same tokens. Else code 5."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.limits import plan as planning
from h2o_flexgen.engine.limits.plan import Plan
from h2o_flexgen.engine.requests.sequence import RequestOutput
from h2o_flexgen.errors import MemoryRefused, PlanError, is_out_of_memory
from h2o_flexgen.memory.tiers import HostMemory
from tests.tiny import prompts_of

LENGTHS = [23, 40, 12, 40, 31, 8, 19, 25, 33]
NEW = 9
SAMPLED: dict[str, Any] = {
    "max_new_tokens": NEW,
    "ignore_eos": True,
    "do_sample": True,
    "temperature": 1.5,
    "logprobs": 2,
}
ENGINE: dict[str, Any] = {"dtype": "float32", "eviction": EvictionConfig("h2o", ratio=0.4), "seed": 3}
BLOCK = {"gpu_batch_size": 2, "num_gpu_batches": 2}
LAYERS = 3

REFUSALS: dict[str, Exception] = {
    "Python": MemoryError(),
    "torch on the CPU": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory"
    ),
    "torch on a GPU": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "the system": MemoryRefused("the system refused 2 GiB of host memory"),
}


class Failing:
    """Calls `function`, but fails in the calls whose numbers are in `at`, counted from 1."""

    def __init__(self, function: Callable[..., Any], error: Exception, at: set[int] | range) -> None:
        self._function, self._error, self._at = function, error, at
        self.calls = 0

    def __call__(self, *args: Any, **settings: Any) -> Any:
        self.calls += 1
        if self.calls in self._at:
            raise self._error
        return self._function(*args, **settings)


@pytest.fixture(scope="module")
def expected(checkpoint) -> list[RequestOutput]:
    """Undisturbed."""
    with Engine(checkpoint("opt")[1], policy=BLOCK, **ENGINE) as llm:
        return llm.generate(prompts_of(LENGTHS), **SAMPLED)


def assert_same(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    for output, other in zip(outputs, expected, strict=True):
        assert output.logprobs == pytest.approx(other.logprobs, abs=1e-3)
        assert [list(likeliest) for likeliest in output.top_logprobs or []] == [
            list(likeliest) for likeliest in other.top_logprobs or []
        ]


@pytest.mark.parametrize("error", REFUSALS.values(), ids=REFUSALS)
def test_what_counts_as_a_lack_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert not is_out_of_memory(PlanError("the plan needs 2 GiB on the gpu tier"))
    assert not is_out_of_memory(RuntimeError("a bug of ours"))
    assert not is_out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize(
    ("error", "call", "gpu"),
    [
        pytest.param(error, call, (None, "1GiB")[j % 2], id=f"{name}-{call}")
        for i, (name, error) in enumerate(REFUSALS.items())
        for j, call in enumerate((1, 4, 8, 14, 30, 80))
        if (i + j) % 4 == 0
    ],
)
def test_running_out_while_computing(
    error: Exception, call: int, gpu: str | None, checkpoint, expected, tmp_path: Path, monkeypatch
) -> None:
    """In the first layer, in the prompts, in the first and in later blocks' decode steps, with a GPU and without."""
    threads = Counter(thread.name for thread in threading.enumerate())
    with Engine(checkpoint("opt")[1], policy=BLOCK, emulate_gpu=gpu, offload_dir=str(tmp_path / "o"), **ENGINE) as llm:
        failing = Failing(llm._decoder.mlp, error, {call})
        monkeypatch.setattr(llm._decoder, "mlp", failing)
        seen: list[RequestOutput] = list(llm.stream(prompts_of(LENGTHS), **SAMPLED))
        assert failing.calls > call
        assert sorted(output.index for output in seen) == list(range(len(LENGTHS))), "each is finished once"
        assert_same(sorted(seen, key=lambda output: output.index), expected)
        record = llm.last_record
        assert (record.sequences, record.generated_tokens) == (len(LENGTHS), len(LENGTHS) * NEW)
        assert record.prompt_tokens == sum(LENGTHS)
        assert [text for text in record.warnings if "unfinished sequences run again" in text]
        tiers = llm._loaded.stages[0].tiers
        left = {tier.name: dict(tier.items) for tier in (tiers.gpu, tiers.cpu) if tier}
        held = {what for usage in left.values() for what in usage}
        assert held <= {"weights", "weight buffers", "staging buffers"}
    assert Counter(thread.name for thread in threading.enumerate()) == threads
    assert list((tmp_path / "o").glob("run-*")) == []


@pytest.mark.slow
def test_the_next_plan_takes_less(checkpoint, expected, monkeypatch) -> None:
    plans: list[Plan] = []
    with Engine(checkpoint("opt")[1], policy=BLOCK, **ENGINE) as llm:
        llm.on_plan = plans.append
        monkeypatch.setattr(llm._decoder, "mlp", Failing(llm._decoder.mlp, MemoryError(), {60, 140}))
        assert_same(llm.generate(prompts_of(LENGTHS), **SAMPLED), expected)
        sizes = [plan.footprint.total("cpu") - plan.request.baseline for plan in plans]
        assert len(plans) == 3
        assert sizes[1] <= planning.LESS * sizes[0]
        assert sizes[2] <= planning.LESS * sizes[1]
        assert plans[1].request.caps.why["cpu"] == "after memory ran out"
        finished = len(LENGTHS) - plans[2].request.workload.num_sequences
        assert finished >= 4, "the first block was done: its rows are not planned for again"
        # What was learnt stays, as long as it leaves room for the work there is.
        llm.generate(prompts_of([5]), max_new_tokens=2)
        assert plans[-1].request.caps.cpu == plans[2].request.caps.cpu
        assert not [text for text in llm.last_record.warnings if "run again" in text]
        llm.generate(prompts_of([100] * 4), max_new_tokens=NEW)
        assert plans[-1].request.caps.why["cpu"] != "after memory ran out"


@pytest.mark.slow
@pytest.mark.parametrize(("call", "gpu"), [(1, None), (3, "1GiB"), (6, None), (6, "1GiB"), (10, None)])
def test_running_out_while_loading(call: int, gpu: str | None, checkpoint, expected, tmp_path, monkeypatch) -> None:
    failing = Failing(HostMemory.allocate, MemoryRefused("the system refused 2 GiB of host memory"), {call})
    monkeypatch.setattr(HostMemory, "allocate", lambda self, nbytes: failing(self, nbytes))
    with Engine(checkpoint("opt")[1], policy=BLOCK, emulate_gpu=gpu, offload_dir=str(tmp_path / "o"), **ENGINE) as llm:
        assert_same(llm.generate(prompts_of(LENGTHS), **SAMPLED), expected)
    assert list((tmp_path / "o").glob("run-*")) == []


@pytest.mark.slow
def test_running_out_on_a_copy_thread(checkpoint, expected, monkeypatch) -> None:
    """What a transfer raises reaches the waiting compute, and the buffers that were on their way come back."""
    policy = {**BLOCK, "weights": {"disk": 1.0}, "cache": {"disk": 1.0}}
    with Engine(checkpoint("opt")[1], policy=policy, **ENGINE) as llm:
        llm.generate(prompts_of(LENGTHS[:2]), **SAMPLED)
        copies = llm._loaded.stages[0].copies
        monkeypatch.setattr(copies, "_read", Failing(copies._read, MemoryError(), {20}))
        assert_same(llm.generate(prompts_of(LENGTHS), **SAMPLED), expected)


def test_a_block_that_was_fixed_gives_way_at_last(checkpoint, expected, monkeypatch) -> None:
    plans: list[Plan] = []
    fixed = {"gpu_batch_size": 9, "num_gpu_batches": 1, "weights": {"cpu": 1.0}, "cache": {"cpu": 1.0}}
    monkeypatch.setattr(planning, "LESS", 0.7)
    with Engine(checkpoint("opt")[1], policy={**fixed, "hidden": {"cpu": 1.0}}, **ENGINE) as llm:
        llm.on_plan = plans.append
        monkeypatch.setattr(llm._decoder, "mlp", Failing(llm._decoder.mlp, MemoryError(), {5}))
        assert_same(llm.generate(prompts_of(LENGTHS), **SAMPLED), expected)
    assert plans[0].policy.block_size == 9
    assert plans[1].policy.gpu_batch_size < 9
    assert plans[1].policy.weights == {"cpu": 1.0}


@pytest.mark.slow
def test_after_some_tries_it_is_an_error_that_says_what_was_tried(checkpoint, monkeypatch) -> None:
    monkeypatch.setattr(planning, "LESS", 0.99)
    with Engine(checkpoint("opt")[1], policy=BLOCK, **ENGINE) as llm:
        failing = Failing(llm._decoder.mlp, MemoryError("no page is left"), range(1, 1000))
        with monkeypatch.context() as patch:
            patch.setattr(llm._decoder, "mlp", failing)
            with pytest.raises(PlanError, match="out of memory: MemoryError no page is left") as caught:
                llm.generate(prompts_of(LENGTHS), **SAMPLED)
        assert failing.calls == planning.TRIES + 1
        assert "tried blocks of 2 x 2 sequences, then" in str(caught.value)
        assert caught.value.exit_code == 5
        assert llm.last_record is None


def test_where_nothing_smaller_fits_it_is_an_error_too(checkpoint, monkeypatch) -> None:
    with Engine(checkpoint("opt")[1], policy={"gpu_batch_size": 1}, emulate_gpu="1GiB", **ENGINE) as llm:
        monkeypatch.setattr(llm._decoder, "mlp", Failing(llm._decoder.mlp, MemoryError(), range(1, 1000)))
        monkeypatch.setattr(planning, "LESS", 0.01)
        with pytest.raises(PlanError, match=r"out of memory: the plan needs .* on the gpu tier.*tried blocks of 1 x 1"):
            llm.generate(prompts_of(LENGTHS), **SAMPLED)


def test_other_errors_are_not_tried_again(checkpoint, monkeypatch) -> None:
    with Engine(checkpoint("opt")[1], policy=BLOCK, **ENGINE) as llm:
        failing = Failing(llm._decoder.mlp, RuntimeError("a bug of ours"), range(1, 1000))
        monkeypatch.setattr(llm._decoder, "mlp", failing)
        with pytest.raises(RuntimeError, match="a bug of ours"):
            llm.generate(prompts_of(LENGTHS), **SAMPLED)
        assert failing.calls == 1


@pytest.mark.slow
def test_scores_and_streamers_are_told_once(checkpoint, monkeypatch) -> None:
    class Heard(list):
        def put(self, value: torch.Tensor) -> None:
            self.extend(value.flatten().tolist())

        def end(self) -> None:
            self.append("end")

    monkeypatch.setattr(planning, "LESS", 1.0)  # there is little that so small a plan could do without
    folder, (prompt, *others) = checkpoint("opt")[1], prompts_of(LENGTHS)
    results = []
    for fail in (set(), {3 * LAYERS + 1, 6 * LAYERS}):
        heard = Heard()
        with Engine(folder, **ENGINE) as llm:
            monkeypatch.setattr(llm._decoder, "mlp", Failing(llm._decoder.mlp, MemoryError(), fail))
            out = llm.generate_ids(
                torch.tensor([prompt]), max_new_tokens=NEW, do_sample=True, streamer=heard, seed=5,
                return_dict_in_generate=True, output_scores=True, eos_token_id=-1,
            )  # fmt: skip
            scores = llm.score([(other, [7, 8, 9]) for other in others])
        results.append((list(heard), out.sequences.tolist(), len(out.scores), scores))
    assert results[0][:3] == results[1][:3]
    assert results[0][0][-1] == "end"
    for score, other in zip(results[0][3], results[1][3], strict=True):
        assert score.logprob == pytest.approx(other.logprob, abs=1e-3)
