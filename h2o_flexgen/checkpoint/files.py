"""The files of a checkpoint: opened once, and read around the page cache by memory.disk's DirectFile."""

from __future__ import annotations

import errno
import os
import stat

import torch

from h2o_flexgen.memory.disk import DirectFile, HostView, host_view


class CheckpointFile:
    """An open file of a checkpoint. It owns the descriptor; any number of threads may read at once."""

    def __init__(self, path: str) -> None:
        """Open `path` for reading, following links; OSError when it is missing, unreadable or not a regular file."""
        self.path, self.name = path, os.path.basename(path)
        # Without O_NONBLOCK, opening a named pipe would wait for a writer for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", path)
        self.size, self.mtime_ns = info.st_size, info.st_mtime_ns
        self._file = DirectFile(path, fd)

    @property
    def closed(self) -> bool:
        return self._file.fd < 0

    def head(self, nbytes: int, offset: int = 0) -> bytes:
        """Up to `nbytes` bytes from `offset`, fewer only at the end of the file. StorageError, ModelError: see read."""
        nbytes = max(0, min(nbytes, self.size - offset)) if offset >= 0 else 0
        view = host_view(torch.empty(nbytes, dtype=torch.uint8))
        self.read(view, 0, offset, nbytes, "the header")
        return bytes(view.view)

    def read(self, out: HostView, at: int, offset: int, nbytes: int, name: str) -> None:
        """Fill out[at : at + nbytes] from byte `offset` on; `name` is for messages.

        StorageError where the disk keeps failing, ModelError where the file has shrunk. Nothing outside `out` is
        touched, but of `out` perhaps more than asked for: what lies beside the span in its pages, as the file has it.
        """
        self._file.read(out, at, offset, nbytes, name)

    def check(self) -> None:
        """ModelError when the file has been written to or replaced since it was opened."""
        self._file.check()

    def close(self) -> None:
        """Close the descriptor; closing twice is fine."""
        self._file.close()
