"""Files read and written at explicit offsets, around the page cache where the file system allows it.

O_DIRECT wants file offset, length and address on page boundaries. `DirectFile` gives it whole pages in place where the
caller's layout allows, and goes through a small bounce buffer where it does not. Never mmap: a file that shrinks must
raise an error, not SIGBUS.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from h2o_flexgen.config.model.tensors import PAGE, page_ceil, page_floor
from h2o_flexgen.errors import ModelError, StorageError, storage_error
from h2o_flexgen.folders import Closing
from h2o_flexgen.units import format_bytes

if TYPE_CHECKING:
    import torch

RETRIES = 3
_BOUNCE = 1 << 20
_RETRY = (errno.EIO, errno.EAGAIN, errno.EINTR)


class HostView(NamedTuple):
    """Host bytes and the address where they start."""

    view: memoryview
    address: int


def host_view(tensor: torch.Tensor) -> HostView:
    """The bytes of a contiguous host tensor; ValueError for any other."""
    import torch  # here, so that a model is found or refused before torch is loaded, which takes seconds

    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"needed a contiguous tensor on the CPU, got {tuple(tensor.shape)} on {tensor.device}")
    flat = tensor.detach().view(-1).view(torch.uint8)
    return HostView(flat.numpy().data, flat.data_ptr())


class DirectFile(Closing):
    """One open file. Owns its descriptor. Reads and writes carry their offset and may come from several threads.

    `direct` says whether the page cache is bypassed; it turns False for good where the file system refuses O_DIRECT,
    and pages are then dropped behind the transfer. A file of the user's (`ours` False) that changes while it is open
    raises ModelError, one of ours StorageError; a file opened for writing is never checked.
    """

    def __init__(self, path: str, fd: int, *, writable: bool = False, ours: bool = False) -> None:
        self.path, self.fd, self._ours = path, fd, ours
        info = os.fstat(fd)
        self._opened = None if writable else info
        self._bounces = threading.local()
        self.direct = stat.S_ISREG(info.st_mode) and self._set_direct(True)

    @classmethod
    def open(cls, path: str, *, ours: bool = False) -> DirectFile:
        """Open for reading, following links. ModelError (StorageError if `ours`) where there is no such file."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if ours or error.errno in (errno.EMFILE, errno.ENFILE, errno.EIO):
                raise storage_error(f"cannot open {path}", error) from error
            raise ModelError(f"cannot open {path}: {error.strerror}") from error
        return cls(path, fd, ours=ours)

    def read(self, out: HostView, at: int, offset: int, nbytes: int, name: str) -> None:
        """Fill out[at : at + nbytes] with the file's bytes from `offset` on; `name` is for messages.

        The pages of `out` that this span touches may be overwritten whole; memory outside `out` never is. A read error
        or an early end is retried, then StorageError naming file, offset and `name`; ModelError if the file changed.
        """
        end = offset + nbytes
        if nbytes == 0:
            return
        if not self.direct:
            self._transfer(os.preadv, out.view[at : at + nbytes], offset, nbytes, name)
            self._forget(offset, nbytes)
            return
        low, high = page_floor(offset), page_ceil(end)
        if (out.address + at - offset) % PAGE:
            low = high = offset
        else:
            if at - (offset - low) < 0:
                low += PAGE
            if at + (high - offset) > len(out.view):
                high -= PAGE
        if low < high:
            place = at + low - offset
            window = out.view[place : place + high - low]
            self._transfer(os.preadv, window, low, min(high, end) - low, name)
        else:
            low = high = end
        self._read_bounced(out.view, at, offset, min(low, end), name)
        first = max(high, offset)
        self._read_bounced(out.view, at + first - offset, first, end, name)

    def write(self, data: HostView, at: int, offset: int, nbytes: int, name: str) -> None:
        """Write data[at : at + nbytes] at `offset`, a multiple of PAGE; the file's last page may be padded with zeros.

        StorageError where the file system is full or keeps failing. The copy threads keep it in the write's ticket: it
        is raised by whoever waits for that ticket, or for a later load of these bytes.
        """
        if offset % PAGE:
            raise ValueError(f"{self.path}: writes start on a page, not at byte {offset}")
        end = at + nbytes
        if not self.direct:
            self._transfer(os.pwritev, data.view[at:end], offset, nbytes, name)
            self._forget(max(0, offset - nbytes), 2 * nbytes)  # starts this span's write-back, drops the one before
            return
        if (data.address + at) % PAGE == 0:
            whole = page_floor(nbytes)
            self._transfer(os.pwritev, data.view[at : at + whole], offset, whole, name)
            at, offset = at + whole, offset + whole
        while at < end:
            size = min(_BOUNCE, end - at)
            bounce, padded = self._bounce(), page_ceil(size)
            bounce[:size] = data.view[at : at + size]
            bounce[size:padded] = bytes(padded - size)
            self._transfer(os.pwritev, bounce[:padded], offset, padded, name)
            at, offset = at + size, offset + size

    def check(self) -> None:
        """ModelError (StorageError if ours) where the file is no longer the one that was opened."""
        then = self._opened
        if then is None:
            return
        try:
            now = os.stat(self.path)
        except FileNotFoundError:
            now = os.fstat(self.fd)  # removed, but what we hold open is whole
        except OSError as error:
            raise storage_error(f"cannot look at {self.path}", error) from error
        same_file = (now.st_dev, now.st_ino) == (then.st_dev, then.st_ino)
        if same_file and (now.st_size, now.st_mtime_ns) == (then.st_size, then.st_mtime_ns):
            return
        if now.st_size != then.st_size:
            change = f"from {format_bytes(then.st_size)} to {format_bytes(now.st_size)} ({now.st_size} bytes)"
        else:
            change = "overwritten" if same_file else "replaced by another"
        kind = StorageError if self._ours else ModelError
        raise kind(f"{self.path} changed during the run: {change}", "its bytes can no longer be trusted", "run again")

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        """An engine that was let go of without `close`, as notebooks do, leaves no open files."""
        if hasattr(self, "fd"):
            self.close()

    def _read_bounced(self, view: memoryview, at: int, offset: int, end: int, name: str) -> None:
        while offset < end:
            low = page_floor(offset)
            size = min(low + _BOUNCE, end) - offset
            bounce, skip = self._bounce(), offset - low
            self._transfer(os.preadv, bounce[: page_ceil(skip + size)], low, skip + size, name)
            view[at : at + size] = bounce[skip : skip + size]
            at, offset = at + size, offset + size

    def _bounce(self) -> memoryview:
        """This thread's aligned scratch."""
        if not hasattr(self._bounces, "view"):
            self._bounces.view = memoryview(mmap.mmap(-1, _BOUNCE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        view: memoryview = self._bounces.view
        return view

    def _transfer(
        self, call: Callable[[int, list[memoryview], int], int], view: memoryview, offset: int, need: int, name: str
    ) -> None:
        """Call until `need` bytes of `view` (which may be longer, whole pages) went through.

        Tries that get nowhere are repeated RETRIES times in all.
        """
        done = failures = 0
        while done < need:
            direct, reason = self.direct, "no more bytes"
            try:
                count = call(self.fd, [view[done:]], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and direct:
                    self._set_direct(False)
                    continue
                if error.errno not in _RETRY:
                    raise storage_error(f"{name}: byte {offset + done} of {self.path}", error) from error
                count, reason = 0, error.strerror or str(error)
            # after a short transfer O_DIRECT goes on from a page boundary
            reached = done + count if done + count >= need or not direct else page_floor(done + count)
            if reached <= done:
                self.check()
                failures += 1
                if failures > RETRIES:
                    raise StorageError(
                        f"{name}: {reason} at byte {offset + done} of {self.path}, after {RETRIES} retries",
                        f"needed {need - done} bytes more", "check the disk and the file",
                    )  # fmt: skip
                time.sleep(0.005 * failures)
            done = max(done, reached)

    def _set_direct(self, wanted: bool) -> bool:
        """Switch O_DIRECT on the descriptor; False where the file system cannot."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
        except OSError:
            return False
        self.direct = wanted
        return True

    def _forget(self, offset: int, nbytes: int) -> None:
        """Drop the pages of a buffered transfer, so that streamed weights do not push everything else out of memory."""
        try:
            os.posix_fadvise(self.fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
        except OSError:
            return
