"""Tiny checkpoints, made once per session."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from tests.tiny import make_model, save

Checkpoint = tuple[PreTrainedModel, str]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """`checkpoint("llama-gqa")`: the model by transformers and the folder it was saved to."""
    made: dict[str, Checkpoint] = {}

    def make(name: str = "opt") -> Checkpoint:
        if name not in made:
            model = make_model(name)
            made[name] = model, str(save(model, tmp_path_factory.mktemp(name)))
        return made[name]

    return make
