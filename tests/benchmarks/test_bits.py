"""The table of what fewer bits cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bits

HOST = {"cores": 2, "cpu": "a processor", "memory_bytes": 2**30}
FACTS = {"host": HOST, "threads": 2, "torch": "2", "date": "2026-01-01T00:00:00Z", "commit": "abc"}


def record(kind: str, nll: float, tokens: list[list[int]], cache: str = "full") -> dict[str, object]:
    return {**FACTS, "model_name": "m", "cache": cache, "bits": kind, "nll": nll, "tokens": tokens}


def test_agreement_ends_with_the_first_token_that_differs() -> None:
    assert bits.agreement([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 4], [5, 0, 7, 8]]) == 5 / 8


def test_the_table_compares_with_16_bits_of_the_same_cache() -> None:
    records = [
        record("16", 2.0, [[1, 2]]),
        record("W4", 2.02, [[1, 3]]),
        record("16", 3.0, [[1, 2]], "H2O 20 %"),
        record("KV8", 3.0, [[1, 2]], "H2O 20 %"),
    ]
    lines = list(bits.table(records))
    assert lines[:5] == [
        "| bits | m, full | m, H2O 20 % |",
        "|---|---:|---:|",
        "| 16 | 7.39 | 20.09 |",
        "| W4 | 7.54 (+2.0%), 50% |  |",
        "| KV8 |  | 20.09 (+0.0%), 100% |",
    ]


@pytest.mark.slow
def test_a_point_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    point = {"model": "demo", "cache": "H2O 20 %", "bits": "K8 V4", "text": None}
    assert bits.run({**point, "context": 24, "continuation": 8, "windows": 2}) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["scored_tokens"] == 16
    assert [len(row) for row in found["tokens"]] == [bits.NEW, bits.NEW]


def test_records_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made = {**FACTS, "nll": 1.0, "scored_tokens": 1, "tokens": [[1]]}
    monkeypatch.setattr(bits, "in_process", lambda module, point: dict(made))
    monkeypatch.setattr("sys.argv", ["bits", "--output", str(tmp_path), "--models", "demo,~/x.gguf", "--bits", "16;W4"])
    assert bits.main() == 0
    assert "| as stored |  |  | 2.72 (+0.0%), 100% |" in capsys.readouterr().out
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 10
