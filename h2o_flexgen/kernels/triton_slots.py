"""Which slots are seen, which one is taken, and which one is next: device code of `triton_decode`."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

_BEST = tl.constexpr(0x7FFFFFFF)  # as score bits: above every number
_LAST = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_RULE = tl.constexpr(8)  # numbers per rule: held, limit, prompt, ring, sinks, hides, recent, evicts


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


class Extent(NamedTuple):
    """Sizes: KV heads per row; slots per task, per row of `probs` and `logits`, per split, of the window."""

    kv_heads: int
    capacity: int
    width: int
    chunk: int
    window: int


@triton.jit
def number_of(slots, task, step):
    """Of this step: what the launch says, or the task's own count."""
    if slots.now is not None:
        step = tl.load(slots.now + task)
    return step


@triton.jit
def finish(slots, task, slot, step):
    """What every step leaves: the slot of its token, and the count of the next step."""
    tl.store(slots.used + task, slot.to(tl.int64))
    if slots.now_out is not None:
        tl.debug_barrier()  # nobody has yet to read the count
        tl.store(slots.now_out + task, step + 1)


@triton.jit
def locate(slots, extent, task, step):
    """The new token's slot, the first slot that is seen and the end of those occupied, int32."""
    rule = slots.rules + task // extent.kv_heads * _RULE
    arrivals, limit = tl.load(rule) + step, tl.load(rule + 1)
    leaving = tl.load(rule + 2) + step + 1 - extent.window
    first = tl.minimum(tl.maximum(leaving, 0), tl.load(rule + 5))
    if slots.given is not None:
        slot = tl.load(slots.given + task) - task.to(tl.int64) * extent.capacity
    elif slots.free is not None:
        slot = tl.load(slots.free + task) - task.to(tl.int64) * extent.capacity
    else:
        ring = tl.load(rule + 3)
        slot = tl.where(arrivals < limit, arrivals, ring + (arrivals - ring) % (limit - ring))
    return slot.to(tl.int32), first.to(tl.int32), tl.minimum(arrivals + 1, limit).to(tl.int32)


@triton.jit
def settle(slots, results, extent, task, where, sums, step, form: tl.constexpr):
    """Probabilities, scores and the slot of the next token, of a task with the logits' `top` and `total` (g,)."""
    slot, first, count = where
    base = task.to(tl.int64) * extent.capacity
    rule = slots.rules + task // extent.kv_heads * _RULE
    now, sinks = tl.load(rule + 2) + step, tl.load(rule + 4)
    start_score = tl.where(now < sinks, float("inf"), 0.0)
    if slots.fresh is not None:
        start_score = tl.where(now < sinks, float("inf"), tl.load(slots.fresh + task))
    best = tl.full((form.scan,), _LAST, tl.int64)
    best_at = tl.full((form.scan,), 0, tl.int32)
    end = count
    if results.probs is not None:
        end = extent.width
    for start in range(0, end, form.scan):
        at = start + tl.arange(0, form.scan)
        used = at < count
        p = tl.full((form.scan,), 0.0, tl.float32)
        if results.logits is not None:
            p = _probabilities(results.logits, extent, task, (at, used & (at >= first)), sums, form)
        if results.probs is not None:
            tl.store(results.probs + task.to(tl.int64) * extent.width + at, p, mask=at < extent.width)
        if slots.score is not None:
            score = tl.where(at == slot, start_score, tl.load(slots.score + base + at, mask=used, other=0.0))
            written = at == slot
            if form.adds:
                score, written = score + p, used
            tl.store(slots.score_out + base + at, score, mask=written)
            pos = tl.where(at == slot, now, tl.load(slots.pos + base + at, mask=used, other=0).to(tl.int64))
            key = tl.where(used, _rank(score, pos, rule, now, extent), _LAST)
            best_at = tl.where(key < best, at, best_at)
            best = tl.minimum(key, best)
    if slots.score is not None:
        victim = tl.max(tl.where(best == tl.min(best, 0), best_at, -1), 0)
        following = tl.where(slot + 1 == tl.load(rule + 1), tl.load(rule + 3), slot + 1)
        following = tl.where(step >= tl.load(rule + 7), victim, following)
        tl.debug_barrier()  # nobody has yet to read the free slot
        tl.store(slots.pos + base + slot, now.to(tl.int32))
        tl.store(slots.free_out + task, base + following)


@triton.jit
def _probabilities(logits, extent, task, slots, sums, form: tl.constexpr):
    """(scan,) of the slots `at`: means over the query heads, 0 where not `seen`.

    Head by head, so that a program has the slots in its registers and not the heads' copies of them; what heads there
    are is known when this is compiled, and their loads do not wait for each other.
    """
    at, seen = slots
    top, total = sums
    heads = tl.arange(0, form.g)
    count: tl.constexpr = form.group
    p = tl.full((form.scan,), 0.0, tl.float32)
    for head in tl.static_range(count):
        peak, norm = tl.sum(tl.where(heads == head, top, 0.0), 0), tl.sum(tl.where(heads == head, total, 0.0), 0)
        of = logits + (task.to(tl.int64) * form.group + head) * extent.width + at
        p += tl.exp2(tl.load(of, mask=seen, other=float("-inf")) - peak) / norm
    return p / form.group


@triton.jit
def _rank(score, pos, rule, now, extent):
    """Score and position as one int64: the lowest goes first, of equal scores the highest position."""
    bits = score.to(tl.int32, bitcast=True)
    leaving = now + 1 - extent.window
    bits = tl.where((pos == leaving) & (leaving >= tl.load(rule + 4)), -1, bits)
    bits = tl.where(pos > now - tl.load(rule + 6), bits | _BEST, bits)
    return (bits.to(tl.int64) << 32) - pos
