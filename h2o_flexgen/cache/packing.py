"""Packed keys and values of caches, and the scales of keys: the reference for kernels that pack and expand themselves.

The layout is `CachePacking`'s; the numbers are bit for bit those of `quant.groupwise` after a Hadamard transform.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from h2o_flexgen.cache.eviction.base import AttendedPrompts
from h2o_flexgen.cache.shape import CacheShape
from h2o_flexgen.cache.vectors import ending, some_of
from h2o_flexgen.config.model.packing import CACHE_GROUP, EXPANDED, CachePacking
from h2o_flexgen.errors import required
from h2o_flexgen.kernels import pieces, triton_available
from h2o_flexgen.kernels.decode import available
from h2o_flexgen.kernels.layers import rotate_halves
from h2o_flexgen.kernels.pieces import hadamard
from h2o_flexgen.kernels.prompt import settle_key_scales
from h2o_flexgen.kernels.types import KeysValues, PackedPrompts, Quantised, RoundingErrors
from h2o_flexgen.quant import groupwise

LAST = 64
"""Queries and keys of a prompt that scales of keys follow from, its last ones."""
_NONE, _NOT_PACKED = "no prompt has come in", "nothing is packed"
_MOST = 8
"""Of the exponents of two of such scales."""


def pack(x: Tensor, packing: CachePacking) -> Tensor:
    """Packs keys or values x (..., dim) into pieces (..., nbytes) uint8. The memory that torch uses is bounded."""
    if triton_available.serves(x.device) and packing.bits != 3:
        from h2o_flexgen.kernels import triton_quant  # imports Triton, which is not there on every machine

        return _in_one(triton_quant.quantise(hadamard(x.float(), packing.block), packing.bits, CACHE_GROUP))
    if available(x.dtype, packing.dim, x.device, packed=True):
        return pieces.pack(x, packing)
    if x.numel() > EXPANDED and x.dim() > 2:
        if len(x) == 1:
            return pack(x[0], packing).unsqueeze(0)
        return torch.cat([pack(half, packing) for half in x.tensor_split(2)])
    return _in_one(groupwise.quantise(hadamard(x.float(), packing.block), packing.bits, CACHE_GROUP))


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
    if available(dtype, packing.dim, packed.device, packed=True):
        return pieces.expand(packed, packing, dtype)
    numbers = groupwise.dequantise(parts_of(packed, packing), exact, packing.bits, CACHE_GROUP)
    return hadamard(numbers, packing.block).to(dtype)


Rows = Tensor | slice
Places = Rows | tuple[int, Tensor] | None
"""Rows of a cache, None: all; or some heads of one of them."""


class KeyScales:
    """The scales s of a cache's rows: a new key is multiplied by s before it is packed, and queries are divided by s.

    With numbers that are transformed together before they are rounded, the error of q k is about |q / s| |k s|, which
    s = sqrt(|q_i| / |k_i|) makes smallest. |q_i| and |k_i| are root mean squares over the last tokens of the row's own
    prompt, and the query heads of a KV head. s is a power of two: multiplying by it rounds no number.

    From `centred` keys their mean over the prompt is subtracted first. A query's logits then are all smaller by one
    number, which leaves a softmax over tokens alone as it was, but not one with a sink's logit or a soft cap.
    """

    def __init__(self, rows: int, centred: bool) -> None:
        self._rows, self.centred = rows, centred
        self._of: Tensor | None = None  # (rows, kv_heads, d) in the dtype of keys
        self.means: Tensor | None = None
        """Likewise; None where keys are not centred."""

    def settle(
        self, rows: Sequence[int], queries: Tensor, keys: Tensor, device: torch.device, past: Tensor | None = None
    ) -> None:
        """Sets scales and means of `rows` by the last of their queries (n, heads, m, d) and all keys (n, kv_heads, S,
        d), which follow the keys that the rows share, `past` (kv_heads, P, d)."""
        asked, held = queries[:, :, -LAST:], ending(keys, past, LAST)
        if self.centred:
            means = mean_of(keys, past)
            held = held - means.unsqueeze(2)
            if self.means is None:
                self.means = torch.zeros(self._rows, *means.shape[1:], dtype=keys.dtype, device=device)
            self.means[list(rows)] = means.to(device)
        scales = scales_of(asked, held).to(device, keys.dtype)
        if self._of is None:
            self._of = scales.new_ones(self._rows, *scales.shape[1:])
        self._of[list(rows)] = scales

    def settle_prompts(
        self, rows: Sequence[int], prompts: AttendedPrompts, length: int, raw: bool, device: torch.device
    ) -> None:
        """As `settle`, by the prompts of `rows`, of `length` tokens; more may follow. raw: queries are not rotated."""
        queries, last = required(prompts.queries, "the last queries are needed"), min(LAST, length)
        queries = queries[:, :, : queries.shape[2] - (prompts.length - length)]
        if raw and prompts.turn is not None:
            cos, sin = prompts.turn(torch.arange(length - last, length, device=queries.device))
            half = cos.shape[-1] // 2
            queries = rotate_halves(queries[:, :, -last:].float(), cos[:, :half], sin[:, :half])
        known = prompts.first(length)
        self.settle(rows, queries, known.stored_k, device, None if known.past is None else known.past[2])

    def settle_packed(self, prompts: PackedPrompts, q: Tensor, k: Tensor) -> None:
        """As `settle`, for all `prompts`, by q (T, heads, d) and k (T, kv_heads, d) of packed tokens."""
        if self._of is None:
            self._of = k.new_ones(self._rows, *k.shape[1:])
            self.means = torch.zeros_like(self._of) if self.centred else None
        settle_key_scales(prompts, q, k, self._of, self.means, LAST, _MOST)

    @classmethod
    def joined(cls, parts: Sequence[tuple[KeyScales | None, Sequence[int]]]) -> KeyScales | None:
        """The given rows, in this order; None of caches without."""
        found = [(scales, list(rows)) for scales, rows in parts if scales is not None]
        if not found:
            return None
        made = cls(sum(len(rows) for _, rows in found), found[0][0].centred)
        made._of = torch.cat([scales.of[rows] for scales, rows in found])
        if made.centred:
            made.means = torch.cat([required(scales.means, _NONE)[rows] for scales, rows in found])
        return made

    @property
    def of(self) -> Tensor:
        """(rows, kv_heads, d)."""
        return required(self._of, _NONE)

    def kept(self, k: Tensor, rows: Places = None) -> Tensor:
        """Keys (n, kv_heads, ..., d) of `rows`, or (n, d) of a row's heads, as they are kept."""
        own = k if self.means is None else k - _like(self.means, k, rows)
        return own * _like(self.of, k, rows)

    def seen(self, k: Tensor, rows: slice | None = None) -> Tensor:
        """The keys that are kept as `k`."""
        own = k / _like(self.of, k, rows)
        return own if self.means is None else own + _like(self.means, k, rows)

    def asked(self, q: Tensor) -> Tensor:
        """Queries (rows, heads, d) as keys that are kept are asked."""
        return (q.unflatten(1, (self.of.shape[1], -1)) / self.of.unsqueeze(2)).flatten(1, 2)


def _like(x: Tensor, k: Tensor, rows: Places) -> Tensor:
    """The `rows` of x (rows, kv_heads, d), made to fit keys k, which may have tokens before the last dimension."""
    some = x if rows is None else x[rows]
    return some if some.dim() == k.dim() else some.unsqueeze(2)


class Keeping:
    """How a cache keeps keys and values: as they are; or keys centred and scaled, both rotated and packed, and beside
    them the rounding errors of the newest tokens and of the first."""

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        self.packings, self._shape, self._device = shape.packings, shape, device
        self.scales = KeyScales(shape.batch, shape.centred) if shape.scaled else None
        self.errors: RoundingErrors | None = None

    @classmethod
    def joined(cls, shape: CacheShape, parts: Sequence[tuple[Keeping, Sequence[int]]]) -> Keeping:
        """The given rows of these go on, in this order."""
        made = cls(shape, parts[0][0]._device)
        made.scales = KeyScales.joined([(part.scales, rows) for part, rows in parts])
        found = [(part.errors, list(rows)) for part, rows in parts if part.errors is not None]
        if found:
            errors = made.mending()

            def rows_of(name: Callable[[RoundingErrors], Tensor]) -> Tensor:
                joined = torch.cat([name(each)[rows] for each, rows in found])
                start, newest = 0, errors.newest
                for each, rows in found:  # where each has its newest token last
                    own = joined[start : start + len(rows), :, :newest]
                    own.copy_(own.roll(newest - 1 - each.at, 2))
                    start += len(rows)
                return joined

            errors.lost = KeysValues(rows_of(lambda each: each.lost.k), rows_of(lambda each: each.lost.v))
            errors.slots = rows_of(lambda each: each.slots)
        return made

    def mending(self) -> RoundingErrors:
        """The errors, which are made where there are none yet."""
        if self.errors is None:
            shape, nbytes = self._shape, [packing.nbytes for packing in required(self.packings, _NOT_PACKED)]
            self.errors = RoundingErrors(shape.newest, shape.first, shape.batch, shape.kv_heads, nbytes, self._device)
        return self.errors

    def stored(self, part: int, x: Tensor, rows: Places = None) -> Tensor:
        """Keys (part 0) or values (1) (n, kv_heads, ..., head_dim) of `rows`, or (n, head_dim) of a row's heads, as
        buffers hold them."""
        return x if self.packings is None else pack(self._scaled(part, x, rows), self.packings[part])

    def expanded(self, held: KeysValues, dtype: torch.dtype, rows: slice | None = None) -> KeysValues:
        """The keys and values (n, kv_heads, slots, head_dim), from the first slot on, that buffers hold so."""
        if self.packings is None:
            return held
        wide = torch.float32 if self.errors is not None or self._shape.centred else dtype
        keys, values = (expand(part, packing, wide) for part, packing in zip(held, self.packings, strict=True))
        if self.errors is not None:
            slots = some_of(self.errors.slots, rows)
            gone, places = (slots < 0).unsqueeze(-1), slots.clamp(0).long().unsqueeze(-1)
            for x, lost, packing in zip((keys, values), self.errors.lost, self.packings, strict=True):
                missing = expand(some_of(lost, rows), packing, torch.float32).masked_fill(gone, 0.0)
                x.scatter_add_(2, places.expand_as(missing), missing)
        seen = keys if self.scales is None else self.scales.seen(keys, rows)
        return KeysValues(seen.to(dtype), values.to(dtype))

    def once(self, k: Tensor) -> Tensor:
        """New keys (b, kv_heads, head_dim) as they are seen once they have been packed."""
        if self.packings is None:
            return k
        packed = expand(self.stored(0, k), self.packings[0], k.dtype)
        return packed if self.scales is None else self.scales.seen(packed)

    def fill(
        self, rows: Rows, held: int, last: KeysValues, first: KeysValues, there: Tensor, buffers: KeysValues
    ) -> None:
        """The prompts of `rows` are in, in the first `held` slots of `buffers`, of which the last m hold their last
        tokens, (n, kv_heads, m, head_dim), m at most as many as newest ones are kept. first: their first tokens (n,
        kv_heads, 1, head_dim); there: in which heads the first slot has them, bool (n or 1, kv_heads or 1)."""
        errors, count = self.mending(), last.k.shape[2]
        newest = errors.newest
        for i, (lost, x) in enumerate(zip(errors.lost, last, strict=True)):
            pieces = buffers[i][rows, :, held - count : held]
            lost[rows, :, newest - count : newest] = self._lost(i, x, pieces, rows)
        slots = torch.full_like(errors.slots[rows], -1)
        slots[..., newest - count : newest] = torch.arange(held - count, held, device=slots.device)
        if self._shape.first:
            for i, (lost, x) in enumerate(zip(errors.lost, first, strict=True)):
                lost[rows, :, newest:] = self._lost(i, x, buffers[i][rows, :, :1], rows)
            there = there.to(slots.device).unsqueeze(-1)
            slots[..., :newest].masked_fill_(there & (slots[..., :newest] == 0), -1)  # it is once among these
            slots[..., newest:].masked_fill_(there, 0)
        errors.slots[rows] = slots

    def put(self, row: int, heads: Tensor, slots: Tensor, tokens: KeysValues, buffers: KeysValues) -> None:
        """Puts tokens (n, head_dim) in slots of a row, of these KV heads, (n,) each, as when they came in first; their
        rounding errors are not kept."""
        for i, (buffer, x) in enumerate(zip(buffers, tokens, strict=True)):
            buffer[row, heads, slots] = self.stored(i, x, (row, heads))
        if self.errors is not None:
            own = self.errors.slots[row]
            places, which = (own[heads] == slots.unsqueeze(1)).nonzero(as_tuple=True)
            own[heads[places], which] = -1

    def rows(self, width: int) -> list[slice | None]:
        """The rows whose first `width` slots are looked at at once: all, or as many as may be expanded at a time."""
        shape, some = self._shape, self._shape.batch
        if self.packings is not None:
            some = max(1, EXPANDED // (shape.kv_heads * width * shape.head_dim))
        return [None] if some >= shape.batch else [slice(row, row + some) for row in range(0, shape.batch, some)]

    def advance(self) -> None:
        if self.errors is not None and self.errors.newest:
            self.errors.at = (self.errors.at + 1) % self.errors.newest

    def take(self, slots: Tensor, new: KeysValues, pieces: Sequence[Tensor]) -> None:
        """The step's tokens (b, kv_heads, head_dim) were packed as `pieces`, into `slots` (b, kv_heads)."""
        errors = required(self.errors, _NONE)
        errors.slots.masked_fill_(errors.slots == slots.unsqueeze(-1), -1)
        if errors.newest:
            for i, (lost, x) in enumerate(zip(errors.lost, new, strict=True)):
                lost[:, :, errors.at] = self._lost(i, x, pieces[i], None)
            errors.slots[:, :, errors.at] = slots.int()

    def move(self, rows: Rows, order: Tensor) -> None:
        """The slots of `rows` have taken the contents of the slots `order` (n, kv_heads, slots), in this order."""
        if self.errors is not None:
            found = self.errors.slots[rows].unsqueeze(-1) == order.unsqueeze(2)
            places = found.int().argmax(-1).masked_fill(~found.any(-1), -1)
            self.errors.slots[rows] = places.int()

    def _scaled(self, part: int, x: Tensor, rows: Places) -> Tensor:
        return x if part or self.scales is None else self.scales.kept(x, rows)

    def _lost(self, part: int, x: Tensor, packed: Tensor, rows: Tensor | slice | None) -> Tensor:
        """The rounding errors of x, scaled, where packing made `packed` of it, packed."""
        packing = required(self.packings, _NOT_PACKED)[part]
        scaled = self._scaled(part, x, rows)
        if available(x.dtype, packing.dim, x.device, packed=True):
            return pieces.pack(scaled, packing, errors=True)
        kept = groupwise.dequantise(parts_of(packed, packing), torch.float32, packing.bits, CACHE_GROUP)
        errors = hadamard(scaled.float(), packing.block) - kept
        return _in_one(groupwise.quantise(errors, packing.bits, CACHE_GROUP))


def mean_of(keys: Tensor, past: Tensor | None) -> Tensor:
    """The mean key (n, kv_heads, d) of prompts, in their dtype, from keys (n, kv_heads, S, d) behind the `past`, which
    all share, (kv_heads, P, d). The first token is left out, which is far from all others; zeros where it is alone."""
    sums = torch.stack([_summed(row) for row in keys])  # one by one: none depends on its neighbours
    first, count = keys[:, :, 0] if past is None else past[:, 0], keys.shape[2] - 1
    if past is not None:
        sums, count = sums + _summed(past), count + past.shape[1]
    # In few digits, so that it does not show how they were added up.
    return ((sums - first) / max(1, count)).bfloat16().to(keys.dtype)


def _summed(keys: Tensor) -> Tensor:
    """Of keys (kv_heads, T, d) the sum over tokens, of some at a time in float64."""
    return torch.stack([part.double().sum(1) for part in keys.split(1024, 1)]).sum(0)


def scales_of(queries: Tensor, keys: Tensor) -> Tensor:
    """Of queries (n, heads, m, d) and keys (n, kv_heads, m', d) the scales (n, kv_heads, d), float64.

    Their exponents are about 0 in the mean, so that they do not depend on what all queries are multiplied by.
    """
    q, k = queries.unflatten(1, (keys.shape[1], -1)).double(), keys.double()  # as in key_scales.c
    exponents = (q.square().mean((2, 3)).log2() - k.square().mean(2).log2()) / 4
    exponents = exponents.nan_to_num(0.0).clamp(-_MOST, _MOST)
    return (exponents - exponents.mean(-1, keepdim=True)).round().exp2()
