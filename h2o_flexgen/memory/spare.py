"""Host memory that was given back and is wanted again at once: by the next block of a call."""

from __future__ import annotations

import threading

from h2o_flexgen.memory.handle import page_ceil
from h2o_flexgen.memory.pages import Block


class Spare:
    """Blocks waiting for a buffer of just their size. Made to wait, they need not be found and zeroed by the system.
    Nor need they be page-locked anew for a GPU.

    The first write to new memory may be slower than a disk: where a virtual machine gives free memory back to its host,
    0.8 GB/s were measured. Owns the blocks that wait; thread safe. Nothing waits until `open`, nor after `close`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[int, list[Block]] = {}
        self._nbytes = 0
        self._open = False

    @property
    def nbytes(self) -> int:
        """Of the blocks that wait, in whole pages."""
        return self._nbytes

    def open(self) -> None:
        """From now on `put` takes blocks."""
        self._open = True

    def close(self) -> None:
        """Nothing is taken any more, and what waits goes back to the system."""
        self._open = False
        self.shrink(0)

    def give_way(self) -> bool:
        """Give all blocks back, as what is locked of them is wanted elsewhere; False where none waited."""
        waited = self._nbytes > 0
        self.shrink(0)
        return waited

    def put(self, nbytes: int, block: Block) -> bool:
        """Keep a block of `nbytes`, of which nobody uses a view any more; False where it is not taken."""
        with self._lock:
            if not self._open or not nbytes:
                return False
            self._blocks.setdefault(nbytes, []).append(block)
            self._nbytes += page_ceil(nbytes)
        return True

    def take(self, nbytes: int) -> Block | None:
        """A block of just `nbytes`, zeroed; None where none waits."""
        with self._lock:
            block = self._pop(nbytes)
        if block is not None:
            block.tensor.zero_()
        return block

    def shrink(self, nbytes: int) -> None:
        """Give blocks back until no more than `nbytes` wait."""
        while True:
            with self._lock:
                block = None if self._nbytes <= nbytes else self._pop(next(iter(self._blocks)))
            if block is None:
                return
            block.free()

    def _pop(self, nbytes: int) -> Block | None:
        blocks = self._blocks.get(nbytes)
        if not blocks:
            return None
        block = blocks.pop()
        if not blocks:
            del self._blocks[nbytes]
        self._nbytes -= page_ceil(nbytes)
        return block
