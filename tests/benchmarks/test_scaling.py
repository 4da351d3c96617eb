"""benchmarks.scaling without measuring: its points are commands that exist, its table and picture say what ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scaling
from benchmarks.records import LLAMA
from h2o_flexgen.cli.arguments import parse_arguments
from h2o_flexgen.models.families import spec_from_config
from tests.tiny import config_of


def _points(*flags: str) -> list[dict[str, Any]]:
    args = scaling._arguments(["--long-model", "llama-110m", *flags])
    return [point for name in args.panels for point in scaling.PANELS[name].points(args)]


@pytest.mark.parametrize("flags", [(), ("--quick",), ("--panels", "batch,long")], ids=str)
def test_points_are_commands_that_exist(flags: tuple[str, ...]) -> None:
    points = _points(*flags)
    keys = [(point["panel"], point["line"], point["x"]) for point in points]
    assert len(keys) == len(set(keys))
    context = spec_from_config({**LLAMA, **scaling.LLAMA_110M}, "llama").max_positions
    for point in points:
        if point["panel"] == "long":
            assert point["settings"]["prompt"] + point["settings"]["new"] <= context
            continue
        parsed = parse_arguments([*scaling.engine(point["flags"])[3:]], {})
        limit = 2048 if parsed.engine.model == "opt-125m" else context
        assert parsed.prompt_len + parsed.sampling.max_new_tokens <= limit
        assert parsed.engine.weights == "dummy"


def test_what_varies_is_what_the_axis_says() -> None:
    for point in _points("--panels", "batch,stream,prompt,generated,budget"):
        parsed = parse_arguments([*scaling.engine(point["flags"])[3:]], {})
        policy, x = parsed.engine.policy, point["x"]
        found = {
            "batch": policy["gpu_batch_size"],
            "stream": policy["num_gpu_batches"],
            "prompt": parsed.prompt_len,
            "generated": parsed.sampling.max_new_tokens,
            "budget": round(100 * parsed.engine.eviction.ratio),
        }[point["panel"]]
        assert found == x, point["name"]
        assert (policy["weights"]["disk"] == 1.0) == (point["panel"] == "stream")


def test_unknown_panels_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scaling._arguments(["--panels", "batch,depth"])
    assert "no panel is called depth" in capsys.readouterr().err


def test_the_trend_of_a_line_and_of_an_outlier() -> None:
    assert scaling.trend([1.0, 1.1, 1.2, 1.3, 1.4]) == pytest.approx(0.4 / 1.2)
    assert scaling.trend([2.0, 2.0, 9.0, 2.0, 2.0]) == 0
    assert scaling.trend([2.0]) == 0


def _record(point: dict[str, Any], number: int) -> dict[str, Any]:
    rates = {f"{what}_throughput": 100.0 * number * point["x"] for what in ("prefill", "decode", "gen")}
    windows = [
        {"step": 8 * (i + 1), "mean_s": 0.01, "median_s": 0.01, "least_s": 0.01, "rss_bytes": 2**30 if i < 3 else None}
        for i in range(4)
    ]
    facts = {"host": {"cpu": "a CPU", "cores": 2, "memory_bytes": 2**34}, "threads": 2, "torch": "2", "commit": "abc"}
    return {**point, **rates, **facts, "date": "2026-01-01T00:00:00", "windows": windows, "peak_bytes": {"rss": 2**30}}


@pytest.mark.slow
def test_table_and_picture_of_all_panels(tmp_path: Path) -> None:
    records = [_record(point, number) for number in (1, 2, 3) for point in _points("--quick")]
    said = "\n".join(scaling.table(records))
    assert "| 4 | full cache | 800 (400 to 1200) |" in said
    assert "10.00 | 10.00 (10.00 to 10.00) | 10.00 | +0.0% | 1,024 to 1,024 MiB (+0.0) |" in said
    scaling.picture(records, tmp_path / "x.png")
    assert 10_000 < (tmp_path / "x.png").stat().st_size < 100_000


def test_a_long_answer_is_seen_window_by_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_of("llama-gqa").save_pretrained(tmp_path)
    settings = {"model": str(tmp_path), "batch": 2, "prompt": 6, "budget": 6, "new": 42, "window": 8}
    assert scaling.main(["--run", json.dumps(settings)]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["generated_tokens"] == 2 * 42
    # 42 tokens are 41 decode steps, whose times lie between 41 calls: 40 of them are known, in five windows.
    assert [window["step"] for window in record["windows"]] == [8, 16, 24, 32, 40]
    assert sum(8 * window["mean_s"] for window in record["windows"]) <= record["total_s"]
    for window in record["windows"]:
        assert 0 < window["least_s"] <= window["median_s"]
        assert window["rss_bytes"] > 2**20
