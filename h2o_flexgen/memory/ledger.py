"""The accounting of one tier: a capacity that is kept, what is used, and for what."""

from __future__ import annotations

import threading

from h2o_flexgen.errors import PlanError
from h2o_flexgen.units import format_bytes


class Ledger:
    """Counts bytes against a capacity (None: no limit), itemised by what they are for.

    Owns no memory. Thread safe. `peak` is the largest `used` ever reached.
    """

    def __init__(self, name: str, capacity: int | None) -> None:
        if capacity is not None and capacity < 0:
            raise ValueError(f"the capacity of the {name} tier is negative: {capacity}")
        self.name = name
        self.capacity = capacity
        self._lock = threading.Lock()
        self._items: dict[str, int] = {}
        self._used = self._peak = 0

    @property
    def used(self) -> int:
        """Bytes in use now."""
        return self._used

    @property
    def peak(self) -> int:
        """The most bytes that were in use at once."""
        return self._peak

    @property
    def free(self) -> int | None:
        """Bytes left, None without a capacity."""
        return None if self.capacity is None else self.capacity - self._used

    def usage(self) -> dict[str, int]:
        """Bytes in use by what they are for, largest first."""
        with self._lock:
            return dict(sorted(self._items.items(), key=lambda item: -item[1]))

    def charge(self, nbytes: int, what: str) -> None:
        """Count `nbytes` made elsewhere. PlanError, and nothing counted, where they do not fit."""
        if nbytes < 0:
            raise ValueError(f"cannot charge {nbytes} bytes for {what}")
        with self._lock:
            if self.capacity is not None and self._used + nbytes > self.capacity:
                raise PlanError(
                    f"{what} needs {format_bytes(nbytes)} on the {self.name} tier, which has "
                    f"{format_bytes(self.capacity - self._used)} free of {format_bytes(self.capacity)}",
                    f"{format_bytes(self._used + nbytes)} would hold what is there and this",
                    f"raise --{self.name}-mem, or move a share of it to another tier",
                )
            self._items[what] = self._items.get(what, 0) + nbytes
            self._used += nbytes
            self._peak = max(self._peak, self._used)

    def refund(self, nbytes: int, what: str) -> None:
        """Give back what was charged for `what`; ValueError for more than that."""
        with self._lock:
            held = self._items.get(what, 0)
            if not 0 <= nbytes <= held:
                raise ValueError(f"cannot refund {nbytes} bytes of {what}: {held} are charged to the {self.name} tier")
            self._used -= nbytes
            self._items[what] = held - nbytes
            if held == nbytes:
                del self._items[what]
