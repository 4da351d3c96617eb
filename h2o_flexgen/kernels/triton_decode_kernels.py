"""A decode step on a GPU: the device code of `triton_decode`.

A task is one row and KV head. Everything that is read of its K and V is occupied and seen; tiles are slots by
dimensions, so that a warp reads whole vectors. All slots of a task go through the same operations, wherever they lie:
equal keys get equal probabilities, so that ties stay ties. Sums, logits and scores are float32; logits are in base 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from h2o_flexgen.kernels.triton_slots import finish, locate, number_of, settle
from h2o_flexgen.kernels.triton_tiles import put, tile, wide_product


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


@triton.jit(do_not_specialize=["step"])
def step_kernel(new, held, slots, results, extent, step, scale, form: tl.constexpr):
    """A whole step of one task by one program."""
    task = tl.program_id(0)
    step = number_of(slots, task, step)
    where = locate(slots, extent, task, step)
    begin = where[1] // form.block * form.block
    top, total, mixed = _attend(new, held, results, extent, (task, begin, where[2]), where, scale, form)
    _write_out(results.out, task, mixed / total[:, None], form)
    if results.logits is not None:
        tl.debug_barrier()  # what one thread wrote of the logits, others read
    if (results.logits is not None) or (slots.score is not None):
        settle(slots, results, extent, task, where, (top, total), step, form)
    finish(slots, task, where[0], step)


@triton.jit(do_not_specialize=["step"])
def split_kernel(new, held, slots, results, extent, step, scale, form: tl.constexpr):
    """The attention of one task to `extent.chunk` of its slots."""
    task, split = tl.program_id(0), tl.program_id(1)
    step = number_of(slots, task, step)
    where = locate(slots, extent, task, step)
    begin = tl.maximum(split * extent.chunk, where[1] // form.block * form.block)
    end = tl.minimum(split * extent.chunk + extent.chunk, where[2])
    if begin < end:
        top, total, mixed = _attend(new, held, results, extent, (task, begin, end), where, scale, form)
        heads, dims = tl.arange(0, form.g), tl.arange(0, form.d)
        at = (split * tl.num_programs(0) + task) * form.group + heads
        tl.store(results.top + at, top, mask=heads < form.group)
        tl.store(results.total + at, total, mask=heads < form.group)
        inside = (heads < form.group)[:, None] & (dims < form.dim)[None, :]
        tl.store(results.mixed + at.to(tl.int64)[:, None] * form.dim + dims[None, :], mixed, mask=inside)


@triton.jit(do_not_specialize=["step"])
def join_kernel(slots, results, extent, step, form: tl.constexpr):
    """Makes one of the splits of one task, and does what is left of the step."""
    task = tl.program_id(0)
    step = number_of(slots, task, step)
    where = locate(slots, extent, task, step)
    heads, dims = tl.arange(0, form.g), tl.arange(0, form.d)
    inside = (heads < form.group)[:, None] & (dims < form.dim)[None, :]
    top = tl.full((form.g,), float("-inf"), tl.float32)
    total = tl.full((form.g,), 0.0, tl.float32)
    mixed = tl.full((form.g, form.d), 0.0, tl.float32)
    for split in range(where[1] // extent.chunk, (where[2] + extent.chunk - 1) // extent.chunk):
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
        settle(slots, results, extent, task, where, (top, total), step, form)
    finish(slots, task, where[0], step)


@triton.jit
def _attend(new, held, results, extent, part, where, scale, form: tl.constexpr):
    """Attention of a task to slots from `begin`, a multiple of the block, to `end`: top and total (g,), mixed (g, d).

    Writes the new token into its slot, if that is one of them, and logits where they are asked for.
    """
    task, begin, end = part
    slot, first, _ = where
    row, head = (task // extent.kv_heads).to(tl.int64), task % extent.kv_heads
    base = task.to(tl.int64) * extent.capacity
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
        x = tl.where(seen[None, :], _logits(q, k, form) * scale, float("-inf"))
        if results.logits is not None:
            to = results.logits + (task.to(tl.int64) * form.group + heads[:, None]) * extent.width + at[None, :]
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
    elif form.wide:
        x = wide_product(q, tl.trans(k))
    else:
        x = tl.dot(q, tl.trans(k), input_precision="tf32x3")
    return x


@triton.jit
def _mix(p, v, form: tl.constexpr):
    """p (g, block) times v (block, d): (g, d) float32; p in the dtype of v, unless g is 1."""
    if form.g == 1:
        x = tl.sum(tl.trans(p) * v.to(tl.float32), 0)[None, :]
    elif form.wide:
        x = wide_product(p.to(v.dtype), v)
    else:
        x = tl.dot(p.to(v.dtype), v, input_precision="tf32x3")
    return x


@triton.jit
def _write_out(out, task, mixed, form: tl.constexpr):
    """The queries' answers (g, d) in the dtype of `out` (rows, heads, dim)."""
    heads, dims = tl.arange(0, form.g), tl.arange(0, form.d)
    to = out + (task.to(tl.int64) * form.group + heads[:, None]) * form.dim + dims[None, :]
    tl.store(to, mixed.to(out.dtype.element_ty), mask=(heads < form.group)[:, None] & (dims < form.dim)[None, :])
