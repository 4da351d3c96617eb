"""What the caller has changed in torch changes no token, and is as it was afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from h2o_flexgen import EvictionConfig
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.requests.sequence import RequestOutput
from tests.tiny import make_model, prompts_of, save

PROMPTS = prompts_of([5, 17, 30])


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


WAYS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "another device": default_device,
    "on another device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no gradients ever": torch.inference_mode,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("gemma3"), tmp_path_factory.mktemp("model"))


def answers(llm: Engine) -> list[RequestOutput]:
    greedy = llm.generate(PROMPTS, max_new_tokens=5, logprobs=0)
    return greedy + llm.generate(PROMPTS, max_new_tokens=5, do_sample=True, top_k=9, seed=3)


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("name", WAYS)
def test_no_token_changes(folder: Path, name: str, impl: str) -> None:
    settings = {"dtype": "float32", "eviction": EvictionConfig("h2o", ratio=0.5), "model_impl": impl}
    with Engine(str(folder), **settings) as llm:
        expected = answers(llm)
    with WAYS[name](), Engine(str(folder), **settings) as llm:
        found = answers(llm)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    for output, other in zip(found, expected, strict=True):
        assert output.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_a_stream_leaves_torch_as_it_was_between_its_sequences(folder: Path) -> None:
    with default_dtype(torch.float64), torch.device("meta"), Engine(str(folder), dtype="float32") as llm:
        for _ in llm.stream(PROMPTS, max_new_tokens=3):
            made = torch.empty(1)
            assert (made.dtype, made.device.type) == (torch.float64, "meta")


@pytest.mark.parametrize("name", WAYS)
def test_generate_ids_takes_lists(folder: Path, name: str) -> None:
    with Engine(str(folder), dtype="float32") as llm:
        expected = llm.generate_ids(PROMPTS[:1], max_new_tokens=3).tolist()
        with WAYS[name]():
            assert llm.generate_ids(PROMPTS[:1], max_new_tokens=3).tolist() == expected
