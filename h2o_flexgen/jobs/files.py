"""Files by descriptors that grow at their ends, and are known to be on the disk. OSError as the system raises it;
`storage_failure` makes one message of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from h2o_flexgen.errors import StorageError

CHUNK = 1 << 20


class AppendedFile:
    """A file that grows at its end by whole pieces: one that does not fit is taken back."""

    def __init__(self, path: Path, flags: int) -> None:
        self.path, self.fd, self.size = path, os.open(path, flags, 0o666), 0

    def require_in_place(self) -> None:
        """StorageError where its path leads to another file or none."""
        if not (self.path.exists() and os.path.samestat(self.path.stat(), os.fstat(self.fd))):
            found = f"{self.path} was removed or renamed while the job wrote to it"
            raise StorageError(found, "needed it in its place", "put it back, or start anew with --overwrite")

    def require_unchanged(self) -> None:
        """StorageError where another program has written to it."""
        if os.fstat(self.fd).st_size != self.size:
            found = f"{self.path} was changed by somebody else while the job wrote to it"
            raise StorageError(found, "needed it as the job left it", "put that back, or start anew with --overwrite")

    def append(self, data: bytes) -> None:
        """OSError where there is no room for all of it; none of it is in the file then, if that can be done."""
        self.require_unchanged()
        view, done = memoryview(data), 0
        try:
            while done < len(view):
                done += os.pwrite(self.fd, view[done:], self.size + done)
            self.size += done
        except BaseException:
            with suppress(OSError):
                self.cut(self.size)
            raise

    def cut(self, size: int) -> None:
        """Forgets all after the first `size` bytes."""
        os.ftruncate(self.fd, size)
        self.size = size

    def sync(self) -> None:
        os.fsync(self.fd)

    def lines(self) -> Iterator[bytes]:
        """Its lines with their ends; the last may have none. One reader at a time: they share the file's position."""
        with open(self.fd, "rb", CHUNK, closefd=False) as file:
            file.seek(0)
            yield from file

    def piece(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset` on; StorageError where there are fewer."""
        parts, done = [], 0
        while done < count:
            part = os.pread(self.fd, count - done, offset + done)
            if not part:
                raise StorageError(f"{self.path} ends before byte {offset + count}")
            parts.append(part)
            done += len(part)
        return b"".join(parts)

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


def storage_failure(what: str, error: OSError) -> StorageError:
    """The StorageError for `what` could not be done, with advice that fits."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    change = "free some space; the same command goes on" if full else "the same command goes on once that is mended"
    return StorageError(f"{what}: {error.strerror or error}", change=change)
