"""The n-th call that moves bytes fails, while weights are packed and read and caches and hidden states go to disk, for
one n after the other until there is no such call."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest

from tests.faulty_io import Leftovers
from tests.programs import Run, answers, left_in

PLACED = (
    "--weights-placement",
    "disk",
    "--cache-placement",
    "disk",
    "--hidden-placement",
    "disk",
    "--dtype",
    "bfloat16",
)
WORK = ("--prompt-len", 6, "--num-prompts", 4, "--gen-len", 2, "--gpu-batch-size", 2, "--num-gpu-batches", 2)


class FaultyCalls:
    """Fails every call from the n-th on with `code`; counts all. Several threads call."""

    def __init__(self, nth: int, code: int) -> None:
        self.left, self.code, self.fired, self._lock = nth, code, False, threading.Lock()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("preadv", "pwritev", "posix_fallocate"):
            patch.setattr(os, name, self._failing(getattr(os, name)))

    def _failing(self, real: object) -> object:
        def call(*arguments: object) -> object:
            with self._lock:
                self.left -= 1
                if self.left <= 0:
                    self.fired = True
                    raise OSError(self.code, os.strerror(self.code))
            return real(*arguments)  # type: ignore[operator]

        return call


@pytest.mark.parametrize(
    ("code", "stride"),
    [(errno.ENOSPC, 7), pytest.param(errno.EIO, 3, marks=pytest.mark.slow)],
)
def test_whichever_call_fails_nothing_is_left_and_nothing_is_wrong(
    tmp_path: Path, small: Path, run: Run, code: int, stride: int
) -> None:
    """Exit 6 with a message, or the right answers; and the run after it gives these."""
    offload, wanted = tmp_path / "offload", tmp_path / "wanted.jsonl"
    arguments = ("--model", small, *PLACED, *WORK, "--offload-dir", offload, "--quiet")
    assert run(*arguments, "-o", wanted).code == 0
    failures, leftovers = 0, Leftovers(offload)
    for nth in range(1, 10_000, stride):
        shutil.rmtree(offload, ignore_errors=True)  # weights are packed anew
        faulty, got = FaultyCalls(nth, code), tmp_path / f"{nth}.jsonl"
        with pytest.MonkeyPatch.context() as patch:
            faulty.install(patch)
            ran = run(*arguments, "-o", got)
        assert "Traceback" not in ran.err
        assert not offload.exists() or left_in(offload) == []
        if not faulty.fired:
            assert (ran.code, answers(got)) == (0, answers(wanted))
            break
        failures += 1
        assert ran.code == 6, f"call {nth}: {ran.err}"
        if leftovers.are_new():  # what it left of packed weights serves no later run wrongly
            again = tmp_path / f"{nth}.again.jsonl"
            assert run(*arguments, "-o", again).code == 0
            assert answers(again) == answers(wanted)
    else:
        pytest.fail("there was always another call")
    assert failures > 2
