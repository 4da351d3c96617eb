"""FAULTS row 5: Ctrl-C and SIGTERM, whatever the run is doing. Every run here is a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.checkpoint.reader import CheckpointSource
from h2o_flexgen.engine.execution.executor import Executor
from h2o_flexgen.planning.llm import LLM
from h2o_flexgen.schedule.tasks import Task
from tests.programs import Child, answers, left_in, until

ON_DISK = ("--weights-placement", "disk", "--cache-placement", "disk", "--hidden-placement", "disk")
SMALL_BLOCKS = ("--gpu-batch-size", 2, "--num-gpu-batches", 2)
Patch = Callable[[], None]


def default_signals() -> None:
    """As a shell starts a program in the foreground, however the tests were started."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def slow_loading(marker: Path) -> Patch:
    """Makes a child say when it loads weights, and take its time over it."""
    original = CheckpointSource.read_into

    def read_into(self: CheckpointSource, *arguments: Any) -> None:
        marker.touch()
        time.sleep(0.05)
        original(self, *arguments)

    return lambda: setattr(CheckpointSource, "read_into", read_into)


def slow_steps(marker: Path, first: int, seconds: float = 0.05) -> Patch:
    """Makes a child say when it computes step `first` or a later one, and take its time from there on."""
    original = Executor._compute

    def compute(self: Executor, task: Task) -> Any:
        if task.step >= first:
            marker.touch()
            time.sleep(seconds)
        return original(self, task)

    return lambda: setattr(Executor, "_compute", compute)


PHASES: dict[str, tuple[Callable[[Path], Patch], tuple[str, ...], signal.Signals]] = {
    "loading": (slow_loading, ("--cache-placement", "disk"), signal.SIGINT),
    "packing": (slow_loading, (*ON_DISK, "--dtype", "bfloat16"), signal.SIGTERM),
    "prefill": (lambda marker: slow_steps(marker, 0), ON_DISK, signal.SIGINT),
    "decode": (lambda marker: slow_steps(marker, 3), ON_DISK, signal.SIGTERM),
}


@pytest.mark.parametrize("phase", PHASES)
def test_row_05_a_signal_ends_the_run_cleanly(tmp_path: Path, model: Path, phase: str) -> None:
    patch, placed, number = PHASES[phase]
    offload, marker, output = tmp_path / "offload", tmp_path / "marker", tmp_path / "answers.jsonl"
    arguments = ("--model", model, "--prompt-len", 9, "--num-prompts", 8, "--gen-len", 8, *SMALL_BLOCKS, *placed)
    with Child(tmp_path, *arguments, "--offload-dir", offload, "--output", output, before=patch(marker)) as child:
        until(marker.exists)
        child.kill(number)
        ran = child.wait()
    assert (ran.code, ran.out) == (128 + number, "")
    assert ("interrupted" if number == signal.SIGINT else "terminated") in ran.err
    assert "Traceback" not in ran.err
    assert left_in(offload) == []
    assert not output.exists(), "an empty answer file is in the way of the next run"


@pytest.mark.parametrize("overwrite", [False, True])
def test_row_05_finished_answers_are_kept_whole(tmp_path: Path, model: Path, overwrite: bool) -> None:
    output, marker = tmp_path / "answers.jsonl", tmp_path / "marker"
    if overwrite:
        output.write_text('"what was there"\n')
    arguments = ("--model", model, "--prompt-len", 5, "--num-prompts", 200, "--gen-len", 2, "--gpu-batch-size", 1)
    flags, slow = ("--overwrite",) if overwrite else (), slow_steps(marker, 0, 0.005)
    with Child(tmp_path, *arguments, "--output", output, *flags, before=slow) as child:

        def written() -> Path:
            return next(tmp_path.glob("answers.jsonl.*.part"), output) if overwrite else output

        until(lambda: written().exists() and written().read_bytes().count(b"\n") >= 2)
        child.kill(signal.SIGINT)
        ran = child.wait()
    assert ran.code == 130
    kept = written()
    lines = answers(kept)
    assert 2 <= len(lines) < 200
    assert f"the {len(lines)} answers that were finished: {kept}" in ran.err
    if overwrite:
        assert output.read_text() == '"what was there"\n', "the old file stays until the new one is complete"


def test_row_05_an_engine_survives_an_interrupt(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a notebook: wherever it arrives, the same engine works again and holds no memory of the failed call."""
    prompts = [[2, 9, 8, 7, 6], [2, 30, 31], [2, 40, 50, 60], [2, 70]]
    everything = {name: {"cpu": 0.5, "disk": 0.5} for name in ("weights", "cache", "hidden")}
    policy: dict[str, Any] = {"gpu_batch_size": 2, "num_gpu_batches": 2, **everything}
    with LLM(str(model), policy=policy, offload_dir=str(tmp_path / "offload")) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, max_new_tokens=4, ignore_eos=True)]
        assert llm._loaded is not None
        used = dict(llm._loaded.stages[0].tiers.cpu.items)
        for ticks in range(0, 60, 7):
            calls = iter(range(1000))
            original = Executor._compute

            def compute(self: Executor, task: Task, calls: Any = calls, ticks: int = ticks, run: Any = original) -> Any:
                if next(calls) == ticks:
                    raise KeyboardInterrupt
                return run(self, task)

            with monkeypatch.context() as patch:
                patch.setattr(Executor, "_compute", compute)
                with pytest.raises(KeyboardInterrupt):
                    llm.generate(prompts, max_new_tokens=4, ignore_eos=True)
            assert dict(llm._loaded.stages[0].tiers.cpu.items) == used
            assert llm._loaded.stages[0].tiers.disk.used == 0
        assert [output.token_ids for output in llm.generate(prompts, max_new_tokens=4, ignore_eos=True)] == expected


def test_row_05_a_second_signal_quits_at_once(tmp_path: Path, model: Path) -> None:
    marker, closing = tmp_path / "marker", tmp_path / "closing"

    def before() -> None:
        slow_steps(marker, 0)()

        def close(self: LLM) -> None:
            closing.touch()
            time.sleep(60)

        LLM.close = close  # type: ignore[method-assign]

    with Child(tmp_path, "--model", model, "--prompt-len", 9, before=before) as child:
        until(marker.exists)
        child.kill(signal.SIGTERM)
        until(closing.exists)
        child.kill(signal.SIGTERM)
        assert child.wait(5).code == 128 + signal.SIGTERM


def test_row_05_what_nohup_ignores_stays_ignored(tmp_path: Path, model: Path) -> None:
    marker = tmp_path / "marker"

    def before() -> None:
        slow_steps(marker, 0, 0.01)()
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    with Child(tmp_path, "--model", model, "--prompt-len", 3, "--num-prompts", 1, "-n", 1, before=before) as child:
        until(marker.exists)
        child.kill(signal.SIGINT)
        assert child.wait().code == 0


def test_row_05_a_signal_that_is_swallowed_ends_the_run_all_the_same(tmp_path: Path, model: Path) -> None:
    """What a handler raises inside a destructor or a callback is printed and forgotten by Python."""

    def before() -> None:
        original, killed = Executor._compute, []

        def compute(self: Executor, task: Task) -> Any:
            if not killed:
                killed.append(True)
                with contextlib.suppress(BaseException):
                    signal.raise_signal(signal.SIGTERM)
            return original(self, task)

        Executor._compute = compute  # type: ignore[method-assign]

    output = tmp_path / "answers.jsonl"
    with Child(tmp_path, "--model", model, "--prompt-len", 9, "-n", 50, "-o", output, before=before) as child:
        ran = child.wait()
    assert (ran.code, ran.out) == (143, "")
    assert not output.exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_row_05_a_signal_while_torch_is_imported(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Which takes seconds, and swallows exceptions as this stand-in for torch does."""
    marker = tmp_path / "marker"
    wait, output = "try: time.sleep(20)\nexcept BaseException: pass\n", tmp_path / "answers.jsonl"
    (tmp_path / "torch.py").write_text(f"import pathlib, time\npathlib.Path({str(marker)!r}).touch()\n{wait}")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-m", "h2o_flexgen.run", "-o", output], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": path}, preexec_fn=default_signals,
    ) as process:  # fmt: skip
        until(marker.exists)
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (code, "")
    assert err == ("interrupted\n" if code == 130 else "terminated\n")
    assert not output.exists(), "an empty answer file is in the way of the next run"


@pytest.mark.parametrize("module", ["h2o_flexgen", "h2o_flexgen.run", "h2o_flexgen.bench"])
def test_row_05_ctrl_c_before_a_program_listens(tmp_path: Path, module: str) -> None:
    """While its own modules are imported: no traceback, and no going on where the import swallows exceptions."""
    marker, seen = tmp_path / "marker", "h2o_flexgen.config.engine"
    (tmp_path / "sitecustomize.py").write_text(
        "import pathlib, sys, time\n\nclass Slow:\n    def find_spec(self, name, *_):\n"
        f"        if name == {seen!r}:\n            pathlib.Path({str(marker)!r}).touch()\n"
        "            try: time.sleep(20)\n            except BaseException: pass\n\n"
        "sys.meta_path.insert(0, Slow())\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-m", module, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path}, preexec_fn=default_signals,
    ) as process:  # fmt: skip
        until(marker.exists)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (-signal.SIGINT, "", ""), "130 for the shell"


@pytest.mark.slow
def test_row_05_a_whole_process_ends_too(tmp_path: Path, model: Path) -> None:
    """The same by `python -m`, with nothing patched: the interpreter's own exit must not wait for a thread."""
    offload, output = tmp_path / "offload", tmp_path / "answers.jsonl"
    command = [sys.executable, "-m", "h2o_flexgen.run", "--model", str(model), "--offload-dir", str(offload)]
    command += ["--prompt-len", "20", "--num-prompts", "5000", "--gbs", "1", "-n", "8", "-o", str(output)]
    with subprocess.Popen(
        [*command, *ON_DISK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=default_signals
    ) as process:
        try:
            until(lambda: output.exists() and output.stat().st_size > 0)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=10)
        finally:
            process.kill()  # else one that did not get there would be waited for to its end
    assert (process.returncode, out) == (130, ""), err
    assert "Traceback" not in err
    assert left_in(offload) == []
    assert 0 < len(answers(output)) < 5000
