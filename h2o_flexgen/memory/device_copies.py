"""Copies between host memory and a GPU: queued at once where nothing has to happen on the host first.

A copy runs on its direction's stream, behind what was computed when it was asked for and behind the copies that it is
to come after. The host waits for it only where the host itself reads what it wrote.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from h2o_flexgen.memory.cuda import Device, Mark, Stream
from h2o_flexgen.memory.transfers import LinkMeters, Operation, Ticket, TraceCallback, Workers

BOUNCE_CHUNK = 4 << 20
"""Bytes of pageable memory that go through a locked buffer at once; there are two buffers per direction."""
BOUNCE_BYTES = 4 * BOUNCE_CHUNK
"""Bytes of all these buffers."""
PIECE = 32 << 20
"""Bytes of one operation on the way to the device. One engine copies in that direction and is not interrupted: a small
copy on another stream, of an answer from the host say, waits for the piece under way and not for all of a unit's
weights. How an engine chooses between streams is up to it; the gain of pieces was not measured."""


class DeviceTicket(Ticket):
    """A copy to or from a GPU. `issued` once it is queued there, done once the GPU is through with it."""

    on_device = True

    def __init__(self, label: str, link: str, nbytes: int, device: Device, after: tuple[Ticket, ...] = ()) -> None:
        super().__init__(label, link, nbytes, (), after)
        self._device = device
        self.end: Mark | None = None
        """Behind the copy on its stream, once it is queued."""

    def wait(self) -> None:
        super().wait()
        if self.end is not None:
            self._device.synchronize(self.end)

    def wait_on_device(self, device: Device | None = None) -> None:
        super().wait()
        if self.end is not None:
            (device or self._device).wait(Stream.COMPUTE, self.end)


class _Copy(NamedTuple):
    """The copies to be made, and `ready`: behind what was computed when that was asked for, on all GPUs concerned."""

    dst: Tensor
    src: Tensor
    stream: Stream
    ready: tuple[Mark, ...]
    ticket: DeviceTicket

    @property
    def plain(self) -> bool:
        """Whether it is one run of bytes."""
        dst, src = self.dst, self.src
        return dst.dtype == src.dtype and dst.is_contiguous() and src.is_contiguous()


class _Flight(NamedTuple):
    """A copy that was queued, between two marks."""

    ticket: DeviceTicket
    start: Mark
    end: Mark


class DeviceCopies:
    """Queues copies on the streams of `device`, and counts those that are done.

    `bounce`: page-locked memory of BOUNCE_BYTES, through which pageable memory is copied in chunks; None: CUDA does
    that. Threads of `workers` queue what has to wait for the host.
    """

    def __init__(
        self, device: Device, workers: Workers, meters: LinkMeters, trace: TraceCallback | None, bounce: Tensor | None
    ) -> None:
        self.device, self._workers, self._meters, self._trace = device, workers, meters, trace
        self._lock = threading.Lock()
        self._queueing = threading.Lock()
        self._closed = False
        self._under_way: dict[Stream, deque[_Flight]] = {stream: deque() for stream in Stream}
        parts = [] if bounce is None else list(bounce[:BOUNCE_BYTES].split(BOUNCE_CHUNK))
        self._bounces = {Stream.UP: parts[:2], Stream.DOWN: parts[2:]}

    def submit(
        self, dst: Tensor, src: Tensor, link: str, after: tuple[Ticket, ...], label: str, sender: Device | None = None
    ) -> Ticket:
        """dst[...] = src after all of `after`, and after what this thread has computed so far. `sender`: the other GPU
        that `src` lies on."""
        if self._closed:
            raise RuntimeError(f"the copy engine is closed: {label} cannot start")
        self.collect()
        ticket = DeviceTicket(label, link, dst.nbytes, self.device, after)
        stream = Stream.UP if self.device.owns(dst) else Stream.DOWN
        ready = [self.device.record(Stream.COMPUTE)]
        if sender is not None:
            stream = Stream.ACROSS
            ready.append(sender.record(Stream.COMPUTE))
        copy = _Copy(dst, src, stream, tuple(ready), ticket)
        host = src if stream is Stream.UP else dst
        if stream is not Stream.ACROSS and not (copy.plain and self.device.locked(host)):
            return self._later(link, copy, self._by_the_host)
        if not all(before.issued() for before in after):
            return self._later(f"{link} queue", copy, self._direct)
        error: BaseException | None = next((t.error for t in after if t.error is not None), None)
        if error is None:
            try:
                self._direct(copy)
            except Exception as caught:
                error = caught
        ticket.resolve(error)
        return ticket

    def in_turn(self, dst: Tensor, src: Tensor, link: str, label: str) -> None:
        """dst[...] = src among what this thread computes; the host has written `src`, or nothing has yet."""
        ticket = DeviceTicket(label, link, dst.nbytes, self.device)
        self._between_marks(_Copy(dst, src, Stream.COMPUTE, (), ticket), self._queue)
        ticket.resolve(None)
        self.collect()

    def collect(self, wait: bool = False) -> None:
        """Count the copies that are done; with `wait` all that are queued, of which the tickets tell what failed."""
        for flights in self._under_way.values():
            while (flight := self._next(flights, wait)) is not None:
                ticket, start, end = flight
                if wait:
                    try:
                        self.device.synchronize(end)
                    except RuntimeError as error:
                        ticket.resolve(error)
                        continue
                ticket.seconds = self.device.seconds(start, end)
                self._meters.add(ticket.link, ticket.nbytes, ticket.seconds)
                if self._trace is not None:
                    begun = self.device.clock(start)
                    self._trace(ticket.label, begun, begun + ticket.seconds, ticket.link)

    def close(self) -> None:
        """Wait for what is queued, and take no more. To be called when the threads have ended."""
        self._closed = True
        self.collect(wait=True)

    def _next(self, flights: deque[_Flight], wait: bool) -> _Flight | None:
        """Takes out the first of `flights`, if there is one, and it is done or to be waited for."""
        with self._lock:
            if not flights or not (wait or self.device.passed(flights[0].end)):
                return None
            return flights.popleft()

    def _later(self, queue: str, copy: _Copy, run: Callable[[_Copy], None]) -> Ticket:
        copy.ticket.operations.append(Operation(partial(run, copy), 0))
        return self._workers.submit(queue, copy.ticket)

    def _direct(self, copy: _Copy) -> None:
        """A copy that needs no help of the host; the copies before it may still be under way on the device."""
        with self._queueing:  # two threads at once would mix up what lies between their marks
            self._between_marks(copy, self._queue)

    def _by_the_host(self, copy: _Copy) -> None:
        """A copy that CUDA needs the host for: from or to pageable memory, or of another layout or dtype."""
        for before in copy.ticket.after:
            before.wait()
        bounced = copy.plain and self._bounces[copy.stream]
        end = self._between_marks(copy, self._bounce if bounced else self._queue)
        if not bounced:
            self.device.synchronize(end)

    def _between_marks(self, copy: _Copy, queue: Callable[[_Copy], None]) -> Mark:
        """`queue` behind what the copy comes after; the mark behind it."""
        marks = [before.end for before in copy.ticket.after if isinstance(before, DeviceTicket)]
        for mark in (*copy.ready, *marks):
            if mark is not None:
                self.device.wait(copy.stream, mark)
        start = self.device.record(copy.stream)
        queue(copy)
        end = copy.ticket.end = self.device.record(copy.stream)
        with self._lock:
            self._under_way[copy.stream].append(_Flight(copy.ticket, start, end))
        return end

    def _queue(self, copy: _Copy) -> None:
        for dst, src in _pieces(copy):
            self.device.copy(copy.stream, dst, src)

    def _bounce(self, copy: _Copy) -> None:
        """Chunk by chunk: while the host fills or empties one locked buffer, the other is copied."""
        to, source = copy.dst.view(-1), copy.src.view(-1)
        step = BOUNCE_CHUNK // copy.dst.element_size()
        marks: deque[tuple[Mark, Tensor, Tensor]] = deque()  # behind the chunks that still have a buffer, and these
        for number, (dst, src) in enumerate(zip(to.split(step), source.split(step), strict=True)):
            if len(marks) == 2:
                self._free_buffer(copy.stream, *marks.popleft())
            buffer = self._bounces[copy.stream][number % 2].view(dst.dtype)[: dst.numel()]
            if copy.stream is Stream.UP:
                move(buffer, src)
                self.device.copy(copy.stream, dst, buffer)
            else:
                self.device.copy(copy.stream, buffer, src)
            marks.append((self.device.record(copy.stream), dst, buffer))
        for mark in marks:
            self._free_buffer(copy.stream, *mark)

    def _free_buffer(self, stream: Stream, mark: Mark, dst: Tensor, buffer: Tensor) -> None:
        self.device.synchronize(mark)
        if stream is Stream.DOWN:
            move(dst, buffer)


def _pieces(copy: _Copy) -> Iterable[tuple[Tensor, Tensor]]:
    """The copy itself, or parts of what goes up and is one run of bytes."""
    if copy.stream is not Stream.UP or not copy.plain or copy.ticket.nbytes <= PIECE:
        return [(copy.dst, copy.src)]
    step = PIECE // copy.dst.element_size()
    return zip(copy.dst.view(-1).split(step), copy.src.view(-1).split(step), strict=True)


def move(dst: Tensor, src: Tensor) -> None:
    """One thread's memmove between contiguous host tensors of one size, without the GIL.

    Not torch's own copy, which would start a second team of threads beside the compute.
    """
    ctypes.memmove(dst.data_ptr(), src.data_ptr(), src.nbytes)
