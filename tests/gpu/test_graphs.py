"""Decode steps as CUDA graphs give what the same steps give one launch after the other."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from h2o_flexgen import SamplingParams
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.execution import cuda_graphs
from h2o_flexgen.engine.requests.sequence import RequestOutput
from tests.policy_matrix import POLICIES, PolicyRow
from tests.tiny import prompts_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GPU = {kind: {"gpu": 1.0} for kind in ("weights", "cache", "hidden")}
PROMPTS = prompts_of([23, 40, 12, 31, 8, 19, 5, 9])
NEW = [20, 20, 20, 12, 30, 30, 20, 20]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for every graph that is launched."""
    launched: list[None] = []
    replay = cuda_graphs.CudaGraph.replay

    def noted(graph: cuda_graphs.CudaGraph) -> None:
        launched.append(None)
        replay(graph)

    monkeypatch.setattr(cuda_graphs.CudaGraph, "replay", noted)
    return launched


def answers(folder: str, policy: PolicyRow, shape: dict[str, int], **settings: Any) -> list[RequestOutput]:
    eviction = policy.eviction(**({"budget": 9} if policy.name != "full" else {}))
    params = [SamplingParams(max_new_tokens=count, ignore_eos=True, logprobs=0) for count in NEW]
    with Engine(folder, device="cuda", eviction=eviction, seed=3, policy={**GPU, **shape}, **settings) as llm:
        found = llm.generate(PROMPTS, params)
        assert llm.last_record is not None
        assert not [said for said in llm.last_record.warnings if "computed by torch" in said]
    return found


@pytest.mark.parametrize("name", ["opt", "llama-gqa", "mistral", "gemma3", "llama-dynamic"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda row: row.name)
def test_graphs_change_nothing(
    policy: PolicyRow,
    name: str,
    checkpoint,
    replays: list[None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All rows in one GPU batch, then two GPU batches whose rows leave while others come."""
    folder = checkpoint(name)[1]
    for shape in ({"gpu_batch_size": 8}, {"gpu_batch_size": 2, "num_gpu_batches": 2}):
        with caplog.at_level(logging.WARNING, cuda_graphs.__name__):
            recorded = answers(folder, policy, shape, dtype="float32")
        assert not caplog.records
        assert len(replays) > 10
        with monkeypatch.context() as patch:
            patch.setenv("H2O_FLEXGEN_GRAPHS", "0")
            count = len(replays)
            eager = answers(folder, policy, shape, dtype="float32")
            assert len(replays) == count
        replays.clear()
        for ours, theirs in zip(recorded, eager, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype: str, checkpoint, replays: list[None]) -> None:
    """Runs, and gives numbers."""
    for output in answers(checkpoint("llama-gqa")[1], POLICIES[1], {"gpu_batch_size": 8}, dtype=dtype):
        assert output.finish_reason == "length"
    assert replays
