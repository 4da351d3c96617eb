"""A job that is killed, told to stop, or runs out of disk, as a process of its own: the same command goes on."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.batch import main
from tests.jobs.files import request, results, timeless, write
from tests.programs import Child, Ran, until
from tests.seeds import moved


def requests(folder: Path, count: int) -> Path:
    """Mixed ones: greedy, drawn, stopped, of several samples, and faulty in each way."""
    source, lines = random.Random(moved(5)), []
    for number in range(count):
        text = "".join(source.choices("abc defg.", k=source.randrange(1, 40)))
        body: dict[str, Any] = {"prompt": text, "max_tokens": source.choice([2, 20, 60])}
        body |= source.choice([{"temperature": 0}, {}, {"seed": 3}, {"n": 2}, {"stop": ["a", "b"]}, {"promt": "x"}])
        name = "r0" if number % 31 == 30 else f"r{number}"
        line = request(name, body)
        lines.append(line[: len(line) // 2] if number % 37 == 36 else line)
    return write(folder / "in.jsonl", *lines)


def finished(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def end(folder: Path, *arguments: object) -> Ran:
    with Child(folder, *arguments, program=main) as child:
        return child.wait(60)


def by_id(path: Path) -> dict[Any, dict[str, Any]]:
    return timeless(results(path, "id"))


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_job_that_is_killed_again_and_again(tmp_path: Path, model: Path, kills: int) -> None:
    """At moments of no choice: in the end nothing is lost, nothing is there twice, and what was finished stayed."""
    file, source = requests(tmp_path, 40 + 8 * kills), random.Random(moved(kills))
    flags = ("-i", file, "--model", model, "--hh-ratio", 0.5, "--gpu-batch-size", 4, "--no-json")
    assert end(tmp_path, *flags, "-o", tmp_path / "whole.jsonl").code == 3
    wanted, out, kept = by_id(tmp_path / "whole.jsonl"), tmp_path / "out.jsonl", b""
    for _ in range(kills):
        goal = finished(out) + source.randrange(1, len(wanted) // kills)
        with Child(tmp_path, *flags, "-o", out, program=main) as child:
            until(lambda goal=goal: finished(out) >= goal)
            os.kill(child.pid, signal.SIGKILL)
            assert child.wait().code == 128 + signal.SIGKILL
        now = out.read_bytes()
        assert now.startswith(kept), "a finished line changed"
        *entries, last = (tmp_path / "out.jsonl.journal").read_bytes().split(b"\n")
        # A result is finished once its entry is there: the kill may have come between the two.
        done = sum(entry.startswith((b"ok ", b"failed ")) for entry in entries)
        assert 0 <= finished(out) - done <= 1
        kept = b"".join(line + b"\n" for line in now.split(b"\n")[:done])
        if not last and source.random() < 0.5:  # as if the kill had come in the middle of a line
            out.write_bytes(now + b'{"id": "batch\xc3')
    ran = end(tmp_path, *flags, "-o", out)
    assert ran.code == 3
    assert by_id(out) == wanted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_job_that_is_told_to_stop(tmp_path: Path, model: Path, number: signal.Signals) -> None:
    file, out = requests(tmp_path, 40), tmp_path / "out.jsonl"
    flags = ("-i", file, "-o", out, "--model", model, "--gpu-batch-size", 2)
    with Child(tmp_path, *flags, program=main) as child:
        until(lambda: finished(out) > 5)
        child.kill(number)
        ran = child.wait()
    assert ran.code == 75
    assert "the same command goes on" in ran.err
    done = finished(out)
    again = end(tmp_path, *flags)
    assert (again.code, again.record["before"]) == (3, done)
    assert finished(out) == 40


def test_a_disk_that_is_full(tmp_path: Path, model: Path) -> None:
    """A file may not grow beyond a limit, in the middle of a line: what is finished stays, exit 6."""
    file, out = requests(tmp_path, 40), tmp_path / "out.jsonl"
    flags = ("-i", file, "-o", out, "--model", model, "--gpu-batch-size", 2)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))

    with Child(tmp_path, *flags, before=limit, program=main) as child:
        ran = child.wait()
    assert ran.code == 6, ran.err
    assert f"cannot write {out}" in ran.err
    assert all(json.loads(line) for line in out.read_text().splitlines())
    done = finished(out)
    assert 0 < done < 40
    assert end(tmp_path, *flags).record["before"] == done
    assert finished(out) == 40


def test_two_processes_at_once(tmp_path: Path, model: Path) -> None:
    file, out = requests(tmp_path, 40), tmp_path / "out.jsonl"
    flags = ("-i", file, "-o", out, "--model", model, "--gpu-batch-size", 2)
    with Child(tmp_path, *flags, program=main) as child:
        until(lambda: finished(out) > 2)
        assert main([str(flag) for flag in flags]) == 7
        assert child.wait(60).code == 3
    assert finished(out) == 40


def test_who_reads_the_summary_may_have_gone(tmp_path: Path, model: Path) -> None:
    """`batch ... | true`: the exit code is that of the job, and failures are told."""
    file = requests(tmp_path, 12)
    read, write_end = os.pipe()
    os.close(read)
    flags = ("-i", file, "-o", tmp_path / "out.jsonl", "--model", model)
    with Child(tmp_path, *flags, program=main, before=lambda: os.dup2(write_end, 1)) as child:
        os.close(write_end)
        ran = child.wait(60)
    assert ran.code == 3
    assert "--retry-failed runs them again" in ran.err
    assert "Traceback" not in ran.err
