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
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: locked for all devices, not only for the one that is asked

Mark: TypeAlias = torch.cuda.Event
"""A place in the queue of a stream."""


class Stream(StrEnum):
    UP = "host to device"
    DOWN = "device to host"
    ACROSS = "device to device"
    COMPUTE = "compute"


class Device:
    """One CUDA device. Calls on UP and DOWN may come from any thread, the others from the one that computes.

    Copies run beside computing where their host memory is page-locked. `torch_device`: where tensors that are to be
    computed with are made.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.torch_device = torch.device("cuda", index)
        copying = (Stream.UP, Stream.DOWN, Stream.ACROSS)
        self._side: dict[Stream, torch.cuda.Stream] = {stream: _stream(self.torch_device) for stream in copying}
        self._far: dict[torch.device, torch.cuda.Stream] = {}
        self._spare: deque[Mark] = deque()
        self._zero = self.record(Stream.UP)
        self.synchronize(self._zero)
        self._zero_time = time.perf_counter()

    def allocate(self, nbytes: int) -> Tensor:
        """1-D uint8 on the device; torch.OutOfMemoryError where there is no room."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def owns(self, tensor: Tensor) -> bool:
        return tensor.device == self.torch_device

    def lock(self, tensor: Tensor) -> bool:
        """Page-locks host memory, so that copies need no help of the host; False where the system refuses."""
        if not tensor.numel():
            return True
        if not int(_cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, _PORTABLE)):
            return True
        # The refusal stays in CUDA's record of errors until something asks, and what asks fails: a kernel does, here.
        with suppress(RuntimeError):
            torch.zeros(1, device=self.torch_device).add_(1)
        return False

    def unlock(self, tensor: Tensor) -> None:
        if tensor.numel():
            _cudart().cudaHostUnregister(tensor.data_ptr())

    def locked(self, tensor: Tensor) -> bool:
        return tensor.is_pinned()

    def record(self, stream: Stream) -> Mark:
        """A mark behind all that is queued on `stream` so far."""
        event: Any
        try:
            event = self._spare.pop()
        except IndexError:
            event = cast(Any, torch.cuda.Event)(enable_timing=True)
        event.record(self._of(stream))
        return cast(Mark, event)

    def release(self, mark: Mark) -> None:
        """`mark` is needed no more: it may become another one."""
        self._spare.append(mark)

    def wait(self, stream: Stream, mark: Mark) -> None:
        """Work that is queued on `stream` from now on starts once `mark` is passed. The host does not wait."""
        self._of(stream).wait_event(mark)

    def copy(self, stream: Stream, dst: Tensor, src: Tensor) -> None:
        """Queues dst[...] = src, one of which is on the device; RuntimeError where that fails at once.

        On ACROSS `dst` is, and `src` is on another device.
        """
        # Between two devices torch copies on the current stream of the source's, and puts both devices' current streams
        # in order around that: neither may be the one that computes.
        far = torch.cuda.stream(self._far_from(src.device)) if stream is Stream.ACROSS else nullcontext()
        with torch.inference_mode(), far, torch.cuda.stream(self._of(stream)):
            dst.copy_(src, non_blocking=True)

    def passed(self, mark: Mark) -> bool:
        return bool(mark.query())

    def synchronize(self, mark: Mark) -> None:
        """The host waits until `mark` is passed; RuntimeError where work before it failed."""
        mark.synchronize()

    def seconds(self, first: Mark, last: Mark) -> float:
        """Between two marks that are passed."""
        return float(first.elapsed_time(last)) / 1000

    def clock(self, mark: Mark) -> float:
        """When a mark was passed, as `time.perf_counter` reads: to a tenth of a millisecond in the first minutes."""
        return self._zero_time + self.seconds(self._zero, mark)

    def capturing(self) -> bool:
        """Whether what is queued on COMPUTE is being recorded for later, and does not run: no marks may be set then."""
        return bool(torch.cuda.is_current_stream_capturing())

    def room(self) -> tuple[int, int]:
        """Bytes that this process may still take or holds already, and bytes that the device has in all.

        Less what others hold, the context, and what libraries hold.
        """
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return free + torch.cuda.memory_reserved(self.torch_device), total

    def cap(self, nbytes: int | None) -> None:
        """From now on the most that torch allocates, activations included, and a torch.OutOfMemoryError beyond; None:
        no limit."""
        _, total = self.room()
        share = 1.0 if nbytes is None else min(1.0, nbytes / total)
        torch.cuda.set_per_process_memory_fraction(share, self.torch_device)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Makes streams, handles and working memory of libraries now that would be made at first use."""
        with torch.inference_mode():
            square = torch.ones(64, 64, dtype=dtype, device=self.torch_device)
            host = torch.empty(64, 64, dtype=dtype)
            torch.nn.functional.linear(square, square).softmax(-1)
            for stream, dst, src in ((Stream.UP, square, host), (Stream.DOWN, host, square)):
                self.wait(stream, self.record(Stream.COMPUTE))
                self.copy(stream, dst, src)
                self.synchronize(self.record(stream))

    def chosen(self) -> AbstractContextManager[None]:
        """Launches of this thread within go to the device."""
        return cast(AbstractContextManager[None], torch.cuda.device(self.torch_device))

    def _far_from(self, device: torch.device) -> torch.cuda.Stream:
        """A stream of another device, for copies from there."""
        if device not in self._far:
            self._far[device] = _stream(device)
        return self._far[device]

    def _of(self, stream: Stream) -> torch.cuda.Stream:
        side = self._side.get(stream)
        return torch.cuda.current_stream(self.torch_device) if side is None else side


def open_device(device: torch.device) -> Device | None:
    """The streams for copies to and from `device`; None for the CPU. Takes the device's context."""
    return Device(device) if device.type == "cuda" else None


def _stream(device: torch.device) -> torch.cuda.Stream:
    return cast(torch.cuda.Stream, cast(Any, torch.cuda.Stream)(device))


def _cudart() -> Any:
    return cast(Any, torch.cuda.cudart)()  # untyped in torch
