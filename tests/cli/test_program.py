"""What is around every program: prompts from stdin, streams that are closed, notices, progress, failures of our own."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.cli import progress
from h2o_flexgen.cli.program import exit_on_errors, output_file
from h2o_flexgen.cli.progress import JobProgress, RunProgress
from h2o_flexgen.cli.search_arguments import parse_search
from h2o_flexgen.config.hardware.profile import find_profile
from h2o_flexgen.errors import H2OFlexGenError, PlanError
from h2o_flexgen.folders import ask_for, can_write
from h2o_flexgen.jobs.journal import JobResults
from h2o_flexgen.jobs.source import Source
from h2o_flexgen.kernels import native
from tests.programs import Child, Run, on_a_terminal


def from_stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_prompts_from_stdin(model: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from_stdin(monkeypatch, "one\n\ntwo\n")
    assert run("--model", model, "--prompts", "-").record["sequences"] == 2
    from_stdin(monkeypatch, '{"prompt": "three"}\n')
    ran = run("--model", model, "--prompts", "-", "-n", 2)
    assert ran.out.splitlines()[1] == "three"
    from_stdin(monkeypatch, "one\n\0\n")
    assert "stdin is not text" in run("--model", model, "--prompts", "-").err


def test_a_closed_stdin_has_no_prompts(model: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it after `<&-`
    ran = run("--model", model, "--prompts", "-")
    assert ran.code == 2
    assert "stdin is closed" in ran.err


def test_the_first_prompts_only(model: Path, run: Run) -> None:
    assert run("--model", model, "--prompt", "a", "--prompt", "b", "--num-prompts", 1).record["sequences"] == 1


def test_a_command_line_that_is_no_unicode(model: Path, run: Run) -> None:
    ran = run("--model", model, "--prompt", "a\udcff")
    assert ran.code == 2
    assert "--prompt is not valid Unicode text" in ran.err


def test_without_prompts_the_speed_is_measured_and_that_is_said(run: Run) -> None:
    ran = run("--model", "demo", "--weights", "dummy", "-n", 2, "--gbs", 1, "--num-gb", 1)
    assert ran.code == 0
    assert "note: no prompts were given, so 1 random ones of 512 tokens measure the speed" in ran.err
    assert (ran.record["sequences"], ran.record["prompt_tokens"]) == (1, 512)


def test_random_prompts_leave_room_in_a_small_context(model: Path, run: Run) -> None:
    ran = run("--model", model, "-n", 9)
    assert ran.code == 0, ran.err
    context = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    assert f"4 random ones of {context - 9} tokens" in ran.err


def test_the_default_run_answers_the_demo_prompts(run: Run) -> None:
    ran = run("-n", 4)
    assert ran.code == 0, ran.err
    assert ran.out.count("\n>>> ") == ran.record["sequences"] > 3


def test_packed_weights_are_mentioned_once(tmp_path: Path, model: Path, run: Run) -> None:
    offload = tmp_path / "offload"
    arguments = ("--model", model, "--prompt", "abc", "--weights-placement", "disk", "--dtype", "bfloat16")
    ran = run(*arguments, "--offload-dir", offload)
    assert re.search(rf"note: \S+ KiB of packed weights stay in {offload} and serve later runs", ran.err), ran.err
    assert "packed weights" not in run(*arguments, "--offload-dir", offload).err


def test_an_empty_offload_folder_is_none(
    tmp_path: Path, model: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`H2O_FLEXGEN_OFFLOAD_DIR=` must not mean the current folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("H2O_FLEXGEN_OFFLOAD_DIR", "")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for flags in ((), ("--offload-dir", "")):
        assert run("--model", model, "--prompt", "abc", "--cache-placement", "disk", *flags).code == 0
    assert list((tmp_path / "here").iterdir()) == []
    assert (tmp_path / "home/.cache/h2o_flexgen/offload/lock").exists()


@pytest.mark.parametrize("closed", [1, 2])
def test_a_stream_that_is_closed(tmp_path: Path, model: Path, closed: int) -> None:
    def before() -> None:
        os.close(closed)
        setattr(sys, {1: "stdout", 2: "stderr"}[closed], None)

    with Child(tmp_path, "--model", model, "--prompt", "abc", before=before) as child:
        assert child.wait().code == 0


def test_python_warnings_are_one_line(model: Path, run: Run) -> None:
    told = "warning: --temperature, --top-k have no effect without --do-sample\n"
    for prompt in (("--prompt", "abc"), ("--prompt-len", 3)):
        ran = run("--model", model, *prompt, "--temperature", 2, "--top-k", 3, "-q")
        assert ran.err == told


def code_of(work: Callable[[], int]) -> int:
    with exit_on_errors() as outcome:
        outcome.code = work()
    return outcome.code


def test_programs_run_in_any_thread(capsys: pytest.CaptureFixture[str]) -> None:
    """Signal handlers belong to the main thread; elsewhere the program does without."""
    codes: list[int] = []

    def fail() -> int:
        raise PlanError("too large", "needed less", "take less")

    thread = threading.Thread(target=lambda: codes.append(code_of(fail)))
    thread.start()
    thread.join()
    assert codes == [5]
    assert capsys.readouterr().err == "error: too large\n  needed less\n  take less\n"


def test_exit_codes_of_other_ends(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(error: BaseException) -> int:
        def work() -> int:
            raise error

        return code_of(work)

    assert ends(MemoryError()) == 5
    assert "error: out of memory" in capsys.readouterr().err
    assert ends(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 17 bytes")) == 5
    assert "lower --cpu-mem" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="a bug of ours"):
        ends(RuntimeError("a bug of ours"))
    assert ends(SystemExit(2)) == 2
    assert ends(KeyboardInterrupt()) == 130
    with pytest.raises(ZeroDivisionError):
        ends(ZeroDivisionError())
    monkeypatch.setenv("H2O_FLEXGEN_DEBUG", "1")
    with pytest.raises(PlanError):
        ends(PlanError("shown with its traceback"))


@pytest.mark.parametrize("names", [["x" * 300], ["closed", "a"]], ids=["too long", "in a closed folder"])
def test_files_that_cannot_be_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even whether they are there, which is raised then; any other failure of a file is a bug of ours."""
    path = tmp_path.joinpath(*names)
    code = errno.ENAMETOOLONG if len(names) == 1 else errno.EACCES

    def refused(*_: object, **__: object) -> os.stat_result:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(os, "stat", refused)
    found = code_of(lambda: ask_for(path) or 0)
    monkeypatch.undo()
    assert found == 2
    assert capsys.readouterr().err == f"error: {path}: {os.strerror(code)}\n  needed a path that can be reached\n"
    code = errno.EIO
    monkeypatch.setattr(os, "stat", refused)
    with pytest.raises(OSError, match="Input/output"):
        code_of(lambda: ask_for(path) or 0)


@pytest.mark.parametrize(
    "asks",
    [
        lambda path: output_file("--output", str(path), keep=True),
        lambda path: find_profile(str(path)),
        lambda path: parse_search(["--model", str(path), "--hardware", "t4"], {}),
        Source,
        JobResults,
    ],
)
def test_what_cannot_be_asked_for_is_not_said_to_be_missing(tmp_path: Path, asks: Callable[[Path], object]) -> None:
    """Since Python 3.14 pathlib answers that such a file is not there."""
    with pytest.raises((OSError, H2OFlexGenError), match="File name too long"):
        asks(tmp_path / ("x" * 300))
    for nowhere in ("x", "a/b", "zero\0"):
        ask_for(tmp_path / nowhere)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/t/made"), "/t/made: No space left on device"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/t']"), "No usable temporary"),
    ],
)
def test_no_room_for_temporary_files(capsys: pytest.CaptureFixture[str], error: OSError, said: str) -> None:
    def work() -> int:
        raise error

    assert code_of(work) == 6
    told = capsys.readouterr().err
    assert said in told
    assert "set TMPDIR" in told


def test_a_model_and_a_home_in_a_closed_folder(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another user, as in containers that run as somebody without a home: exit 4; and a cache elsewhere."""
    closed, asked = tmp_path / "closed", os.stat

    def stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if not isinstance(path, int) and closed in Path(os.fsdecode(path)).parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return asked(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", stat)
    ran = run("--model", closed / "model", "--prompt", "abc")
    assert (ran.code, ran.err.splitlines()[0]) == (4, f"error: {closed / 'model'}: Permission denied")
    closed.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != closed)
    assert not can_write(closed / "h2o_flexgen")


def test_handlers_and_warnings_are_put_back() -> None:
    import signal

    before = (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), warnings.showwarning)
    assert code_of(lambda: 0) == 0
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), warnings.showwarning) == before


@pytest.mark.parametrize("quiet", [False, True])
def test_the_first_run_says_that_it_compiles(
    model: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: bool
) -> None:
    """In an empty cache folder, and with a compiler that has nothing to do: what it leaves is no library."""
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo 1\nexit 0\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(native, "_compiler", lambda: str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    try:
        ran = run("--model", model, "--prompt", "abc", "-n", 2, *(["-q"] if quiet else []))
    finally:
        native.library.cache_clear()
    assert ran.code == 0
    if native.why_not() is None:
        assert ("compiling the C kernels" in ran.err) == (not quiet)


@pytest.mark.parametrize("columns", [0, 100])
def test_a_bar_on_a_terminal(tmp_path: Path, model: Path, columns: int) -> None:
    arguments = ("--model", model, "--prompt-len", 9, "--num-prompts", 6, "-n", 50, "--gbs", 2)
    code, seen = on_a_terminal(tmp_path, columns, *arguments)
    assert code == 0
    assert "loading weights:   0%|" in seen
    assert re.search(r"prefill: +0%\|.*0/54 tokens", seen), seen
    assert "loading weights" in seen.partition("prefill")[0]
    assert "model       " in seen
    assert "bar" not in seen.splitlines()[-1]
    assert "prefill" not in on_a_terminal(tmp_path, 100, *arguments, "--quiet")[1]


def test_the_bar_says_the_phase_and_what_is_left(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_DRAW_EVERY", 0.0)
    arguments = ("--model", model, "--prompt-len", 9, "--num-prompts", 6, "-n", 50, "--gbs", 2)
    lines = on_a_terminal(tmp_path, 100, *arguments)[1].split("\r")
    for words in (
        r"prefill: +17%\|.* 9/54 tokens, \S+ tokens/s, 0 of 6 sequences, \d\d:\d\d left, then decode",
        r"prefill: 100%\|.* 54/54 tokens, \S+ tokens/s, 4 of 6 sequences, \d\d:\d\d left",
        r"decode: +33%\|.* 100/300 tokens, \S+ tokens/s, 2 of 6 sequences, \d\d:\d\d left",
    ):
        assert any(re.match(words, line) for line in lines), (words, lines)


def test_a_line_now_and_then_where_stderr_is_no_terminal(
    model: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = run("--model", model, "--prompt-len", 9, "--num-prompts", 4, "-n", 3, "--gbs", 2)
    assert "\nprefill:" not in ran.err, "a short run needs none"
    monkeypatch.setattr(progress, "_LINE_EVERY", 0.0)
    monkeypatch.setattr(progress, "_SHARE", 1.0)
    ran = run("--model", model, "--prompt-len", 9, "--num-prompts", 4, "-n", 3, "--gbs", 2)
    lines = [line for line in ran.err.splitlines() if line.startswith(("prefill:", "decode:"))]
    assert lines[0] == "prefill: 0 of 36 tokens, 0 of 4 sequences"
    assert any(
        re.match(r"prefill: 24 of 36 tokens, .* tokens/s, \d of 4 sequences, 00:00 left", line) for line in lines
    )
    assert any(re.match(r"decode: 6 of 12 tokens, .* tokens/s, 2 of 4 sequences, 00:00 left", line) for line in lines)
    assert any(line.startswith("loading weights: ") for line in ran.err.splitlines())


class Clock:
    """What `Progress` takes the time from, and a call of 2 blocks of 4 prompts of 100 tokens and 11 new ones each."""

    UNITS, UNIT_S, STEP_S = 5, 2.0, 3.0
    WHOLE_S = 2 * (UNITS * UNIT_S + 10 * STEP_S)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)

    def run(self, told: RunProgress) -> Iterator[str]:
        """What is said after each unit of the prompts and each step."""
        told("loading weights", 5, 5)
        self.now += 60  # which is not of the call
        for block in range(2):
            told("generating", 44 * block, 88)
            for unit in range(self.UNITS + 1):
                self.now += self.UNIT_S if unit else 0
                told("prefill", 400 * block + 80 * unit, 800)
                yield told._state("prefill")
            for step in range(1, 11):
                told("generating", 44 * block + 4 * step, 88)
                yield told._state("generating")
                self.now += self.STEP_S


def left(state: str) -> int:
    """The seconds in "01:05 left"."""
    minutes, seconds = re.findall(r"(\d\d):(\d\d) left", state)[0]
    return 60 * int(minutes) + int(seconds)


def test_the_time_that_is_left_is_right_from_the_first_decode_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = Clock(monkeypatch), RunProgress(quiet=True, sequences=8)
    start = clock.now + 60
    for number, state in enumerate(clock.run(told)):
        spent = clock.now - start
        if number > clock.UNITS + 1:
            # A new token comes with a prompt, which is one fewer of the ten steps for each of the blocks.
            assert left(state) == pytest.approx(clock.WHOLE_S - spent, abs=2 * clock.STEP_S + 1), (number, state)
        elif 0 < number <= clock.UNITS:
            assert state.endswith(" left, then decode")
            assert left(state) == 2 * clock.UNITS * clock.UNIT_S - spent
        else:
            assert "left" not in state, "nothing of that phase was measured yet"


def test_before_anything_is_measured_a_prediction_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = Clock(monkeypatch), RunProgress(quiet=True, sequences=8)
    told.expect({"prefill_s": 20.0, "decode_s": 60.0})
    states = list(clock.run(told))
    assert left(states[0]) == clock.WHOLE_S
    assert left(states[clock.UNITS]) == 10 + 60
    told.expect(None)
    assert told._state("prefill").endswith("left"), "what was measured stays known"


def test_progress_that_is_closed_twice(capsys: pytest.CaptureFixture[str]) -> None:
    bars = RunProgress(quiet=False, sequences=1)
    bars("prefill", 1, 2)
    bars("generating", 1, 2)
    bars.close()
    bars.close()
    assert capsys.readouterr().out == ""


def test_a_job_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """From its begin on, and no time where there is nothing to tell it from."""
    clock = Clock(monkeypatch)
    told, quiet = (JobProgress(each, 2000, 500) for each in (False, True))
    foreseen = JobProgress(False, 2000, 500, left=lambda seconds: f"between {seconds:.0f} s and a day left")
    told.finished(10, 0)
    assert capsys.readouterr().err == "", "a short job needs no line"
    for words, line in (
        (("packing weights", 1 << 20, 1 << 30), "packing weights: 1 MiB of 1 GiB\n"),
        (("prefill", 5, 10), "510 of 2,000 requests\n"),
    ):
        clock.now += 50
        for each in (told, quiet):
            each(*words)
        assert capsys.readouterr().err == line
    clock.now += 50
    for each in (told, quiet):
        each.finished(100, 3)
        each.close()
    assert capsys.readouterr().err == "600 of 2,000 requests, 3 failed\n"
    foreseen.finished(100, 0)
    assert capsys.readouterr().err == "600 of 2,000 requests, between 150 s and a day left\n"


def test_a_job_does_not_spend_its_time_on_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)

    def left(_: float) -> str:
        clock.now += 3
        return "an hour left"

    told = JobProgress(False, 10**6, left=left)
    for second in range(400):
        clock.now += 1
        told.finished(second, 0)
    assert capsys.readouterr().err.count("an hour left") == 3
