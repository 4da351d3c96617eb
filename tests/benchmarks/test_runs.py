"""benchmarks.runs: points are commands that exist, the table says what ran, a run of the demo is one record."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import runs
from benchmarks.records import facts
from h2o_flexgen.cli.arguments import parse_arguments


def _points(*vary: str, flags: str = "--prompt-len 16", limit: str | None = None) -> list[dict[str, Any]]:
    return runs.points(Namespace(vary=list(vary), flags=flags, limit=limit))


def test_points_are_all_combinations_and_commands_that_exist() -> None:
    found = _points("gpu-batch-size=1,8", "hh-ratio=1,0.2", "share-prefixes=true,false", "num-gpu-batches=-,2")
    assert len({point["name"] for point in found}) == 16
    parsed = [parse_arguments(runs.command(point)[3:], {}) for point in found]
    assert {arguments.engine.policy["gpu_batch_size"] for arguments in parsed} == {1, 8}
    assert {arguments.engine.eviction.ratio for arguments in parsed} == {1.0, 0.2}
    assert {arguments.engine.share_prefixes for arguments in parsed} == {True, False}
    assert ["num_gpu_batches" in arguments.engine.policy for arguments in parsed] == [False, True] * 8
    assert {(arguments.engine.weights, arguments.prompt_len) for arguments in parsed} == {("dummy", 16)}


def test_a_flag_without_values_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runs.main(["--vary", "gpu-batch-size"])
    assert "--vary gpu-batch-size: needed" in capsys.readouterr().err


def _record(point: dict[str, Any], repetition: int, speed: float, **more: Any) -> dict[str, Any]:
    rates = {f"{rate}_throughput": speed for rate in runs.RATES}
    work = {"predicted": None, "bytes_moved": {}, "prompt_tokens": 64, "computed_prompt_tokens": None}
    return {**facts(["x"]), **point, **rates, **work, "peak_bytes": {"rss": 1 << 30}, "repetition": repetition, **more}


def test_the_table_compares_pair_by_pair_and_with_predictions() -> None:
    slow, fast = _points("hh-ratio=1,0.2")
    records = [_record(point, n, speed * (1 + n)) for n in (0, 1) for point, speed in ((slow, 10.0), (fast, 25.0))]
    for record in records:
        record["predicted"] = {"gen_throughput": 1.1 * record["gen_throughput"]}
    (capped,) = _points(limit="6G")
    seen = {"memcap": {"peak_bytes": 5 << 30}, "bytes_moved": {"disk->cpu": 3 << 30}, "computed_prompt_tokens": 8}
    text = "\n".join(runs.table([*records, _record(capped, 0, 2.0, **seen)]))
    assert "| 1 | 15 (10 to 20) | 15 (10 to 20) | 15 (10 to 20) | 1.00 (1.00 to 1.00) | 16.5 (+10%) | 64 |" in text
    assert "| 0.2 | 37.5 (25 to 50) | 37.5 (25 to 50) | 37.5 (25 to 50) | 2.50 (2.50 to 2.50) | 41.25 (+10%) |" in text
    assert "Predictions of 2 settings: median error 10%, worst +10%." in text
    assert "`--prompt-len 16`, within 6G:" in text
    assert "| 2 | 2 | 2 | 1.00 |  | 8 | 3 GiB | 5 GiB | 1 |" in text


def test_a_run_is_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command line as a whole, with what a process would print."""
    from h2o_flexgen import run

    def here(command: list[str]) -> dict[str, Any]:
        assert run.main(command[3:]) == 0
        return {**facts(command), **json.loads(capsys.readouterr().out.splitlines()[-1])}

    monkeypatch.setattr(runs, "run_json", here)
    flags = "--model demo --weights checkpoint --prompt-len 8 --num-prompts 2 --gen-len 2"
    words = ["--vary", "hh-ratio=1,0.5", "--flags", flags, "--repetitions", "1", "--output", str(tmp_path)]
    assert runs.main(words) == 0
    assert capsys.readouterr().out.count("| 16 | 0 B |") == 2
