"""Recall: evicted tokens wait a tier lower, and come back when a query attends to them.

All keys and values of a row are written to a shelf when they come in, by position and as they are computed: evicted
tokens are there already, and are packed again where they come back to a packed cache. An index of the row's keys,
rotated, in 4 bits, lies where attention is computed. In each of the first `FIRST` steps of a row, and in the first of
every `EVERY` later ones, before its newest query attends, the index gives the query's attention to each token; the
best of the evicted tokens take the slots of the worst kept ones. The number of kept tokens never changes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
import xxhash
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.cache.lengths import CacheLengths
from h2o_flexgen.cache.packing import Keeping, expand, pack
from h2o_flexgen.cache.ring_slots import CacheSlots, Queries
from h2o_flexgen.cache.slots import ScoredSlots
from h2o_flexgen.config.budget import Budget
from h2o_flexgen.config.recall import NEAR, RATED, index_packing, is_rated, looks, most_moved, shelf_bytes
from h2o_flexgen.kernels.ranks import NativeRecall, Recalled, ShelvedKeys
from h2o_flexgen.kernels.torch_attention import capped
from h2o_flexgen.kernels.types import KeysValues, PackedPrompts
from h2o_flexgen.memory.copies import bit_flip
from h2o_flexgen.memory.disk import host_view
from h2o_flexgen.memory.tiers import DiskTier, Region

_WHAT = "evicted tokens"


@dataclass
class RecallCounts:
    """The counts of recall in one run; tokens are counted for each layer and KV head."""

    recalled: int = 0
    """Tokens that came back."""
    looks: int = 0
    """Times that a row and KV head was looked through."""
    written: int = 0
    """Bytes of keys and values written to shelves."""
    read: int = 0
    """Bytes of keys and values read from shelves."""
    held: float = 0.0
    """Over the looks that are rated, one of `RATED`, the attention by the index that the kept tokens have once the best
    have come back."""
    best: float = 0.0
    """Over the same looks, the most attention that as many tokens could have."""

    def add(self, found: Recalled) -> None:
        """Adds the counts of a step, but for bytes."""
        self.recalled += found.recalled
        self.looks += found.looks
        self.held += found.held
        self.best += found.best


class Shelf:
    """Keys and values of one row in one layer, in host memory."""

    held: KeysValues | None = None
    """All of them, (kv_heads, length, d), if they are in host memory."""

    def __init__(self, size: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        """size: (kv_heads, length, d). device: where the cache is."""
        self._parts = self.held = KeysValues(*torch.empty(2, *size, dtype=dtype).unbind(0))
        self._device = device

    def write(self, start: int, k: Tensor, v: Tensor) -> int:
        """Writes k, v (kv_heads, n, d) of the positions from `start` on. Returns the bytes that were moved."""
        stop = start + k.shape[1]
        self._parts.k[:, start:stop], self._parts.v[:, start:stop] = k, v
        return 2 * k.numel() * self._parts.k.itemsize

    def read(self, heads: Tensor, positions: Tensor) -> tuple[KeysValues, int]:
        """K and V (n, d) of these KV heads and positions, (n,) each, on the cache's device, and the bytes moved."""
        heads, positions = heads.cpu(), positions.cpu()
        found = KeysValues(*(x[heads, positions].to(self._device) for x in self._parts))
        return found, 2 * found.k.nbytes

    def release(self) -> None:
        """The row goes; a second time does nothing."""


class DiskShelves:
    """Room on disk for the shelves of one block: a file of equal parts, and a buffer in host memory.

    Used by one thread. Its owner releases region and buffer.
    """

    def __init__(self, disk: DiskTier, region: Region, tokens: Iterable[int], length: int, buffer: Tensor) -> None:
        """tokens: of each shelf the bytes of a token, in whole pages. length: tokens of each. buffer: uint8, aligned to
        a page."""
        self.buffer, self.view = buffer, host_view(buffer)
        self._disk, self._free, self._longer, start = disk, dict[int, list[Region]](), list[Region](), 0
        for token in tokens:
            self._free.setdefault(token, []).append(region.part(start, token * length))
            start += token * length

    def take(self, size: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> DiskShelf:
        """A shelf; in a file of its own if it is longer than was planned. Raises as
        `DiskTier.allocate`."""
        token = shelf_bytes("disk", 2 * size[0] * size[2] * dtype.itemsize)
        free = self._free.get(token)
        if free and free[-1].nbytes >= size[1] * token:
            return DiskShelf(self, free.pop(), size, dtype, device)
        self._longer.append(self._disk.allocate(size[1] * token, _WHAT))
        return DiskShelf(self, self._longer[-1], size, dtype, device)

    def give_back(self, token: int, part: Region) -> None:
        if part in self._longer:
            self._longer.remove(part)
            part.close()
        else:
            self._free[token].append(part)

    def close(self) -> None:
        """Releases what is longer than was planned."""
        for region in self._longer:
            region.close()


class DiskShelf(Shelf):
    """A shelf on disk: a token's keys, then its values, of all heads, on pages of their own, whose checksums are kept.

    Transfers are of whole pages. They raise StorageError where the disk is full or fails, or gives back other bytes.
    """

    def __init__(
        self, room: DiskShelves, part: Region, size: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        heads, length, dim = size
        self._room, self._part, self._dtype, self._device = room, part, dtype, device
        self._shape, self._content = (2, heads, dim), 2 * heads * dim * dtype.itemsize
        self._token = shelf_bytes("disk", self._content)
        self._at_once = len(room.buffer) // self._token
        self._sums = array("Q", bytes(8 * length))

    def write(self, start: int, k: Tensor, v: Tensor) -> int:
        region, token = self._part, self._token
        for first in range(0, k.shape[1], self._at_once):
            count = min(self._at_once, k.shape[1] - first)
            staged = self._room.buffer[: count * token]
            pages = staged if k.device.type == "cpu" else torch.zeros_like(staged, device=k.device)
            for part, x in zip(self._tokens(pages).unbind(1), (k, v), strict=True):
                part.copy_(x[:, first : first + count].transpose(0, 1))
            if pages is not staged:
                staged.copy_(pages)
            at = start + first
            self._sums[at : at + count] = array("Q", (self._sum(i) for i in range(count)))
            region.file.write(self._room.view, 0, region.offset + at * token, count * token, _WHAT)
        return k.shape[1] * token

    def read(self, heads: Tensor, positions: Tensor) -> tuple[KeysValues, int]:
        wanted, places = positions.unique(return_inverse=True)
        found = KeysValues(*torch.empty(2, len(heads), self._shape[2], dtype=self._dtype, device=self._device))
        listed: list[int] = wanted.tolist()
        for first in range(0, len(listed), self._at_once):
            some = listed[first : first + self._at_once]
            self._load(some)
            pages = self._room.buffer[: len(some) * self._token].to(self._device)
            here = (places >= first) & (places < first + len(some))
            tokens = self._tokens(pages)[places[here] - first, :, heads[here]]
            found.k[here], found.v[here] = tokens.unbind(1)
        return found, len(listed) * self._token

    def release(self) -> None:
        if self._sums:
            self._sums = array("Q")
            self._room.give_back(self._token, self._part)

    def _load(self, positions: list[int]) -> None:
        """The pages of these positions, in order, to the buffer; adjacent ones at once."""
        region, token = self._part, self._token
        ends = [i for i in range(1, len(positions)) if positions[i] != positions[i - 1] + 1]
        for first, stop in pairwise((0, *ends, len(positions))):
            at = region.offset + positions[first] * token
            region.file.read(self._room.view, first * token, at, (stop - first) * token, _WHAT)
        for i, position in enumerate(positions):
            if self._sum(i) != self._sums[position]:
                raise bit_flip(_WHAT, region.file.path, region.offset + position * token)

    def _sum(self, place: int) -> int:
        """Of the pages of the token at this place of the buffer."""
        return xxhash.xxh3_64_intdigest(self._room.view.view[place * self._token : (place + 1) * self._token])

    def _tokens(self, pages: Tensor) -> Tensor:
        """Keys and values (n, 2, kv_heads, d) in uint8 pages."""
        content = pages.view(-1, self._token)[:, : self._content]
        return content.view(self._dtype).unflatten(1, self._shape)


@dataclass
class _ShelvedRow:
    shelf: Shelf
    index: Tensor
    """Its keys, rotated and packed: (kv_heads, length, bytes) uint8, or as `NativeRecall.index` makes it."""
    length: int
    """Tokens that there is room for."""
    recent: int
    """Last tokens that do not leave."""
    most: int
    """Tokens that come back at a look, at most."""
    came: Tensor | None
    """How often each has come back: (kv_heads, length) int32, where that is logged."""


class _HeldSlots(NamedTuple):
    """The slots of one row: scores and positions (kv_heads, capacity), the slot that the next token takes (kv_heads,),
    and a function that puts tokens of KV heads and positions into slots, (n,) each."""

    score: Tensor
    pos: Tensor
    free: Tensor
    take: Callable[[Tensor, Tensor, Tensor], None]

    def slots(self, first: int, stop: int) -> Tensor:
        """The slots of positions `first` to `stop`, (kv_heads, stop - first) int64; -1 for tokens that are not kept."""
        heads, capacity = self.pos.shape
        places = (self.pos - first).long().scatter(1, self.free.unsqueeze(1), -1)
        places = torch.where((places >= 0) & (places < stop - first), places, stop - first)
        found = torch.full((heads, stop - first + 1), -1, dtype=torch.int64, device=self.pos.device)
        return found.scatter_(1, places, torch.arange(capacity, device=self.pos.device).expand(heads, -1))[:, :-1]


class Recall:
    """The shelves of the rows of one cache, and the indexes of their keys. Used by the cache's thread."""

    rates: ClassVar[int] = RATED
    """One look of so many is rated."""

    def __init__(
        self,
        lengths: Sequence[int],
        every: int,
        counts: RecallCounts,
        logs: bool = False,
        disk: DiskShelves | None = None,
    ) -> None:
        """lengths: tokens of each row, the last that may come included. logs: whether `returns` are remembered. disk:
        where shelves are; None: in host memory."""
        self._lengths, self._every, self._counts, self._logs = list(lengths), every, counts, logs
        self._disk = disk
        self._rows: list[_ShelvedRow | None] = [None] * len(lengths)
        self._native: NativeRecall | None = None
        self._by_kernel = False  # whether `_native` moves keys and values as well
        self._begun: CacheLengths | None = None  # of the steps that `_native` is for

    @classmethod
    def joined(cls, parts: Sequence[tuple[Recall | None, Sequence[int]]]) -> Recall | None:
        """The given rows, in this order; None of caches without."""
        found = [(part, rows) for part, rows in parts if part is not None]
        if not found:
            return None
        first, lengths = found[0][0], [part._lengths[row] for part, rows in found for row in rows]
        made = cls(lengths, first._every, first._counts, first._logs, first._disk)
        made._rows = [part._rows[row] for part, rows in found for row in rows]
        return made

    def fill(
        self, rows: Sequence[int], budgets: Sequence[Budget], k: Tensor, v: Tensor, past: KeysValues | None = None
    ) -> None:
        """The prompts of `rows`, k, v (n, kv_heads, S, d), which follow those of `past`, (kv_heads, P, d). budgets: of
        all rows; one that chooses nothing by score has no shelf."""
        for row, *own in zip(rows, k, v, strict=True):
            if budgets[row].scored:
                self._rows[row] = self._shelved(row, budgets[row], KeysValues(*own), past)

    def fill_packed(self, prompts: PackedPrompts, budgets: Sequence[Budget], k: Tensor, v: Tensor) -> None:
        """As `fill`, from k, v (T, kv_heads, d) of packed tokens."""
        for row in prompts.rows:
            tokens = slice(row.first, row.first + row.length)
            own = [x[tokens].transpose(0, 1).unsqueeze(0) for x in (k, v)]
            self.fill([row.place], budgets, own[0], own[1])

    def _shelved(self, row: int, budget: Budget, own: KeysValues, past: KeysValues | None) -> _ShelvedRow:
        heads, count, dim = own.k.shape
        before, packing = 0 if past is None else past.k.shape[1], index_packing(dim)
        length = max(self._lengths[row], before + count)
        native = NativeRecall.serves(own.k)
        if native:
            index = NativeRecall.index(heads, length, dim)
        else:
            index = torch.empty(heads, length, packing.nbytes, dtype=torch.uint8, device=own.k.device)
        make: Callable[..., Shelf] = Shelf if self._disk is None else self._disk.take
        shelf = make((heads, length, dim), own.k.dtype, own.k.device)
        for start, part in ((0, past), (before, own)):
            if part is None:
                continue
            if native:
                NativeRecall.fill(part, start, shelf.held, index, length)
            else:
                index[:, start : start + part.k.shape[1]] = pack(part.k, packing)
            if native and shelf.held is not None:
                self._counts.written += 2 * part.k.nbytes
            else:
                self._counts.written += shelf.write(start, *part)
        came = torch.zeros(heads, length, dtype=torch.int32) if self._logs else None
        return _ShelvedRow(shelf, index, length, budget.recent, most_moved(budget), came)

    def leave(self, kept: Sequence[int]) -> None:
        """All rows but those at the places `kept` go, and give back the room of their shelves."""
        for place in set(range(len(self._rows))).difference(kept):
            if (row := self._rows[place]) is not None:
                row.shelf.release()

    def returns(self, row: int) -> list[list[tuple[int, int]]] | None:
        """(position, times) of what has come back to a row, by KV head; None without a log or a shelf."""
        shelved = self._rows[row]
        if shelved is None or shelved.came is None:
            return None
        return [[(int(at), int(head[at])) for at in head.nonzero()] for head in shelved.came]

    def _log(self, before: Tensor, after: Tensor) -> None:
        """Counts the tokens that came back in a step: slots held the positions `before` it, and hold others `after` it,
        (b, kv_heads, capacity)."""
        rows, heads, slots = (before != after).nonzero(as_tuple=True)
        for place, head, position in zip(*(x.tolist() for x in (rows, heads, after[rows, heads, slots])), strict=True):
            row = self._rows[place]
            if row is not None and row.came is not None:
                row.came[head, position] += 1

    def step(
        self,
        asked: Queries,
        new: KeysValues,
        lengths: CacheLengths,
        slots: CacheSlots,
        held: KeysValues,
        keeping: Keeping,
    ) -> None:
        """Begins a step with the tokens `new` (b, kv_heads, d): writes them to the shelves, and looks for evicted ones
        in the rows whose turn it is; tokens that come back go to the slots of `held`, as `keeping` keeps them."""
        if not isinstance(slots, ScoredSlots):
            return
        if self._begun is not lengths:
            self._by_kernel = self._disk is None and keeping.packings is None
            self._begun, self._native = lengths, self._native_of(lengths, held.k if self._by_kernel else new.k)
        before = slots.table[1].clone() if self._logs else None
        if self._native is None:
            self._recall(asked, new, lengths, slots, partial(self._put, keeping, held))
        else:
            if not self._by_kernel:
                self._write(new, lengths)
            found = self._native.step(lengths.step, (asked.q, *new), asked.logits, held, slots.ranking)
            if found.looks:  # most steps look at nothing
                self._counts.add(found)
            if self._by_kernel:
                token = 2 * held.k.shape[-1] * held.k.itemsize
                self._counts.written += token * found.written
                self._counts.read += token * found.recalled
            elif found.recalled:
                for place, moves in enumerate(self._native.moves):
                    heads, order = (moves[..., 0] >= 0).nonzero(as_tuple=True)
                    if len(heads):
                        to, positions = moves[heads, order].long().unbind(1)
                        self._put(keeping, held, place, heads, positions, to)
        if before is not None:
            self._log(before, slots.table[1])

    def _recall(
        self, asked: Queries, new: KeysValues, lengths: CacheLengths, slots: ScoredSlots, put: Callable[..., None]
    ) -> None:
        """A step in torch operations."""
        free = slots.free()
        for place, row, now in self._write(new, lengths):
            k = new.k[place].unsqueeze(1)
            row.index[:, now : now + 1] = pack(k, index_packing(k.shape[-1]))
            taken = lengths.before[place] + lengths.step
            if looks(taken, self._every):
                first = 0 if lengths.window is None else max(0, now + 1 - lengths.window)
                worth = _worth(row.index[:, first : now + 1], asked.q[place], asked)
                own = _HeldSlots(slots.score[place], slots.table[1][place], free[place], partial(put, place))
                kept, moved = self._look(row, worth, own, first, now)
                rated = is_rated(taken, self._every, self.rates)
                rating = _rating(worth.mean(1), kept) if rated else (0.0, 0.0)
                self._counts.add(Recalled(0, len(worth), moved, *rating))

    def _write(self, new: KeysValues, lengths: CacheLengths) -> list[tuple[int, _ShelvedRow, int]]:
        """The tokens `new` (b, kv_heads, d) go to the shelves. Returns place, row and position of each."""
        found = list[tuple[int, _ShelvedRow, int]]()
        for place, (row, now) in enumerate(zip(self._rows, lengths.next_pos, strict=True)):
            if row is not None and now < row.length:  # else it is done, and its neighbours are not
                self._counts.written += row.shelf.write(now, *(x[place].unsqueeze(1) for x in new))
                found.append((place, row, now))
        return found

    def _put(
        self, keeping: Keeping, held: KeysValues, place: int, heads: Tensor, positions: Tensor, slots: Tensor
    ) -> None:
        """Tokens of a row of these KV heads and positions, (n,) each, go from its shelf into slots of `held`."""
        if (row := self._rows[place]) is not None:
            found, nbytes = row.shelf.read(heads, positions)
            keeping.put(place, heads, slots, found, held)
            self._counts.read += nbytes

    def _native_of(self, lengths: CacheLengths, like: Tensor) -> NativeRecall | None:
        """For steps of these lengths and a cache as `like`; None where no kernel takes that."""
        if not NativeRecall.serves(like):
            return None
        shelved = list[ShelvedKeys | None]()
        for row, now, before in zip(self._rows, lengths.next_pos, lengths.before, strict=True):
            if row is not None:
                how = row.recent, row.most, now - lengths.step, before
                shelf = row.shelf.held if self._by_kernel else None
            shelved.append(None if row is None else ShelvedKeys(shelf, row.index, row.length, *how))
        return NativeRecall(shelved, like.shape[-1], self._every, self.rates, lengths.window)

    def _look(self, row: _ShelvedRow, worth: Tensor, own: _HeldSlots, first: int, now: int) -> tuple[Tensor, int]:
        """Of the query at `now`, whose attention to the tokens from `first` on is `worth` (kv_heads, group, T). Returns
        which of them are kept after it, (kv_heads, T) bool, and how many have come back."""
        near = functional.max_pool1d(worth.amax(1), 2 * NEAR + 1, 1, NEAR)
        slot = own.slots(first, now + 1)
        kept = slot >= 0
        leaves = kept & own.score.gather(1, slot.clamp(min=0)).isfinite()  # static tokens have the score +inf
        leaves[:, max(0, now + 1 - row.recent - first) :] = False
        kept[:, -1] = True  # the newest
        wanted, least = near.masked_fill(kept, -1.0), near.masked_fill(~leaves, 2.0)
        back, leaving = _ordered(wanted, row.most), _ordered(-least, row.most, late=True)
        heads, places = (wanted.gather(1, back) > least.gather(1, leaving)).nonzero(as_tuple=True)
        positions, gone = back[heads, places], leaving[heads, places]
        if len(heads):
            targets = slot[heads, gone]
            own.take(heads, positions + first, targets)
            own.pos[heads, targets] = (positions + first).int()
            # Tokens that came back should stay until the next look: they get the best score of the tokens that leave.
            best = own.score.new_zeros(len(own.score)).scatter_reduce_(0, heads, own.score[heads, targets], "amax")
            own.score[heads, targets] = best[heads]
        kept[heads, gone], kept[heads, positions] = False, True
        return kept, len(heads)


def _worth(index: Tensor, q: Tensor, asked: Queries) -> Tensor:
    """The attention of q (heads, d) to tokens with the keys of `index` (kv_heads, T, bytes), softmax probabilities
    (kv_heads, group, T) float32."""
    keys = expand(index, index_packing(q.shape[-1]), torch.float32)
    logits = (q.float().view(len(keys), -1, q.shape[-1]) @ keys.transpose(1, 2)) * asked.logits.scale
    return capped(logits, asked.logits.soft_cap).softmax(-1)


def _rating(worth: Tensor, kept: Tensor) -> tuple[float, float]:
    """The worth (kv_heads, T) of what is kept, and the most that as many tokens have."""
    best = worth.sort(-1, descending=True).values.cumsum(-1).gather(-1, kept.sum(-1, keepdim=True) - 1)
    return float((worth * kept).sum()), float(best.sum())


def _ordered(values: Tensor, count: int, late: bool = False) -> Tensor:
    """The places of the `count` largest of each row (n, T), fewer where there are no more; of equal ones the first ones
    come first, or the last ones."""
    flipped = values.flip(1) if late else values
    order = flipped.sort(dim=1, descending=True, stable=True).indices[:, :count]
    return values.shape[1] - 1 - order if late else order
