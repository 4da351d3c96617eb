"""Engines and forks: what would wait for ever for threads that stayed in the parent, or share its files, is refused."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.errors import UsageError
from tests.tiny import make_model, save


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(make_model("llama-gqa"), tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def threads_as_they_were() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def in_a_fork(work: Callable[[], object]) -> str:
    """What `work` returns there as text, or the UsageError that it raises."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def run() -> None:
        try:
            answers.put(str(work()))
        except UsageError as error:
            answers.put(str(error))

    child = context.Process(target=run)
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
        pytest.fail("the child hangs")
    return answers.get()


def test_an_engine_stays_in_its_process(folder: str, tmp_path: Path) -> None:
    disk = {"weights": {"disk": 1.0}, "cache": {"disk": 1.0}, "hidden": {"cpu": 1.0}}
    policy = {**disk, "gpu_batch_size": 1, "num_gpu_batches": 2}
    with Engine(folder, dtype="float32", policy=policy, offload_dir=str(tmp_path / "offload")) as llm:
        expected = [each.token_ids for each in llm.generate([[2, 5], [2, 7, 9]], max_new_tokens=3)]
        said = in_a_fork(lambda: llm.generate([[2, 5]], max_new_tokens=3))
        assert "this engine is that of the process that this one was forked from" in said
        assert [each.token_ids for each in llm.generate([[2, 5], [2, 7, 9]], max_new_tokens=3)] == expected


@pytest.mark.parametrize("threads", [1, 2])
def test_a_fork_makes_an_engine_with_one_thread(folder: str, threads: int) -> None:
    def work() -> list[int]:
        torch.set_num_threads(threads)
        with Engine(folder, dtype="float32") as llm:
            return llm.generate([[2, 5]], max_new_tokens=3)[0].token_ids

    expected = str(work())
    said = in_a_fork(work)
    assert said == expected if threads == 1 else "torch.set_num_threads(1) in it first" in said
