"""What the memory tests share: calls that fail on demand, a watch over threads left behind, tiers and a file."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import pytest
import torch

from h2o_flexgen.memory import copies
from h2o_flexgen.memory.disk import DirectFile
from h2o_flexgen.memory.rundir import OffloadDir
from h2o_flexgen.memory.tiers import Tiers, make_tiers

PREADV, PWRITEV = os.preadv, os.pwritev


class Faulty:
    """Fails where `when(call number, from 1)` says so: with `error`, or by letting only `short` bytes through."""

    def __init__(self, when: Callable[[int], bool], error: int = errno.EIO, short: int | None = None) -> None:
        self.when, self.error, self.short = when, error, short
        self.calls = 0
        self._lock = threading.Lock()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """From now on these are the system's calls."""
        patch.setattr(os, "preadv", self.preadv)
        patch.setattr(os, "pwritev", self.pwritev)

    def _fails(self) -> bool:
        with self._lock:
            self.calls += 1
            return self.when(self.calls)

    def preadv(self, fd: int, views: list[memoryview], offset: int) -> int:
        return self._moved(PREADV, fd, views, offset)

    def pwritev(self, fd: int, views: list[memoryview], offset: int) -> int:
        return self._moved(PWRITEV, fd, views, offset)

    def _moved(self, real: Callable[..., int], *arguments: object) -> int:
        if not self._fails():
            return real(*arguments)
        if self.short is None:
            raise OSError(self.error, os.strerror(self.error))
        return min(self.short, real(*arguments))


def without_direct(patch: pytest.MonkeyPatch) -> None:
    """A file system that knows no O_DIRECT."""
    patch.setattr(DirectFile, "_set_direct", lambda self, wanted: False)


def in_chunks(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Copies go piece by piece, of so many bytes."""
    patch.setattr(copies, "CHUNK", nbytes)


@pytest.fixture(scope="session")
def disk() -> Iterator[str]:
    with TemporaryDirectory() as folder:
        yield folder


@pytest.fixture
def tmp_path(disk: str) -> Path:
    """On a disk, whose direct reads and writes want whole pages: a file system in memory takes any."""
    return Path(mkdtemp(dir=disk))


def engine_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("h2o-")]


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    yield
    assert engine_threads() == [], "threads outlived their engine"


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    with (
        OffloadDir(tmp_path / "off") as folder,
        make_tiers(None, None, None, True, folder, device=torch.device("cpu")) as made,
    ):
        yield made


@pytest.fixture
def payload(tmp_path: Path) -> tuple[str, bytes]:
    """A file whose size is no multiple of a page, and its bytes."""
    data = os.urandom(3 * 4096 * 16 + 1234)
    path = tmp_path / "payload.bin"
    path.write_bytes(data)
    return str(path), data
