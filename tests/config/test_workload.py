"""Workload and Registry, the two smallest."""

from __future__ import annotations

from typing import Any

import pytest

from h2o_flexgen.config.workload import Workload
from h2o_flexgen.errors import ModelError, UsageError
from h2o_flexgen.registry import Registry, suggestion


def test_total_length() -> None:
    assert Workload(512, 32).total_len == 544


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 32), "--prompt-len is 0"),
        ((5, 0), "--gen-len is 0"),
        ((5, 3, 0), "--num-prompts is 0"),
        ((5, 3.0), "--gen-len is 3.0"),
        ((True, 3), "--prompt-len is True"),
    ],
)
def test_lengths_that_make_no_sense(arguments: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Workload(*arguments)


def test_registry() -> None:
    letters: Registry[int] = Registry("letter", ModelError)
    assert letters.register("alpha", 1) == 1
    letters.register("beta", 2)
    assert letters.names() == ("alpha", "beta")
    assert letters.get("beta") == 2
    assert "alpha" in letters
    with pytest.raises(ModelError, match=r"unknown letter 'Alhpa'. needed one of alpha, beta. did you mean 'alpha'?"):
        letters.get("Alhpa")
    with pytest.raises(ValueError, match="'alpha' is registered twice"):
        letters.register("alpha", 3)


def test_suggestions_are_for_close_words_only() -> None:
    assert suggestion("wieghts", ["weights", "cache"]) == "did you mean 'weights'?"
    assert suggestion("zzz", ["weights", "cache"]) == ""


def test_a_question_ends_its_sentence() -> None:
    assert str(ModelError("no model x", "did you mean 'y'?", "list them")) == "no model x. did you mean 'y'? list them"
