"""benchmarks.opt30b without its 60 GB: how many layers fit, what a smaller model is called, which command is run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import opt30b
from h2o_flexgen.baselines.memcap import cap_command
from h2o_flexgen.cli.arguments import parse_arguments
from h2o_flexgen.models.families import spec_from_config


def _args(tmp_path: Path, *flags: str) -> Any:
    return opt30b._arguments(["--output", str(tmp_path), "--offload-dir", str(tmp_path / "off"), *flags])


def _prepared(tmp_path: Path, *flags: str) -> dict[str, Any]:
    scratch = tmp_path / "off" / "weights"
    scratch.mkdir(parents=True, exist_ok=True)
    return opt30b.prepared(_args(tmp_path, *flags), scratch, tmp_path)


def test_as_many_layers_as_fit() -> None:
    sizes = [opt30b.weight_bytes(opt30b.spec_of("opt-30b", layers)) for layers in range(1, 49)]
    assert sizes[-1] == opt30b.weight_bytes(opt30b.spec_of("opt-30b")) > 59e9
    for room in (0, sizes[0] - 1, sizes[0], sizes[6], sizes[6] + 1, sizes[7] - 1, sizes[46] + 9, sizes[47], 10**12):
        fitting = sum(size <= room for size in sizes)
        assert opt30b.layers_that_fit("opt-30b", room) == fitting, room


def test_a_smaller_model_says_so_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opt30b, "room", lambda scratch: 20 * 10**9)
    point = _prepared(tmp_path)
    assert point["title"] == "opt-30b with 15 of 48 layers"
    assert (point["layers"], point["of_layers"]) == (15, 48)
    config = json.loads((Path(point["model"]) / "config.json").read_text(encoding="utf-8"))
    spec = spec_from_config(config, "x")
    assert (spec.num_layers, spec.hidden_size) == (15, 7168)
    assert opt30b.weight_bytes(spec) == point["weight_bytes"]
    assert "with-15-of-48-layers" in point["model"]
    assert opt30b.estimate(point).startswith("opt-30b with 15 of 48 layers, ")


def test_the_whole_model_where_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opt30b, "room", lambda scratch: 10**12)
    assert _prepared(tmp_path)["title"] == _prepared(tmp_path)["model"] == "opt-30b"
    monkeypatch.setattr(opt30b, "room", lambda scratch: 3 * 10**9)
    for flags in (("--layers", "4"), ("--layers", "-1")):
        with pytest.raises(SystemExit, match="room for 1 of them"):
            _prepared(tmp_path, *flags)
    monkeypatch.setattr(opt30b, "room", lambda scratch: 10**9)
    with pytest.raises(SystemExit, match="room for 0 of them"):
        _prepared(tmp_path)


def test_weights_of_another_size_make_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opt30b, "room", lambda scratch: 10**12)
    _prepared(tmp_path, "--layers", "2")
    packed = tmp_path / "off" / "weights" / "packed-0"
    packed.mkdir()
    (packed / "unit").write_bytes(b"x")
    _prepared(tmp_path, "--layers", "2")
    _prepared(tmp_path, "--layers", "3", "--dry-run")
    assert packed.exists()
    _prepared(tmp_path, "--layers", "3")
    assert not packed.exists()


def test_what_an_earlier_run_left_counts_as_room(tmp_path: Path) -> None:
    before = opt30b.room(tmp_path)
    (tmp_path / "sub").mkdir()
    with (tmp_path / "sub" / "unit").open("wb") as file:
        file.truncate(1 << 40)  # a hole: it takes no room, and its size is counted
    assert opt30b.room(tmp_path) > before + (1 << 39)


def test_the_command_is_one_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opt30b, "room", lambda scratch: 10**12)
    point = _prepared(tmp_path, "--layers", "2", "--batch", "3", "--num-batches", "5", "--limit", "4G")
    command = opt30b.command(point, tmp_path, tmp_path / "memcap.json")
    assert command[: command.index(sys.executable, 1)] == cap_command("4G", [tmp_path], tmp_path / "memcap.json")
    parsed = parse_arguments(command[command.index("h2o_flexgen.run") + 1 :], {})
    policy = parsed.engine.policy
    assert (policy["gpu_batch_size"], policy["num_gpu_batches"], parsed.num_prompts) == (3, 5, 15)
    assert policy["weights"]["disk"] == policy["cache"]["cpu"] == policy["hidden"]["cpu"] == 1.0
    assert parsed.engine.disk_mem >= point["weight_bytes"]


def test_table_and_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opt30b, "room", lambda scratch: 10**12)
    facts = {"host": {"cpu": "a CPU", "cores": 2, "memory_bytes": 2**34}, "threads": 2, "torch": "2", "commit": "abc"}
    run = {
        **{"gen_throughput": 0.5, "decode_throughput": 2.0, "prefill_s": 30.0, "decode_s": 70.0, "total_s": 101.0},
        "bytes_moved": {"disk->cpu": 7000},
        "planned_disk_bytes": 7000,
        "bandwidth": {"disk->cpu": 2e9},
        "memcap": {"peak_bytes": 2**31},
        "peak_bytes": {"rss": 2**30},
        "bound": {"resource": "disk->cpu", "seconds": 90.0, "busy": {"disk->cpu": 90.0, "compute": 40.0}},
        "date": "2026-01-01T00:00:00",
    }
    records = [{**facts, **run, **_prepared(tmp_path, "--layers", "2"), "repetition": number} for number in (0, 1)]
    said = "\n".join(opt30b.table(records))
    assert "| opt-30b with 2 of 48 layers, 3.2 GB | 32 x 2, 64+8, 6G | 0.5 (0.5 to 0.5) |" in said
    assert "| 7,000 | yes | 2 GB/s | 2 GiB | 1 GiB | disk->cpu, busy for 90 of 101 s | 2 |" in said
    assert "| no: 8,000 |" in "\n".join(opt30b.table([{**records[0], "planned_disk_bytes": 8000}]))
    assert "Nothing was measured." in "\n".join(opt30b.table([]))
    opt30b.picture(records, tmp_path / "x.png")
    assert 3_000 < (tmp_path / "x.png").stat().st_size < 100_000
