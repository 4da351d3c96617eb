"""Where the package keeps what it makes: compiled kernels, calibrations, packed weights. Standard library only.

Containers have no home, a user id without an entry, or a home that cannot be written. Then a folder for temporary files
serves, and one warning says so.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import BinaryIO, Self

log = logging.getLogger(__name__)


def expanded(path: str | os.PathLike[str]) -> Path:
    """`path` with the home folder for its "~"; as it is where no home is known."""
    return Path(os.path.expanduser(path))


def ask_for(path: str | os.PathLike[str]) -> None:
    """Raises the system's OSError where not even that is told whether `path` is there: in a folder that may not be
    entered, or with too long a name. pathlib did so until Python 3.13; since then it calls such a file missing."""
    with suppress(ValueError):  # a name with a zero in it, which no file has
        try:
            os.stat(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise


def cached(*parts: str) -> Path:
    """The path of `parts` in this package's cache folder, h2o_flexgen in $XDG_CACHE_HOME or ~/.cache.

    Where that cannot be written, what is there already is found there; all else goes into a folder for temporary files.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or expanded("~/.cache")) / "h2o_flexgen"
    usual = home.joinpath(*parts)
    if can_write(home) or (parts and os.path.exists(usual)):
        return usual
    return _temporary(str(home)).joinpath(*parts)


def locked(fd: int, *, wait: bool = False) -> bool:
    """Whether this process has the lock of an open file now; False where another one has it and there is no `wait`."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def can_write(folder: Path) -> bool:
    if not folder.is_absolute():
        return False  # "~", where no home is known
    there = nearest(folder)
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def nearest(folder: Path) -> Path:
    """`folder` if it is there, else the first of those that it would be in."""
    # Unlike pathlib this raises nothing where a folder may not be entered, or a name is too long.
    return next((each for each in (folder, *folder.parents) if os.path.exists(each)), folder)


@cache
def _temporary(instead_of: str) -> Path:
    """A folder of this user alone among those for temporary files, the same for later runs where that can be."""
    try:
        own = Path(tempfile.gettempdir()) / f"h2o_flexgen-{os.getuid()}"
    except OSError:
        return Path(instead_of)  # nothing can be written at all: whoever tries says so
    try:
        own.mkdir(mode=0o700, exist_ok=True)
        status = own.lstat()
        # Anybody may have made a folder of that name, and libraries are loaded from it.
        private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    except OSError:
        private = False
    try:
        if not private or not os.access(own, os.W_OK | os.X_OK):
            own = Path(tempfile.mkdtemp(prefix="h2o_flexgen-"))
    except OSError:
        return Path(instead_of)
    log.warning("%s cannot be written: %s holds kernels, calibrations and packed weights instead", instead_of, own)
    return own


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write what becomes the file `path` at the end, complete or not there at all; makes its folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        yield temporary
        temporary.replace(path)
    finally:
        with suppress(OSError):  # it is not there once it was renamed
            temporary.unlink()


@contextmanager
def synced_file(path: Path) -> Iterator[BinaryIO]:
    """As `whole_file`, opened for this user alone; at the end all of it is on the disk, and its name."""
    with whole_file(path) as temporary, open(temporary, "xb", opener=partial(os.open, mode=0o600)) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """The names in a folder are on the disk, and not only in the system's memory."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2] or name


class Closing:
    """Mixin of context managers that end with `close`: files, folders, and what works on them."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
