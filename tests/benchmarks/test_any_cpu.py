"""benchmarks.any_cpu: every setting twice, pieces that are done once, and failures that are seen."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import any_cpu

SETTINGS = (
    *("OPENBLAS_CORETYPE=Haswell", "OPENBLAS_CORETYPE=SkylakeX", "OPENBLAS_CORETYPE=Zen", "MKL_CBWR=COMPATIBLE"),
    *("ATEN_CPU_CAPABILITY=default", "ATEN_CPU_CAPABILITY=avx2", "H2O_FLEXGEN_NATIVE=0"),
    *("OMP_NUM_THREADS=1", "OMP_NUM_THREADS=2"),
)
FAKE = """#!/bin/sh
echo "$*" >>asked
case "$*" in
  *broken*)
    test -e mended || {
      echo "FAILED tests/broken/test_x.py::test_y - no"; echo "1 failed, 2 passed in 3s"; exit 1; } ;;
  *dead*) echo "no tests ran" ; exit 4 ;;
esac
echo "3 passed, 1 skipped, 2 deselected in 0.10s"
"""


def test_every_setting_is_in_two_runs() -> None:
    counts = Counter(setting for run in any_cpu.RUNS for setting in run.split())
    assert set(counts) == set(SETTINGS)
    assert min(counts.values()) >= 2


def test_folders_cover_all_test_files() -> None:
    files = {str(path.relative_to(any_cpu.ROOT)) for path in any_cpu.ROOT.glob("tests/**/test_*.py")}
    top, *below = any_cpu.folders()
    assert top == "tests"
    assert {file for file in files if not any(file.startswith(f"{folder}/") for folder in below)} == {
        file for file in files if file.count("/") == 1
    }


@pytest.fixture
def faked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which RUNNER's fake notes the commands of all pieces, and answers for pytest."""
    fake = tmp_path / "runner"
    fake.write_text(FAKE.replace("asked", f"{tmp_path}/asked").replace("mended", f"{tmp_path}/mended"))
    fake.chmod(0o755)
    monkeypatch.setenv("RUNNER", str(fake))
    monkeypatch.setattr(any_cpu, "RUNS", ("A=1 B=2", "C=3"))
    monkeypatch.setattr(any_cpu, "usable", lambda settings: settings.replace(" B=2", ""))
    monkeypatch.setattr(any_cpu, "revision", lambda: "abc")
    return tmp_path


def _run(folder: Path, *args: str) -> tuple[int, int]:
    """The exit code, and how many pieces ran."""
    asked = folder / "asked"
    before = len(asked.read_text().splitlines()) if asked.exists() else 0
    code = any_cpu.main([*args, "--output", str(folder)])
    return code, len(asked.read_text().splitlines()) - before


def test_pieces_run_once_per_commit(faked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run(faked, "tests/one", "tests/two/") == (0, 4)
    first, *_, last = (faked / "asked").read_text().splitlines()
    assert first.startswith("env A=1 H2O_TEST_SEED=1 ")
    assert first.endswith("tests/one")
    assert "env C=3 H2O_TEST_SEED=2 " in last
    assert _run(faked, "tests/one", "tests/two", "tests") == (0, 2)
    monkeypatch.setattr(any_cpu, "revision", lambda: "def")
    assert _run(faked, "tests/one", "--also", "abc") == (0, 0)
    assert _run(faked, "tests/one") == (0, 2)
    monkeypatch.setattr(any_cpu, "revision", lambda: "abc+")  # changed files: who knows which
    assert _run(faked, "tests/one") == _run(faked, "tests/one") == (0, 2)
    said = (faked / "any-cpu.md").read_text()
    assert "| A=1 B=2; B=2 left out: not on this processor | 1 | 3 | 9 | 3 | 0 | 0.0 |" in said


def test_failures_are_told_and_run_again(faked: Path) -> None:
    assert _run(faked, "tests/broken", "tests/dead") == (1, 4)
    record = json.loads((faked / "any-cpu.jsonl").read_text().splitlines()[0])
    assert record["outcomes"] == {"failed": 1, "passed": 2}
    said = (faked / "any-cpu.md").read_text()
    assert "| C=3 | 2 | 2 | 2 | 0 | 2 |" in said
    assert "- seed 1, commit abc: FAILED tests/broken/test_x.py::test_y" in said
    assert "- seed 2, commit abc: tests/dead: exit code 4: no tests ran" in said
    (faked / "mended").touch()
    assert _run(faked, "tests/broken") == (0, 2)
    assert "FAILED tests/broken/test_x.py::test_y" in (faked / "any-cpu.md").read_text()  # what failed once is told


def test_settings_that_a_processor_does_not_bear_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(any_cpu, "PROBE", "import os; assert 'NOT_HERE' not in os.environ")
    assert any_cpu.usable("GOOD=1 NOT_HERE=2 ALSO=3") == "GOOD=1 ALSO=3"
