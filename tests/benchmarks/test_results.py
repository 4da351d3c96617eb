"""Committed records are read by the current tools: all files in results/, which stays small."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import overnight, peaks, processors
from h2o_flexgen.baselines.store import RecordFile, Store

RESULTS = Path(__file__).parents[2] / "results"
TABLES: dict[str, Callable[[list[dict[str, Any]]], Iterable[str]]] = {
    "overnight": overnight.table,
    "peaks": peaks.table,
    "processors": processors.table,
}
"""What makes table.md of the records in a folder, by its name without the date."""


def found(pattern: str) -> list[Path]:
    return sorted(path for path in RESULTS.rglob(pattern) if "local" not in path.relative_to(RESULTS).parts)


def named(path: Path) -> str:
    return str(path.relative_to(RESULTS))


LINES, COMPARISONS = found("*.jsonl"), sorted({path.parent for path in found("run-*.json")})


@pytest.mark.parametrize("path", LINES, ids=named)
def test_a_file_of_records(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = RecordFile.open(path.parent, path.name).records
    assert len(records) == len(path.read_text(encoding="utf-8").splitlines()) > 0
    assert not capsys.readouterr().err
    table = TABLES.get(path.parent.name.split("-", 3)[-1])
    if table is None:
        return
    lines = list(table(records))
    assert "\n".join(lines) + "\n" == (path.parent / "table.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", COMPARISONS, ids=named)
def test_a_folder_of_a_comparison(folder: Path) -> None:
    paths = sorted(folder.glob("run-*.json"))
    settings = json.loads(paths[0].read_text(encoding="utf-8"))["settings"]
    store = Store.open(folder, settings)
    assert sum(map(len, store.runs.values())) == len(paths)
    assert len(store.failures) == len(list(folder.glob("failed-*.json")))


def test_results_are_found_and_stay_small() -> None:
    files = [path for path in found("*") if path.is_file()]
    assert len(LINES) > 8
    assert len(COMPARISONS) == 2
    assert len(files) < 120
    assert sum(path.stat().st_size for path in files) < 2_000_000
