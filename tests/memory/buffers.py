"""Memory to copy from and to, and whole files to read."""

from __future__ import annotations

import torch

from h2o_flexgen.memory.handle import Extent
from h2o_flexgen.memory.tiers import HostMemory


def whole(path: str, nbytes: int) -> tuple[Extent, ...]:
    return (Extent(path, 0, nbytes, 0, "layers.0.attn"),)


def random_bytes(nbytes: int) -> torch.Tensor:
    return HostMemory().allocate(nbytes).tensor.random_(0, 256)


def padded(nbytes: int) -> torch.Tensor:
    return HostMemory().allocate(-(-nbytes // 4096) * 4096).tensor
