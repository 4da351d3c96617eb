"""Files whose n-th call fails: for tests that loop over n until a run is clean."""

from __future__ import annotations

import errno
import io
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

READS = ("read", "pread", "preadv")
WRITES = ("write", "pwrite", "pwritev", "fsync", "fdatasync", "ftruncate", "posix_fallocate")
OPENS = ("open", "mkdir", "replace", "rename", "link")
ALL = (*OPENS, *READS, *WRITES)


class FaultyIO:
    """Of the calls named in `calls` that touch files below `folders`, the `at`-th (from 1) fails with `code`.

    lasting   all calls after it fail too, as on a disk that is broken or full

    `count` calls were made; `failed` of them failed: 0 says that `at` lies beyond the end of the run. `open` stands for
    Python's own open() as well. Files that C libraries open by themselves are not seen. Removing files never fails.
    """

    def __init__(
        self, *folders: str | Path, at: int, code: int = errno.EIO, lasting: bool = False, calls: tuple[str, ...] = ALL
    ) -> None:
        self._folders = tuple(os.path.realpath(folder) for folder in folders)
        self._at, self._code, self._lasting, self._calls = at, code, lasting, calls
        self._lock = threading.Lock()
        self.count = self.failed = 0

    @contextmanager
    def injected(self) -> Iterator[FaultyIO]:
        """Within, calls of this process fail."""
        with ExitStack() as stack:
            for name in self._calls:
                stack.enter_context(patch.object(os, name, self._failing(getattr(os, name))))
            if "open" in self._calls:
                stack.enter_context(patch.object(io, "open", self._failing(io.open)))
                stack.enter_context(patch("builtins.open", self._failing(open)))
            yield self

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(first: Any, *rest: Any, **named: Any) -> Any:
            if self._concerns(first, named.get("dir_fd", named.get("src_dir_fd"))):
                with self._lock:
                    self.count += 1
                    fails = self.count == self._at or (self._lasting and self.count > self._at)
                    self.failed += fails
                if fails:
                    raise OSError(self._code, os.strerror(self._code), None if isinstance(first, int) else str(first))
            return call(first, *rest, **named)

        return wrapped

    def _concerns(self, file: Any, folder: int | None) -> bool:
        """Whether a path or descriptor is that of something below the folders."""
        try:
            if isinstance(file, int):
                place = os.readlink(f"/proc/self/fd/{file}")
            else:
                base = "" if folder is None else os.readlink(f"/proc/self/fd/{folder}")
                place = os.path.realpath(os.path.join(base, os.fspath(file)))
        except (OSError, TypeError, ValueError):
            return False
        return any(place == each or place.startswith(each + os.sep) for each in self._folders)


class Leftovers:
    """What failed runs left in a folder, by names and contents: each state is to be looked at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[frozenset[tuple[str, bytes]]] = set()

    def are_new(self) -> bool:
        """Whether no earlier call found the same. Folders of runs have names of their own, which do not count."""
        paths = [(re.sub(r"/run-[^/]+", "/run", str(path)), path) for path in self._folder.rglob("*")]
        left = frozenset((name, path.read_bytes() if path.is_file() else b"") for name, path in paths)
        new = left not in self._seen
        self._seen.add(left)
        return new


def until_clean(
    make: Callable[[int], FaultyIO], run: Callable[[], None], after: Callable[[FaultyIO], None], stride: int = 1
) -> int:
    """Calls `run` with the first call failing, then the one that is `stride` calls later, and so on, and `after` behind
    each, until a run meets no fault.

    `make` gives the faults of a run whose n-th call fails; `after` looks at what became of the run. Returns the last n
    of a run that failed a call, 0 where there was none.
    """
    for n in itertools.count(1, stride):
        with make(n).injected() as faults:
            run()
        after(faults)
        if not faults.failed:
            return max(0, n - stride)
    raise AssertionError("unreachable")
