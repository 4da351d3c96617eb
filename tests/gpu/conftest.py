"""The tiny checkpoints of the engine's tests."""

from __future__ import annotations

from tests.engine.conftest import checkpoint

__all__ = ["checkpoint"]
