"""How torch's OpenMP threads wait: what importing the package puts into the environment, and when it does not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from h2o_flexgen import openmp
from h2o_flexgen.openmp import SHORT_SPIN, SWITCH, spin_briefly, spin_warning, without_short_spin

PRINT = "import os, h2o_flexgen, sys; print([os.environ.get(name) for name in ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT')])"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment in which nobody has said how threads wait."""
    for name in (*SHORT_SPIN, "KMP_BLOCKTIME", SWITCH):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def _printed(*before: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", "; ".join([*before, PRINT])], capture_output=True, text=True, timeout=60, check=True
    )
    return run.stdout.strip()


def test_importing_the_package_makes_threads_spin_briefly(bare: pytest.MonkeyPatch) -> None:
    assert _printed() == str(list(SHORT_SPIN.values()))


@pytest.mark.parametrize(
    ("name", "value"), [("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "7"), ("KMP_BLOCKTIME", "5"), (SWITCH, "0")]
)
def test_what_the_user_said_stands(name: str, value: str, bare: pytest.MonkeyPatch) -> None:
    bare.setenv(name, value)
    before = dict(os.environ)
    bare.delitem(sys.modules, "torch", raising=False)
    spin_briefly()
    assert dict(os.environ) == before


def test_of_a_torch_that_is_loaded_already_there_is_a_warning(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(openmp, "_torch_first", [False])
    assert spin_warning() is None
    bare.setitem(sys.modules, "torch", openmp)  # any module
    before = dict(os.environ)
    spin_briefly()
    assert dict(os.environ) == before
    assert "import h2o_flexgen first" in (spin_warning() or "")


def test_what_is_taken_away_for_others_is_ours_alone() -> None:
    assert without_short_spin({"A": "1", **SHORT_SPIN}) == {"A": "1"}
    for theirs in ({"OMP_WAIT_POLICY": "passive"}, {**SHORT_SPIN, "GOMP_SPINCOUNT": "5"}):
        assert without_short_spin(theirs) == theirs
