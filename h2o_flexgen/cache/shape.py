"""The shape of a cache's keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from h2o_flexgen.cache.lengths import slots_needed
from h2o_flexgen.config.budget import Budget
from h2o_flexgen.config.model.packing import (
    CacheBits,
    CachePacking,
    CacheRotation,
    cache_packings,
    centres_keys,
    scales_keys,
)


@dataclass(frozen=True)
class CacheShape:
    """The shape of K and V: (batch, kv_heads, capacity, head_dim), with `capacity` slots, see `slots_needed`.

    Packed K and V (`bits` below 16, see `CachePacking`) are uint8, and their last dimension is bytes. joint: values are
    the keys, in one tensor. newest, first: tokens of a packed cache whose rounding errors are stored, too.

    Where heads of a layer keep different numbers of tokens, `far` are the KV heads that look far, `slots` those of each
    other head and of each of these, and `capacity` is their mean: K and V have the parts' one after the other.
    """

    batch: int
    kv_heads: int
    head_dim: int
    capacity: int
    bits: CacheBits = 16
    joint: bool = False
    rotation: CacheRotation = "rotate"
    newest: int = 0
    first: int = 0
    far: tuple[int, ...] = ()
    slots: tuple[int, int] = (0, 0)

    @classmethod
    def of(
        cls,
        budgets: Sequence[Budget],
        kv_heads: int,
        head_dim: int,
        bits: CacheBits = 16,
        joint: bool = False,
        rotation: CacheRotation = "rotate",
    ) -> CacheShape:
        """The smallest cache for rows with these budgets."""
        return cls(len(budgets), kv_heads, head_dim, slots_needed(budgets), bits, joint, rotation)

    def with_slots(self, slots: Sequence[int]) -> CacheShape:
        """With so many: in each head, or in each that looks near and each that looks far."""
        if not self.far:
            return replace(self, capacity=slots[0])
        near, far = slots
        total = near * (self.kv_heads - len(self.far)) + far * len(self.far)
        return replace(self, capacity=-(-total // self.kv_heads), slots=(near, far))

    @property
    def heads(self) -> tuple[tuple[int, ...], ...]:
        """The KV heads that keep equally many tokens."""
        everyone = range(self.kv_heads)
        return (tuple(head for head in everyone if head not in self.far), self.far) if self.far else (tuple(everyone),)

    @property
    def parts(self) -> tuple[CacheShape, ...]:
        """The shapes of these heads."""
        if not self.far:
            return (self,)
        sizes = zip(self.heads, self.slots, strict=True)
        return tuple(replace(self, kv_heads=len(heads), capacity=count, far=()) for heads, count in sizes)

    @property
    def longest(self) -> int:
        """The most slots of any head."""
        return max(part.capacity for part in self.parts)

    @property
    def packings(self) -> tuple[CachePacking, CachePacking] | None:
        """The packings of keys and values; None: not packed."""
        packings = cache_packings(self.bits, self.head_dim, self.rotation)
        return (packings[0], packings[0]) if packings is not None and self.joint else packings

    @property
    def scaled(self) -> bool:
        """Whether keys are scaled before they are packed."""
        return scales_keys(self.bits, self.rotation) and not self.joint

    @property
    def centred(self) -> bool:
        """Whether keys are centred before they are scaled."""
        return centres_keys(self.bits, self.rotation) and not self.joint

    @property
    def sizes(self) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
        packings, slots = self.packings, (self.batch, self.kv_heads, self.capacity)
        keys, values = (self.head_dim,) * 2 if packings is None else (packing.nbytes for packing in packings)
        return (*slots, keys), (*slots, values)

    def kept(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of K and V in a computation in `dtype`."""
        return dtype if self.packings is None else torch.uint8

    def computed(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that K and V of `dtype` are computed in; float32 for packed ones."""
        return dtype if self.packings is None else torch.float32

    def nbytes(self, dtype: torch.dtype) -> int:
        return sum(map(prod, self.sizes[: 1 if self.joint else 2])) * self.kept(dtype).itemsize

    @property
    def mended(self) -> int:
        """Tokens of a row whose rounding errors are stored."""
        return self.newest + self.first

    @property
    def mended_bytes(self) -> int:
        """Bytes of the rounding errors of the newest and first tokens, beside K and V."""
        return self.batch * self.kv_heads * self.mended * sum(size[-1] for size in self.sizes)

    def buffers(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """A K and a V of this shape, zeros."""
        k, v = (torch.zeros(size, dtype=self.kept(dtype), device=device) for size in self.sizes)
        return k, k if self.joint else v
