"""What is measured on: a model's shape in one dtype on one device, and memory that no processor cache holds."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle
from pathlib import Path

import psutil
import torch
from torch import Tensor

from h2o_flexgen.calibration.timing import FEWEST_SAMPLES, Sample, Timer
from h2o_flexgen.config.kernels import Kernels
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import TENSOR_ALIGN, round_up
from h2o_flexgen.memory.cuda import open_device
from h2o_flexgen.memory.handle import torch_dtype
from h2o_flexgen.memory.pages import Allocation, DeviceMemory, HostMemory
from h2o_flexgen.units import GIB, MIB, format_bytes

_CACHES = "/sys/devices/system/cpu/cpu0/cache"
_UNKNOWN_CACHE = 64 * MIB
_ROTATION = 4
"""How many times the largest cache is gone through before anything is used again."""
_LEAST, _MOST = 256 * MIB, 2 * GIB
_TILE = 1 << 21  # numbers of noise that are made; the rest are copies


def touch(buffer: Tensor) -> Tensor:
    """`buffer` (uint8), written all over with bytes that do not compress: the first touch of memory is slow."""
    tile = torch.randint(0, 256, (MIB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for part in buffer.split(MIB):
        part.copy_(tile[: part.numel()])
    return buffer


@dataclass
class Spreads:
    """How far the quartiles of what was measured lie apart, figure by figure, and what else is to be said of each."""

    found: dict[str, list[float]] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)

    def note(self, figure: str, sample: Sample) -> Sample:
        """`sample` itself, remembered as one of those that `figure` is made of."""
        spreads = self.found.setdefault(figure, [])
        if sample.taken >= FEWEST_SAMPLES:
            spreads.append(sample.spread)
        return sample

    @property
    def typical(self) -> dict[str, float]:
        """The median over the samples of each figure that has any with enough repetitions."""
        return {figure: statistics.median(spreads) for figure, spreads in self.found.items() if spreads}

    def sources(self) -> dict[str, str]:
        """The `sources` of a HardwareProfile."""
        typical, sources = self.typical, {}
        for figure in self.found:
            wide = f"quartiles {typical[figure]:.0%} apart" if figure in typical else "too few repetitions for a spread"
            sources[figure] = "; ".join(filter(None, ["measured", self.said.get(figure), wide]))
        return sources


def largest_cache() -> int:
    """Bytes of the processor's last-level cache, as far as the system tells."""
    sizes = [_cache_size(path) for path in Path(_CACHES).glob("index*/size")]
    return max(sizes, default=0) or _UNKNOWN_CACHE


def _cache_size(path: Path) -> int:
    try:
        match = re.fullmatch(r"(\d+)([KM]?)", path.read_text(encoding="ascii").strip())
    except OSError:
        return 0
    return int(match[1]) * {"": 1, "K": 1024, "M": MIB}[match[2]] if match else 0


def arena_size() -> int:
    """Bytes that are gone through in turns: several times any cache, an eighth of what is free at most."""
    wanted = min(max(_LEAST, _ROTATION * largest_cache()), _MOST)
    return min(wanted, max(psutil.virtual_memory().available // 8, 16 * MIB)) // (2 * MIB) * (2 * MIB)


class Bench:
    """One compute device. Owns its arena: memory of the kind that weights and caches lie in, full of small numbers.

    `arena_bytes`: how much; None: `arena_size`. A context manager.
    """

    def __init__(self, spec: ModelSpec, dtype: str, device: torch.device, arena_bytes: int | None = None) -> None:
        self.spec, self.dtype, self.device = spec, torch_dtype(dtype), device
        synchronise: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self.timer = Timer(synchronise)
        self.spreads = Spreads()
        gpu = open_device(device)
        memory = HostMemory() if gpu is None else DeviceMemory(gpu)
        self._block: Allocation = memory.allocate(arena_bytes or arena_size())
        self.arena = self._block.tensor
        # The first touch of memory can take longer than anything that is measured: all of it is written here.
        self._tile_over(self.arena.view(self.dtype))

    @property
    def name(self) -> str:
        """As a profile calls the device."""
        return "gpu" if self.device.type == "cuda" else "cpu"

    @property
    def chunk(self) -> int:
        """Prompt tokens that the engine computes at once on such a device."""
        return (Kernels.TRITON if self.name == "gpu" else Kernels.CPU).chunk

    @property
    def itemsize(self) -> int:
        """Bytes per number."""
        return self.dtype.itemsize

    @cached_property
    def _tile(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        tile = torch.empty(_TILE).normal_(0.0, 0.02, generator=generator).to(self.dtype)
        return tile.to(self.device)

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
        step = round_up(nbytes, TENSOR_ALIGN)
        count = len(self.arena) // step
        if count < 1:
            raise ValueError(f"{format_bytes(nbytes)} do not fit into {format_bytes(len(self.arena))}")
        return [self.arena[i * step : i * step + nbytes] for i in range(count if most is None else min(count, most))]

    def matrices(self, out_features: int, in_features: int) -> Iterator[Tensor]:
        """Weights (out, in) without end, one place of the arena after the other."""
        nbytes = out_features * in_features * self.itemsize
        weights = [place.view(self.dtype).view(out_features, in_features) for place in self.places(nbytes)]
        return cycle(weights)

    def close(self) -> None:
        """Give the arena back."""
        del self.arena
        self._block.free()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
