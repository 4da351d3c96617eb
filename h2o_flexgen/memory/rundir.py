"""The offload folder: private run folders that are locked, owned and removed, and packed weights that runs share.

Layout, all names our own:
    lock                     held for moments, while a run folder is made or a stale one removed
    run-<pid>-<random>/      one run's files; its `lock` is held as long as the run lives
    packed-<hash>/           packed weights of one checkpoint; its `lock` is held while they are made
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from h2o_flexgen.errors import StorageError, UsageError, storage_error
from h2o_flexgen.folders import Closing, locked
from h2o_flexgen.units import format_bytes

log = logging.getLogger(__name__)

_INSTANT = 0.1
"""Seconds in which whoever has just locked a folder has signed it, and as a rule let go of it."""

_RUN_NAME = re.compile(r"run-\d+-[0-9a-f]{16}")
_OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_LOCK = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class OffloadDir(Closing):
    """The offload folder of one run, and the run's private folder in it. A context manager.

    UsageError for a path that is not a folder, a symbolic link, another user's, or writable by all; StorageError where
    the file system refuses. Everything is done relative to open descriptors, so that a folder or link swapped in behind
    our back is never followed. `close` removes the run folder and releases its lock; so do letting go of it without,
    and the interpreter's exit.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        self._files = 0
        self._fd = _open_root(self.path)
        self._run_fd = self._lock_fd = -1
        try:
            with _locked(self._fd, "lock", f"offload folder {self.path}"):
                self._remove_stale_runs()
                self._make_run_folder()
        except OSError as error:
            _close(self._lock_fd, self._run_fd, self._fd)
            if isinstance(error, StorageError):
                raise
            raise storage_error(f"cannot make a run folder in {self.path}", error) from error
        fds = (self._lock_fd, self._run_fd, self._fd)
        self._leave = weakref.finalize(self, _leave, os.getpid(), self.path, self._run_name, *fds)

    @property
    def run_path(self) -> Path:
        return self.path / self._run_name

    def new_file(self, stem: str) -> tuple[str, int]:
        """A new, empty file of the run: `<stem>-<counter>.bin`, mode 0600, opened for reading and writing.

        Its path for messages, and a descriptor that the receiver closes.
        """
        if not re.fullmatch(r"[a-z]+", stem):
            raise ValueError(f"{stem!r} is not a plain word")
        self._files += 1
        name = f"{stem}-{self._files:06d}.bin"
        try:
            return str(self.run_path / name), os.open(name, _OPEN_NEW, 0o600, dir_fd=self._run_fd)
        except OSError as error:
            raise storage_error(f"cannot make {self.run_path / name}", error) from error

    def remove_file(self, path: str) -> None:
        """Remove a file that `new_file` made; one that is gone already is fine."""
        try:
            os.unlink(os.path.basename(path), dir_fd=self._run_fd)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("could not remove %s: %s", path, error.strerror)

    @contextmanager
    def packed(self, fingerprint: str) -> Iterator[Path]:
        """The folder for the packed weights of `fingerprint`, held exclusively; waits for another run, and logs that.

        The folder stays. Files completed in it are only ever read afterwards, without the lock.
        """
        name = packed_name(fingerprint)
        path = self.path / name
        try:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._fd)
            folder = os.open(name, _OPEN_DIR, dir_fd=self._fd)
        except OSError as error:
            raise storage_error(f"cannot use {path} as a folder", error) from error
        try:
            _refuse_strangers(path, os.fstat(folder))
            with _locked(folder, "lock", f"packed weights {path}"):
                yield path
        finally:
            os.close(folder)

    def free_bytes(self) -> int:
        """Bytes this user may still write to the file system of the offload folder."""
        info = os.fstatvfs(self._fd)
        return info.f_bavail * info.f_frsize

    def require_free(self, nbytes: int, what: str) -> None:
        """StorageError where the file system has less than `nbytes` free for `what`."""
        free = self.free_bytes()
        if free < nbytes:
            raise StorageError(
                f"{what} needs {format_bytes(nbytes)} in {self.path}, whose file system has {format_bytes(free)} free",
                change="free some space, or name another folder with --offload-dir",
            )

    def close(self) -> None:
        """Remove the run folder and release its lock; a second call does nothing. Files that will not go are logged."""
        self._leave()
        self._lock_fd = self._run_fd = self._fd = -1

    def _make_run_folder(self) -> None:
        self._run_name = f"run-{os.getpid()}-{secrets.token_hex(8)}"
        os.mkdir(self._run_name, 0o700, dir_fd=self._fd)
        self._run_fd = os.open(self._run_name, _OPEN_DIR, dir_fd=self._fd)
        self._lock_fd = os.open("lock", _OPEN_LOCK | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._run_fd)
        _flock(self._lock_fd, str(self.run_path))
        _sign(self._lock_fd)

    def _remove_stale_runs(self) -> None:
        """Remove run folders whose lock is free. The folder lock is held, so none of them is just being made."""
        for name in sorted(os.listdir(self._fd)):
            if not _RUN_NAME.fullmatch(name):
                continue
            try:
                folder = os.open(name, _OPEN_DIR, dir_fd=self._fd)
            except OSError:  # a link or a file with such a name is not ours to touch
                continue
            try:
                holder = None if os.fstat(folder).st_uid != os.geteuid() else _left_by(folder)
                if holder is not None:
                    log.warning("removing %s, left behind by %s", self.path / name, holder)
                    _remove_tree(name, self._fd, self.path)
            finally:
                os.close(folder)


def packed_name(fingerprint: str) -> str:
    """The name of the folder with the packed weights of `fingerprint`."""
    return f"packed-{hashlib.sha256(fingerprint.encode()).hexdigest()[:32]}"


def _open_root(path: Path) -> int:
    """A descriptor of the offload folder, made if it is not there, once it is known to be ours and safe."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        info = os.lstat(path)
    except (NotADirectoryError, FileExistsError) as error:
        raise UsageError(f"offload folder {path}: a file stands where a folder is needed") from error
    except OSError as error:
        raise storage_error(f"cannot make the offload folder {path}", error) from error
    if stat.S_ISLNK(info.st_mode):
        raise UsageError(
            f"offload folder {path} is a symbolic link", "needed a real folder", "give the path that it points to"
        )
    if not stat.S_ISDIR(info.st_mode):
        raise UsageError(f"offload folder {path} is not a folder")
    try:
        fd = os.open(path, _OPEN_DIR)
    except OSError as error:
        raise storage_error(f"cannot open the offload folder {path}", error) from error
    try:
        _refuse_strangers(path, os.fstat(fd))
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=fd, effective_ids=True):
            raise StorageError(f"offload folder {path} cannot be written", change="name another one with --offload-dir")
    except BaseException:
        os.close(fd)
        raise
    parent = os.stat(path.parent)
    if parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
        log.warning("%s can be written by every user, who could rename the offload folder in it", path.parent)
    return fd


def _refuse_strangers(path: Path, info: os.stat_result) -> None:
    """UsageError where another user owns the folder or may write to it."""
    if info.st_uid != os.geteuid():
        raise UsageError(
            f"offload folder {path} belongs to user {info.st_uid}, not to you ({os.geteuid()})",
            "others could change the weights and caches in it",
            "name a folder of your own with --offload-dir",
        )
    if info.st_mode & stat.S_IWOTH:
        raise UsageError(
            f"offload folder {path} can be written by every user (mode {stat.S_IMODE(info.st_mode):04o})",
            "others could change the weights and caches in it",
            f"name a folder inside it, such as {path / 'h2o_flexgen'}, or chmod o-w",
        )


def _left_by(folder: int) -> str | None:
    """Who left the run folder behind, or None while its run lives."""
    try:
        fd = os.open("lock", _OPEN_LOCK, dir_fd=folder)
    except FileNotFoundError:
        return "a run that left no name"
    except OSError:
        return None
    try:
        return _holder(fd) if _flock(fd, "run folder") else None
    finally:
        os.close(fd)


def _leave(owner: int, path: Path, run_name: str, lock_fd: int, run_fd: int, fd: int) -> None:
    """Remove a run folder of the process `owner`: a forked child must not remove its parent's files."""
    if os.getpid() == owner:
        _remove_tree(run_name, fd, path)
        _close(lock_fd, run_fd, fd)


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def _remove_tree(name: str, folder: int, path: Path) -> None:
    """Remove `name` and what it holds, links as links; another run may be removing it too."""
    for _ in range(3):
        try:
            shutil.rmtree(name, dir_fd=folder)
            return
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("could not remove %s: %s", path / name, error.strerror or error)
            return


@contextmanager
def _locked(folder: int, name: str, what: str) -> Iterator[None]:
    """Hold the lock file `name` of an open folder exclusively, signed with our pid and host."""
    try:
        fd = os.open(name, _OPEN_LOCK | os.O_CREAT, 0o600, dir_fd=folder)
    except OSError as error:
        raise storage_error(f"cannot open the lock of the {what}", error) from error
    try:
        if not _flock(fd, what):
            time.sleep(_INSTANT)
            if not _flock(fd, what):
                log.warning("waiting for the %s, held by %s", what, _holder(fd))
                _flock(fd, what, wait=True)
        _sign(fd)
        yield
    finally:
        os.close(fd)


def _flock(fd: int, what: str, *, wait: bool = False) -> bool:
    """As `locked`; StorageError where there are no locks."""
    try:
        return locked(fd, wait=wait)
    except OSError as error:
        raise storage_error(f"the file system cannot lock the {what}", error) from error


def _sign(fd: int) -> None:
    """Write our pid and host into a lock file. The lock holds without it, so a full disk is not a reason to fail."""
    with suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)


def _holder(fd: int) -> str:
    """Who signed a lock file: "pid 123 on node7"."""
    words = os.pread(fd, 300, 0).decode(errors="replace").split()
    return f"pid {words[0]} on {words[1]}" if len(words) == 2 else "a run that left no name"
