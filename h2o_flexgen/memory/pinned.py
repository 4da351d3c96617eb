"""Page-locked host memory within bounds, which a GPU copies from and to without the host's help."""

from __future__ import annotations

import logging
import os
import resource
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from h2o_flexgen.memory.cuda import Device
from h2o_flexgen.units import format_bytes

log = logging.getLogger(__name__)

_CAP_IPC_LOCK = 14
_STATUS = "/proc/self/status"


class Pin(Enum):
    """How much a buffer wants to be page-locked."""

    NEVER = 0
    """The GPU never copies it."""
    IF_ROOM = 1
    """Weights, caches and hidden states: locked beside the room kept for buffers that everything goes through."""
    FIRST = 2
    """Buffers that everything goes through."""


class PageLock(NamedTuple):
    """The outcome of a wish to be page-locked. `undo` is to be called once, before the memory goes."""

    pin: Pin
    held: bool
    undo: Callable[[], None]


class PinnedPool:
    """Locks host memory for `device`, at most `limit` bytes (None: as much as the system allows). Thread safe.

    Memory that does not fit, or that the system refuses, stays pageable: copies work all the same, and take longer.
    After a refusal only `Pin.FIRST` buffers are tried.
    """

    def __init__(
        self, device: Device, limit: int | None = None, bounce: Tensor | None = None, others: Sequence[Device] = ()
    ) -> None:
        """`bounce`: memory that is to be locked before all else, for copies of what is pageable. `others`: devices that
        copy from and to what is locked, too."""
        self.device, self.limit = device, limit
        self.devices = (device, *others)
        """All that copy, in the order of their stages."""
        self.locked = self.pageable = 0
        """Bytes that are locked, and bytes that wanted to be and are not."""
        self._kept = self._first = 0
        self._lock, self._said = threading.Lock(), False
        self._unlock_bounce = (lambda: None) if bounce is None else self.lock(bounce, Pin.FIRST).undo
        self.bounce = bounce if self.locked else None
        """The memory that was locked first; None where that was refused, or not wanted."""

    def close(self) -> None:
        """Unlocks the memory that was locked first. A second call does nothing."""
        self._unlock_bounce()
        self._unlock_bounce, self.bounce = lambda: None, None

    def keep(self, nbytes: int) -> None:
        """Leave room for as much of what comes first."""
        self._kept = nbytes

    def lock(self, tensor: Tensor, pin: Pin, make_room: Callable[[], bool] = lambda: False) -> PageLock:
        """Lock flat uint8 host memory that starts on a page.

        `make_room` is called where that does not succeed: if it has unlocked anything, that is tried once more.
        """
        nbytes, first = tensor.numel(), pin is Pin.FIRST
        if pin is Pin.NEVER or not nbytes:
            return PageLock(pin, False, lambda: None)
        done = self._locked(tensor, first) or (make_room() and self._locked(tensor, first))
        if not done:
            self._refused(nbytes, first)

        def undo() -> None:
            with self._lock:
                if done:
                    self.device.unlock(tensor)
                    self._count(-nbytes, first)
                else:
                    self.pageable -= nbytes

        return PageLock(pin, done, undo)

    def warn(self) -> None:
        """Says once how many bytes stay pageable, if any do."""
        with self._lock:
            if self._said or not self.pageable:
                return
            self._said = True
        log.warning(
            "%s of the host memory that the GPU copies from and to are page-locked, %s are not: copies of these go "
            "through buffers, and are slower",
            format_bytes(self.locked), format_bytes(self.pageable),
        )  # fmt: skip

    def _locked(self, tensor: Tensor, first: bool) -> bool:
        """Lock it, if there is room and the system does not refuse."""
        with self._lock:
            done = self._fits(tensor.numel(), first) and self.device.lock(tensor)
            if done:
                self._count(tensor.numel(), first)
            return done

    def _refused(self, nbytes: int, first: bool) -> None:
        """It stays pageable. If there was room, the system has no more."""
        with self._lock:
            self.pageable += nbytes
            if not first and self._fits(nbytes, first):
                self.limit = self.locked + self._room_kept

    def _fits(self, nbytes: int, first: bool) -> bool:
        kept = 0 if first else self._room_kept
        return self.limit is None or self.locked + nbytes + kept <= self.limit

    @property
    def _room_kept(self) -> int:
        """Bytes kept for weights, caches and hidden states that have not come yet."""
        return max(0, self._kept - self._first)

    def _count(self, nbytes: int, first: bool) -> None:
        self.locked += nbytes
        self._first += nbytes if first else 0


def lockable_memory() -> int | None:
    """Bytes of host memory that this process should lock at most; None without a limit.

    The driver knows: CUDA locks pages in its kernel module, and most drivers do not go by RLIMIT_MEMLOCK, which is
    8 MiB or less on many hosts. Refused memory stays pageable, see `PinnedPool`. With H2O_FLEXGEN_MEMLOCK=1 the limit
    is kept to even where the driver would lock more, unless the process may lock all (CAP_IPC_LOCK).
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    wanted = os.environ.get("H2O_FLEXGEN_MEMLOCK", "0").lower() in ("1", "true", "yes", "on")
    return soft if wanted and soft != resource.RLIM_INFINITY and not _may_lock_all() else None


def _may_lock_all() -> bool:
    """Whether the process has CAP_IPC_LOCK; False where the system does not say."""
    try:
        lines = Path(_STATUS).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    capabilities = [int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")]
    return any(mask >> _CAP_IPC_LOCK & 1 for mask in capabilities)
