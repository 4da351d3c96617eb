"""benchmarks.ragged: lengths with the sums they should have, pairs that belong together, a run that ends as drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ragged
from h2o_flexgen.engine import engine
from tests.tiny import config_of

FACTS = {"host": {"cpu": "a CPU", "cores": 2, "memory_bytes": 2**34}, "threads": 2, "torch": "2", "commit": "abc"}
SHAPE = {"sequences": 9, "places": 4, "prompt": 10, "new": 6}


@pytest.mark.parametrize(("count", "mean"), [(192, 64), (192, 32), (9, 6), (1, 5), (30, 1)])
def test_ragged_lengths_have_the_sum_of_uniform_ones(count: int, mean: int) -> None:
    for seed in (1, 2, 3):
        found = ragged.lengths(count, mean, seed)
        assert (len(found), sum(found)) == (count, count * mean)
        assert 1 <= min(found) <= max(found) <= ragged.TAIL * mean
        assert found == ragged.lengths(count, mean, seed)


def test_the_tail_is_long() -> None:
    found = sorted(ragged.lengths(192, 64, 1))
    assert found[96] < 0.8 * 64
    assert found[-1] > 3.5 * 64


def _record(kind: str, repetition: int, seconds: float, cache: str = "full") -> dict[str, Any]:
    times = {"total_s": seconds, "prefill_s": seconds / 4, "decode_s": 3 * seconds / 4}
    point = {"title": "a, b", "cache": cache, "kind": kind, "repetition": repetition, "model": "opt-125m", **SHAPE}
    return {**FACTS, **point, **times, "generated_tokens": 54, "row_steps": 60, "date": "2026-01-01T00:00:00"}


def test_ratios_are_taken_within_a_repetition() -> None:
    records = [_record("uniform", 0, 2.0), _record("uniform", 1, 4.0), _record("known", 1, 5.0)]
    records += [_record("known", 0, 4.0), _record("known", 2, 1.0), _record("uniform", 0, 9.0, "h2o")]
    assert ragged.ratios(records, "a, b", "full", "known") == [0.5, 0.8]
    assert ragged.ratios(records, "a, b", "h2o", "known") == []


def test_table_and_picture(tmp_path: Path) -> None:
    records = [
        _record(kind, number, 2.0 + number + (kind != "uniform"), cache)
        for number in range(3)
        for cache in ragged.CACHES
        for kind in ragged.KINDS
    ]
    said = "\n".join(ragged.table(records))
    assert "| H2O 20 % | known | 13.5 (10.8 to 18) | 75% (67% to 80%), n = 3 | 1.00 | 3.00 | 1.11 |" in said
    ragged.picture(records, tmp_path / "x.png")
    assert 3_000 < (tmp_path / "x.png").stat().st_size < 100_000


@pytest.mark.parametrize("kind", ["unforeseen", "known"])
def test_a_run_generates_what_was_drawn(kind: str, tmp_path: Path, monkeypatch, capsys) -> None:
    config_of("opt").save_pretrained(tmp_path)
    point = {"model": str(tmp_path), "cache": "h2o", "ratio": 0.5, "kind": kind, **SHAPE}
    monkeypatch.setattr(engine, "Sampler", engine.Sampler)  # which a run replaces
    assert ragged.main(["--run", json.dumps(point)]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["generated_tokens"] == SHAPE["sequences"] * SHAPE["new"]
    assert record["prompt_tokens"] == SHAPE["sequences"] * SHAPE["prompt"]
    asked = ragged.TAIL * SHAPE["new"] if kind == "unforeseen" else max(ragged.lengths(9, 6, 2))
    assert record["gen_len"] <= asked
    assert record["generated_tokens"] <= record["row_steps"] <= 2 * record["generated_tokens"]
