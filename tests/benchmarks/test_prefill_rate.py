"""benchmarks.prefill_rate: FLOPs counted by hand, the table of made-up records, and one tiny run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import prefill_rate
from h2o_flexgen.config.model.known import known_config
from h2o_flexgen.models.families import spec_from_config

FACTS = {"host": {"cpu": "a CPU", "cores": 2, "memory_bytes": 2**34}, "threads": 2, "torch": "2", "commit": "abc"}


def test_flops_are_those_that_are_computed() -> None:
    spec = replace(spec_from_config(known_config("opt-125m") or {}, "opt-125m"), num_layers=3)
    rows, prompt, hidden, ffn = 4, 10, 768, 3072
    attention = sum(4 * (i + 1) * hidden for _ in range(rows) for i in range(prompt))
    mlps = 2 * rows * prompt + rows  # tokens; in the last layer only those that are sampled from
    expected = 3 * (2 * rows * prompt * 4 * hidden**2 + attention) + 2 * mlps * 2 * hidden * ffn
    assert prefill_rate.prefill_flops(spec, rows, prompt) == pytest.approx(expected + 2 * rows * hidden * 50272)


def test_shares_are_medians_of_turns() -> None:
    turns = [{"prefill_s": s, "prefill": 8e11 / s, "gemm": 4e11, "large": 5e11} for s in (2.0, 2.5, 4.0)]
    lines = list(prefill_rate.table([{"title": "one", "turns": turns, "date": "2026-11-21", **FACTS}]))
    assert lines[2] == "| one | 2.5 | 320 | 400 | 500 | 80% (50% to 100%) | 64% (40% to 80%) |"


def test_a_tiny_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(prefill_rate, "_GEMM_SECONDS", 0.0)
    monkeypatch.setattr(prefill_rate, "_WEIGHTS", 1)
    monkeypatch.setattr(prefill_rate, "LARGE", 64)
    point = {"model": "opt-125m", "layers": 1, "rows": 2, "prompt": 16, "ratio": 0.2, "rounds": 2}
    assert prefill_rate.run(point) == 0
    record = json.loads(capsys.readouterr().out)
    assert len(record["turns"]) == 2
    assert record["gemm_share"] > 0


def test_the_table_is_made_of_what_is_there(tmp_path: Path) -> None:
    turns = [{"prefill_s": 2.0, "prefill": 4e11, "gemm": 4e11, "large": 5e11}]
    record = {**prefill_rate.points(3)[0], "repetition": 0, "turns": turns, "date": "2026-11-21", **FACTS}
    (tmp_path / "records.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.prefill_rate", "--only", "1", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == done.stdout
