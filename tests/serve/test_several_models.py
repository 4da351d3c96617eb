"""Several models in one service: no fault of one, and no stream of requests for it, keeps anybody from the others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from h2o_flexgen.cli.serve.arguments import parse_serve
from tests.jobs.files import request
from tests.programs import write_talker
from tests.serve.conftest import Serve, Service, finished, until_asked

SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9, "temperature": 0}
MOST = 60
"""Requests of each of those who ask without an end."""


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return write_talker(tmp_path / "other", num_hidden_layers=2)


def asked(client: openai.OpenAI, model: str, **more: Any) -> str:
    answer = client.with_options(timeout=60).chat.completions.create(model=model, **{**SAID, **more})
    return answer.choices[0].message.content or ""


def refused(client: openai.OpenAI, model: str) -> str:
    with pytest.raises(openai.InternalServerError) as raised:
        asked(client, model)
    assert raised.value.status_code == 503
    return raised.value.message


def batch_for(client: openai.OpenAI, model: str, lines: int = 3) -> Any:
    body = {"prompt": "abc", "max_tokens": 5, "model": model}
    text = "\n".join(request(f"r{i}", body) for i in range(lines))
    file = client.files.create(file=("a.jsonl", text.encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="1h")


@contextmanager
def many_clients(service: Service, model: str) -> Iterator[Callable[[], bool]]:
    """Of different patience: some wait at any time. Gives whether they still ask."""
    done, over = list[int](), list[bool]()

    def ask(most: int) -> None:
        client = service.client
        for _ in range(MOST):
            if over:
                return
            asked(client, model, max_tokens=most, extra_body={"ignore_eos": True})
        done.append(most)

    with ThreadPoolExecutor(16) as pool:
        asking = [pool.submit(ask, 5 + 3 * i) for i in range(16)]
        try:
            yield lambda: not done
        finally:
            over.append(True)
            for each in asking:
                each.result()


def test_a_model_that_is_gone_leaves_the_others(serve: Serve, other: Path) -> None:
    with serve("--more-models", other) as service:
        client = service.client
        first = asked(client, "model")
        shutil.rmtree(other)
        assert "model other cannot be used: its files" in refused(client, "other")
        with pytest.raises(openai.NotFoundError):
            asked(client, "third")
        assert asked(client, "model") == first


def test_a_model_that_changes_under_the_service(serve: Serve, other: Path) -> None:
    """Read from the disk while it is used: requests for it fail, its batch waits, and the other model answers."""
    with serve("--more-models", other, "--percent", 0, 0, 100, 0, 100, 0) as service:
        client = service.client
        first = asked(client, "model")
        asked(client, "other")
        os.truncate(other / "model.safetensors", 5000)
        assert "model other cannot be used: its files" in refused(client, "other")
        waits = batch_for(client, "other")
        assert asked(client, "model") == first
        until_asked(lambda: client.batches.retrieve(waits.id).errors)
        assert finished(client, batch_for(client, "model").id).status == "completed"


def test_many_requests_for_one_model_keep_nobody_from_the_other(serve: Serve, other: Path) -> None:
    with serve("--more-models", other) as service:
        wanted, client = asked(service.client, "other"), service.client
        with many_clients(service, "model") as still:
            assert asked(client, "other") == wanted
            assert finished(client, batch_for(client, "other").id).status == "completed"
            assert still()


def test_many_requests_keep_no_batch_waiting(serve: Serve, other: Path) -> None:
    with serve("--more-models", other) as service, many_clients(service, "model") as still:
        assert finished(service.client, batch_for(service.client, "model").id).status == "completed"
        assert still()


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        (["--more-models", "b/two", "three", "--served-model-name", "x", "y"], {}),
        (["--more-models", "b/two", "--served-model-name", "x", "--more-models", "three", "--served-model-name=y"], {}),
        ([], {"H2O_FLEXGEN_MORE_MODELS": "b/two three", "H2O_FLEXGEN_SERVED_MODEL_NAME": "x y"}),
    ],
)
def test_models_and_names_in_any_way(argv: list[str], environ: dict[str, str]) -> None:
    found = parse_serve(["--model", "a/one", *argv], environ)
    assert list(found.models) == ["one", "two", "three"]
    assert list(found.jobs.served_model_name) == ["x", "y"]
