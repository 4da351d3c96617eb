"""What the engines of one process hold: each plans with what the others leave of the memory that they share."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch

from h2o_flexgen.memory.pages import HostMemory
from h2o_flexgen.memory.tiers import Tier

_open: WeakKeyDictionary[object, frozenset[Tier]] = WeakKeyDictionary()
_lock = threading.Lock()  # engines may run in threads of their own


def note_tiers(loaded: object, tiers: Iterable[Tier]) -> None:
    """From now on what `tiers` hold counts, for as long as `loaded` is there. Closed tiers hold nothing."""
    with _lock:
        _open[loaded] = frozenset(tiers)


def held_bytes(besides: object = None, device: torch.device = HostMemory.device) -> int:
    """Bytes of `device` that engines of this process hold now, weights and all, those of `besides` left out.

    A gpu tier that is emulated is memory of the host.
    """
    with _lock:
        others = [tiers for loaded, tiers in _open.items() if loaded is not besides]
    return sum(tier.held for tiers in others for tier in tiers if tier.device == device)
