"""Packed keys and values of caches, and the scales of keys: the reference for kernels that pack and expand themselves.

The layout is `CachePacking`'s; the numbers are bit for bit those of `quant.groupwise` after a Hadamard transform.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from h2o_flexgen.cache.eviction.base import AttendedPrompts
from h2o_flexgen.cache.shape import CacheShape
from h2o_flexgen.cache.vectors import some_of
from h2o_flexgen.config.model.packing import CACHE_GROUP, EXPANDED, CachePacking
from h2o_flexgen.errors import required
from h2o_flexgen.huge import LARGE
from h2o_flexgen.kernels import pieces, triton_available
from h2o_flexgen.kernels.layers import rotate_halves
from h2o_flexgen.kernels.pieces import hadamard
from h2o_flexgen.kernels.types import KeysValues, Newest, PackedPrompts, Quantised
from h2o_flexgen.quant import groupwise
from h2o_flexgen.quant.groupwise import GroupFormat

LAST = 64
"""Queries and keys of a prompt that scales of keys follow from, its last ones."""
_MOST = 8
"""Of the exponents of two of such scales."""


def pack(x: Tensor, packing: CachePacking) -> Tensor:
    """Keys or values x (..., dim) in their pieces, (..., nbytes) uint8. What torch takes for that is bounded."""
    if triton_available.serves(x.device) and packing.bits != 3:
        from h2o_flexgen.kernels import triton_quant  # imports Triton, which is not there on every machine

        return _in_one(triton_quant.quantise(hadamard(x.float(), packing.block), packing.bits, CACHE_GROUP))
    if pieces.available(x.dtype, packing.dim, x.device):
        return pieces.pack(x, packing)
    if x.numel() > EXPANDED and x.dim() > 2:
        if len(x) == 1:
            return pack(x[0], packing).unsqueeze(0)
        return torch.cat([pack(half, packing) for half in x.tensor_split(2)])
    return _in_one(groupwise.quantise(hadamard(x.float(), packing.block), GroupFormat(packing.bits, CACHE_GROUP)))


def _in_one(parts: Quantised) -> Tensor:
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)


def parts_of(packed: Tensor, packing: CachePacking) -> Quantised:
    """Views of the codes, scales and lows of `packed` (..., nbytes)."""
    codes, scale, low = packed.split([packing.code_bytes, 2 * packing.groups, 2 * packing.groups], dim=-1)
    return Quantised(codes, scale.view(torch.bfloat16), low.view(torch.bfloat16))


def expand(packed: Tensor, packing: CachePacking, dtype: torch.dtype) -> Tensor:
    """The numbers that `packed` (..., nbytes) was made of, (..., dim) in `dtype`."""
    exact = torch.float32 if packing.block else dtype
    if triton_available.serves(packed.device) and packing.bits != 3:
        from h2o_flexgen.kernels import triton_quant

        apart = Quantised(*(part.contiguous() for part in parts_of(packed, packing)))
        return hadamard(triton_quant.dequantise(apart, exact, packing.bits, CACHE_GROUP), packing.block).to(dtype)
    if pieces.available(dtype, packing.dim, packed.device):
        return pieces.expand(packed, packing, dtype)
    numbers = groupwise.dequantise(parts_of(packed, packing), exact, GroupFormat(packing.bits, CACHE_GROUP))
    return hadamard(numbers, packing.block).to(dtype)


class KeyScales:
    """Of the rows of a cache, what each number of their keys is multiplied by when it comes in, and queries divided by.

    No score changes but for rounding: with numbers that are transformed together before they are rounded, the error of
    q k is about |q / s| |k s|, which s = sqrt(|q_i| / |k_i|) makes smallest. |q_i| and |k_i| are root mean squares over
    the last tokens of the row's own prompt, and the query heads of a KV head. s is a power of two: nothing is rounded.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._of: Tensor | None = None  # (rows, kv_heads, d) in the dtype of keys

    def settle(self, rows: Sequence[int], queries: Tensor, keys: Tensor, device: torch.device) -> None:
        """Those of `rows`, from the last of their queries (n, heads, m, d) and keys (n, kv_heads, m', d)."""
        asked, held = queries[:, :, -LAST:], keys[:, :, -LAST:]
        scales = scales_of(asked, held).to(device, keys.dtype)
        if self._of is None:
            self._of = scales.new_ones(self._rows, *scales.shape[1:])
        self._of[list(rows)] = scales

    def settle_prompts(
        self, rows: Sequence[int], prompts: AttendedPrompts, length: int, raw: bool, device: torch.device
    ) -> None:
        """Those of `rows`, from their prompts of `length` tokens, which more may follow. raw: queries are not rotated.
        """
        if prompts.queries is None:
            raise ValueError(f"the last {LAST} queries are needed")
        queries, last = prompts.queries[:, :, : prompts.queries.shape[2] - (prompts.length - length)], min(LAST, length)
        if raw and prompts.turn is not None:
            cos, sin = prompts.turn(torch.arange(length - last, length, device=queries.device))
            half = cos.shape[-1] // 2
            queries = rotate_halves(queries[:, :, -last:].float(), cos[:, :half], sin[:, :half])
        self.settle(rows, queries, prompts.first(length).last(last).stored_keys, device)

    def settle_packed(self, prompts: PackedPrompts, q: Tensor, k: Tensor) -> None:
        """Those of all `prompts`, from q (T, heads, d) and k (T, kv_heads, d) of packed tokens."""
        for row in prompts.rows:
            last = slice(row.first + max(0, row.length - LAST), row.first + row.length)
            asked, held = (x[last].transpose(0, 1).unsqueeze(0) for x in (q, k))
            self.settle([row.place], asked, held, k.device)

    def packed(self, k: Tensor, prompts: PackedPrompts) -> Tensor:
        """Keys (T, kv_heads, d) of the packed `prompts` as they are kept; of tokens of no prompt anything."""
        kept = LARGE.like(k)
        for row in prompts.rows:
            tokens = slice(row.first, row.first + row.length)
            torch.mul(k[tokens], self.of[row.place], out=kept[tokens])
        return kept

    @classmethod
    def joined(cls, parts: Sequence[tuple[KeyScales | None, Sequence[int]]]) -> KeyScales | None:
        """The given rows, in this order; None of caches without."""
        made = cls(sum(len(rows) for _, rows in parts))
        found = [scales.of[list(rows)] for scales, rows in parts if scales is not None]
        if not found:
            return None
        made._of = torch.cat(found)
        return made

    @property
    def of(self) -> Tensor:
        """(rows, kv_heads, d)."""
        return required(self._of, "no prompt has come in")

    def kept(self, k: Tensor, rows: Tensor | slice | None = None) -> Tensor:
        """Keys (n, kv_heads, ..., d), of `rows` or all, as they are kept."""
        return k * self._like(k, rows)

    def seen(self, k: Tensor, rows: slice | None = None) -> Tensor:
        """The keys that are kept as `k`."""
        return k / self._like(k, rows)

    def asked(self, q: Tensor) -> Tensor:
        """Queries (rows, heads, d) as keys that are kept are asked."""
        return (q.unflatten(1, (self.of.shape[1], -1)) / self.of.unsqueeze(2)).flatten(1, 2)

    def _like(self, k: Tensor, rows: Tensor | slice | None) -> Tensor:
        scales = self.of if rows is None else self.of[rows]
        return scales if k.dim() == 3 else scales.unsqueeze(2)


class Keeping:
    """How a cache keeps keys and values: as they are; or keys scaled, both rotated and packed, and beside them what
    that has cost the newest tokens."""

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        self.packings, self._shape, self._device = shape.packings, shape, device
        self.scales = KeyScales(shape.batch) if shape.scaled else None
        self.newest: Newest | None = None

    @classmethod
    def joined(cls, shape: CacheShape, parts: Sequence[tuple[Keeping, Sequence[int]]]) -> Keeping:
        """The given rows of these go on, in this order."""
        made = cls(shape, parts[0][0]._device)
        made.scales = KeyScales.joined([(part.scales, rows) for part, rows in parts])
        found = [(part.newest, list(rows)) for part, rows in parts if part.newest is not None]
        if found:
            newest = made._newest(found[0][0].lost.k.dtype)

            def rows_of(name: Callable[[Newest], Tensor]) -> Tensor:
                return torch.cat([name(each)[rows].roll(each.count - 1 - each.at, 2) for each, rows in found])

            newest.lost = KeysValues(rows_of(lambda each: each.lost.k), rows_of(lambda each: each.lost.v))
            newest.slots = rows_of(lambda each: each.slots)
        return made

    def _newest(self, dtype: torch.dtype) -> Newest:
        if self.newest is None:
            shape = self._shape
            self.newest = Newest(shape.newest, (shape.batch, shape.kv_heads, shape.head_dim), dtype, self._device)
        return self.newest

    def stored(self, part: int, x: Tensor, rows: Tensor | slice | None = None) -> Tensor:
        """Keys (part 0) or values (1) (n, kv_heads, ..., head_dim) of `rows`, or all, as buffers hold them."""
        return x if self.packings is None else pack(self._scaled(part, x, rows), self.packings[part])

    def expanded(self, held: KeysValues, dtype: torch.dtype, rows: slice | None = None) -> KeysValues:
        """The keys and values (n, kv_heads, slots, head_dim), from the first slot on, that buffers hold so."""
        if self.packings is None:
            return held
        exact = dtype if self.newest is None else torch.float32
        keys, values = (expand(part, packing, exact) for part, packing in zip(held, self.packings, strict=True))
        if self.newest is not None:
            slots = some_of(self.newest.slots, rows)
            gone, places = (slots < 0).unsqueeze(-1), slots.clamp(0).long().unsqueeze(-1)
            for x, lost in zip((keys, values), self.newest.lost, strict=True):
                missing = some_of(lost, rows).float().masked_fill(gone, 0.0)
                x.scatter_add_(2, places.expand_as(missing), missing)
        seen = keys if self.scales is None else self.scales.seen(keys, rows)
        return KeysValues(seen.to(dtype), values.to(dtype))

    def once(self, k: Tensor) -> Tensor:
        """New keys (b, kv_heads, head_dim) as they are seen once they have been packed."""
        if self.packings is None:
            return k
        packed = expand(self.stored(0, k), self.packings[0], k.dtype)
        return packed if self.scales is None else self.scales.seen(packed)

    def fill(self, rows: Tensor | slice, held: int, last: KeysValues, buffers: KeysValues) -> None:
        """The prompts of `rows` are in, in the first `held` slots of `buffers`, of which the last m hold their last
        tokens, (n, kv_heads, m, head_dim), m at most as many as newest ones are kept."""
        if self.packings is None or not self._shape.newest:
            return
        newest, count = self._newest(last.k.dtype), last.k.shape[2]
        for i, (lost, x) in enumerate(zip(newest.lost, last, strict=True)):
            pieces = buffers[i][rows, :, held - count : held]
            lost[rows, :, newest.count - count :] = self._lost(i, x, pieces, rows)
        newest.slots[rows] = -1
        places = torch.arange(held - count, held, dtype=torch.int32, device=newest.slots.device)
        newest.slots[rows, :, newest.count - count :] = places

    def put(self, row: int, heads: Tensor, slots: Tensor, tokens: KeysValues, buffers: KeysValues) -> None:
        """Tokens (n, head_dim) go into slots of a row, of these KV heads, (n,) each, as when they first came in; what
        packing costs them is not kept."""
        for i, (buffer, x) in enumerate(zip(buffers, tokens, strict=True)):
            if self.packings is not None:
                scaled = x if i or self.scales is None else x * self.scales.of[row][heads]
                x = pack(scaled, self.packings[i])
            buffer[row, heads, slots] = x
        if self.newest is not None:
            own = self.newest.slots[row]
            places, which = (own[heads] == slots.unsqueeze(1)).nonzero(as_tuple=True)
            own[heads[places], which] = -1

    def rows(self, width: int) -> list[slice | None]:
        """The rows whose first `width` slots are looked at at once: all, or as many as may be expanded at a time."""
        shape, some = self._shape, self._shape.batch
        if self.packings is not None:
            some = max(1, EXPANDED // (shape.kv_heads * width * shape.head_dim))
        return [None] if some >= shape.batch else [slice(row, row + some) for row in range(0, shape.batch, some)]

    def advance(self) -> None:
        if self.newest is not None:
            self.newest.at = (self.newest.at + 1) % self.newest.count

    def take(self, slots: Tensor, new: KeysValues, pieces: Sequence[Tensor]) -> None:
        """The step's tokens (b, kv_heads, head_dim) were packed as `pieces`, into `slots` (b, kv_heads)."""
        newest = self.newest
        if newest is None:
            return
        for i, (lost, x) in enumerate(zip(newest.lost, new, strict=True)):
            lost[:, :, newest.at] = self._lost(i, x, pieces[i], None)
        newest.slots.masked_fill_(newest.slots == slots.unsqueeze(-1), -1)
        newest.slots[:, :, newest.at] = slots.int()

    def forget(self, rows: Tensor | slice) -> None:
        """What `rows` hold has moved."""
        if self.newest is not None:
            self.newest.slots[rows] = -1

    def _scaled(self, part: int, x: Tensor, rows: Tensor | slice | None) -> Tensor:
        return x if part or self.scales is None else self.scales.kept(x, rows)

    def _lost(self, part: int, x: Tensor, pieces: Tensor, rows: Tensor | slice | None) -> Tensor:
        """What packing has cost x."""
        kept = expand(pieces, required(self.packings, "nothing is packed")[part], torch.float32)
        return (self._scaled(part, x, rows).float() - kept).to(x.dtype)


def scales_of(queries: Tensor, keys: Tensor) -> Tensor:
    """Of queries (n, heads, m, d) and keys (n, kv_heads, m', d) the scales (n, kv_heads, d), float32.

    Their exponents are about 0 in the mean, so that they do not depend on what all queries are multiplied by.
    """
    q, k = queries.unflatten(1, (keys.shape[1], -1)).float(), keys.float()
    exponents = (q.square().mean((2, 3)).log2() - k.square().mean(2).log2()) / 4
    exponents = exponents.nan_to_num(0.0).clamp(-_MOST, _MOST)
    return (exponents - exponents.mean(-1, keepdim=True)).round().exp2()
