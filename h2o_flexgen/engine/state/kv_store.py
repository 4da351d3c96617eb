"""KV caches while a block runs: resident, or moving between the compute tier and their backing store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from h2o_flexgen.cache.chunked import ChunkedCache
from h2o_flexgen.cache.eviction import spans
from h2o_flexgen.cache.eviction.base import EvictionPolicy, RankedPolicy
from h2o_flexgen.cache.heads_apart import HeadsApart
from h2o_flexgen.cache.kv_cache import KVCache, PromptWatch
from h2o_flexgen.cache.lengths import CacheLengths, chooses
from h2o_flexgen.cache.packing import LAST
from h2o_flexgen.cache.recall import Recall
from h2o_flexgen.cache.shape import CacheShape
from h2o_flexgen.config.eviction import Budget
from h2o_flexgen.config.model.packing import scales_keys
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import TENSOR_ALIGN, StateSpec, page_ceil, round_up, states_bytes
from h2o_flexgen.engine.requests.sequence import Sequence
from h2o_flexgen.engine.state.backing import Backing, Parking
from h2o_flexgen.errors import required
from h2o_flexgen.folders import Closing
from h2o_flexgen.memory.copies import CopyEngine
from h2o_flexgen.memory.handle import torch_dtype
from h2o_flexgen.memory.pinned import Pin
from h2o_flexgen.memory.tiers import Tiers
from h2o_flexgen.memory.transfers import Ticket
from h2o_flexgen.schedule.footprint import REWRITE_EVERY

Place = tuple[int, int]  # (layer, GPU batch)
States = dict[tuple[Literal["conv", "recurrent"], int], Tensor]
"""By kind and number."""


class RowStatePlaces:
    """Views of the states at the beginning of a buffer: each (places, *shape), by the rows' places in the GPU batch."""

    def __init__(self, specs: tuple[StateSpec, ...], places: int, dtype: str) -> None:
        self._specs, self._places, self._dtype = specs, places, dtype
        self.nbytes = states_bytes(specs, places, dtype)
        self._views: States = {}

    def attach(self, buffer: Tensor) -> None:
        """Uses this flat uint8 buffer of `nbytes` or more."""
        start, self._views = 0, {}
        for spec in self._specs:
            kept = torch.float32 if spec.wide else torch_dtype(self._dtype)
            size = self._places * prod(spec.shape) * kept.itemsize
            view = buffer[start : start + size].view(kept).view(self._places, *spec.shape)
            self._views[spec.kind, spec.number] = view
            start += round_up(size, TENSOR_ALIGN)

    def detach(self) -> None:
        self._views = {}

    def first(self, rows: int) -> States:
        """The states of the first `rows` places, to be updated in place."""
        return {key: view[:rows] for key, view in self._attached().items()}

    def move(self, kept: SequenceOf[int]) -> None:
        """The rows at the places `kept` move to the first places; none moves up."""
        moving = [(to, place) for to, place in enumerate(kept) if to != place]
        if not moving:
            return
        for view in self._attached().values():
            index = torch.tensor(moving, device=view.device)
            view[index[:, 0]] = view[index[:, 1]]

    def _attached(self) -> States:
        if not self._views:
            raise RuntimeError("the states are not attached")
        return self._views


@dataclass(frozen=True)
class CacheMaker:
    """Makes the caches of rows that enter a GPU batch.

    shapes    of each (layer, GPU batch), for all rows that it may hold
    recall    makes a Recall of rows with so many tokens; None: evicted tokens are lost
    _lengths  the last rows and their shared lengths, by GPU batch, window, slots, device and a layer's own budgets
    """

    spec: ModelSpec
    eviction: EvictionPolicy
    shapes: Mapping[Place, CacheShape]
    devices: Mapping[Place, torch.device]
    watch: PromptWatch | None = None
    recall: Callable[[SequenceOf[int]], Recall] | None = None
    _lengths: dict[tuple[object, ...], tuple[SequenceOf[Sequence], CacheLengths]] = field(default_factory=dict)

    def make(self, layer: int, gpu_batch: int, rows: SequenceOf[Sequence]) -> KVCache:
        window, chunk = self.spec.arch.window_of(layer), self.spec.arch.chunk_of(layer)
        shape, device = replace(self.shapes[layer, gpu_batch], batch=len(rows)), self.devices[layer, gpu_batch]
        cache: KVCache
        made: dict[str, Any] = {"layer": layer, "row_ids": [row.row_id for row in rows], "device": device}
        parts, of_rows = list[KVCache](), self.budgets(layer, rows)
        for i, part in enumerate(shape.parts):
            budgets = [budget.part(i) for budget in of_rows]
            own = tuple(budgets) if rows and rows[0].by_layer else ()
            alike = gpu_batch, window, part.capacity, part.kv_heads, device, own
            known, lengths = self._lengths.get(alike, (None, None))
            if lengths is None or known is not rows:
                lengths = CacheLengths(budgets, part.capacity, device, window if chunk is None else None)
                self._lengths[alike] = rows, lengths
            else:
                lengths = lengths.for_another_layer()
            cache = (KVCache if chunk is None else ChunkedCache)(part, lengths, self.eviction, **made)
            cache.chunk = chunk
            parts.append(cache)
        cache = HeadsApart(shape, parts) if shape.far else parts[0]
        cache.watch = self.watch
        if self.recall is not None:
            cache.recall = self.recall([len(row.prompt_ids) + row.steps - 1 for row in rows])
        return cache

    def budgets(self, layer: int, rows: SequenceOf[Sequence]) -> list[Budget]:
        window = self.spec.arch.window_of(layer)
        return [row.budget_in(layer, window) for row in rows]

    def queries(self, layer: int, rows: SequenceOf[Sequence]) -> int:
        """The most of its prompts' last queries that the cache of `rows` needs."""
        budgets, policy, least = self.budgets(layer, rows), self.eviction, self.least_queries
        if least:  # these are the prompts' own, behind which prompts are replayed
            least += max((len(row.prompt_ids) for row in rows if row.replays), default=0)
        if not (isinstance(policy, RankedPolicy) and chooses(budgets)):
            return least
        prompts = zip((len(row.prompt_ids) for row in rows), budgets, strict=True)
        parts = ((length, part) for length, budget in prompts for part in budget.parts or (budget,))
        asked = (spans.queries(policy, length, budget) for length, budget in parts if budget.scored)
        return max((least, *asked))

    @property
    def least_queries(self) -> int:
        """As `queries`, of any cache."""
        return LAST if scales_keys(self.spec.cache_bits, self.spec.cache_rotation) else 0

    def wants_column_sums(self, layer: int, rows: SequenceOf[Sequence]) -> bool:
        """Whether the cache of `rows` needs the column sums of its prompts' attention."""
        return self.eviction.column_sums and chooses(self.budgets(layer, rows))


class BatchCache:
    """One buffer of a (layer, GPU batch): states, if the layer has any, then K and V of all places.

    `rows` is the cache of the decode rows, `fresh` that of rows whose prompts are under way; `join` makes one of both.
    shrinks: with fewer rows K and V become smaller, so that fewer bytes move between tiers. Without slots in `shape`
    there are only states.
    """

    def __init__(
        self, shape: CacheShape, dtype: torch.dtype, shrinks: bool, states: RowStatePlaces | None = None
    ) -> None:
        self.shape, self._dtype, self._shrinks, self.states = shape, dtype, shrinks, states
        self.state_bytes = 0 if states is None else states.nbytes
        self.rows: KVCache | None = None
        self.fresh: KVCache | None = None
        self.filling: Ticket | None = None
        """Another thread fills `fresh`; until it is done no other may touch the caches."""
        self._buffer: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Of states, K and V, in whole pages."""
        return self.state_bytes + page_ceil(self.shape.nbytes(self._dtype))

    def attach(self, buffer: Tensor) -> None:
        """Uses this flat uint8 buffer of `nbytes` or more."""
        self._buffer = buffer
        if self.states is not None:
            self.states.attach(buffer)
        if self.rows is not None:
            self._attach(self.rows, 0, self.rows.shape.batch)

    def detach(self) -> None:
        self._buffer = None
        if self.states is not None:
            self.states.detach()
        for cache in (self.rows, self.fresh):
            for part in () if cache is None else cache.parts:
                if part.k is not None:
                    part.detach()

    def change(self, kept: list[int], fresh: KVCache | None) -> None:
        """The decode rows at the places `kept` move to the first places, none up; `fresh` follows."""
        old, count = self.rows, len(kept)
        if old is not None and old.recall is not None:
            old.recall.leave(kept)
        if self.states is not None:
            self.states.move(kept)
        if not self.shape.capacity:
            return
        rows = count + (0 if fresh is None else fresh.shape.batch)
        if self._shrinks:
            if old is not None and rows > self.shape.batch:
                self._spread(old, rows)
            self.shape = replace(self.shape, batch=rows)
        self.rows = None if old is None or not kept else self._joined([(old, kept)], count)
        self.fresh = fresh
        if fresh is not None:
            self._attach(fresh, count, rows)

    def _spread(self, old: KVCache, rows: int) -> None:
        """Moves K and V up to where they lie with room for so many `rows`: late ones may come after some have left."""
        count = self.shape.batch
        here = [tensor for places in self._places(0, count) for tensor in places]
        self.shape = replace(self.shape, batch=rows)
        there = [tensor for places in self._places(0, count) for tensor in places]
        for source, target in reversed(list(zip(here, there, strict=True))):  # the last first, into what is free
            for row in reversed(range(count)):
                target[row].copy_(source[row].clone())
        self._attach(old, 0, count)

    def join(self) -> None:
        """Makes the fresh rows decode rows, once their prompts are in; not while `filling`."""
        rows, fresh = self.rows, self.fresh
        if fresh is None or self.filling is not None:
            return
        if rows is not None:
            parts = [(cache, list(range(cache.shape.batch))) for cache in (rows, fresh)]
            fresh = self._joined(parts, rows.shape.batch + fresh.shape.batch)
        self.rows, self.fresh = fresh, None

    def settled(self) -> BatchCache:
        """The cache, after waiting for `filling`."""
        ticket, self.filling = self.filling, None
        if ticket is not None:
            ticket.wait()
            self.join()
        return self

    def _attach(self, cache: KVCache, start: int, stop: int) -> None:
        for part, (k, v) in zip(cache.parts, self._places(start, stop), strict=True):
            part.attach(k, v)

    def _joined(self, members: SequenceOf[tuple[KVCache, SequenceOf[int]]], count: int) -> KVCache:
        """The given rows of these caches in one, in the first `count` places."""
        made = list[KVCache]()
        for i, (k, v) in enumerate(self._places(0, count)):
            own = [(cache.parts[i], rows) for cache, rows in members]
            made.append(own[0][0].joined(own, k, v))
        return made[0] if len(made) == 1 else HeadsApart(replace(self.shape, batch=count), made)

    def _places(self, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
        """K and V of the places [start, stop) of each part of the cache: one after the other behind the states, or in
        the same memory."""
        buffer = required(self._buffer, "the cache is not attached")[self.state_bytes :]
        kept = self.shape.kept(self._dtype)
        for part in self.shape.parts:
            keys, values = (prod(size) * kept.itemsize for size in part.sizes)
            k, v = buffer[:keys], buffer[:keys] if self.shape.joint else buffer[keys : keys + values]
            yield k.view(kept).view(part.sizes[0])[start:stop], v.view(kept).view(part.sizes[1])[start:stop]
            buffer = buffer[keys + values :]


class _MovingCache:
    """A cache off the compute tier. Tokens newer than the copy in its backing store wait in `_news`."""

    def __init__(self, cache: BatchCache, backing: Backing) -> None:
        self.cache, self.backing = cache, backing
        self.buffer: Tensor | None = None  # the transfer buffer that it is in
        self.ticket: Ticket | None = None
        self.saved = False
        self._written: tuple[KVCache, int] | None = None  # what the backing store's copy is of
        self._news: list[list[tuple[Tensor, Tensor, Tensor]]] = []  # of each part

    def save(self, buffer: Tensor) -> Ticket | None:
        """Writes everything when rows have changed and every REWRITE_EVERY steps, else only states; new tokens then
        wait for `apply_news`."""
        self.saved, states = True, self.cache.state_bytes
        if not self.cache.shape.capacity:
            return self.backing.save(buffer)
        rows = self._rows
        if (rows, rows.rewritten) == self._written and len(self._news) + 1 < REWRITE_EVERY:
            self._news.append([self._newest(part) for part in rows.parts])
            return self.backing.save(buffer[:states]) if states else None
        self._written = rows, rows.rewritten
        self._news.clear()
        return self.backing.save(buffer)

    def apply_news(self) -> None:
        """Adds the waiting tokens to freshly loaded K and V, in order, as slots may be reused."""
        for parts in self._news:
            for part, (index, *news) in zip(self._rows.parts, parts, strict=True):
                for buffer, new in zip(part.buffers, news, strict=True):
                    buffer.flatten(0, 2).index_copy_(0, index, new)

    @staticmethod
    def _newest(part: KVCache) -> tuple[Tensor, Tensor, Tensor]:
        """Where the newest tokens are among the slots of all rows and heads, and their K and V."""
        slots = part.last_slots
        index = slots.flatten() + torch.arange(slots.numel(), device=slots.device) * part.shape.capacity
        # Whole vectors by one index: `scatter_` has one for each number, and took fifteen times as long.
        k, v = (buffer.flatten(0, 2).index_select(0, index) for buffer in part.buffers)
        return index, k, v

    @property
    def _rows(self) -> KVCache:
        return required(self.cache.rows, "the cache has no rows yet")


class CacheStore(Closing):
    """The caches of one block. The executor calls `load`, `wait` and `store` in schedule order."""

    def __init__(
        self,
        tiers: Tiers,
        copies: CopyEngine,
        shapes: Mapping[Place, CacheShape],
        backing: Mapping[Place, str],
        dtype: torch.dtype,
        stays_on_cpu: bool,
        counted: bool,
        states: Mapping[Place, RowStatePlaces],
    ) -> None:
        """shapes: of all places of each (layer, GPU batch); backing: the tier of each. stays_on_cpu: attention over
        caches on cpu is computed there. counted: transformers' modules allocate their caches, which are only counted
        here."""
        resident = {tiers.compute.name, "cpu"} if stays_on_cpu else {tiers.compute.name}
        self.moves = moving = frozenset(place for place in shapes if backing[place] not in resident)
        """(layer, GPU batch) of the caches that the schedule must load and store."""
        self._caches = {
            place: BatchCache(shape, dtype, place in moving, states.get(place)) for place, shape in shapes.items()
        }
        beside = stays_on_cpu and tiers.gpu is not None
        self.on_host = {place: shape.batch for place, shape in shapes.items() if beside and backing[place] == "cpu"}
        """The most rows of each (layer, GPU batch) whose cache is attended to in host memory beside a gpu."""
        self._used: list[_MovingCache] = []
        self.most_slots = max((shape.longest for shape in shapes.values()), default=0)
        self.nbytes = sum(shape.nbytes(dtype) + shape.mended_bytes for shape in shapes.values())  # K and V
        self.state_bytes = sum(each.nbytes for each in states.values())
        with ExitStack() as stack:
            sizes = {place: (backing[place], cache.nbytes) for place, cache in self._caches.items() if place in moving}
            self._parking = stack.enter_context(Parking(tiers, copies, sizes, "kv cache", "cache buffers"))
            self._moving = {
                place: _MovingCache(self._caches[place], store) for place, store in self._parking.stores.items()
            }
            for place, cache in self._caches.items():
                tier = tiers.memory(backing[place]) if place not in moving else None
                if tier is not None and counted:
                    tier.charge(cache.nbytes, "kv cache")
                    stack.callback(tier.refund, cache.nbytes, "kv cache")
                elif tier is not None:
                    # Attention is computed where it lies: no GPU copies it.
                    cache.attach(stack.enter_context(tier.allocate(cache.nbytes, "kv cache", Pin.NEVER)).tensor)
            self._resources = stack.pop_all()
        if tiers.pins is not None:
            tiers.pins.warn()

    def load(self, layer: int, gpu_batch: int) -> None:
        moving = self._moving[layer, gpu_batch]
        self._make_room()
        moving.buffer, ready = self._parking.take()
        moving.ticket = moving.backing.fetch(moving.buffer[: moving.cache.nbytes], ready)

    def wait(self, layer: int, gpu_batch: int) -> BatchCache:
        """The cache, with K and V on the device that attends."""
        moving = self._moving.get((layer, gpu_batch))
        if moving is None:
            return self._caches[layer, gpu_batch].settled()
        loaded, moving.ticket = moving.ticket, None
        if moving.buffer is None:
            if moving.cache.rows is not None or moving.saved:
                raise RuntimeError(f"cache of layer {layer}, GPU batch {gpu_batch} was not loaded")
            self._make_room()
            moving.buffer = self._parking.take_now()
        if loaded is not None:
            loaded.wait_on_device()
        moving.cache.attach(moving.buffer)
        if loaded is not None:
            moving.apply_news()
        self._used.append(moving)
        return moving.cache

    def store(self, layer: int, gpu_batch: int) -> None:
        """Starts saving a cache that the step used; its buffer is free once that is done."""
        moving = self._moving[layer, gpu_batch]
        buffer = required(moving.buffer, f"cache of layer {layer}, GPU batch {gpu_batch} holds no transfer buffer")
        self._release(moving, moving.save(buffer[: moving.cache.nbytes]))

    def holding(self, row_id: int) -> Iterator[tuple[int, KVCache, int]]:
        """The layers and caches that hold the row of this id, and its place there. For inspection."""
        for (layer, _), cache in self._caches.items():
            rows = cache.settled().rows if cache.filling else cache.rows
            if rows is not None and row_id in rows.row_ids:
                yield layer, rows, rows.row_ids.index(row_id)

    def _release(self, moving: _MovingCache, ticket: Ticket | None) -> None:
        self._used.remove(moving)
        if moving.buffer is not None:
            self._parking.give_back(moving.buffer, ticket)
        moving.buffer = None
        moving.cache.detach()

    def _make_room(self) -> None:
        # Used caches that are still here will not be stored (in the last step): stores would have been issued by now.
        for moving in list(self._used):
            self._release(moving, None)

    def close(self) -> None:
        """Releases all memory and files. No copy may be under way."""
        for cache in self._caches.values():
            cache.detach()
        self._resources.close()
        self._moving.clear()
