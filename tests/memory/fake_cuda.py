"""A device made of host memory, whose copies run as late, or as early, as streams and marks allow.

Nothing is copied before somebody has to wait for it (or before chance decides so), so that a missing wait shows as
wrong data; and every access is checked for an order, see `races`, so that it shows where the data happen to be right.
"""

from __future__ import annotations

import ctypes
import threading
import time
from bisect import bisect_right, insort
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.memory.cuda import Stream
from h2o_flexgen.memory.tiers import HostMemory
from tests.memory.races import Clock, Races
from tests.seeds import python_random


@dataclass(eq=False)
class FakeMark:
    """The place before operation `index` of a stream, and what is known to have happened by then."""

    device: FakeDevice
    stream: Stream
    index: int
    clock: Clock
    time: float = 0.0


class Copied(NamedTuple):
    """One copy that was queued."""

    stream: Stream
    dst: Tensor
    src: Tensor


@dataclass(eq=False)
class FakeDevice:
    """See memory.cuda.Device. `chance`: that an operation runs before it has to.

    `drops(stream, mark)`: waits of a stream for a mark that are left out; with stream None those of the host. `first`:
    the device that this one is beside; `name` tells the races which is which.
    """

    chance: float = 0.0
    lockable: int | None = None
    drops: Callable[[Stream | None, FakeMark], bool] = lambda stream, mark: False
    seed: int = 0
    races: Races = field(default_factory=Races)
    name: str = ""
    first: FakeDevice | None = None
    torch_device = torch.device("cpu")

    def __post_init__(self) -> None:
        self.copied: list[Copied] = []
        self.waits: list[tuple[Stream, Stream]] = []
        self.host_waits: list[str] = []
        """The threads that waited for the device."""
        self.capped: list[int | None] = []
        self.released: set[FakeMark] = set()
        self.failing: BaseException | None = None
        self._queues: dict[Stream, list[Copied | FakeMark | tuple[FakeMark]]] = {stream: [] for stream in Stream}
        self._done = dict.fromkeys(Stream, 0)
        """Operations per stream that have run; of the computes, which run at once, those that somebody waited for."""
        self._device: list[tuple[int, int, Tensor]] = []  # sorted; alive, so that nothing else ever lies where they do
        self._locked: dict[int, int] = {}
        self._random = python_random(self.seed)
        self._lock = threading.RLock()
        if self.first is not None:  # host memory is locked for all, and one knows of the other's streams
            self.races, self._locked, self._lock = self.first.races, self.first._locked, self.first._lock

    def allocate(self, nbytes: int) -> Tensor:
        made = HostMemory().allocate(nbytes).tensor
        insort(self._device, (made.data_ptr(), made.data_ptr() + nbytes, made))
        self.races.watch(made.data_ptr(), nbytes, "device memory")
        return made

    def owns(self, tensor: Tensor) -> bool:
        at = tensor.data_ptr()
        before = bisect_right(self._device, at, key=itemgetter(0)) - 1
        return before >= 0 and at < self._device[before][1]

    def lock(self, tensor: Tensor) -> bool:
        if self.lockable is not None and sum(self._locked.values()) + tensor.numel() > self.lockable:
            return False
        self._locked[tensor.data_ptr()] = tensor.numel()
        self.races.watch(tensor.data_ptr(), tensor.numel(), "locked memory")
        return True

    def unlock(self, tensor: Tensor) -> None:
        self.races.forget(tensor.data_ptr(), self._locked.pop(tensor.data_ptr()))

    def locked(self, tensor: Tensor) -> bool:
        return any(start <= tensor.data_ptr() < start + size for start, size in self._locked.items())

    def record(self, stream: Stream) -> FakeMark:
        with self._lock:
            self._enter(stream)
            mark = FakeMark(self, stream, len(self._queues[stream]), self.races.release(self._actor(stream)))
            self._queues[stream].append(mark)
            if stream is Stream.COMPUTE:
                mark.time = time.perf_counter()
            self._perhaps()
            return mark

    def release(self, mark: Any) -> None:
        self.released.add(mark)

    def wait(self, stream: Stream, mark: Any) -> None:
        with self._lock:
            assert mark not in self.released
            self._enter(stream)
            if self.drops(stream, mark):
                return
            self.waits.append((stream, mark.stream))
            self.races.acquire(self._actor(stream), mark.clock)
            if stream is Stream.COMPUTE:
                mark.device._pass(mark)
            else:
                self._queues[stream].append((mark,))
            self._perhaps()

    def copy(self, stream: Stream, dst: Tensor, src: Tensor) -> None:
        with self._lock:
            if self.failing is not None:
                raise self.failing
            self._enter(stream)
            done = Copied(stream, dst, src)
            for tensor, write in ((dst, True), (src, False)):
                start, nbytes = extent(tensor)
                self.races.access(self._actor(stream), start, nbytes, write, f"copy {len(self.copied)}")
            self.copied.append(done)
            if stream is Stream.COMPUTE:
                self._move(done)
            else:
                self._queues[stream].append(done)
            self._perhaps()

    def passed(self, mark: Any) -> bool:
        # Who asks learns of no order here: nothing but the books may depend on what happens to be done.
        with self._lock:
            self._perhaps()
            return self._done[mark.stream] > mark.index

    def synchronize(self, mark: Any) -> None:
        with self._lock:
            self.host_waits.append(threading.current_thread().name)
            if not self.drops(None, mark):
                self._pass(mark)
                self.races.acquire(self.races.host(), mark.clock)

    def seconds(self, first: Any, last: Any) -> float:
        assert first not in self.released
        assert last not in self.released
        return last.time - first.time

    def clock(self, mark: Any) -> float:
        return mark.time

    def capturing(self) -> bool:
        return False

    def room(self) -> tuple[int, int]:
        return 12 << 30, 16 << 30

    def cap(self, nbytes: int | None) -> None:
        self.capped.append(nbytes)

    def warm_up(self, dtype: torch.dtype) -> None: ...

    def chosen(self) -> AbstractContextManager[None]:
        return nullcontext()

    def computed(self, tensor: Tensor, write: bool, what: str) -> None:
        """A compute read or wrote a tensor; on host memory that is not the device's work but the thread's."""
        with self._lock:
            start, nbytes = extent(tensor)
            actor = self.races.host()
            if self.owns(tensor):
                self._enter(Stream.COMPUTE)
                actor = self._actor(Stream.COMPUTE)
            self.races.access(actor, start, nbytes, write, what)

    def _enter(self, stream: Stream) -> None:
        """What a thread queues comes after what it has done."""
        self.races.acquire(self._actor(stream), self.races.release(self.races.host()))

    def _actor(self, stream: Stream) -> str:
        return f"{self.name}{stream}"

    def _pass(self, mark: FakeMark) -> None:
        while self._done[mark.stream] <= mark.index:
            self._step(mark.stream)

    def _perhaps(self) -> None:
        for stream in (Stream.UP, Stream.DOWN, Stream.ACROSS):
            while self._done[stream] < len(self._queues[stream]) and self._random.random() < self.chance:
                self._step(stream)

    def _step(self, stream: Stream) -> None:
        work = self._queues[stream][self._done[stream]]
        if isinstance(work, Copied):
            self._move(work)
        elif isinstance(work, FakeMark):
            work.time = work.time or time.perf_counter()
        elif work[0].stream is not Stream.COMPUTE:
            work[0].device._pass(work[0])
        self._done[stream] += 1

    def _move(self, work: Copied) -> None:
        if work.dst.dtype == work.src.dtype and work.dst.is_contiguous() and work.src.is_contiguous():
            # not by torch: this is not the thread's own doing, and is not to be recorded as such
            ctypes.memmove(work.dst.data_ptr(), work.src.data_ptr(), work.dst.numel() * work.dst.element_size())
        else:
            with torch.inference_mode():
                work.dst.copy_(work.src)


def extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor, and how many there are up to its last one."""
    if not tensor.numel():
        return tensor.data_ptr(), 0
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), span * tensor.element_size()
