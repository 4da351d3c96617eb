"""Copies between host memory and a GPU: queued at once where nothing has to happen on the host first.

A copy runs on its direction's stream, behind what was computed when it was asked for and behind the copies that it is
to come after. Nobody waits for it on the host, unless the host itself reads what it wrote.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from h2o_flexgen.memory.cuda import Device, Mark, Stream
from h2o_flexgen.memory.jobs import Job, Ticket, TraceCallback, one_piece
from h2o_flexgen.memory.workers import Workers

_POLL = 0.0005  # seconds between looks at a copy that is waited for with a time limit
BOUNCE_CHUNK = 4 << 20
"""Bytes of pageable memory that go through a locked buffer at once; there are two buffers per direction."""
BOUNCE_BYTES = 4 * BOUNCE_CHUNK
"""Of all those buffers."""
PIECE = 32 << 20
"""Bytes of one operation on the way to the device. One engine copies in that direction and is not interrupted: a small
copy on another stream, of an answer from the host say, waits for the piece under way and not for all of a unit's
weights. How an engine chooses between streams is its own affair; what pieces bring is not measured."""


class DeviceTicket(Ticket):
    """A copy to or from a GPU. `issued` once it is queued there, done once the GPU is through with it."""

    def __init__(self, label: str, link: str, nbytes: int, device: Device) -> None:
        super().__init__(label, link, nbytes)
        self._device = device
        self.end: Mark | None = None
        """Behind the copy on its stream, once it is queued."""

    def wait(self, timeout: float | None = None) -> None:
        """See Ticket."""
        until = None if timeout is None else time.perf_counter() + timeout
        super().wait(timeout)
        if self.end is None:
            return
        while until is not None and not self._device.passed(self.end):
            if time.perf_counter() >= until:
                raise TimeoutError(f"{self.label} ({self.link}) is still under way after {timeout} s")
            time.sleep(_POLL)
        self._device.synchronize(self.end)

    def wait_on_device(self, device: Device | None = None) -> None:
        """See Ticket."""
        super().wait()
        if self.end is not None:
            (device or self._device).wait(Stream.COMPUTE, self.end)

    def done(self) -> bool:
        """See Ticket."""
        return self.issued() and (self.end is None or self._device.passed(self.end))


class _Copy(NamedTuple):
    """What is to be copied, and `ready`: behind what was computed when that was asked for, on all GPUs concerned."""

    dst: Tensor
    src: Tensor
    stream: Stream
    ready: tuple[Mark, ...]
    after: tuple[Ticket, ...]
    ticket: DeviceTicket

    @property
    def host(self) -> Tensor:
        """The side that is host memory."""
        return self.src if self.stream is Stream.UP else self.dst

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
    """Queues copies on the streams of `device`, and keeps the books of those that are done.

    `bounce`: page-locked memory of BOUNCE_BYTES, through which pageable memory is copied in chunks; None: CUDA does
    that. Threads of `workers` queue what has to wait for the host.
    """

    def __init__(self, device: Device, workers: Workers, trace: TraceCallback | None, bounce: Tensor | None) -> None:
        self.device, self._workers, self._trace = device, workers, trace
        self._lock = threading.Lock()
        self._queueing = threading.Lock()
        self._closed = False
        self._flights: dict[Stream, deque[_Flight]] = {stream: deque() for stream in Stream}
        self._bytes, self._seconds = Counter[str](), dict[str, float]()
        parts = [] if bounce is None else list(bounce[:BOUNCE_BYTES].split(BOUNCE_CHUNK))
        self._bounces = {Stream.UP: parts[:2], Stream.DOWN: parts[2:]}

    def submit(
        self, dst: Tensor, src: Tensor, link: str, after: Sequence[Ticket], label: str, sender: Device | None = None
    ) -> Ticket:
        """dst[...] = src after all of `after`, and after what this thread has computed so far. `sender`: the other GPU
        that `src` lies on."""
        if self._closed:
            raise RuntimeError(f"the copy engine is closed: {label} cannot start")
        self.collect()
        ticket = DeviceTicket(label, link, dst.numel() * dst.element_size(), self.device)
        stream = Stream.UP if self.device.owns(dst) else Stream.DOWN
        ready = [self.device.record(Stream.COMPUTE)]
        if sender is not None:
            stream = Stream.ACROSS
            ready.append(sender.record(Stream.COMPUTE))
        copy = _Copy(dst, src, stream, tuple(ready), tuple(after), ticket)
        direct = stream is Stream.ACROSS or (copy.plain and self.device.locked(copy.host))
        if not direct:
            move = self._bounced if copy.plain and self._bounces[stream] else self._slow
            return self._workers.submit(
                link, Job(ticket, one_piece(partial(move, copy), 0), copy.after, on_device=True)
            )
        if not all(before.issued() for before in copy.after):
            job = Job(ticket, one_piece(partial(self._queue, copy), 0), copy.after, on_device=True)
            return self._workers.submit(f"{link} queue", job)
        error: BaseException | None = next((t.error for t in copy.after if t.error is not None), None)
        if error is None:
            try:
                self._queue(copy)
            except Exception as caught:
                error = caught
        ticket.resolve(error)
        return ticket

    def in_turn(self, dst: Tensor, src: Tensor, link: str, label: str) -> None:
        """dst[...] = src among what this thread computes; the host has written `src`, or nothing has yet."""
        ticket = DeviceTicket(label, link, dst.numel() * dst.element_size(), self.device)
        start = self.device.record(Stream.COMPUTE)
        self.device.copy(Stream.COMPUTE, dst, src)
        ticket.end = self.device.record(Stream.COMPUTE)
        ticket.resolve(None)
        with self._lock:
            self._flights[Stream.COMPUTE].append(_Flight(ticket, start, ticket.end))
        self.collect()

    def collect(self) -> None:
        """Book the copies that are done; waits for none."""
        for flights in self._flights.values():
            while (flight := self._next(flights, done=True)) is not None:
                self._book(flight)

    def drain(self) -> None:
        """Wait for all copies that are queued, and book them. What failed on the device is left to the tickets."""
        for flights in self._flights.values():
            while (flight := self._next(flights, done=False)) is not None:
                try:
                    self.device.synchronize(flight.end)
                except RuntimeError as error:
                    flight.ticket.resolve(error)
                else:
                    self._book(flight)

    def close(self) -> None:
        """Wait for what is queued, and take no more. To be called when the threads have ended."""
        self._closed = True
        self.drain()

    def meters(self) -> tuple[Counter[str], dict[str, float]]:
        """(bytes moved, busy seconds) per link, of the copies that are done."""
        self.collect()
        with self._lock:
            return Counter(self._bytes), dict(self._seconds)

    def _next(self, flights: deque[_Flight], done: bool) -> _Flight | None:
        """Takes out the first of `flights`, if there is one, and it is through where it has to be `done`."""
        with self._lock:
            if not flights or (done and not self.device.passed(flights[0].end)):
                return None
            return flights.popleft()

    def _queue(self, copy: _Copy) -> None:
        """The copy on the device's stream, in pieces between two marks; what it comes after may be under way there."""
        with self._queueing:  # two threads at once would mix up what lies between their marks
            self._begin(copy, copy.after)
            start = self.device.record(copy.stream)
            for dst, src in _pieces(copy):
                self.device.copy(copy.stream, dst, src)
            self._end(copy, start)

    def _slow(self, copy: _Copy) -> None:
        """A copy that CUDA needs the host for: from or to pageable memory, or of another layout or dtype."""
        for before in copy.after:
            before.wait()
        self._begin(copy, ())
        start = self.device.record(copy.stream)
        self.device.copy(copy.stream, copy.dst, copy.src)
        self.device.synchronize(self._end(copy, start))

    def _bounced(self, copy: _Copy) -> None:
        """A copy of pageable memory in chunks: while the host fills or empties one buffer, the other is copied."""
        for before in copy.after:
            before.wait()
        self._begin(copy, ())
        start = self.device.record(copy.stream)
        to, source = copy.dst.view(-1), copy.src.view(-1)
        step = BOUNCE_CHUNK // copy.dst.element_size()
        marks: deque[tuple[Mark, Tensor, Tensor]] = deque()  # behind the chunks that still have a buffer, and these
        for number, (dst, src) in enumerate(zip(to.split(step), source.split(step), strict=True)):
            if len(marks) == 2:
                self._free_bounce(copy.stream, *marks.popleft())
            bounce = self._bounces[copy.stream][number % 2].view(dst.dtype)[: dst.numel()]
            if copy.stream is Stream.UP:
                _move(bounce, src)
                self.device.copy(copy.stream, dst, bounce)
            else:
                self.device.copy(copy.stream, bounce, src)
            marks.append((self.device.record(copy.stream), dst, bounce))
        for mark in marks:
            self._free_bounce(copy.stream, *mark)
        self._end(copy, start)

    def _free_bounce(self, stream: Stream, mark: Mark, dst: Tensor, bounce: Tensor) -> None:
        self.device.synchronize(mark)
        if stream is Stream.DOWN:
            _move(dst, bounce)

    def _begin(self, copy: _Copy, after: Sequence[Ticket]) -> None:
        for mark in copy.ready:
            self.device.wait(copy.stream, mark)
        for before in after:
            if isinstance(before, DeviceTicket) and before.end is not None:
                self.device.wait(copy.stream, before.end)

    def _end(self, copy: _Copy, start: Mark) -> Mark:
        end = copy.ticket.end = self.device.record(copy.stream)
        with self._lock:
            self._flights[copy.stream].append(_Flight(copy.ticket, start, end))
        return end

    def _book(self, flight: _Flight) -> None:
        ticket, seconds = flight.ticket, self.device.seconds(flight.start, flight.end)
        with self._lock:
            ticket.seconds = seconds
            self._bytes[ticket.link] += ticket.nbytes
            self._seconds[ticket.link] = self._seconds.get(ticket.link, 0.0) + seconds
        if self._trace is not None:
            start = self.device.clock(flight.start)
            self._trace(ticket.label, start, start + seconds, ticket.link)


def _pieces(copy: _Copy) -> Iterable[tuple[Tensor, Tensor]]:
    """The copy itself, or parts of what goes up and is one run of bytes."""
    if copy.stream is not Stream.UP or not copy.plain or copy.ticket.nbytes <= PIECE:
        return [(copy.dst, copy.src)]
    step = PIECE // copy.dst.element_size()
    return zip(copy.dst.view(-1).split(step), copy.src.view(-1).split(step), strict=True)


def _move(dst: Tensor, src: Tensor) -> None:
    """One thread's memmove between contiguous host tensors of one size, without the GIL."""
    ctypes.memmove(dst.data_ptr(), src.data_ptr(), src.numel() * src.element_size())
