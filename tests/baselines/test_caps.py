"""Why nothing can be held to a memory limit, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from h2o_flexgen.baselines import caps


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    caps.cap_problem.cache_clear()
    yield
    caps.cap_problem.cache_clear()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 0", None),
        ("echo careful >&2; echo 'memcap: needs root' >&2; exit 1", "needs root"),
        ("exit 3", "memcap.sh ended with 3, and said nothing"),
    ],
)
def test_the_scripts_last_line_says_it(
    script: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memcap = tmp_path / "memcap.sh"
    memcap.write_text(f"#!/bin/sh\n{script}\n")
    memcap.chmod(0o755)
    monkeypatch.setattr(caps, "MEMCAP", memcap)
    assert caps.cap_problem() == said


def test_a_package_without_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caps, "MEMCAP", tmp_path / "memcap.sh")
    assert "comes with the repository" in str(caps.cap_problem())
