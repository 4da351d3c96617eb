"""Moving keys and values: from prompts to slots, from row to row, and from angle to angle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.kernels import triton_available
from h2o_flexgen.kernels.layers import rotate_halves


def index_of(rows: Sequence[int], device: torch.device) -> slice | Tensor:
    """An index of these rows; a slice where they are neighbours, so that nothing is copied."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows, device=device)


def beginning(own: Tensor, shared: Tensor | None) -> Tensor:
    """The first token of own (n, kv_heads, S, d), which follow those that the rows share, (kv_heads, P, d)."""
    return own[:, :, :1] if shared is None else shared[:, :1].expand(len(own), -1, -1, -1)


def ending(own: Tensor, shared: Tensor | None, count: int) -> Tensor:
    """The last `count` tokens of own (n, kv_heads, S, d), which follow those that the rows share, (kv_heads, P, d)."""
    missing = count - own.shape[2]
    if missing <= 0 or shared is None:
        return own[:, :, max(0, -missing) :]
    return torch.cat([shared[:, -missing:].expand(len(own), -1, -1, -1), own], dim=2)


def some_of(x: Tensor, rows: slice | None) -> Tensor:
    """Of a tensor that has something for each row, or one for all, what is of these rows; None: of all."""
    return x if rows is None or len(x) == 1 else x[rows]


def order_without(pos: Tensor, ranges: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """Slots in the order in which they are once the positions in `ranges`, some of each row, have gone.

    pos: (n, kv_heads, capacity), -1 in empty slots, which come last. Returns int64 like it.
    """
    stays = pos >= 0
    for each, own, at in zip(ranges, stays, pos, strict=True):
        for start, stop in each:
            own &= (at < start) | (at >= stop)
    return (~stays).to(torch.uint8).argsort(dim=-1, stable=True)


def select(own: Tensor, shared: Tensor | None, kept: Tensor) -> Tensor:
    """The positions `kept`, as `CacheSlots.fill` returns them, of K or V: `shared` (kv_heads, P, d), then `own`.

    own: (n, kv_heads, S, d). Returns (n, kv_heads, c, d).
    """
    # Whole vectors of head_dim by one index: 30 times as fast as `gather`. The engine's prompts lie in memory as
    # (n, S, heads, d), of which kv_heads are these; tokens that rows share are copied once.
    n, heads, length, size = own.shape
    row = torch.arange(n, device=own.device).view(-1, 1, 1) * length
    head = torch.arange(heads, device=own.device).view(-1, 1)
    if shared is None:
        vectors, pitch = _in_order(own)
    else:
        vectors, pitch = own.transpose(1, 2).reshape(-1, size), heads
        vectors = torch.cat([shared.transpose(0, 1).reshape(-1, size), vectors])
        row = row * (kept >= shared.shape[1])
    index = (row + kept) * pitch + head
    return vectors.index_select(0, index.view(-1)).view(n, heads, -1, size)


def lowest(keys: Tensor, counts: int | Sequence[int]) -> Tensor:
    """Which of each row's int64 keys (n, heads, N), all different, are the `counts` lowest; one count for all rows, or
    one for each."""
    # NumPy sorts with AVX-512 where torch compares: a tenth of the time, and the threshold alone is needed.
    if keys.device.type == "cpu":
        ordered = torch.from_numpy(np.sort(keys.numpy(), axis=-1))
    else:
        ordered = keys.sort(-1).values
    last = torch.as_tensor(counts, device=keys.device).view(-1, 1, 1)
    bound = ordered.gather(-1, last.clamp(min=1).expand(*keys.shape[:2], 1) - 1)
    return (keys <= bound) & (last > 0)


def reordered(vectors: Tensor, order: Tensor) -> Tensor:
    """vectors (..., N, d), in the order (..., c) of places among the N: (..., c, d)."""
    size, count = vectors.shape[-1], vectors.shape[-2]
    first = torch.arange(order[..., 0].numel(), device=order.device).view(*order.shape[:-1], 1) * count
    return vectors.reshape(-1, size).index_select(0, (order + first).view(-1)).view(*order.shape, size)


def _in_order(own: Tensor) -> tuple[Tensor, int]:
    """K or V (n, heads, S, d) as vectors (m, d) in which token t of row r has its first head at (r S + t) pitch.

    No copy is made where they lie in memory as part of a wider (n, S, pitch, d), as one product makes them.
    """
    n, heads, length, size = own.shape
    row, head, token, one = own.stride()
    if one == 1 and head == size and token % size == 0 and token >= heads * size and (n == 1 or row == length * token):
        pitch = token // size
        return own.as_strided(((n * length - 1) * pitch + heads, size), (size, 1)), pitch
    return own.transpose(1, 2).reshape(-1, size), heads


def move_down(source: Tensor, rows: Sequence[int], target: Tensor, used: int) -> None:
    """Rows of K or V to the first rows of `target`; both are contiguous (n, kv_heads, capacity, d).

    The target may lie in the source's memory, before it or in the same place. Row i of it comes from row i
    of the source or a later one, so that nothing is overwritten before it is read. Only the first `used` slots count,
    in all rows of the source; the others are zeroed where they are no slots of the source's own, as what is there may
    not be finite.
    """
    if source.data_ptr() == target.data_ptr() and source.shape[1:] == target.shape[1:]:
        movers = [(place, row) for place, row in enumerate(rows) if row != place]
        if all(row >= len(rows) for _, row in movers):
            # Gaps that are filled with what lies behind all of the target. Row by row: indexed copies took longer.
            for place, row in movers:
                target[place, :, :used].copy_(source[row, :, :used])
            return
    size, slot = (target.stride(i) * target.itemsize for i in (0, 2))
    apart = source.untyped_storage().data_ptr() != target.untyped_storage().data_ptr()
    done = 0
    while done < len(rows):
        first, last = rows[done], done + 1
        while last < len(rows) and rows[last] == first + last - done:
            last += 1
        down = source[first].data_ptr() - target[done].data_ptr()
        if first < done or (not apart and down < 0):
            raise ValueError(f"row {first} would move up to {done}")
        # Pieces that do not overlap with where they go; where every row does, copies of one after the other.
        piece = last - done if apart else max(1, down // size)
        for start in range(done, last, piece) if apart or down else ():
            stop = min(start + piece, last)
            moved = source[first + start - done : first + stop - done]
            moved = moved if apart or down >= size else moved.clone()
            target[start:stop, :, :used] = moved[:, :, :used]
            if apart or down % slot or target[start].data_ptr() < source.data_ptr():
                target[start:stop, :, used:] = 0
        done = last


def rolled(
    q: Tensor, keys: Tensor, table: tuple[Tensor, Tensor], newest: Tensor, ranks: Tensor
) -> tuple[Tensor, Tensor]:
    """The query (b, heads, d) and the keys (b, kv_heads, width, d) rotated by their places among what is held.

    These are `newest` (b, 1) and `ranks`, which broadcast to (b, kv_heads, width). `table`: see `KVCache.attend`.
    """
    half = table[0].shape[-1] // 2
    cos, sin = (angles[:, :half] for angles in table)

    def at(places: Tensor) -> tuple[Tensor, Tensor]:
        flat, shape = places.reshape(-1), (*places.shape, half)
        return cos.index_select(0, flat).view(shape), sin.index_select(0, flat).view(shape)

    query = rotate_halves(q, *at(newest))
    if triton_available.serves(keys.device):
        from h2o_flexgen.kernels import triton_rotate  # imports Triton, which is not there on every machine

        return query, triton_rotate.rotate_cached(keys, ranks, cos, sin)
    return query, rotate_halves(keys, *at(ranks))
