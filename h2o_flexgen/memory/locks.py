"""Lock files: held by flock, signed with pid and host, gone with their process however it ends."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from h2o_flexgen.errors import StorageError

log = logging.getLogger(__name__)

OPEN_LOCK = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


def storage_error(found: str, error: OSError) -> StorageError:
    """The StorageError for what the file system answered, with advice that fits."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    change = "free some space, or name another folder with --offload-dir" if full else "name another with --offload-dir"
    return StorageError(f"{found}: {error.strerror or error}", change=change)


@contextmanager
def locked(folder: int, name: str, what: str) -> Iterator[None]:
    """Hold the lock file `name` of an open folder exclusively, signed with our pid and host."""
    try:
        fd = os.open(name, OPEN_LOCK | os.O_CREAT, 0o600, dir_fd=folder)
    except OSError as error:
        raise storage_error(f"cannot open the lock of the {what}", error) from error
    try:
        if not flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, what):
            log.warning("waiting for the %s, held by %s", what, holder(fd))
            flock(fd, fcntl.LOCK_EX, what)
        sign(fd)
        yield
    finally:
        os.close(fd)


def flock(fd: int, operation: int, what: str) -> bool:
    """True with the lock, False where another process has it (LOCK_NB); StorageError where there are no locks."""
    try:
        fcntl.flock(fd, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        raise storage_error(f"the file system cannot lock the {what}", error) from error
    return True


def sign(fd: int) -> None:
    """Write our pid and host into a lock file. The lock holds without it, so a full disk is no reason to fail."""
    with suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)


def holder(fd: int) -> str:
    """Who signed a lock file: "pid 123 on node7"."""
    words = os.pread(fd, 300, 0).decode(errors="replace").split()
    return f"pid {words[0]} on {words[1]}" if len(words) == 2 else "a run that left no name"
