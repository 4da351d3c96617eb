"""A stream that is not finished has the engine to itself: other calls are refused, and it goes on unharmed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.errors import UsageError
from tests.tiny import prompts_of

PROMPTS = prompts_of([9, 14, 5, 20, 7])
SETTINGS: dict[str, Any] = {"max_new_tokens": 4, "ignore_eos": True}
DISK = {"disk": 1.0}
CALLS: dict[str, Callable[[Engine], object]] = {
    "generate": lambda llm: llm.generate(PROMPTS[:1], **SETTINGS),
    "stream": lambda llm: list(llm.stream(PROMPTS[:1], **SETTINGS)),
    "score": lambda llm: llm.score([([2, 5], [6, 7])]),
    "generate_ids": lambda llm: llm.generate_ids(torch.tensor([[2, 5]]), max_new_tokens=2),
}


@pytest.fixture
def engine(checkpoint, tmp_path: Path) -> Iterator[Engine]:
    """Everything is on disk, so that two calls would be in each other's way."""
    policy = {"weights": DISK, "cache": DISK, "hidden": DISK, "gpu_batch_size": 2, "num_gpu_batches": 1}
    with Engine(checkpoint("opt")[1], dtype="float32", policy=policy, offload_dir=str(tmp_path / "offload")) as llm:
        yield llm


def first_of(engine: Engine) -> Any:
    """A stream that is not finished."""
    stream = engine.stream(PROMPTS, **SETTINGS)
    next(stream)
    return stream


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_stream_goes_on_after_another_call_was_refused(call: Callable[[Engine], object], engine: Engine) -> None:
    expected = {output.index: output.token_ids for output in engine.generate(PROMPTS, **SETTINGS)}
    stream = engine.stream(PROMPTS, **SETTINGS)
    found = [next(stream)]
    with pytest.raises(UsageError, match=r"a call or stream of this engine is still under way.* close\(\) it first"):
        call(engine)
    found += stream
    assert {output.index: output.token_ids for output in found} == expected
    call(engine)


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_engine_is_one_processs_and_says_so(duplicate: Callable[[Engine], object], engine: Engine) -> None:
    with pytest.raises(UsageError, match=r"cannot be pickled or copied.* make one in each process"):
        duplicate(engine)
    assert engine.generate(PROMPTS[:1], **SETTINGS)


def test_a_stream_that_is_given_up_makes_way(engine: Engine) -> None:
    def raises() -> None:
        for _ in engine.stream(PROMPTS, **SETTINGS):
            raise ValueError("an error of the caller's own")

    stream = first_of(engine)
    stream.close()
    expected = engine.generate(PROMPTS, **SETTINGS)
    stream = first_of(engine)
    del stream
    assert engine.generate(PROMPTS, **SETTINGS) == expected
    with pytest.raises(ValueError, match="of the caller's own"):
        raises()
    assert engine.generate(PROMPTS, **SETTINGS) == expected


def test_so_does_one_that_fails(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a bug of ours")

    expected, stream = engine.generate(PROMPTS, **SETTINGS), first_of(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine._decoder, "mlp", fails)
        with pytest.raises(RuntimeError, match="a bug of ours"):
            list(stream)
    assert engine.generate(PROMPTS, **SETTINGS) == expected


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_closed_engine_says_so(call: Callable[[Engine], object], engine: Engine) -> None:
    stream = first_of(engine)
    engine.close()
    with pytest.raises(UsageError, match="was closed before a call had ended"):
        list(stream)
    with pytest.raises(UsageError, match="this engine is closed"):
        call(engine)


def test_a_stream_of_a_closed_engine_can_be_closed(engine: Engine) -> None:
    stream = first_of(engine)
    engine.close()
    stream.close()
