"""The disk tier: page-aligned regions of preallocated files in the run's private folder."""

from __future__ import annotations

import os

from h2o_flexgen.config.model.tensors import PAGE
from h2o_flexgen.errors import PlanError, StorageError
from h2o_flexgen.memory.disk import DirectFile, Syscalls
from h2o_flexgen.memory.handle import page_ceil
from h2o_flexgen.memory.ledger import Ledger
from h2o_flexgen.memory.locks import storage_error
from h2o_flexgen.memory.rundir import OffloadDir
from h2o_flexgen.units import format_bytes


class Region:
    """A span of a preallocated file: bytes [offset, offset + nbytes), on pages that belong to it alone.

    `part` gives views that share the file; releasing the whole region closes and removes it. A region remembers the
    digest of the last write through it, a part of its own writes only.
    """

    def __init__(self, file: DirectFile, offset: int, nbytes: int, what: str, tier: DiskTier | None = None) -> None:
        self.file, self.offset, self.nbytes, self.what = file, offset, nbytes, what
        self._tier = tier
        self._written: tuple[int, bytes] | None = None

    def remember(self, nbytes: int, digest: bytes) -> None:
        """Called after a write of `nbytes` from the start of the region."""
        self._written = (nbytes, digest)

    def digest_of(self, nbytes: int) -> bytes | None:
        """The digest of the region's first `nbytes`, None unless the last write was of just those."""
        return self._written[1] if self._written is not None and self._written[0] == nbytes else None

    def part(self, offset: int, nbytes: int) -> Region:
        """The sub-span [offset, offset + nbytes); `offset` is a multiple of PAGE. It owns nothing."""
        if offset % PAGE or not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"bytes {offset} + {nbytes} are no part of the {self.nbytes} bytes of {self.what}")
        return Region(self.file, self.offset + offset, nbytes, self.what)

    def release(self) -> None:
        """Remove the file and give its bytes back; nothing for a part, or a second time."""
        tier, self._tier = self._tier, None
        if tier is not None:
            tier.give_back(self)

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class DiskTier(Ledger):
    """Regions in `folder` (None: a run without an offload folder), under a capacity. Owns the files it makes."""

    def __init__(self, capacity: int | None, folder: OffloadDir | None, syscalls: Syscalls | None = None) -> None:
        super().__init__("disk", capacity)
        self._folder, self._sys = folder, syscalls or Syscalls()
        self._live: set[Region] = set()

    def allocate(self, nbytes: int, what: str) -> Region:
        """A region of `nbytes` in a file of its own, its blocks reserved now.

        PlanError over the capacity or without an offload folder; StorageError where the file system has no room.
        """
        if self._folder is None:
            raise PlanError(f"{what} needs {format_bytes(nbytes)} on disk, and there is no offload folder",
                            change="name one with --offload-dir")  # fmt: skip
        size = page_ceil(nbytes)
        self.charge(size, what)
        try:
            self._folder.require_free(size, what)
            region = self._make(self._folder, size, nbytes, what)
        except BaseException:
            self.refund(size, what)
            raise
        self._live.add(region)
        return region

    def give_back(self, region: Region) -> None:
        """Called by Region.release."""
        self._live.discard(region)
        region.file.close()
        if self._folder is not None:
            self._folder.remove_file(region.file.path)
        self.refund(page_ceil(region.nbytes), region.what)

    def close(self) -> None:
        """Release whatever is still allocated."""
        for region in tuple(self._live):
            region.release()

    def _make(self, folder: OffloadDir, size: int, nbytes: int, what: str) -> Region:
        path, fd = folder.new_file("region")
        try:
            if size:
                self._sys.fallocate(fd, size)
            return Region(DirectFile(path, fd, writable=True, ours=True, syscalls=self._sys), 0, nbytes, what, self)
        except OSError as error:
            os.close(fd)
            folder.remove_file(path)
            if isinstance(error, StorageError):
                raise
            raise storage_error(f"{what} needs {format_bytes(size)} at {path}", error) from error
