"""What several tests of checkpoints need: a hub's cache, a folder of packed weights, a watch over weight memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from h2o_flexgen.checkpoint import reader
from h2o_flexgen.memory.rundir import OffloadDir


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's cache and the current folder are the test's own, and nothing says to stay offline."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def offload(tmp_path: Path) -> Iterator[OffloadDir]:
    with OffloadDir(tmp_path / "offload") as folder:
        yield folder


@pytest.fixture
def no_weight_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may get as far as a source."""

    def refuse(*_: object) -> None:
        raise AssertionError("a broken checkpoint was accepted")

    monkeypatch.setattr(reader.CheckpointSource, "__init__", refuse)
