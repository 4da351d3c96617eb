"""The fixtures of `tests.programs`."""

from tests.programs import model, own_model, run

__all__ = ["model", "own_model", "run"]
