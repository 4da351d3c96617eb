"""A service as a process of its own, and the `openai` package that asks it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

# What a service imports, those two as well, is imported before processes fork.
import h2o_flexgen.cli.serve.service  # noqa: F401
from h2o_flexgen.serve import main
from tests.programs import Child, until, write_talker

KEY = "sk-of-a-test"


class Service(Child):
    """`serve` in a forked process, on a port of its own. A context manager: what still runs at the end is killed."""

    def __init__(self, folder: Path, *flags: object, key: str | None = KEY, **how: Any) -> None:
        given = () if key is None else ("--api-key", key)
        arguments = ("--port", 0, "--data-dir", folder / "data", *given, *flags)
        (folder / "stderr").write_text("")
        super().__init__(folder, *arguments, program=main, **how)
        self._said, self._key, self.data = folder / "stderr", key, folder / "data"

    @property
    def said(self) -> str:
        return self._said.read_text()

    @property
    def url(self) -> str:
        """Where it listens, once it does."""
        until(lambda: self._found() or "error" in self.said.lower(), 60)
        found = self._found()
        assert found is not None, self.said
        return found[1]

    def _found(self) -> re.Match[str] | None:
        return re.search(r"^serving .* on (http://\S+),", self.said, re.MULTILINE)

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self._key or "none", max_retries=0)


Serve = Callable[..., Any]


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that converses, and thinks where it is told to. Not to be changed."""
    folder = write_talker(tmp_path_factory.mktemp("talker") / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] += "{% if enable_thinking %}<think>{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def serve(tmp_path: Path, talker: Path) -> Serve:
    """Starts a service with a folder of the test: `with serve("--hh-ratio", 0.5) as service:`."""

    @contextmanager
    def start(*flags: object, **how: Any) -> Iterator[Service]:
        with Service(tmp_path, "--model", talker, *flags, **how) as service:
            yield service

    return start


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, talker: Path) -> Iterator[Service]:
    """One for tests that leave nothing unfinished."""
    with Service(tmp_path_factory.mktemp("served"), "--model", talker, "--max-file", "1MiB") as service:
        yield service


def until_asked(true: Callable[[], object], seconds: float = 60.0) -> None:
    """Waits for `true`, which asks a service: more seldom than what costs nothing."""
    until(lambda: true() or time.sleep(0.03), seconds)


def finished(client: openai.OpenAI, name: str, seconds: float = 60.0) -> Any:
    """A batch once it is over."""
    going = ("validating", "in_progress", "finalizing", "cancelling")
    until_asked(lambda: client.batches.retrieve(name).status not in going, seconds)
    return client.batches.retrieve(name)
