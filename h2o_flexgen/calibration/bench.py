"""A model's shape in one dtype on one device, to measure on, and memory that no processor cache holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from h2o_flexgen.calibration.timing import Repeats, Sample, Spreads, Timer
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import TENSOR_ALIGN, round_up
from h2o_flexgen.config.offload import Kernels
from h2o_flexgen.engine.limits.devices import cgroup_room, rss
from h2o_flexgen.folders import Closing
from h2o_flexgen.memory.cuda import open_device
from h2o_flexgen.memory.handle import torch_dtype
from h2o_flexgen.memory.tiers import DeviceMemory, HostMemory
from h2o_flexgen.units import GIB, MIB, format_bytes

_CACHES = "/sys/devices/system/cpu/cpu0/cache"
_UNKNOWN_CACHE = 64 * MIB
_ROTATION = 4
"""How many times the largest cache is gone through before anything is used again."""
_LEAST, _MOST = 256 * MIB, 2 * GIB
_MOST_PLACES = 1 << 15
"""Of weights in the arena: making half a million, of a tiny model, takes seconds for each figure."""
_TILE = 1 << 21  # numbers of noise that are made; the rest are copies


def largest_cache() -> int:
    """Bytes of the processor's last-level cache, as far as the system tells."""
    sizes = []
    for path in Path(_CACHES).glob("index*/size"):
        with suppress(OSError):
            match = re.fullmatch(r"(\d+)([KM]?)", path.read_text(encoding="ascii").strip())
            sizes += [int(match[1]) * {"": 1, "K": 1024, "M": MIB}[match[2]]] if match else []
    return max(sizes, default=0) or _UNKNOWN_CACHE


def free_memory(cap: int | None = None) -> int:
    """Bytes that this process may still take of the host's memory, of `cap` bytes in all where that is given."""
    rooms = [psutil.virtual_memory().available, cgroup_room()]
    rooms.append(None if cap is None else cap - rss())
    return max(0, min(room for room in rooms if room is not None))


def arena_size(free: int) -> int:
    """Bytes that are gone through in turns: several times any cache, an eighth of what is free at most."""
    wanted = min(max(_LEAST, _ROTATION * largest_cache()), _MOST)
    return min(wanted, max(free // 8, 16 * MIB)) // (2 * MIB) * (2 * MIB)


class Bench(Closing):
    """One compute device. Owns its arena: memory of the kind that weights and caches lie in, full of small numbers.

    `arena_bytes`: how much; None: `arena_size`. `spreads` and `repeats` are those of the whole calibration, `cap` its
    bytes of host memory. A context manager.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: str,
        device: torch.device,
        arena_bytes: int | None = None,
        spreads: Spreads | None = None,
        repeats: Repeats | None = None,
        cap: int | None = None,
    ) -> None:
        self.spec, self.dtype, self.device = spec, torch_dtype(dtype), device
        self.itemsize = self.dtype.itemsize
        self.name = "gpu" if device.type == "cuda" else "cpu"
        """As a profile calls the device."""
        self.chunk = (Kernels.TRITON if self.name == "gpu" else Kernels.CPU).chunk
        """Prompt tokens that the engine computes at once on such a device."""
        self.spreads = spreads or Spreads()
        self.timer = Timer(torch.cuda.synchronize if self.name == "gpu" else lambda: None, repeats=repeats)
        generator = torch.Generator().manual_seed(0)
        tile = torch.empty(_TILE).normal_(0.0, 0.02, generator=generator).to(self.dtype)
        self._tile = tile.to(device)
        gpu = open_device(device)
        memory = HostMemory() if gpu is None else DeviceMemory(gpu)
        self._cap = cap
        self._allocation = memory.allocate(arena_bytes or arena_size(free_memory(cap)))
        self.arena = self._allocation.tensor
        # The first touch of memory can take longer than anything that is measured: all of it is written here.
        self.refill()

    def measure(self, figure: str, call: Callable[[], object], seconds: float, **settings: Any) -> Sample:
        """See Timer.measure; the sample is one of those that `figure` of this device is made of."""
        return self.spreads.note(f"{self.name} {figure}", self.timer.measure(call, seconds, **settings))

    def room(self) -> int:
        """Bytes of host memory that may be taken now, whatever the device is."""
        return free_memory(self._cap)

    def noise(self, *shape: int) -> Tensor:
        """Small normal numbers in memory of their own."""
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._tile_over(made.view(-1))
        return made

    def _tile_over(self, flat: Tensor) -> None:
        for part in flat.split(_TILE):
            part.copy_(self._tile[: part.numel()])

    def places(self, nbytes: int, most: int | None = None) -> list[Tensor]:
        """Flat uint8 stretches of the arena, as many of `nbytes` as it holds, at most `most`; aligned as tensors are.

        ValueError for what is larger than the arena.
        """
        return list(self._stretches(nbytes)[:most].unbind())

    def _stretches(self, nbytes: int) -> Tensor:
        """The places as one tensor, of which the single ones are made at once."""
        step = round_up(nbytes, TENSOR_ALIGN)
        count = len(self.arena) // step
        if count < 1:
            raise ValueError(f"{format_bytes(nbytes)} do not fit into {format_bytes(len(self.arena))}")
        return self.arena.as_strided((count, nbytes), (step, 1))

    def matrices(self, out_features: int, in_features: int) -> Iterator[Tensor]:
        """Weights (out, in) without end, one place of the arena after the other, as far as there are not too many."""
        stretches = self._stretches(out_features * in_features * self.itemsize)[:_MOST_PLACES].view(self.dtype)
        return cycle(stretches.unflatten(1, (out_features, in_features)).unbind())

    def refill(self) -> None:
        """The arena full of small numbers again, whatever was written to it."""
        self._tile_over(self.arena.view(self.dtype))

    def close(self) -> None:
        del self.arena
        self._allocation.free()
