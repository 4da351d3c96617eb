"""A pretended system for all tests of comparisons."""

from __future__ import annotations

from typing import Any

import pytest

from h2o_flexgen.baselines.systems import SYSTEMS, System


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch):
    """`pretend(name, {"speed": 2.0})` makes a system of that name behave as `tests.baselines.fake` says."""

    def add(name: str, options: dict[str, Any] | None = None, **fields: Any) -> None:
        system = System("tests.baselines.fake", "pretends", lambda ratio: options or {}, **fields)
        monkeypatch.setitem(SYSTEMS._items, name, system)

    return add
