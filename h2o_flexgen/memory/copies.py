"""Asynchronous copies between tiers: extents and regions of files, and tensors. Every call returns a Ticket."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import torch
import xxhash

from h2o_flexgen.config.model.tensors import page_floor
from h2o_flexgen.errors import StorageError
from h2o_flexgen.folders import Closing
from h2o_flexgen.memory.cuda import Device
from h2o_flexgen.memory.device_copies import DeviceCopies, move
from h2o_flexgen.memory.disk import DirectFile, HostView, host_view
from h2o_flexgen.memory.handle import Extent
from h2o_flexgen.memory.tiers import Region
from h2o_flexgen.memory.transfers import LinkMeters, Operation, Ticket, TraceCallback, Workers

# A cold 256 MiB file, O_DIRECT, NVMe behind virtio, two cores, GB/s (medians of 7):
# 1 thread: 3.2 at 1 MiB, 3.6 at 4 MiB; 2 threads: 2.7 at 256 KiB, 3.5 at 1 MiB, 3.7 at 2 MiB, 3.8 at 4 MiB and 8 MiB.
READ_THREADS = 2
CHUNK = 4 << 20

After: TypeAlias = Ticket | Iterable[Ticket | None] | None
"""Transfers that have to be done before."""


def checksum(tensors: Iterable[torch.Tensor]) -> bytes:
    """xxh3_128 digest of contiguous host tensors, as if their bytes were one run."""
    state = xxhash.xxh3_128()
    for tensor in tensors:
        state.update(host_view(tensor).view)
    return state.digest()


class CopyEngine(Closing):
    """Moves bytes on threads of its own: READ_THREADS for disk reads, one for disk writes, one per other link.

    Order between tickets is given by `after` alone; otherwise earlier ones are preferred. A source must not change, nor
    a target be used, before the ticket is done. Errors surface at `Ticket.wait`. Copies to and from `device` are queued
    on streams of its own; `bounce`: see DeviceCopies. Owns its threads and the files it opens; a context manager, to be
    closed before the tiers. After `close` nothing runs.
    """

    def __init__(
        self,
        *,
        trace: TraceCallback | None = None,
        device: Device | None = None,
        bounce: torch.Tensor | None = None,
    ) -> None:
        self._meters = LinkMeters()
        self._workers = Workers(self._meters, trace)
        self._files: dict[str, DirectFile] = {}
        self._files_lock = threading.Lock()
        self._on_device: DeviceCopies | None = None
        if device is not None:
            self._on_device = DeviceCopies(device, self._workers, self._meters, trace, bounce)

    @property
    def bytes_moved(self) -> Counter[str]:
        """Bytes per link ("disk->cpu", ...) so far."""
        self._collect()
        return Counter({link: nbytes for link, nbytes in self._meters.read()[0].items() if "->" in link and nbytes})

    @property
    def busy_seconds(self) -> dict[str, float]:
        """Seconds per link, or other name of `run`, in which at least one transfer was running."""
        self._collect()
        return self._meters.read()[1]

    def watch(self, paths: Iterable[str], *, ours: bool = False) -> None:
        """Open files now: from here on a change of theirs is an error, ModelError or (if `ours`) StorageError."""
        for path in paths:
            self._file(path, ours)

    def read_extents(
        self,
        extents: Sequence[Extent],
        buffer: torch.Tensor,
        *,
        digest: bytes | None = None,
        after: After = None,
    ) -> Ticket:
        """Fill the extents' places in `buffer` (1-D uint8, host); in place by O_DIRECT where it starts on a page.

        `digest`: the `checksum` of the extents' bytes in order. The ticket raises StorageError where it differs, or
        where the disk keeps failing, ModelError where a file changed since it was opened.
        """
        out = _flat(buffer)
        for extent in extents:
            if not 0 <= extent.buffer_offset <= extent.buffer_offset + extent.nbytes <= len(out.view):
                raise ValueError(f"{extent.name} does not fit into a buffer of {len(out.view)} bytes")
        label = extents[0].name if extents else "nothing"

        def check() -> None:
            for path in dict.fromkeys(extent.path for extent in extents):
                self._file(path).check()
            spans = (buffer[extent.buffer_offset : extent.buffer_offset + extent.nbytes] for extent in extents)
            if digest is not None and checksum(spans) != digest:
                raise bit_flip(label, extents[0].path, extents[0].file_offset)

        operations = (
            Operation(partial(self._read, out, extent, start, size), size)
            for extent in extents
            for start, size in _cuts(extent.file_offset, extent.nbytes)
        )
        nbytes = sum(extent.nbytes for extent in extents)
        return self._submit("disk-read", Ticket(label, "disk->cpu", nbytes, operations, _tickets(after), check))

    def read_region(self, region: Region, out: torch.Tensor, *, after: After = None) -> Ticket:
        """Fill `out` (contiguous, host) from the start of `region`; checked against the last write's digest."""

        def check() -> None:
            known = region.written is not None and region.written[0] == out.nbytes
            if known and region.written != (out.nbytes, checksum((out,))):
                raise bit_flip(region.what, region.file.path, region.offset)

        operations = self._in_region(region, region.file.read, out)
        ticket = Ticket(region.what, "disk->cpu", out.nbytes, operations, _tickets(after), check)
        return self._submit("disk-read", ticket)

    def write(self, region: Region, data: torch.Tensor, *, after: After = None) -> Ticket:
        """Write `data` (contiguous, host) to the start of `region`, which remembers its digest."""
        operations = self._in_region(region, region.file.write, data)

        def remember() -> None:
            region.written = data.nbytes, checksum((data,))

        ticket = Ticket(region.what, "cpu->disk", data.nbytes, operations, _tickets(after), remember)
        return self._submit("disk-write", ticket)

    def copy(
        self,
        dst: torch.Tensor,
        src: torch.Tensor,
        link: str,
        *,
        after: After = None,
        label: str = "",
        sender: Device | None = None,
    ) -> Ticket:
        """dst[...] = src. A plain memory copy on the host; to or from the device after the work queued there so far.

        `sender`: another device, that `src` lies on, while `dst` lies on this engine's.
        """
        if dst.shape != src.shape:
            raise ValueError(f"cannot copy {tuple(src.shape)} to {tuple(dst.shape)}")
        label = label or link
        if self._on_device is not None and any(map(self._on_device.device.owns, (dst, src))):
            return self._on_device.submit(dst, src, link, _tickets(after), label, sender)
        operations = [Operation(partial(_convert, dst, src), dst.nbytes)]
        if dst.dtype == src.dtype and dst.is_contiguous() and src.is_contiguous():
            parts = (tensor.view(-1).view(torch.uint8).split(CHUNK) for tensor in (dst, src))
            operations = [Operation(partial(move, *pair), len(pair[0])) for pair in zip(*parts, strict=True)]
        return self._submit(link, Ticket(label, link, dst.nbytes, operations, _tickets(after)))

    def copy_in_turn(self, dst: torch.Tensor, src: torch.Tensor, link: str, *, label: str = "") -> None:
        """dst[...] = src, host memory, for what is computed from now on, ahead of what `copy` was given: for little.

        On a device `src` may change once what is computed behind the copy is through."""
        if self._on_device is not None and self._on_device.device.owns(dst):
            self._on_device.in_turn(dst, src, link, label or link)
            return
        operations = [Operation(partial(_convert, dst, src), dst.nbytes)]
        self._submit(f"{link} in turn", Ticket(label or link, link, dst.nbytes, operations)).wait()

    def run(
        self, fn: Callable[[], None], link: str, nbytes: int = 0, *, after: After = None, label: str = ""
    ) -> Ticket:
        """Call `fn` on the thread of `link`; `nbytes` are booked there. `fn` must not wait for tickets.

        A name without an arrow, which is not a link's, has a thread and busy seconds, and no bytes.
        """
        queue = "disk-write" if link.endswith("->disk") else "disk-read" if link.startswith("disk->") else link
        return self._submit(queue, Ticket(label or link, link, nbytes, [Operation(fn, nbytes)], _tickets(after)))

    def drain(self) -> None:
        """Wait until nothing is under way; errors stay with their tickets."""
        self._workers.drain()
        self._collect(wait=True)

    def close(self) -> None:
        """Drop what has not started, let running chunks end, join the threads, close the files. May be called again."""
        self._workers.close()
        if self._on_device is not None:
            self._on_device.close()
        with self._files_lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def __del__(self) -> None:
        """The threads of an engine that was let go of without `close` end."""
        if hasattr(self, "_workers"):
            self._workers.abandon()

    def _file(self, path: str, ours: bool = False) -> DirectFile:
        with self._files_lock:
            if path not in self._files:
                self._files[path] = DirectFile.open(path, ours=ours)
            return self._files[path]

    def _collect(self, wait: bool = False) -> None:
        if self._on_device is not None:
            self._on_device.collect(wait)

    def _submit(self, queue: str, ticket: Ticket) -> Ticket:
        return self._workers.submit(queue, ticket, READ_THREADS if queue == "disk-read" else 1)

    def _in_region(
        self, region: Region, transfer: Callable[[HostView, int, int, int, str], None], tensor: torch.Tensor
    ) -> Iterable[Operation]:
        """`transfer` between all of `tensor` and the start of `region`, chunk by chunk."""
        view = host_view(tensor)
        if tensor.nbytes > region.nbytes:
            raise ValueError(f"{tensor.nbytes} bytes do not fit into the {region.nbytes} bytes of {region.what}")
        return [
            Operation(partial(transfer, view, start, region.offset + start, size, region.what), size)
            for start, size in _cuts(0, tensor.nbytes)
        ]

    def _read(self, out: HostView, extent: Extent, offset: int, nbytes: int) -> None:
        at = extent.buffer_offset + offset - extent.file_offset
        self._file(extent.path).read(out, at, offset, nbytes, extent.name)


def _tickets(after: After) -> tuple[Ticket, ...]:
    if after is None or isinstance(after, Ticket):
        return () if after is None else (after,)
    return tuple(ticket for ticket in after if ticket is not None)


def _cuts(offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """[offset, offset + nbytes) as (start, size) pairs that meet on page boundaries."""
    start, end = offset, offset + nbytes
    while start < end:
        stop = min(page_floor(start) + CHUNK, end)
        yield start, stop - start
        start = stop


def _convert(dst: torch.Tensor, src: torch.Tensor) -> None:
    """One thread's copy between dtypes and layouts, by torch."""
    with torch.inference_mode():
        dst.copy_(src)


def _flat(buffer: torch.Tensor) -> HostView:
    if buffer.dtype != torch.uint8 or buffer.dim() != 1:
        raise ValueError(f"needed a flat uint8 buffer, got {buffer.dtype} of shape {tuple(buffer.shape)}")
    return host_view(buffer)


def bit_flip(label: str, path: str, offset: int) -> StorageError:
    """The error of bytes that are not what was written."""
    return StorageError(
        f"{label}: what was read at byte {offset} of {path} does not match its checksum (a bit flip, or a torn write)",
        "nothing of it was used",
        "check the disk; a packed file is made anew once it is deleted",
    )
