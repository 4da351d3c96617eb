"""FAULTS rows 6, 7, 14 and 26 through the program: full, failing and lying disks, files that change."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.engine.execution.executor import Executor
from h2o_flexgen.errors import StorageError
from h2o_flexgen.memory.rundir import OffloadDir
from h2o_flexgen.planning.llm import LLM
from tests.programs import Child, Run, answers, left_in

DISK_CACHE = ("--cache-placement", "disk", "--gpu-batch-size", 2, "--num-gpu-batches", 2)
DISK_WEIGHTS = ("--weights-placement", "disk")
PACKED = (*DISK_WEIGHTS, "--dtype", "bfloat16")
DISK_RECALL = ("--eviction", "h2o", "--kv-budget", 5, "--sinks", 1, "--recall", "disk", "--recall-every", 1)
WORK = ("--prompt-len", 9, "--num-prompts", 4, "--gen-len", 4)


def test_row_06_no_room_for_an_answer(model: Path, run: Run) -> None:
    """/dev/full takes nothing, as a full disk does."""
    ran = run("--model", model, "--prompt", "abc", "--output", "/dev/full")
    assert ran.code == 6
    assert "cannot write to --output /dev/full: No space left on device" in ran.err
    assert os.stat("/dev/full").st_rdev, "a device is never replaced by a file"


@pytest.mark.parametrize("flag", ["--trace", "--log-file", "--record-scores", "--report"])
def test_row_06_a_file_without_room_is_named(model: Path, run: Run, flag: str) -> None:
    ran = run("--model", model, "--prompt", "abc", "--hh-ratio", 0.5, flag, "/dev/full")
    assert ran.code == 6
    assert "error: cannot write /dev/full: No space left on device\n  free some space, or name a file on" in ran.err


def test_row_06_answers_before_the_disk_filled_up_stay_valid(tmp_path: Path, model: Path) -> None:
    output = tmp_path / "answers.jsonl"

    def before() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    arguments = ("--model", model, "--prompt-len", 9, "--num-prompts", 30, "--gen-len", 9, "--gpu-batch-size", 1)
    with Child(tmp_path, *arguments, "-o", output, before=before) as child:
        ran = child.wait()
    assert ran.code == 6
    assert "cannot write to --output" in ran.err
    lines = answers(output)
    assert 0 < len(lines) < 30
    assert f"the {len(lines)} answers that were finished" in ran.err


def test_row_06_no_room_for_what_goes_to_stdout(tmp_path: Path, model: Path) -> None:
    def before() -> None:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)

    with Child(tmp_path, "--model", model, "--prompt", "abc", before=before) as child:
        ran = child.wait()
    assert ran.code == 6
    assert "cannot write to stdout: No space left on device" in ran.err


def test_row_06_an_offload_folder_without_room_is_refused_before_any_work(
    tmp_path: Path, model: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights would fit, and the weights with the cache would not: nothing is packed in vain."""
    offload = tmp_path / "offload"
    monkeypatch.setattr(OffloadDir, "free_bytes", lambda _: 1_400_000)
    weights = run("--model", model, *PACKED, *WORK, "--offload-dir", offload)
    assert weights.code == 0, weights.err
    packed = sorted(offload.glob("packed-*/*"))
    more = ("--model", model, "--weights-placement", "disk", "--dtype", "float16", *DISK_CACHE)
    ran = run(*more, "--prompt-len", 60, "--num-prompts", 16, "--gbs", 16, "-n", 60, "--offload-dir", offload)
    assert ran.code == 6
    assert "KV cache" in ran.err
    assert f"in {offload}, whose file system has 1.34 MiB free" in ran.err
    assert "free some space, or name another folder with --offload-dir" in ran.err
    assert [path for path in sorted(offload.glob("packed-*/*")) if path.suffix == ".bin" or path in packed] == packed
    assert left_in(offload) == []


@pytest.mark.parametrize("placed", [PACKED, DISK_CACHE, DISK_RECALL])
def test_row_06_an_offload_folder_that_fills_up(tmp_path: Path, model: Path, placed: tuple[object, ...]) -> None:
    """A limit on the size of files stands for a disk that has less room than it said."""
    offload = tmp_path / "offload"

    def before() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    with Child(tmp_path, "--model", model, *placed, *WORK, "--offload-dir", offload, before=before) as child:
        ran = child.wait()
    assert ran.code == 6
    assert "error: " in ran.err
    assert "Traceback" not in ran.err
    assert left_in(offload) == []
    assert not list(offload.glob("packed-*/*.tmp"))


PREADV = os.preadv


class FailingReads:
    """preadv that fails for files in `folder`: the first `times` calls, after `after` good ones."""

    def __init__(self, folder: Path, times: int, after: int = 0) -> None:
        self.folder, self.left, self.after, self.failed = str(folder), times, after, 0
        self._lock = threading.Lock()

    def __call__(self, fd: int, views: list[memoryview], offset: int) -> int:
        with self._lock:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(self.folder):
                self.after -= 1
                if self.after < 0 and self.left > 0:
                    self.left -= 1
                    self.failed += 1
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
        return PREADV(fd, views, offset)


@pytest.mark.parametrize("placed", [DISK_WEIGHTS, PACKED, DISK_CACHE, DISK_RECALL])
def test_row_07_a_read_error_is_retried(
    tmp_path: Path, model: Path, run: Run, monkeypatch: pytest.MonkeyPatch, placed: tuple[object, ...]
) -> None:
    folder = model if placed == DISK_WEIGHTS else tmp_path / "offload"
    arguments = ("--model", model, *placed, *WORK, "--offload-dir", tmp_path / "offload")
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    assert run(*arguments, "-o", first).code == 0
    failing = FailingReads(folder, 2, after=3)
    monkeypatch.setattr(os, "preadv", failing)
    assert run(*arguments, "-o", second).code == 0
    assert failing.failed == 2
    assert answers(first) == answers(second)


@pytest.mark.parametrize("placed", [DISK_WEIGHTS, DISK_CACHE, DISK_RECALL])
def test_row_07_a_disk_that_keeps_failing_is_named(
    tmp_path: Path, model: Path, run: Run, monkeypatch: pytest.MonkeyPatch, placed: tuple[object, ...]
) -> None:
    folder = model if placed == DISK_WEIGHTS else tmp_path / "offload"
    failing = FailingReads(folder, 10**6, after=19 if placed == DISK_WEIGHTS else 3)
    monkeypatch.setattr(os, "preadv", failing)
    ran = run("--model", model, *placed, *WORK, "--offload-dir", tmp_path / "offload")
    assert ran.code == 6
    assert "Input/output error at byte " in ran.err
    assert str(folder) in ran.err
    assert "after 3 retries" in ran.err
    assert {DISK_WEIGHTS: "layers.", DISK_CACHE: "kv cache", DISK_RECALL: "evicted tokens"}[placed] in ran.err
    assert left_in(tmp_path / "offload") == []


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(bytes(data))


def test_row_14_a_flipped_bit_in_packed_weights(tmp_path: Path, model: Path, run: Run) -> None:
    offload = tmp_path / "offload"
    arguments = ("--model", model, *PACKED, *WORK, "--offload-dir", offload)
    good, again = tmp_path / "good.jsonl", tmp_path / "again.jsonl"
    assert run(*arguments, "-o", good).code == 0
    units = sorted(offload.glob("packed-*/unit-*.bin"))
    flip(units[2], 1000)
    ran = run(*arguments)
    assert ran.code == 6
    assert f"{units[2]} does not match its checksum" in ran.err
    assert "the damaged file was removed; run again to have it packed anew" in ran.err
    assert not units[2].exists()
    cured = run(*arguments, "-o", again)
    assert cured.code == 0, cured.err
    assert answers(good) == answers(again)


@pytest.mark.parametrize("gpu", [None, "1GiB"], ids=["cpu", "emulated gpu"])
@pytest.mark.parametrize("interrupted", [False, True])
def test_row_14_damaged_weights_are_not_used_by_the_next_call(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool, gpu: str | None
) -> None:
    """Nor by the one after a call that ended before it had waited for them: only what was checked is trusted."""
    settings: dict[str, Any] = {"policy": {"weights": {"disk": 1.0}}, "dtype": "bfloat16", "emulate_gpu": gpu}

    def tokens(llm: LLM) -> list[list[int]]:
        outputs = llm.generate([[2, 9, 8, 7, 6], [2, 30, 31]], max_new_tokens=5, ignore_eos=True)
        return [output.token_ids for output in outputs]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with LLM(str(model), offload_dir=str(tmp_path), **settings) as llm:
        good = tokens(llm)
    units = sorted(tmp_path.glob("packed-*/unit-*.bin"))
    units[0].write_bytes(bytes(255 - byte for byte in units[0].read_bytes()))  # what every pass begins with
    with LLM(str(model), offload_dir=str(tmp_path), **settings) as llm:
        if interrupted:
            with monkeypatch.context() as patch:
                patch.setattr(Executor, "_compute", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    tokens(llm)
        with pytest.raises(StorageError, match="run again to have it packed anew"):
            tokens(llm)
        assert not units[0].exists()
        assert tokens(llm) == good
        assert len(list(tmp_path.glob("packed-*/unit-*.bin"))) == len(units)


@pytest.mark.parametrize(("placed", "what"), [(DISK_CACHE, "kv cache"), (DISK_RECALL, "evicted tokens")])
def test_row_14_a_flipped_bit_in_the_cache_on_disk(
    tmp_path: Path, model: Path, run: Run, monkeypatch: pytest.MonkeyPatch, placed: tuple[object, ...], what: str
) -> None:
    """Of evicted tokens in all that was written, as few of them come back."""
    flipped = []
    original = os.pwritev

    def pwritev(fd: int, views: list[memoryview], offset: int) -> int:
        count = original(fd, views, offset)
        if not (flipped and placed == DISK_CACHE) and "/run-" in os.readlink(f"/proc/self/fd/{fd}"):
            flipped.append(offset)
            direct = bytearray(views[0])
            for at in range(7, len(direct), 4096):
                direct[at] ^= 1
            with open(f"/proc/self/fd/{fd}", "r+b") as file:
                file.seek(offset)
                file.write(direct)
        return count

    monkeypatch.setattr(os, "pwritev", pwritev)
    ran = run("--model", model, *placed, *WORK, "--offload-dir", tmp_path / "offload")
    assert flipped
    assert ran.code == 6
    assert f"{what}: what was read at byte " in ran.err
    assert "nothing of it was used" in ran.err


def damage(kind: str, path: Path) -> None:
    if kind == "shrinks":
        os.truncate(path, 5000)
    elif kind == "is replaced":
        other = path.with_name("other")
        other.write_bytes(path.read_bytes())
        os.replace(other, path)
    else:
        flip(path, path.stat().st_size - 1)


@pytest.mark.parametrize("kind", ["shrinks", "is replaced", "is overwritten"])
@pytest.mark.parametrize("when", ["before loading", "after loading"])
def test_row_26_a_checkpoint_that_changes_during_the_run(
    tmp_path: Path, own_model: Path, run: Run, monkeypatch: pytest.MonkeyPatch, kind: str, when: str
) -> None:
    original = LLM._load

    def load(self: LLM, plan: Any) -> Any:
        if when == "before loading":
            damage(kind, own_model / "model.safetensors")
            return original(self, plan)
        loaded = original(self, plan)
        damage(kind, own_model / "model.safetensors")
        return loaded

    monkeypatch.setattr(LLM, "_load", load)
    ran = run("--model", own_model, *DISK_WEIGHTS, *WORK, "--offload-dir", tmp_path / "offload")
    assert ran.code == 4, ran.err
    assert f"{own_model / 'model.safetensors'} changed during the run: " in ran.err


@pytest.mark.slow
def test_an_engine_survives_a_failing_disk(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error the same engine works again, and has given everything of the failed block back."""
    prompts = [[2, 9, 8, 7, 6], [2, 30, 31], [2, 40, 50, 60], [2, 70]]
    policy = {"gpu_batch_size": 2, "num_gpu_batches": 2, "cache": {"disk": 1.0}, "weights": {"disk": 1.0}}
    settings: dict[str, Any] = {"policy": policy, "offload_dir": str(tmp_path / "offload")}
    with LLM(str(model), **settings) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, max_new_tokens=5, ignore_eos=True)]
        used = llm._loaded.stages[0].tiers.cpu.used if llm._loaded else -1
        for name, afters in (("preadv", (0, 3, 7, 15)), ("pwritev", (0, 3, 5))):
            for after in afters:
                _fail_once_for_good(monkeypatch, name, after, str(tmp_path / "offload"))
                with pytest.raises(OSError, match="Input/output"):
                    llm.generate(prompts, max_new_tokens=5, ignore_eos=True)
                monkeypatch.undo()
                assert llm._loaded is not None
                assert llm._loaded.stages[0].tiers.cpu.used == used
                assert [
                    output.token_ids for output in llm.generate(prompts, max_new_tokens=5, ignore_eos=True)
                ] == expected


def _fail_once_for_good(monkeypatch: pytest.MonkeyPatch, name: str, after: int, folder: str) -> None:
    original: Callable[..., int] = getattr(os, name)
    calls = [0]

    def call(fd: int, views: list[memoryview], offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(folder):
            calls[0] += 1
            if calls[0] > after:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(fd, views, offset)

    monkeypatch.setattr(os, name, call)
