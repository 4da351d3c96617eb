"""The calls that a job makes to the file system, in one place: tests put one that fails in its stead."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from h2o_flexgen.errors import StorageError

CHUNK = 1 << 20


class FileSystem:
    """Files by descriptors. OSError as the system raises it; `storage_failure` makes one message of it."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def read(self, fd: int, count: int, offset: int) -> bytes:
        return os.pread(fd, count, offset)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """What was written is on the disk, and not only in the system's memory."""
        os.fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_folder(self, folder: Path) -> None:
        """The names in a folder are on the disk."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sync(fd)
        finally:
            os.close(fd)


class AppendedFile:
    """A file that grows at its end by whole pieces: one that does not fit is taken back."""

    def __init__(self, files: FileSystem, path: Path, flags: int, size: int = 0) -> None:
        self._files, self.path = files, path
        self.fd, self.size = files.open(path, flags), size

    def append(self, data: bytes) -> None:
        """OSError where there is no room for all of it; none of it is in the file then, if that can be done."""
        view, done = memoryview(data), 0
        try:
            while done < len(view):
                done += self._files.write(self.fd, view[done:], self.size + done)
        except BaseException:
            with suppress(OSError):
                self.cut(self.size)
            raise
        self.size += done

    def cut(self, size: int) -> None:
        """Forgets all after the first `size` bytes."""
        self._files.truncate(self.fd, size)
        self.size = size

    def sync(self) -> None:
        self._files.sync(self.fd)

    def lines(self, start: int = 0) -> Iterator[bytes]:
        """Its lines with their ends, from the byte `start` on; the last may have none."""
        rest, offset = b"", start
        while data := self._files.read(self.fd, CHUNK, offset):
            offset += len(data)
            *whole, rest = (rest + data).split(b"\n")
            yield from (line + b"\n" for line in whole)
        if rest:
            yield rest

    def piece(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset` on; StorageError where there are fewer."""
        parts, done = [], 0
        while done < count:
            part = self._files.read(self.fd, count - done, offset + done)
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
