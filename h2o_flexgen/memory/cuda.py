"""All that the engine asks of CUDA beside computing: memory, streams, events. Tests replace exactly this.

Work is queued on four streams: one for copies to the device, one for copies from it, one for copies from other devices,
and the one that computes, which is torch's current stream of the calling thread. Streams know nothing of each other: a
`Mark` on one, and a `wait` for it on another, of this device or of another, are the only order between them.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext, suppress
from enum import StrEnum
from typing import Any, Protocol, cast

import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: locked for all devices, not only for the one that is asked


class Stream(StrEnum):
    """A queue of work on the device."""

    UP = "host to device"
    DOWN = "device to host"
    ACROSS = "device to device"
    COMPUTE = "compute"


class Mark(Protocol):
    """A place in the queue of a stream: an event, recorded. Opaque but to the device that made it."""


class Device(Protocol):
    """One accelerator. Calls on UP and DOWN may come from any thread, the others from the one that computes."""

    torch_device: torch.device
    """Where tensors that are to be computed with are made."""

    def allocate(self, nbytes: int) -> Tensor:
        """1-D uint8 on the device; torch.OutOfMemoryError where there is no room."""

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor lies on the device."""

    def lock(self, tensor: Tensor) -> bool:
        """Page-locks host memory, so that copies need no help of the host; False where the system refuses."""

    def unlock(self, tensor: Tensor) -> None:
        """Undoes `lock`."""

    def locked(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in page-locked host memory."""

    def record(self, stream: Stream) -> Mark:
        """A mark behind all that is queued on `stream` so far."""

    def release(self, mark: Mark) -> None:
        """Nobody asks for `mark` any more: it may become another one."""

    def wait(self, stream: Stream, mark: Mark) -> None:
        """What is queued on `stream` from now on starts once `mark` is passed. The host does not wait."""

    def copy(self, stream: Stream, dst: Tensor, src: Tensor) -> None:
        """Queues dst[...] = src, one of which is on the device; RuntimeError where that fails at once.

        On ACROSS `dst` is, and `src` is on another device.
        """

    def passed(self, mark: Mark) -> bool:
        """Whether the device has come by."""

    def synchronize(self, mark: Mark) -> None:
        """The host waits until `mark` is passed; RuntimeError where work before it failed."""

    def seconds(self, first: Mark, last: Mark) -> float:
        """Between two marks that are passed."""

    def clock(self, mark: Mark) -> float:
        """When a mark was passed, as `time.perf_counter` reads."""

    def capturing(self) -> bool:
        """Whether what is queued on COMPUTE is being recorded for later, and does not run: no marks may be set then."""

    def room(self) -> tuple[int, int]:
        """Bytes that this process may still take or holds already, and bytes that the device has in all.

        Less what others hold, the context, and what libraries hold.
        """

    def cap(self, nbytes: int | None) -> None:
        """From now on the most that is allocated, activations included; None: no limit."""

    def warm_up(self, dtype: torch.dtype) -> None:
        """Makes what is made at first use: streams, handles and working memory of libraries."""

    def chosen(self) -> AbstractContextManager[None]:
        """What this thread launches within goes to the device."""


class CudaDevice:
    """See Device. Copies run beside computing where their host memory is page-locked."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.torch_device = torch.device("cuda", index)
        copying = (Stream.UP, Stream.DOWN, Stream.ACROSS)
        self._side: dict[Stream, torch.cuda.Stream] = {stream: _stream(self.torch_device) for stream in copying}
        self._far: dict[torch.device, torch.cuda.Stream] = {}
        self._spare: deque[Mark] = deque()
        self._zero, self._zero_time = self._now()

    def allocate(self, nbytes: int) -> Tensor:
        """See Device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def owns(self, tensor: Tensor) -> bool:
        """See Device."""
        return tensor.device == self.torch_device

    def lock(self, tensor: Tensor) -> bool:
        """See Device."""
        if not tensor.numel():
            return True
        nbytes = tensor.numel() * tensor.element_size()
        if not int(_cudart().cudaHostRegister(tensor.data_ptr(), nbytes, _PORTABLE)):
            return True
        # The refusal stays in CUDA's record of errors until something asks, and what asks fails: a kernel does, here.
        with suppress(RuntimeError):
            torch.zeros(1, device=self.torch_device).add_(1)
        return False

    def unlock(self, tensor: Tensor) -> None:
        """See Device."""
        if tensor.numel():
            _cudart().cudaHostUnregister(tensor.data_ptr())

    def locked(self, tensor: Tensor) -> bool:
        """See Device."""
        return tensor.is_pinned()

    def record(self, stream: Stream) -> Mark:
        """See Device."""
        event: Any
        try:
            event = self._spare.pop()
        except IndexError:
            event = cast(Any, torch.cuda.Event)(enable_timing=True)
        event.record(self._of(stream))
        return cast(Mark, event)

    def release(self, mark: Mark) -> None:
        """See Device."""
        self._spare.append(mark)

    def wait(self, stream: Stream, mark: Mark) -> None:
        """See Device."""
        self._of(stream).wait_event(cast(torch.cuda.Event, mark))

    def copy(self, stream: Stream, dst: Tensor, src: Tensor) -> None:
        """See Device."""
        # Between two devices torch copies on the current stream of the source's, and puts both devices' current streams
        # in order around that: neither may be the one that computes.
        far = torch.cuda.stream(self._far_from(src.device)) if stream is Stream.ACROSS else nullcontext()
        with torch.inference_mode(), far, torch.cuda.stream(self._of(stream)):
            dst.copy_(src, non_blocking=True)

    def passed(self, mark: Mark) -> bool:
        """See Device."""
        return bool(cast(torch.cuda.Event, mark).query())

    def synchronize(self, mark: Mark) -> None:
        """See Device."""
        cast(torch.cuda.Event, mark).synchronize()

    def seconds(self, first: Mark, last: Mark) -> float:
        """See Device."""
        return float(cast(torch.cuda.Event, first).elapsed_time(cast(torch.cuda.Event, last))) / 1000

    def clock(self, mark: Mark) -> float:
        """See Device. Right to a tenth of a millisecond in the first minutes, less so later."""
        return self._zero_time + self.seconds(self._zero, mark)

    def capturing(self) -> bool:
        """See Device."""
        return bool(torch.cuda.is_current_stream_capturing())

    def room(self) -> tuple[int, int]:
        """See Device."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return free + torch.cuda.memory_reserved(self.torch_device), total

    def cap(self, nbytes: int | None) -> None:
        """See Device. A limit of torch's allocator: what it would exceed is a torch.OutOfMemoryError."""
        _, total = self.room()
        share = 1.0 if nbytes is None else min(1.0, nbytes / total)
        torch.cuda.set_per_process_memory_fraction(share, self.torch_device)

    def warm_up(self, dtype: torch.dtype) -> None:
        """See Device."""
        with torch.inference_mode():
            square = torch.ones(64, 64, dtype=dtype, device=self.torch_device)
            host = torch.empty(64, 64, dtype=dtype)
            torch.nn.functional.linear(square, square).softmax(-1)
            for stream, dst, src in ((Stream.UP, square, host), (Stream.DOWN, host, square)):
                self.wait(stream, self.record(Stream.COMPUTE))
                self.copy(stream, dst, src)
                self.synchronize(self.record(stream))

    def chosen(self) -> AbstractContextManager[None]:
        """See Device."""
        return cast(AbstractContextManager[None], torch.cuda.device(self.torch_device))

    def _far_from(self, device: torch.device) -> torch.cuda.Stream:
        """A stream of another device, for copies from there."""
        if device not in self._far:
            self._far[device] = _stream(device)
        return self._far[device]

    def _of(self, stream: Stream) -> torch.cuda.Stream:
        side = self._side.get(stream)
        return torch.cuda.current_stream(self.torch_device) if side is None else side

    def _now(self) -> tuple[Mark, float]:
        """A mark that is passed, and when that was."""
        mark = self.record(Stream.UP)
        self.synchronize(mark)
        return mark, time.perf_counter()


def open_device(device: torch.device) -> CudaDevice | None:
    """What copies to and from `device` go through; None for the CPU. Takes the device's context."""
    return CudaDevice(device) if device.type == "cuda" else None


def _stream(device: torch.device) -> torch.cuda.Stream:
    return cast(torch.cuda.Stream, cast(Any, torch.cuda.Stream)(device))


def _cudart() -> Any:
    return cast(Any, torch.cuda.cudart)()  # untyped in torch
