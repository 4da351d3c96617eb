"""Pretended systems, and comparisons of them in one folder, for all tests of comparisons."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.baselines import store
from h2o_flexgen.baselines.runner import Runner
from h2o_flexgen.baselines.settings import SYSTEMS, System
from h2o_flexgen.bench import main

_COMMIT = cache(store.commit)


@pytest.fixture(autouse=True)
def _one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Git is asked once what is measured here, and not before every run."""
    monkeypatch.setattr(store, "commit", _COMMIT)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch):
    """`pretend(name, {"speed": 2.0})` makes a system of that name behave as `tests.baselines.fake` says."""

    def add(name: str, options: dict[str, Any] | None = None, **fields: Any) -> None:
        system = System("tests.baselines.fake", "pretends", lambda ratio: options or {}, **fields)
        monkeypatch.setitem(SYSTEMS._items, name, system)

    return add


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`bench("-r", "2")` compares ours with theirs in `tmp_path`/out: (what ran by name and batch, summary, stderr)."""
    ran: list[tuple[str, int]] = []
    run = Runner.run

    def noted(self: Runner, name: str, batch: int, *rest: int) -> Any:
        ran.append((name, batch))
        return run(self, name, batch, *rest)

    monkeypatch.setattr(Runner, "run", noted)

    def call(*arguments: str, code: int = 0) -> tuple[list[tuple[str, int]], dict[str, Any], str]:
        ran.clear()
        small = ["--systems", "ours,theirs", "-b", "2", "--prompt-len", "8", "--gen-len", "4", "--threads", "1"]
        assert main([*small, "--output-dir", str(tmp_path / "out"), *arguments]) == code
        out, err = capsys.readouterr()
        return list(ran), json.loads(out.splitlines()[-1]) if out else {}, err

    return call
