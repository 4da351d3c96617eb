"""The fixtures of `tests.programs`, and a smaller model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import model, own_model, run, write_model

__all__ = ["model", "own_model", "run"]


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer, for runs in which every call fails once. Not to be changed."""
    return write_model(tmp_path_factory.mktemp("small") / "model", num_hidden_layers=1)
