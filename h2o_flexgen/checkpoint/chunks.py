"""Reading a tensor in chunks: one is being read while the one before it is copied or converted."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

import torch

from h2o_flexgen.checkpoint.tables import Entry
from h2o_flexgen.config.tensors import PAGE
from h2o_flexgen.memory.disk import host_view
from h2o_flexgen.memory.pages import HostMemory

CHUNK = 4 << 20  # bytes
_READERS = 4  # tensors that may be read ahead at once; each has one read under way at most


class Chunk(NamedTuple):
    """Bytes [start, start + len(data)) of a tensor, uint8, valid until the next chunk is asked for."""

    start: int
    data: torch.Tensor


class ChunkReader:
    """Streams tensors through pairs of staging buffers, one pair for each thread that reads at the same time.

    Owns the buffers (2 x CHUNK each) and the threads that read ahead; `close` ends them.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._threads = ThreadPoolExecutor(_READERS, thread_name_prefix="checkpoint-read")

    def stream(self, entry: Entry, what: str) -> Iterator[Chunk]:
        """The bytes of `entry` in order; `what` names them in errors. StorageError and ModelError as file.read."""
        # Chunks lie in their pages as they do in the file's, so that whole pages are read in place. What starts at an
        # odd byte cannot lie so and be a float tensor too: such reads take a detour.
        place = entry.offset % PAGE if entry.offset % 4 == 0 else 0
        pair = self._take()
        views = tuple(host_view(buffer) for buffer in pair)

        def read(number: int) -> None:
            start = number * CHUNK
            nbytes = min(CHUNK, entry.nbytes - start)
            entry.file.read(views[number % 2], place, entry.offset + start, nbytes, what)

        ahead = None
        try:
            if entry.nbytes:
                read(0)
            for number in range(-(-entry.nbytes // CHUNK)):
                if ahead is not None:
                    ahead.result()
                if (number + 1) * CHUNK < entry.nbytes:
                    ahead = self._threads.submit(read, number + 1)
                nbytes = min(CHUNK, entry.nbytes - number * CHUNK)
                yield Chunk(number * CHUNK, pair[number % 2][place : place + nbytes])
        finally:
            if ahead is not None:
                wait([ahead])
            self._pairs.append(pair)

    def close(self) -> None:
        """Wait for what is being read and drop the buffers; a second call does nothing."""
        self._threads.shutdown()
        self._pairs.clear()

    def _take(self) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            return self._pairs.pop()
        except IndexError:
            memory = HostMemory()
            return memory.allocate(CHUNK + PAGE).tensor, memory.allocate(CHUNK + PAGE).tensor
