"""The fixtures of jobs: the tiny model of `tests.programs`, and the program."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from h2o_flexgen.batch import main
from tests.programs import Ran, model

__all__ = ["model"]


@pytest.fixture
def batch(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs the program in this process: `batch("-i", file, "-o", file, "--model", folder)`."""

    def call(*arguments: object) -> Ran:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Ran(code, *capsys.readouterr())

    return call
