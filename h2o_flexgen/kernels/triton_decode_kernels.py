"""A decode step on a GPU: the device code of `triton_decode`.

A task is one row and KV head. Everything that is read of its K and V is occupied and seen; tiles are slots by
dimensions, so that a warp reads whole vectors. All slots of a task go through the same operations, wherever they lie:
equal keys get equal probabilities, so that ties stay ties. Sums, logits and scores are float32; logits are in base 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from h2o_flexgen.kernels.triton_quant import bytes_to_pairs, groups_to_codes, pairs_to_bytes

QUANT_GROUP = 64  # of packed K and V
_GROUP = tl.constexpr(QUANT_GROUP)
_BEST = tl.constexpr(0x7FFFFFFF)  # as score bits: above every number
_LAST = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_RULE = tl.constexpr(8)  # numbers per rule: held, limit, prompt, ring, sinks, hides, recent, evicts


class New(NamedTuple):
    """Queries (rows, heads, dim), keys and values (rows, kv_heads, dim) of the new tokens; strides in elements."""

    q: Any
    k: Any
    v: Any
    q_row: int
    q_head: int
    k_row: int
    k_head: int
    v_row: int
    v_head: int


class Results(NamedTuple):
    """`out`, `probs` (tasks, width), and scratch: `logits` (tasks, group, width), parts (splits, tasks, group, ..)."""

    out: Any
    probs: Any
    logits: Any
    mixed: Any
    top: Any
    total: Any


class Held(NamedTuple):
    """K and V (rows, kv_heads, capacity, dim); packed: codes (.., bytes) with scales and lows (.., groups)."""

    k: Any
    v: Any
    k_scale: Any = None
    k_low: Any = None
    v_scale: Any = None
    v_low: Any = None


class DecodeForm(NamedTuple):
    """The sizes and options that a kernel is compiled for."""

    dim: int
    d: int  # dim, as a power of two
    group: int
    g: int  # query heads per KV head as tiles have them: 1, or 16 for matrix products
    block: int  # slots per tile
    scan: int  # slots at a time when scores are added to
    stages: int  # tiles on the way
    bits: int  # of packed K and V; 0: they are not packed
    pitch: int  # bytes from the codes of one slot to those of the next
    line_pitch: int  # numbers from its scales or lows to those of the next
    adds: bool
    wide: bool  # see `product`


class Slots(NamedTuple):
    """State of the slots, as `types.Ranking` has it. Writes go to the tensors named `.._out`, and to `pos` and `used`.

    `now`, (tasks,) int64, is the number of the step where that is not an argument of the launch.
    """

    rules: Any
    used: Any
    score: Any = None
    score_out: Any = None
    pos: Any = None
    free: Any = None
    free_out: Any = None
    given: Any = None
    fresh: Any = None
    now: Any = None
    now_out: Any = None


class DecodeSizes(NamedTuple):
    """Sizes: KV heads per row; slots per task, per row of `probs` and `logits`, per split, of the window."""

    kv_heads: int
    capacity: int
    width: int
    chunk: int
    window: int


@triton.jit(do_not_specialize=["step"])
def step_kernel(new, held, slots, results, sizes, step, scale, cap, form: tl.constexpr):
    """A whole step of one task by one program."""
    task = tl.program_id(0)
    step = number_of(slots, task, step)
    where = locate(slots, sizes, task, step)
    begin = where[1] // form.block * form.block
    top, total, mixed = _attend(new, held, results, sizes, (task, begin, where[2]), where, (scale, cap), form)
    _write_out(results.out, task, mixed / total[:, None], form)
    if results.logits is not None:
        tl.debug_barrier()  # what one thread wrote of the logits, others read
    if (results.logits is not None) or (slots.score is not None):
        evict(slots, results, sizes, task, where, (top, total), step, form)
    finish(slots, task, where[0], step)


@triton.jit(do_not_specialize=["step"])
def split_kernel(new, held, slots, results, sizes, step, scale, cap, form: tl.constexpr):
    """The attention of one task to `sizes.chunk` of its slots."""
    task, split = tl.program_id(0), tl.program_id(1)
    step = number_of(slots, task, step)
    where = locate(slots, sizes, task, step)
    begin = tl.maximum(split * sizes.chunk, where[1] // form.block * form.block)
    end = tl.minimum(split * sizes.chunk + sizes.chunk, where[2])
    if begin < end:
        top, total, mixed = _attend(new, held, results, sizes, (task, begin, end), where, (scale, cap), form)
        heads, dims = tl.arange(0, form.g), tl.arange(0, form.d)
        at = (split * tl.num_programs(0) + task) * form.group + heads
        tl.store(results.top + at, top, mask=heads < form.group)
        tl.store(results.total + at, total, mask=heads < form.group)
        inside = (heads < form.group)[:, None] & (dims < form.dim)[None, :]
        tl.store(results.mixed + at.to(tl.int64)[:, None] * form.dim + dims[None, :], mixed, mask=inside)


@triton.jit(do_not_specialize=["step"])
def join_kernel(slots, results, sizes, step, form: tl.constexpr):
    """Makes one of the splits of one task, and does what is left of the step."""
    task = tl.program_id(0)
    step = number_of(slots, task, step)
    where = locate(slots, sizes, task, step)
    heads, dims = tl.arange(0, form.g), tl.arange(0, form.d)
    inside = (heads < form.group)[:, None] & (dims < form.dim)[None, :]
    top = tl.full((form.g,), float("-inf"), tl.float32)
    total = tl.full((form.g,), 0.0, tl.float32)
    mixed = tl.full((form.g, form.d), 0.0, tl.float32)
    for split in range(where[1] // sizes.chunk, (where[2] + sizes.chunk - 1) // sizes.chunk):
        at = (split * tl.num_programs(0) + task) * form.group + heads
        other = tl.load(results.top + at, mask=heads < form.group, other=0.0)
        peak = tl.maximum(top, other)
        mine, theirs = tl.exp2(top - peak), tl.exp2(other - peak)
        total = total * mine + theirs * tl.load(results.total + at, mask=heads < form.group, other=1.0)
        part = tl.load(results.mixed + at.to(tl.int64)[:, None] * form.dim + dims[None, :], mask=inside, other=0.0)
        mixed = mixed * mine[:, None] + part * theirs[:, None]
        top = peak
    _write_out(results.out, task, mixed / total[:, None], form)
    if (results.logits is not None) or (slots.score is not None):
        evict(slots, results, sizes, task, where, (top, total), step, form)
    finish(slots, task, where[0], step)


@triton.jit
def _attend(new, held, results, sizes, part, where, counted, form: tl.constexpr):
    """Attention of a task to slots from `begin`, a multiple of the block, to `end`: top and total (g,), mixed (g, d).

    Writes the new token into its slot, if that is one of them, and logits where they are asked for.
    """
    task, begin, end = part
    slot, first, _ = where
    scale, cap = counted
    row, head = (task // sizes.kv_heads).to(tl.int64), task % sizes.kv_heads
    base = task.to(tl.int64) * sizes.capacity
    heads, dims = tl.arange(0, form.g), tl.arange(0, form.d)
    asked = new.q + row * new.q_row + (head * form.group + heads)[:, None] * new.q_head + dims[None, :]
    q = tl.load(asked, mask=(heads < form.group)[:, None] & (dims < form.dim)[None, :], other=0.0)
    mine = (begin <= slot) & (slot < end)
    new_k = put(new.k + row * new.k_row + head * new.k_head, held.k, held.k_scale, held.k_low, base + slot, mine, form)
    new_v = put(new.v + row * new.v_row + head * new.v_head, held.v, held.v_scale, held.v_low, base + slot, mine, form)
    top = tl.full((form.g,), float("-inf"), tl.float32)
    total = tl.full((form.g,), 0.0, tl.float32)
    mixed = tl.full((form.g, form.d), 0.0, tl.float32)
    for start in tl.range(begin, end, form.block, num_stages=form.stages):
        at = start + tl.arange(0, form.block)
        seen = (at >= first) & (at < end)
        old, is_new = seen & (at != slot), (at == slot)[:, None]
        k = tile(held.k, held.k_scale, held.k_low, base, at, old, form)
        v = tile(held.v, held.v_scale, held.v_low, base, at, old, form)
        k = tl.where(is_new, new_k.to(q.dtype)[None, :], k.to(q.dtype))
        v = tl.where(is_new, new_v.to(q.dtype)[None, :], v.to(q.dtype))
        x = tl.where(seen[None, :], capped(_logits(q, k, form) * scale, cap), float("-inf"))
        if results.logits is not None:
            to = results.logits + (task.to(tl.int64) * form.group + heads[:, None]) * sizes.width + at[None, :]
            tl.store(to, x, mask=(heads < form.group)[:, None] & seen[None, :])
        peak = tl.maximum(top, tl.max(x, 1))
        p, shrink = tl.exp2(x - peak[:, None]), tl.exp2(top - peak)
        total = total * shrink + tl.sum(p, 1)
        mixed = mixed * shrink[:, None] + _mix(p, v, form)
        top = peak
    return top, total, mixed


@triton.jit
def _logits(q, k, form: tl.constexpr):
    """q (g, d) times k (block, d): (g, block) float32."""
    if form.g == 1:
        x = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)[None, :]
    else:
        x = product(q, tl.trans(k), form.wide)
    return x


@triton.jit
def capped(x, cap):
    """cap tanh(x / cap) of logits and cap in base 2, where there is a cap."""
    if cap is not None:
        e = tl.exp2(tl.abs(x) * (-2.8853900817779268 / cap))
        y = cap * (1 - e) / (1 + e)
        x = tl.where(x < 0, -y, y)
    return x


@triton.jit
def _mix(p, v, form: tl.constexpr):
    """p (g, block) times v (block, d): (g, d) float32; p in the dtype of v, unless g is 1."""
    if form.g == 1:
        x = tl.sum(tl.trans(p) * v.to(tl.float32), 0)[None, :]
    else:
        x = product(p.to(v.dtype), v, form.wide)
    return x


@triton.jit
def product(a, b, wide: tl.constexpr):
    """a (m, k) times b (k, n) in float32.

    `wide`, for Triton's interpreter: its `dot` is numpy's matmul, which has no bfloat16 and rounds differently from
    lane to lane; here, as in a GPU's matrix units, every element is summed the same way.
    """
    if wide:
        x = tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    else:
        x = tl.dot(a, b, input_precision="tf32x3")
    return x


@triton.jit
def _write_out(out, task, mixed, form: tl.constexpr):
    """The queries' answers (g, d) in the dtype of `out` (rows, heads, dim)."""
    heads, dims = tl.arange(0, form.g), tl.arange(0, form.d)
    to = out + (task.to(tl.int64) * form.group + heads[:, None]) * form.dim + dims[None, :]
    tl.store(to, mixed.to(out.dtype.element_ty), mask=(heads < form.group)[:, None] & (dims < form.dim)[None, :])


# ---- K and V in the slots of a task, as tiles: read, unpacked and written


@triton.jit
def tile(kept, scale, low, base, at, old, form: tl.constexpr):
    """K or V (block, d) of slots `at`; 0 where not `old`, of which nothing is read."""
    if form.bits == 0:
        dims = tl.arange(0, form.d)
        mask = old[:, None] & (dims < form.dim)[None, :]
        loaded = tl.load(kept + base * form.dim + at[:, None] * form.dim + dims[None, :], mask=mask, other=0.0)
    else:
        loaded = _unpacked(kept, scale, low, base, at, old, form)
    return loaded


@triton.jit
def _unpacked(kept, scale, low, base, at, old, form: tl.constexpr):
    """As `tile`, float32, of K or V in codes."""
    wide: tl.constexpr = form.dim * form.bits // 8
    groups: tl.constexpr = (form.dim + _GROUP - 1) // _GROUP
    each: tl.constexpr = min(_GROUP, form.d)
    bytes_, group = tl.arange(0, form.d * form.bits // 8), tl.arange(0, form.d // each)
    mask = old[:, None] & (bytes_ < wide)[None, :]
    codes = tl.load(kept + base * form.pitch + at[:, None] * form.pitch + bytes_[None, :], mask=mask, other=0)
    if form.bits == 4:
        codes = bytes_to_pairs(codes, form.block, form.d)
    values = tl.reshape(codes.to(tl.float32), (form.block, form.d // each, each))
    mask = old[:, None] & (group < groups)[None, :]
    of = base * form.line_pitch + at[:, None] * form.line_pitch + group[None, :]
    scales = tl.load(scale + of, mask=mask, other=0.0).to(tl.float32)
    lows = tl.load(low + of, mask=mask, other=0.0).to(tl.float32)
    return tl.reshape(lows[:, :, None] + values * scales[:, :, None], (form.block, form.d))


@triton.jit
def put(source, kept, scale, low, slot, mine, form: tl.constexpr):
    """The new token's K or V (d,) as its slot will hold it; if `mine`, puts it there."""
    dims = tl.arange(0, form.d)
    if form.bits == 0:
        x = tl.load(source + dims, mask=dims < form.dim, other=0.0)
        tl.store(kept + slot * form.dim + dims, x, mask=dims < tl.where(mine, form.dim, 0))
    else:
        x = _put_packed(source, kept, scale, low, slot, mine, form)
    return x


@triton.jit
def _put_packed(source, kept, scale, low, slot, mine, form: tl.constexpr):
    """As `put`, float32, of K or V in codes."""
    dims = tl.arange(0, form.d)
    wide: tl.constexpr = form.dim * form.bits // 8
    groups: tl.constexpr = (form.dim + _GROUP - 1) // _GROUP
    each: tl.constexpr = min(_GROUP, form.d)
    n: tl.constexpr = form.d // each
    # The missing numbers of a short last group repeat its last number.
    x = tl.load(source + tl.minimum(dims, form.dim - 1)).to(tl.float32)
    codes, scales, lows = groups_to_codes(tl.reshape(x, (n, each)), (1 << form.bits) - 1)
    bytes_, group = tl.arange(0, form.d * form.bits // 8), tl.arange(0, n)
    packed = codes.to(tl.uint8)
    if form.bits == 4:
        packed = pairs_to_bytes(codes, n, each)
    packed = tl.reshape(packed, (form.d * form.bits // 8,))
    tl.store(kept + slot * form.pitch + bytes_, packed, mask=bytes_ < tl.where(mine, wide, 0))
    line = slot * form.line_pitch + group
    tl.store(scale + line, scales.to(tl.bfloat16), mask=group < tl.where(mine, groups, 0))
    tl.store(low + line, lows.to(tl.bfloat16), mask=group < tl.where(mine, groups, 0))
    return tl.reshape(lows[:, None] + codes.to(tl.float32) * scales[:, None], (form.d,))


# ---- which slots are seen, which one is taken, and which one is next


@triton.jit
def number_of(slots, task, step):
    """The number of this step: the launch's argument, or the task's own count."""
    if slots.now is not None:
        step = tl.load(slots.now + task)
    return step


@triton.jit
def finish(slots, task, slot, step):
    """Leave the results of a step: the slot of its token, and the count of the next step."""
    tl.store(slots.used + task, slot.to(tl.int64))
    if slots.now_out is not None:
        tl.debug_barrier()  # every thread has read the count
        tl.store(slots.now_out + task, step + 1)


@triton.jit
def locate(slots, sizes, task, step):
    """The new token's slot, the first slot that is seen and the end of those occupied, int32."""
    rule = slots.rules + task // sizes.kv_heads * _RULE
    arrivals, limit = tl.load(rule) + step, tl.load(rule + 1)
    leaving = tl.load(rule + 2) + step + 1 - sizes.window
    first = tl.minimum(tl.maximum(leaving, 0), tl.load(rule + 5))
    if slots.given is not None:
        slot = tl.load(slots.given + task) - task.to(tl.int64) * sizes.capacity
    elif slots.free is not None:
        slot = tl.load(slots.free + task) - task.to(tl.int64) * sizes.capacity
    else:
        ring = tl.load(rule + 3)
        slot = tl.where(arrivals < limit, arrivals, ring + (arrivals - ring) % (limit - ring))
    return slot.to(tl.int32), first.to(tl.int32), tl.minimum(arrivals + 1, limit).to(tl.int32)


@triton.jit
def evict(slots, results, sizes, task, where, sums, step, form: tl.constexpr):
    """Probabilities, scores and the slot of the next token, of a task with the logits' `top` and `total` (g,)."""
    slot, first, count = where
    base = task.to(tl.int64) * sizes.capacity
    rule = slots.rules + task // sizes.kv_heads * _RULE
    now, sinks = tl.load(rule + 2) + step, tl.load(rule + 4)
    start_score = tl.where(now < sinks, float("inf"), 0.0)
    if slots.fresh is not None:
        start_score = tl.where(now < sinks, float("inf"), tl.load(slots.fresh + task))
    best = tl.full((form.scan,), _LAST, tl.int64)
    best_at = tl.full((form.scan,), 0, tl.int32)
    end = count
    if results.probs is not None:
        end = sizes.width
    for start in range(0, end, form.scan):
        at = start + tl.arange(0, form.scan)
        used = at < count
        p = tl.full((form.scan,), 0.0, tl.float32)
        if results.logits is not None:
            p = _probabilities(results.logits, sizes, task, (at, used & (at >= first)), sums, form)
        if results.probs is not None:
            tl.store(results.probs + task.to(tl.int64) * sizes.width + at, p, mask=at < sizes.width)
        if slots.score is not None:
            score = tl.where(at == slot, start_score, tl.load(slots.score + base + at, mask=used, other=0.0))
            written = at == slot
            if form.adds:
                score, written = score + p, used
            tl.store(slots.score_out + base + at, score, mask=written)
            pos = tl.where(at == slot, now, tl.load(slots.pos + base + at, mask=used, other=0).to(tl.int64))
            key = tl.where(used, _rank(score, pos, rule, now, sizes), _LAST)
            best_at = tl.where(key < best, at, best_at)
            best = tl.minimum(key, best)
    if slots.score is not None:
        victim = tl.max(tl.where(best == tl.min(best, 0), best_at, -1), 0)
        following = tl.where(slot + 1 == tl.load(rule + 1), tl.load(rule + 3), slot + 1)
        following = tl.where(step >= tl.load(rule + 7), victim, following)
        tl.debug_barrier()  # every thread has read the free slot
        tl.store(slots.pos + base + slot, now.to(tl.int32))
        tl.store(slots.free_out + task, base + following)


@triton.jit
def _probabilities(logits, sizes, task, slots, sums, form: tl.constexpr):
    """(scan,) of the slots `at`: means over the query heads, 0 where not `seen`.

    Head by head, so that a program has the slots in its registers and not the heads' copies of them; the number of
    heads is known when this is compiled, and their loads do not wait for each other.
    """
    at, seen = slots
    top, total = sums
    heads = tl.arange(0, form.g)
    count: tl.constexpr = form.group
    p = tl.full((form.scan,), 0.0, tl.float32)
    for head in tl.static_range(count):
        peak, norm = tl.sum(tl.where(heads == head, top, 0.0), 0), tl.sum(tl.where(heads == head, total, 0.0), 0)
        of = logits + (task.to(tl.int64) * form.group + head) * sizes.width + at
        p += tl.exp2(tl.load(of, mask=seen, other=float("-inf")) - peak) / norm
    return p / form.group


@triton.jit
def _rank(score, pos, rule, now, sizes):
    """Score and position as one int64: the lowest goes first, of equal scores the highest position."""
    bits = score.to(tl.int32, bitcast=True)
    leaving = now + 1 - sizes.window
    bits = tl.where((pos <= leaving) & (pos >= tl.load(rule + 4)), -1, bits)
    bits = tl.where(pos > now - tl.load(rule + 6), bits | _BEST, bits)
    return (bits.to(tl.int64) << 32) - pos
