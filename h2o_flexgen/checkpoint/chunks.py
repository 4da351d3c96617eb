"""Reading a tensor in chunks: one is being read while the one before it is copied or converted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

import torch

from h2o_flexgen.checkpoint.parts import Part, Span
from h2o_flexgen.config.model.tensors import PAGE
from h2o_flexgen.memory.disk import host_view
from h2o_flexgen.memory.handle import torch_dtype
from h2o_flexgen.memory.pages import HostMemory

CHUNK = 4 << 20  # bytes
_GAP = 4 * PAGE  # bytes that are read and left rather than that a second request is made
_READERS = 4  # tensors that may be read ahead at once; each has one read under way at most


class Chunk(NamedTuple):
    """Bytes [start, start + len(data)) of a tensor, uint8, valid until the next chunk is asked for."""

    start: int
    data: torch.Tensor


class Piece(NamedTuple):
    """`nbytes` bytes that lie `skip` bytes into a request, and from byte `start` on in the tensor."""

    start: int
    skip: int
    nbytes: int


class Request(NamedTuple):
    """Bytes [offset, stop) of a file, CHUNK of them at most, and which of them are wanted."""

    offset: int
    stop: int
    pieces: tuple[Piece, ...]


def requests_for(runs: Iterable[Span]) -> list[Request]:
    """What to ask the file for, to get the bytes of `runs`, none of which is empty, one after another.

    A request takes in as many runs as follow one another in the file with small gaps: for a bias, a fused projection
    leaves each head a run of a few hundred bytes.
    """
    found: list[Request] = []
    done = 0
    for start, stop in runs:
        while start < stop:
            last = found[-1] if found else None
            if last is not None and 0 <= start - last.stop <= _GAP and start < last.offset + CHUNK:
                end = min(stop, last.offset + CHUNK)
                piece = Piece(done, start - last.offset, end - start)
                found[-1] = Request(last.offset, end, (*last.pieces, piece))
            else:
                end = min(stop, start + CHUNK)
                found.append(Request(start, end, (Piece(done, 0, end - start),)))
            done += end - start
            start = end
    return found


class ChunkReader:
    """Streams tensors through pairs of staging buffers, one pair for each thread that reads at the same time.

    Owns the buffers (2 x CHUNK each) and the threads that read ahead; `close` ends them.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._threads = ThreadPoolExecutor(_READERS, thread_name_prefix="checkpoint-read")

    def stream(self, part: Part, what: str) -> Iterator[Chunk]:
        """The bytes of `part` in order; `what` names them in errors. StorageError and ModelError as file.read."""
        pair = self._take()
        views = tuple(host_view(buffer) for buffer in pair)
        requests, itemsize = requests_for(part.runs), torch_dtype(part.dtype).itemsize

        def place(number: int) -> int:
            # Chunks lie in their pages as they do in the file's, so that whole pages are read in place. What starts at
            # an odd byte cannot lie so and be a float tensor too: such reads take a detour.
            offset = requests[number].offset
            return offset % PAGE if offset % itemsize == 0 else 0

        def read(number: int) -> None:
            request = requests[number]
            nbytes = request.stop - request.offset
            part.file.read(views[number % 2], place(number), request.offset, nbytes, what)

        ahead = None
        try:
            read(0)
            for number, request in enumerate(requests):
                if ahead is not None:
                    ahead.result()
                if number + 1 < len(requests):
                    ahead = self._threads.submit(read, number + 1)
                buffer = pair[number % 2][place(number) :]
                for start, skip, nbytes in request.pieces:
                    yield Chunk(start, buffer[skip : skip + nbytes])
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
