"""Caches and hidden states while a block runs: resident, or moving between the compute tier and their homes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing

import torch
from torch import Tensor

from h2o_flexgen.cache.kv_cache import CacheShape, KVCache
from h2o_flexgen.engine.batch import GpuBatch
from h2o_flexgen.engine.homes import BufferRing, Home, HomeMaker
from h2o_flexgen.memory.copies import CopyEngine, Ticket
from h2o_flexgen.memory.handle import page_ceil
from h2o_flexgen.memory.tiers import Tiers
from h2o_flexgen.schedule.footprint import REWRITE_EVERY, STATE_BUFFERS

Place = tuple[int, int]  # (layer, batch index)


def kv_views(buffer: Tensor, shape: CacheShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V of `shape`, one after the other in a flat uint8 `buffer`."""
    dims = (shape.batch, shape.kv_heads, shape.capacity, shape.head_dim)
    half = dims[0] * dims[1] * dims[2] * dims[3] * dtype.itemsize
    k, v = (buffer[i * half : (i + 1) * half].view(dtype).view(dims) for i in (0, 1))
    return k, v


def kv_bytes(shape: CacheShape, dtype: torch.dtype) -> int:
    """Bytes of K and V together."""
    return 2 * shape.batch * shape.kv_heads * shape.capacity * shape.head_dim * dtype.itemsize


class _MovingCache:
    """One cache that does not live where it is used. Tokens newer than its home's copy wait in `_news`."""

    def __init__(self, cache: KVCache, home: Home) -> None:
        self.cache, self.home = cache, home
        self.slot: int | None = None
        self.ticket: Ticket | None = None
        self._news: list[tuple[Tensor, Tensor, Tensor]] = []

    def save(self, buffer: Tensor, step: int) -> Ticket | None:
        """Writes everything after the prompt and every REWRITE_EVERY steps, else only remembers the new token.

        A sixteenth of the writes for a little memory; a load applies what is remembered.
        """
        if step > 0 and len(self._news) + 1 < REWRITE_EVERY:
            slots = self.cache.last_slots.clone()
            self._news.append((*self._at(slots), slots))
            return None
        self._news.clear()
        return self.home.save(buffer)

    def apply_news(self) -> None:
        """Brings freshly loaded K and V up to date; later tokens overwrite earlier ones in a reused slot."""
        for k, v, slots in self._news:
            index = slots.unsqueeze(-1).unsqueeze(-1).expand(-1, -1, 1, k.shape[-1])
            for buffer, new in zip(self._buffers(), (k, v), strict=True):
                buffer.scatter_(2, index, new)

    def _at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        index = slots.unsqueeze(-1).unsqueeze(-1).expand(-1, -1, 1, self.cache.shape.head_dim)
        k, v = (buffer.gather(2, index) for buffer in self._buffers())
        return k, v

    def _buffers(self) -> tuple[Tensor, Tensor]:
        if self.cache.k is None or self.cache.v is None:
            raise RuntimeError("the cache is not attached")
        return self.cache.k, self.cache.v


class CacheStore:
    """The caches of one block. `load`, `wait` and `store` are called by the executor in schedule order."""

    def __init__(
        self,
        tiers: Tiers,
        copies: CopyEngine,
        caches: Mapping[Place, KVCache],
        homes: Mapping[Place, str],
        dtype: torch.dtype,
        stays_on_cpu: bool,
    ) -> None:
        """`homes`: the tier of each (layer, batch). `stays_on_cpu`: attention of caches on cpu is computed there."""
        self._tiers, self._caches, self._dtype = tiers, dict(caches), dtype
        self._scored = {layer for (layer, _), cache in caches.items() if cache.wants_column_sums}
        resident = {tiers.compute.name, "cpu"} if stays_on_cpu else {tiers.compute.name}
        self._moving: dict[Place, _MovingCache] = {}
        self._used: list[_MovingCache] = []
        moving = {place for place in caches if homes[place] not in resident}
        largest = max((page_ceil(kv_bytes(caches[place].shape, dtype)) for place in moving), default=0)
        with ExitStack() as stack:
            count = STATE_BUFFERS if moving else 0
            self._ring = stack.enter_context(closing(BufferRing(tiers.compute, largest, count, "cache buffers")))
            make_home = HomeMaker(tiers, copies, "kv cache", largest, {homes[place] for place in moving}, stack)
            for place, cache in caches.items():
                nbytes = page_ceil(kv_bytes(cache.shape, dtype))
                if place in moving:
                    self._moving[place] = _MovingCache(cache, make_home(homes[place], nbytes))
                else:
                    buffer = stack.enter_context(tiers.memory(homes[place]).allocate(nbytes, "kv cache"))
                    cache.attach(*kv_views(buffer.tensor, cache.shape, dtype))
            self._resources = stack.pop_all()

    @property
    def moves(self) -> frozenset[Place]:
        """(layer, batch) of the caches that the schedule must load and store."""
        return frozenset(self._moving)

    def wants_column_sums(self, layer: int) -> bool:
        """Whether any cache of `layer` needs the column sums of its prompts' attention."""
        return layer in self._scored

    @property
    def most_slots(self) -> int:
        """Slots of the largest cache."""
        return max(cache.shape.capacity for cache in self._caches.values())

    def load(self, layer: int, batch: int) -> None:
        """Starts bringing a cache to the compute tier."""
        moving = self._moving[layer, batch]
        moving.slot = self._take()
        moving.ticket = moving.home.fetch(self._bytes(moving))

    def wait(self, layer: int, batch: int, step: int) -> KVCache:
        """The cache, with K and V where attention is computed."""
        if (layer, batch) not in self._moving:
            return self._caches[layer, batch]
        moving = self._moving[layer, batch]
        if step == 0:
            moving.slot = self._take()
        if moving.slot is None:
            raise RuntimeError(f"cache of layer {layer}, batch {batch} was not loaded")
        if moving.ticket is not None:
            moving.ticket.wait()
            moving.ticket = None
        moving.cache.attach(*kv_views(self._ring.buffers[moving.slot].tensor, moving.cache.shape, self._dtype))
        if step > 0:
            moving.apply_news()
        self._used.append(moving)
        return moving.cache

    def store(self, layer: int, batch: int, step: int) -> None:
        """Starts saving a cache that `step` used; its buffer is free once that is done."""
        moving = self._moving[layer, batch]
        self._release(moving, moving.save(self._bytes(moving), step))

    def _release(self, moving: _MovingCache, ticket: Ticket | None) -> None:
        self._used.remove(moving)
        if moving.slot is not None:
            self._ring.give_back(moving.slot, ticket)
        moving.slot = None
        moving.cache.detach()

    def _take(self) -> int:
        # What was used and has no store coming (the last step has none) makes room: its store would be issued by now.
        for moving in list(self._used):
            self._release(moving, None)
        return self._ring.take()

    def _bytes(self, moving: _MovingCache) -> Tensor:
        if moving.slot is None:
            raise RuntimeError("this cache holds no transfer buffer")
        return self._ring.buffers[moving.slot].tensor[: page_ceil(kv_bytes(moving.cache.shape, self._dtype))]

    def close(self) -> None:
        """Gives all memory and files back. No copy may be under way."""
        for cache in self._caches.values():
            if cache.k is not None:
                cache.detach()
        self._resources.close()
        self._moving.clear()


class HiddenStore:
    """The hidden states of a block's batches that are parked off the compute tier between two units."""

    def __init__(
        self, tiers: Tiers, copies: CopyEngine, homes: Mapping[int, str], nbytes: int, dtype: torch.dtype
    ) -> None:
        """`homes`: tier per batch; `nbytes`: of the largest hidden state, packed prompts of a whole GPU batch."""
        compute = tiers.compute
        parked = {batch: tier for batch, tier in homes.items() if tier != compute.name}
        self.moves = frozenset(parked)
        self._dtype, size = dtype, page_ceil(nbytes)
        with ExitStack() as stack:
            count = STATE_BUFFERS if parked else 0
            self._ring = stack.enter_context(closing(BufferRing(compute, size, count, "hidden buffers")))
            make_home = HomeMaker(tiers, copies, "hidden states", size, set(parked.values()), stack)
            self._homes: dict[int, Home] = {batch: make_home(tier, size) for batch, tier in parked.items()}
            self._resources = stack.pop_all()
        self._shapes: dict[int, torch.Size] = {}
        self._loading: dict[int, tuple[int, Ticket]] = {}

    def store(self, batch: GpuBatch) -> None:
        """Parks the hidden states; the compute tier's copy is dropped."""
        hidden = batch.take_hidden()
        slot = self._ring.take()
        buffer = self._ring.buffers[slot].tensor[: page_ceil(hidden.numel() * hidden.itemsize)]
        self._view(buffer, hidden.shape).copy_(hidden)
        self._shapes[batch.index] = hidden.shape
        self._ring.give_back(slot, self._homes[batch.index].save(buffer))
        batch.hidden = None

    def load(self, batch: GpuBatch) -> None:
        """Starts bringing parked hidden states back."""
        slot = self._ring.take()
        nbytes = page_ceil(self._shapes[batch.index].numel() * self._dtype.itemsize)
        self._loading[batch.index] = (slot, self._homes[batch.index].fetch(self._ring.buffers[slot].tensor[:nbytes]))

    def wait(self, batch: GpuBatch) -> None:
        """Makes `batch.hidden` valid if a load is on its way."""
        loading = self._loading.pop(batch.index, None)
        if loading is not None:
            slot, ticket = loading
            ticket.wait()
            batch.hidden = self._view(self._ring.buffers[slot].tensor, self._shapes[batch.index]).clone()
            self._ring.give_back(slot)

    def _view(self, buffer: Tensor, shape: torch.Size) -> Tensor:
        return buffer[: shape.numel() * self._dtype.itemsize].view(self._dtype).view(shape)

    def close(self) -> None:
        """Gives all memory and files back. No copy may be under way."""
        self._loading.clear()
        self._resources.close()
        self._homes.clear()
