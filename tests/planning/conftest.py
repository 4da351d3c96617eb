"""The fixtures of `tests.programs`."""

from tests.programs import own_model, run

__all__ = ["own_model", "run"]
