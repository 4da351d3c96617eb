"""Tiny checkpoints, made once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import OPTForCausalLM

from tests.tiny import make_opt, save

Checkpoint = tuple[OPTForCausalLM, str]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """`checkpoint("opt-350m")`: the model by transformers and the folder it was saved to."""
    made: dict[str, Checkpoint] = {}

    def make(variant: str = "opt") -> Checkpoint:
        if variant not in made:
            model = make_opt(variant)
            folder: Path = tmp_path_factory.mktemp(variant)
            made[variant] = model, str(save(model, folder))
        return made[variant]

    return make
