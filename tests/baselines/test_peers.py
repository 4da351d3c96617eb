"""Peers in environments of their own, under a cap, at their best batch; with adapters that only pretend."""

from __future__ import annotations

import ast
import csv
import json
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.baselines import memcap
from h2o_flexgen.baselines.best import FIRST, Search, common, projected, search, smaller
from h2o_flexgen.baselines.process import Finished, run_process
from h2o_flexgen.baselines.runner import Runner
from h2o_flexgen.baselines.settings import SYSTEMS, BenchSettings, find_model
from h2o_flexgen.baselines.work import REFUSED
from h2o_flexgen.bench import main

SMALL = ["--prompt-len", "8", "--gen-len", "4", "--threads", "1", "-r", "1"]
BUILT_FROM = {"llamacpp": "llama_cpp_python"}
needs_cap = pytest.mark.skipif(memcap.cap_problem() is not None, reason="needs root and control groups")


def _bench(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    assert main([*SMALL, "--output-dir", str(folder), *arguments]) == 0
    table, _, last = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    return table, json.loads(last)


def _rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "table.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _runner(tmp_path: Path, **settings: Any) -> Runner:
    chosen = BenchSettings(prompt_len=8, gen_len=4, threads=1, **settings)
    folders = (tmp_path / "scratch", tmp_path / "work")
    return Runner(chosen, find_model(chosen), lambda count: [[5] * 8] * count, *folders)


def test_an_environment_of_its_own(pretend, capsys, tmp_path: Path) -> None:
    pretend("peer", environment="peer")
    pretend("absent", environment="absent")
    python = tmp_path / "peers" / "peer" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPEER=1 exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (tmp_path / "peers" / "absent" / "bin").mkdir(parents=True)  # begun, but not done
    (tmp_path / "peers" / "peer" / "installed").touch()
    arguments = ["--systems", "peer,absent", "-b", "2", "--peers", str(tmp_path / "peers")]
    table, summary = _bench(capsys, tmp_path / "out", *arguments)
    assert list(summary["systems"]) == ["peer"]
    assert summary["failed"] == {"absent": "not installed: scripts/peer_env.sh absent"}
    assert "did not run: not installed" in table


def test_a_refusal_is_told_as_it_is(pretend, capsys, tmp_path: Path) -> None:
    pretend("picky", {"refuse": "runs OPT only"})
    pretend("crashed", {"fail": "Segmentation fault"})
    table, summary = _bench(capsys, tmp_path / "out", "--systems", "picky,crashed", "-b", "2")
    assert summary["failed"] == {"picky": "runs OPT only", "crashed": "exit code 4: Segmentation fault"}
    assert "| picky | did not run: runs OPT only |" in table
    assert [(row["system"], row["failed"]) for row in _rows(tmp_path / "out")] == list(summary["failed"].items())


def test_preparation_happens_once(pretend, capsys, tmp_path: Path) -> None:
    pretend("prepared", prepares=True, scratch="mine")
    arguments = ["--systems", "prepared", "-b", "2", "--scratch-dir", str(tmp_path / "scratch"), "-r", "3"]
    _bench(capsys, tmp_path / "out", *arguments)
    assert (tmp_path / "scratch" / "opt-125m" / "mine" / "prepared").read_text() == "once\n"


def test_wrong_text_is_counted(pretend, capsys, tmp_path: Path) -> None:
    pretend("right", own=True)
    pretend("wrong", {"wrong": 1})
    table, summary = _bench(capsys, tmp_path / "out", "--model", "demo", "--systems", "right,wrong", "-b", "3")
    assert summary["same_text"]["wrong"] == {"same": 2, "sequences": 3}
    assert "| 2 of 3 |" in table
    assert [row["same_text"] for row in _rows(tmp_path / "out")] == ["3", "2"]


def test_random_weights_compare_no_text(pretend, capsys, tmp_path: Path) -> None:
    pretend("one")
    table, summary = _bench(capsys, tmp_path / "out", "--systems", "one", "-b", "2")
    assert "same_text" not in summary
    assert "same text" not in table
    assert "Text is not compared" in table


def test_csv(pretend, capsys, tmp_path: Path) -> None:
    pretend("ours", {"speed": 4.0, "moved": {"disk->cpu": 5, "cpu->disk": 6}}, own=True)
    pretend("theirs", {"read": 4096})
    table, _ = _bench(capsys, tmp_path / "out", "--systems", "ours,theirs", "-b", "2")
    ours, theirs = _rows(tmp_path / "out")
    assert (ours["batches"], ours["system"], ours["batch"], ours["dtype"]) == ("equal", "ours", "2", "bfloat16")
    assert (ours["bytes_moved"], ours["disk_read_bytes"], ours["gen_throughput_ratio"]) == ("11", "", "")
    assert (theirs["bytes_moved"], theirs["disk_read_bytes"], theirs["reference"]) == ("", "4096", "ours")
    assert float(theirs["decode_throughput_ratio"]) == float(theirs["prefill_throughput_ratio"]) == 0.25
    assert (ours["pairs"], theirs["pairs"]) == ("", "1")
    assert float(theirs["gen_throughput"]) == pytest.approx(2 * 4 / 3)
    assert int(theirs["peak_bytes"]) > 1 << 20
    assert "| 4 KiB | - |" in table
    assert "| - | 11 B |" in table
    assert "| ours / theirs | 4.00x | 4.00x | 4.00x | 1 |" in table


@needs_cap
def test_the_cap_is_the_same_for_all(pretend, capsys, tmp_path: Path) -> None:
    pretend("small")
    pretend("large", {"waste": 300})
    folder = tmp_path / "out"
    arguments = ["--systems", "small,large", "-b", "2", "--cpu-mem", "128MiB", "--gpu-mem", "1"]
    table, summary = _bench(capsys, folder, *arguments)
    assert summary["cap"] == {"cpu_mem": 128 << 20, "enforced": True, "why_not": None}
    assert summary["failed"]["large"].startswith("out of memory: exit code 137: the command wanted more than")
    record = json.loads((folder / "run-01-small.json").read_text())
    assert 0 < record["peak_cgroup_bytes"] <= 128 << 20
    assert record["peak_bytes"] == record["peak_cgroup_bytes"]
    assert (record["detail"]["cpu_mem"], record["detail"]["gpu_mem"]) == (128 << 20, 1 << 30)
    assert "within 128 MiB" in table


def test_a_cap_that_cannot_be_enforced_is_told(pretend, capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("h2o_flexgen.baselines.runner.cap_problem", lambda: "needs root")
    pretend("one")
    table, summary = _bench(capsys, tmp_path / "out", "--systems", "one", "-b", "2", "--cpu-mem", "1")
    assert summary["cap"] == {"cpu_mem": 1 << 30, "enforced": False, "why_not": "needs root"}
    assert "nothing enforced it: needs root." in table
    assert json.loads((tmp_path / "out" / "run-01-one.json").read_text())["peak_cgroup_bytes"] is None


@needs_cap
def test_a_capped_run_that_takes_too_long_leaves_nothing(tmp_path: Path) -> None:
    prefix = memcap.cap_command(64 << 20, [], tmp_path / "report.json")
    finished = run_process("http.server", ["0"], threads=1, timeout=1.0, prefix=prefix)
    assert finished.timed_out
    assert finished.reason.startswith("gave up after")
    assert memcap.read_report(tmp_path / "report.json")["exit_code"] == 143  # it ended when it was asked to
    assert memcap.read_report(tmp_path / "nowhere.json") == {}


def test_reads_from_disks_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "data"
    pages = mmap.mmap(-1, 8 << 20)
    pages.write(os.urandom(8 << 20))
    try:  # past the page cache: one that is asked to drop pages may keep some
        stored = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    except OSError:
        pytest.skip("the folder is not on a disk")
    try:
        assert os.write(stored, pages) == 8 << 20
    finally:
        os.close(stored)
    run_process("base64", ["-e", os.devnull], threads=1, timeout=60)  # then it reads nothing of itself
    finished = run_process("base64", ["-e", str(file)], threads=1, timeout=60)
    if finished.read_bytes == 0:
        pytest.skip("the folder is not on a disk")
    assert finished.read_bytes is not None
    assert finished.read_bytes >= 8 << 20


@pytest.mark.slow
def test_the_best_batch_is_found_and_shown_beside_the_equal_one(pretend, capsys, tmp_path: Path) -> None:
    pretend("ours", {"flat": 32}, own=True)  # no faster beyond 32
    pretend("theirs", {"room": 8})  # no room beyond 8
    folder = tmp_path / "out"
    table, summary = _bench(capsys, folder, "--systems", "ours,theirs", "-b", "auto")
    assert [run["batch"] for run in summary["tried"]["ours"]] == [8, 16, 32, 64]
    assert [run["batch"] for run in summary["tried"]["theirs"]] == [8, 16]
    assert summary["tried"]["theirs"][1]["out_of_memory"]
    assert summary["batches"] == {"ours": 8, "theirs": 8}
    assert summary["best"]["batches"] == {"ours": 32, "theirs": 8}
    assert summary["best"]["ratios"]["ours/theirs"]["gen_throughput"]["median"] == 4
    assert [(row["batches"], row["system"], row["batch"]) for row in _rows(folder)] == [
        ("equal", "ours", "8"),
        ("equal", "theirs", "8"),
        ("best", "ours", "32"),
        ("best", "theirs", "8"),
    ]
    assert "batch 16: out of memory: exit code 1: RuntimeError" in table
    assert (folder / "best" / "run-01-ours.json").is_file()


@pytest.mark.slow
def test_a_list_of_batches_and_systems_that_never_run(pretend, capsys, tmp_path: Path) -> None:
    pretend("broken", {"fail": "boom"})
    pretend("good")
    pretend("absent", environment="absent")
    _, summary = _bench(capsys, tmp_path / "out", "--systems", "broken,good,absent", "-b", "2,3")
    assert [run["batch"] for run in summary["tried"]["good"]] == [2, 3]
    assert summary["batches"] == {"good": 3}
    assert "best" not in summary  # the equal batch is everybody's best
    assert summary["failed"]["broken"] == "exit code 4: boom"
    assert "scripts/peer_env.sh absent" in summary["failed"]["absent"]


def test_too_little_memory_for_the_first_batch_halves_it(pretend, tmp_path: Path) -> None:
    pretend("tight", {"room": 3})
    found = search(_runner(tmp_path, systems=("tight",), batch_sizes=()), "tight", lambda line: None)
    assert [run["batch"] for run in found.tried] == [FIRST, FIRST // 2, FIRST // 4]
    assert found.best == 2


def test_a_search_ends_when_its_time_is_up(pretend, tmp_path: Path) -> None:
    pretend("slow")
    runner = _runner(tmp_path, systems=("slow",), batch_sizes=(), search_time=1e-6)
    found = search(runner, "slow", lambda line: None)
    assert [run["batch"] for run in found.tried] == [FIRST]
    assert found.stopped == "the time for the search was up"


def test_a_batch_that_would_take_the_machines_memory_is_not_tried(pretend, tmp_path: Path, monkeypatch) -> None:
    pretend("big")
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 1 << 20}))
    found = search(_runner(tmp_path, systems=("big",), batch_sizes=()), "big", lambda line: None)
    assert [run["batch"] for run in found.tried] == [FIRST]
    assert "memory" in found.stopped


def test_common_and_smaller_batches() -> None:
    def tried(**speeds: float) -> Search:
        return Search([{"batch": int(size[1:]), "gen_throughput": speed} for size, speed in speeds.items()])

    one, two, none = tried(b8=1.0, b16=3.0, b32=2.0, b64=4.0), tried(b8=1.0, b16=2.0), Search()
    assert common({"one": one, "two": two, "none": none}) == 16
    assert common({"one": tried(b4=1.0), "two": tried(b8=1.0)}) == 4
    assert common({"none": none}) is None
    assert smaller(one) == [16, 32, 8]
    assert none.reason == "nothing was tried"


def test_projection_of_a_short_run(pretend, tmp_path: Path) -> None:
    pretend("one")
    run = _runner(tmp_path, systems=("one",)).run("one", batch=2, gen_len=3)  # 1 s, then 2 s for two steps
    assert projected(run, short=3, gen_len=11) == pytest.approx(2 * 11 / (1 + 10))


def test_what_looks_like_too_little_memory() -> None:
    def ended(code: int, errors: str = "") -> Finished:
        return Finished(code, "", errors, 1.0, 0, False)

    assert ended(137, "memcap: the command wanted more than 6G, and the kernel ended it\n").out_of_memory
    assert ended(-9).out_of_memory
    assert ended(1, "x\ntorch.OutOfMemoryError: CUDA out of memory. Tried\nmemcap: peak 3 of 4 bytes").out_of_memory
    assert not ended(1, "ValueError: no").out_of_memory
    assert ended(1, "ValueError: no\nmemcap: peak 3 of 4 bytes").reason == "exit code 1: ValueError: no"
    assert ended(REFUSED, "runs OPT only\n").reason == "runs OPT only"


def test_adapters_of_peers_need_nothing_else_of_this_package() -> None:
    """Their environments have none of what the rest imports."""
    folder = Path(memcap.__file__).parent
    allowed = {"work", "transformers", "flexgen_placement", "random_gguf"}
    standard = {"cores"}  # the standard library alone, and not in that folder
    for name in (*allowed, *(SYSTEMS.get(name).adapter.rpartition(".")[2] for name in SYSTEMS.names())):
        if name != "own":  # ours
            tree = ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))
            froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
            ours = {
                alias.name if node.module == "h2o_flexgen.baselines" else (node.module or "").rpartition(".")[2]
                for node in froms
                if (node.module or "").startswith("h2o_flexgen")
                for alias in node.names
            }
            assert ours <= allowed | standard, name


def test_every_environment_has_its_versions() -> None:
    pins = Path(memcap.__file__).parents[2] / "configs" / "peers"
    wanted = {SYSTEMS.get(name).environment for name in SYSTEMS.names()} - {""}
    assert {path.stem for path in pins.glob("*.txt")} == wanted
    for path in pins.glob("*.txt"):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        assert all(line.count("==") == 1 for line in lines), path
        peer = BUILT_FROM.get(path.stem, path.stem)
        assert any(line.startswith(f"{peer}==") for line in lines), path
        # Any other torch may bring gigabytes of CUDA; what is built from C++ has none.
        assert ("torch==2.13.0" in lines) == (path.stem not in BUILT_FROM), path
