"""Attention of one tick: decode rows over caches, prompts over themselves and shared prefixes; and layer states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from h2o_flexgen.cache.chunked import ChunkedCache
from h2o_flexgen.cache.eviction.base import AttendedPrompts, Turn
from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.cache.prefix_store import LayerPrefix
from h2o_flexgen.cache.ring_slots import SlotChoice
from h2o_flexgen.engine.batching.gpu_batch import AttentionPart
from h2o_flexgen.engine.batching.prefix_tree import PromptChunk, PromptSegment
from h2o_flexgen.engine.state.kv_store import RowStatePlaces, States
from h2o_flexgen.errors import required
from h2o_flexgen.huge import LARGE
from h2o_flexgen.kernels import torch_attention
from h2o_flexgen.kernels.decode import available
from h2o_flexgen.kernels.prompt import packed_attention, prefill_attention, takes_packed
from h2o_flexgen.kernels.types import KeysValues, Logits, PrefillAttention
from h2o_flexgen.models.rotary import Angles, rotate_both

if TYPE_CHECKING:
    from h2o_flexgen.models.hf.states import MixedTokens, MixerCall


NO_CACHE = "prompts are in hand, and no cache to fill from them"


class PrefixPath:
    """The segments before the current one in its prompt, in one layer, depth first; and their tokens in one piece.

    Belongs to one block, and passes from GPU batch to GPU batch and from layer to layer.
    """

    def __init__(self) -> None:
        self._pieces: list[LayerPrefix] = []
        self._joined: tuple[int, LayerPrefix] | None = None

    def before(self, depth: int) -> LayerPrefix | None:
        """Keys and values of the first `depth` segments; later ones are dropped."""
        del self._pieces[depth:]
        if depth == 0:
            self._joined = None
            return None
        if self._joined is None or self._joined[0] != depth:
            self._joined = depth, self._join()
        return self._joined[1]

    def push(self, piece: LayerPrefix) -> None:
        """Adds a segment's own tokens; its sums are of the whole path."""
        self._pieces.append(piece)

    def clear(self) -> None:
        self._pieces.clear()
        self._joined = None

    def _join(self) -> LayerPrefix:
        if len(self._pieces) == 1:
            return self._pieces[0]
        k, v = (torch.cat(parts, dim=1) for parts in zip(*((each.k, each.v) for each in self._pieces), strict=True))
        rotated = self._pieces[0].stored_k is not self._pieces[0].k
        stored = torch.cat([piece.stored_k for piece in self._pieces], dim=1) if rotated else k
        return self._pieces[-1]._replace(k=k, v=v, stored_k=stored)


Fill = Callable[[list[int], Tensor, Tensor, Tensor | None, KeysValues | None], None]
"""`KVCache.fill` of rows, k, v, scores and past, on the device that computed them."""


@dataclass
class PromptAttention:
    """Attention of one layer for the fresh prompts of one GPU batch, chunk by chunk.

    A prompt is pruned into `cache` after its last segment, so that only the path ever holds full-length K and V.

    lengths        of the prompts; the tokens behind them are replayed, and not cached
    column_sums    whether any cache of the block wants them in this layer
    queries        how many of the last queries the cache wants, before rotation if `raw_queries`
    turn           the rotation of queries
    rolling        the cache gets keys that are not rotated
    fill           fills the cache while something else is computed; None: it is filled at once
    path_sums      whether a prefix store keeps column sums, so that the path needs them
    choice         which tokens prompts attend to
    behind         decode rows of the part, before its chunk
    reads          keys and values are another layer's, and in its cache already
    """

    cache: KVCache
    path: PrefixPath
    logits: Logits
    lengths: list[int]
    column_sums: bool
    queries: int = 0
    raw_queries: bool = False
    turn: Turn | None = None
    window: int | None = None
    rolling: bool = False
    fill: Fill | None = None
    layer: int = 0
    path_sums: bool = False
    choice: SlotChoice | None = None
    behind: int = 0
    reads: bool = False

    def chunk(self, chunk: PromptChunk, angles: Angles | None, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor) -> None:
        """q (t, heads, d), k and v (t, kv_heads, d) of the chunk's packed tokens; mixed values go to `out`, like q.
        angles: of all packed prompts."""
        q, k, v = qkv
        stored_k, raw_q = k, q
        if angles is not None:
            angles = Angles(*(part[chunk.start : chunk.stop] for part in angles))
            q, k = rotate_both(q, k, angles)
        stored_k = stored_k if self.rolling else k
        self.path.before(chunk.segments[0].depth)
        looked_at = raw_q if self.raw_queries else q
        for segment in self._packed(chunk, (q, k, v), stored_k, out):
            span = slice(segment.start - chunk.start, segment.stop - chunk.start)
            self._segment(segment, [t[span] for t in (q, k, v, stored_k, looked_at)], out[span], span.start)

    def _packed(
        self, chunk: PromptChunk, qkv: tuple[Tensor, Tensor, Tensor], stored_k: Tensor, out: Tensor
    ) -> Sequence[PromptSegment]:
        """Computes whole prompts without a path all at once, if a kernel can; returns the other segments.

        With many short prompts, overhead per segment would exceed the kernels' time.
        """
        alone = [segment for segment in chunk.segments if segment.rows and not segment.depth]
        longest = max((segment.length for segment in alone), default=0)
        if self.reads or (self.cache.chunk is not None and longest >= self.cache.chunk):
            return chunk.segments
        if self.choice is not None and longest > self.choice.choice.most:
            return chunk.segments
        if any(segment.length != self.lengths[segment.rows[0]] for segment in alone):
            return chunk.segments
        spans = list[tuple[int, int, int]]()
        for segment in alone:
            first = segment.start - chunk.start
            spans.extend((row, first + i * segment.length, segment.length) for i, row in enumerate(segment.rows))
        prompts = self.cache.packing(spans) if alone and self.fill is None else None
        if prompts is None or not takes_packed(*qkv, self.logits.scale, prompts):
            return chunk.segments
        wanted = self.cache.wants_column_sums
        sums = packed_attention(qkv, prompts, self.logits, wanted, out, window=self.window)
        self.cache.settle_packed(prompts, qkv[0], stored_k)
        self.cache.fill_packed(prompts, stored_k, qkv[2], sums)
        return [segment for segment in chunk.segments if not segment.rows or segment.depth]

    def _segment(self, segment: PromptSegment, packed: list[Tensor], out: Tensor, first: int) -> None:
        if segment.held is not None:
            self.path.before(segment.depth)
            self.path.push(segment.held.layer(self.layer, segment.past, packed[0].device))
            return
        rows = max(1, len(segment.rows))
        q, k, v, stored_k, asked = (t.unflatten(0, (rows, segment.length)).transpose(1, 2) for t in packed)
        past = self.path.before(segment.depth)
        seen = None if past is None else KeysValues(past.k, past.v)
        wanted = self.column_sums or (self.path_sums and not segment.rows)
        mixed, sums = self._attend(q, KeysValues(k, v), seen, wanted, first)
        out.copy_(mixed.transpose(1, 2).flatten(0, 1))
        if past is not None and sums is not None and past.sums is not None:
            sums[..., : segment.past] += past.sums
        queries = self._last_queries(asked, past)
        if segment.rows and self.reads:
            return
        if segment.rows:
            sums = sums if self.cache.wants_column_sums else None
            if self._fill_packed(segment, packed, sums):
                return
            before = None if past is None else (past.k, past.v, past.stored_k)
            prompts = AttendedPrompts(k, v, stored_k, self.logits, before, queries, sums, self.turn)
            self._fill(list(segment.rows), prompts)
        else:
            own = KeysValues(k[0].contiguous(), v[0].contiguous())
            stored = stored_k[0].contiguous() if self.rolling else own.k
            last = None if queries is None else queries[0].contiguous()
            piece = LayerPrefix(*own, stored, None if sums is None else sums[0], last)
            self.path.push(piece)
            if segment.new is not None:
                segment.new.add(self.layer, piece)

    def _fill_packed(self, segment: PromptSegment, packed: list[Tensor], sums: Tensor | None) -> bool:
        """Fills the cache with prompts that the segment ends by a kernel, if one can: otherwise does nothing, False.

        packed: q, k, v, keys as they are stored and queries as policies look at them, of the segment's tokens. sums:
        of everything up to there, (n, kv_heads, P + S).
        """
        past, (q, _, v, k, _) = self.path.before(segment.depth), packed
        length, own = segment.past + segment.length, segment.length
        serves = self.fill is None and self.cache.chunk is None and available(v.dtype, v.shape[-1], v.device)
        if not serves or length != self.lengths[segment.rows[0]]:
            return False
        if past is not None and (self.raw_queries or (past.queries is None and own < self.queries)):
            return False
        if past is None:
            spans = [(row, i * length, length) for i, row in enumerate(segment.rows)]
            return self._filled(spans, (q, k, v), sums)
        asked = q.new_empty(q.shape[1], 0, q.shape[2]) if past.queries is None else past.queries
        whole = [_ending(x, length, own) for x in (asked, past.stored_k, past.v)]
        for i, row in enumerate(segment.rows):  # one by one, behind the tokens that all share
            for joined, x in zip(whole, (q, k, v), strict=True):
                joined[segment.past :] = x[i * own : (i + 1) * own]
            if not self._filled([(row, 0, length)], (whole[0], whole[1], whole[2]), None if sums is None else sums[i]):
                return False
        return True

    def _filled(
        self, spans: list[tuple[int, int, int]], qkv: tuple[Tensor, Tensor, Tensor], sums: Tensor | None
    ) -> bool:
        """`KVCache.fill_packed` of whole prompts, if a kernel does that."""
        prompts = self.cache.packing(spans)
        if prompts is None:
            return False
        self.cache.settle_packed(prompts, qkv[0], qkv[1])
        self.cache.fill_packed(prompts, qkv[1], qkv[2], None if sums is None else sums.flatten())
        return True

    def _attend(
        self, q: Tensor, own: KeysValues, past: KeysValues | None, wanted: bool, first: int
    ) -> PrefillAttention:
        """See `prefill_attention`. `first`: the segment's first token in the chunk."""
        logits, window = self.logits, self.window
        before, length = 0 if past is None else past.k.shape[1], q.shape[2]
        if self.choice is not None and before + length > self.choice.choice.most:
            choice, indexed = self.choice
            shared = None if past is None else past.k[0]
            seen = choice.of_prompts(self.behind + first, own.k[:, 0], shared, indexed)
            return torch_attention.prefill_attention(q, *own, logits, wanted, past=past, window=window, seen=seen)
        chunk = self.cache.chunk
        if chunk is None or before + length <= chunk:
            return prefill_attention(q, *own, logits, wanted, past=past, window=window)
        outs, sums, start = [], None, before
        if wanted:
            sums = torch.zeros(len(q), own.k.shape[1], before + length, device=q.device)
        while start < before + length:
            begin = start // chunk * chunk
            stop = min(begin + chunk, before + length)
            held = None if past is None or begin >= before else KeysValues(*(part[:, begin:] for part in past))
            mine = slice(max(begin, before) - before, stop - before)
            keys, values = (part[:, :, mine] for part in own)
            asked = q[:, :, start - before : stop - before]
            mixed, added = prefill_attention(asked, keys, values, logits, wanted, past=held, window=window)
            outs.append(mixed)
            if sums is not None and added is not None:
                sums[..., begin:stop] = added
            start = stop
        return PrefillAttention(torch.cat(outs, dim=2), sums)

    def _last_queries(self, asked: Tensor, past: LayerPrefix | None) -> Tensor | None:
        """The last queries up to the end of a segment with queries (n, heads, S, d), as many as policies look at."""
        if not self.queries:
            return None
        if past is not None and past.queries is not None and asked.shape[2] < self.queries:
            asked = torch.cat([past.queries.expand(len(asked), -1, -1, -1), asked], dim=2)
        return asked[:, :, -self.queries :]

    def _fill(self, rows: list[int], prompts: AttendedPrompts) -> None:
        place, length = self.cache.device, self.lengths[rows[0]]
        self.cache.settle_prompts(rows, prompts, length, self.raw_queries)
        if isinstance(self.cache, ChunkedCache):
            inside = length % self.cache.chunk
            prompts = prompts.first(length).last(inside)
            for row in rows:
                self.cache.begins(row, length - inside)
            length = inside
        scores = self.cache.scores_of(rows, prompts) if length else prompts.k.new_zeros(*prompts.k.shape[:3]).float()
        prompts = prompts.first(length)
        past = None if prompts.past is None else KeysValues(prompts.past[2], prompts.past[1])
        if self.fill is not None:
            self.fill(rows, prompts.stored_k, prompts.v, scores, past)
            return
        scores = None if scores is None else scores.to(place)
        past = None if past is None else KeysValues(past.k.to(place), past.v.to(place))
        self.cache.fill(rows, prompts.stored_k.to(place), prompts.v.to(place), scores, past)


def _ending(before: Tensor, length: int, own: int) -> Tensor:
    """Room for the tokens of a prompt (length, heads, d), of which the last but `own` ones are `before` (heads, P, d).
    Any numbers are in front of these."""
    joined = before.new_empty(length, before.shape[0], before.shape[2])
    joined[length - own - before.shape[1] : length - own] = before.transpose(0, 1)
    return joined


@dataclass
class TickAttention:
    """Attention of one layer for one GPU batch; called by the decoder, part by part.

    cache          of the decode rows, None without any; `prompts`: of the fresh rows, likewise
    row_angles     of the packed decode rows; None with rolling positions, where `table` rotates cached keys
    prompt_angles  of the packed prompts
    growth         factors (T, 1, 1) for the queries of all packed tokens; None: 1
    choice         of the slots that decode rows attend to
    again          keys and values of the step are in the cache already, see `KVCache.again`
    """

    logits: Logits
    cache: KVCache | None
    prompts: PromptAttention | None
    row_angles: Angles | None
    prompt_angles: Angles | None
    table: Angles | None
    growth: Tensor | None = None
    choice: SlotChoice | None = None
    again: bool = False

    def part(self, part: AttentionPart, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Mixed values (t, heads, d) for q (t, heads, d), k and v (t, kv_heads, d) of the part's tokens."""
        rows = part.rows
        if part.chunk is None:
            return self.decode(q, k, v)
        if q.is_cuda:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        else:
            out = LARGE.empty(*q.shape, dtype=q.dtype)
        if rows:
            out[:rows] = self.decode(q[:rows], k[:rows], v[:rows])
        prompts = required(self.prompts, NO_CACHE)
        asked = q[rows:] if self.growth is None else q[rows:] * self.growth[part.span][rows:]
        prompts.chunk(part.chunk, self.prompt_angles, (asked, k[rows:], v[rows:]), out[rows:])
        return out

    def decode(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One decode step on the cache's device, with q, k, v and the result where q is."""
        return self.placed(*self.turned(q, k, v))

    def placed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same of rotated q and k."""
        if self.cache is None or self.cache.device == q.device:
            return self.attend(q, k, v)
        place = self.cache.device
        return self.attend(q.to(place), k.to(place), v.to(place)).to(q.device)

    def turned(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of the decode rows, rotated unless positions roll."""
        if self.row_angles is None:
            return q, k, v
        if self.growth is not None:
            q = q * self.growth[: len(q)]
        return (*rotate_both(q, k, self.row_angles), v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One decode step, everything on the cache's device."""
        cache = required(self.cache, "decode rows are in hand, and no cache of theirs")
        logits = self.logits.to(cache.device)
        if self.again:
            return cache.again((q, k, v), logits)
        cache.choice = None if self.choice is None else self.choice.within(cache.shape.capacity)
        return cache.attend(q, k, v, logits, self.table)


@dataclass
class TickStates:
    """The states of one layer for one GPU batch, of which the first `decoding` rows decode. path: the states behind
    each segment before the current one in its prompt; shared as `PrefixPath`."""

    places: RowStatePlaces
    path: list[States]
    decoding: int

    def mix(self, part: AttentionPart, call: MixerCall) -> Any:
        """The result of a mixer for the tokens of a part."""
        return call.of(self._pieces(part, call))

    def _pieces(self, part: AttentionPart, call: MixerCall) -> Iterator[MixedTokens]:
        """The decode rows of a part as one piece, then its prompts: neighbours as one, and by itself a segment that
        others follow, whose states they begin with."""
        start = part.rows
        prompts: list[tuple[int, int, States]] = []
        if part.rows:
            yield call.piece(0, part.rows, self.places.first(part.rows), decode=True)
        for segment in () if part.chunk is None else part.chunk.segments:
            behind = self.path[segment.depth - 1] if segment.depth else {}
            prompts += [(segment.length, self.decoding + row, behind) for row in segment.rows]
            if segment.rows:
                continue
            if prompts:
                yield self._together(call, start, prompts)
                start, prompts = start + sum(length for length, _, _ in prompts), []
            piece = call.piece(start, segment.length, {key: state.clone() for key, state in behind.items()})
            yield piece
            start += segment.length
            self.path[segment.depth :] = [piece.states.held()]
        if prompts:
            yield self._together(call, start, prompts)

    def _together(self, call: MixerCall, start: int, prompts: list[tuple[int, int, States]]) -> MixedTokens:
        return call.prompts(start, prompts, self.places.first(1 + max(place for _, place, _ in prompts)))
