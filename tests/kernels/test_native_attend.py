"""The decode step in C against the slow kernel and a plain ranking."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from h2o_flexgen.cache.eviction import keydiff, roco
from h2o_flexgen.cache.eviction.base import AttendedStep
from h2o_flexgen.cache.eviction.inertiakv import InertiaPolicy
from h2o_flexgen.cache.eviction.scissorhands import ScissorhandsPolicy
from h2o_flexgen.config.model.packing import CachePacking
from h2o_flexgen.kernels.decode import NativeAttend, available
from h2o_flexgen.kernels.pieces import expand, pack
from h2o_flexgen.kernels.types import Logits, RankedBy, Ranking, RankRule, RoundingErrors, SlotRule
from tests.cache.conftest import needs_native
from tests.oracles import attention as reference
from tests.pairs import pairs
from tests.seeds import torch_generator

CPU = torch.device("cpu")
NEVER = 1 << 62

pytestmark = needs_native


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def in_order(count: int) -> SlotRule:
    """A row whose newest token takes the last of `count` slots."""
    return SlotRule(
        held=count - 1, limit=count, prompt=count - 1, ring=count - 1, sinks=0, hides=0, recent=0, evicts=NEVER
    )


def step_of(
    counts: list[int],
    kv_heads: int,
    group: int,
    d: int,
    dtype: torch.dtype,
    seed: int = 0,
    soft_cap: float | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """One step of the kernel over rows with `counts` slots, and of the reference: output, probabilities, K, V each.

    What no row occupies is NaN. The new token's vectors are views with strides.
    """
    generator = torch_generator(seed)
    rows, capacity = len(counts), max(counts) + 2
    k, v = torch.randn(2, rows, kv_heads, capacity, d, generator=generator).to(dtype)
    new = torch.randn(rows, (group + 2) * kv_heads, d, generator=generator).to(dtype)
    q, new_k, new_v = new.split([group * kv_heads, kv_heads, kv_heads], dim=1)
    valid = torch.arange(capacity) < torch.tensor(counts).view(-1, 1, 1)
    for buffer in (k, v):
        buffer.masked_fill_(~valid.unsqueeze(-1), float("nan"))
    kernel = NativeAttend([in_order(count) for count in counts], (rows, kv_heads, capacity, d))
    kernel.attach(k, v)
    probs = torch.full((rows, kv_heads, capacity), 7.0)
    out = kernel.step(0, (q, new_k, new_v), Logits(0.3, soft_cap), probs=probs)
    expected_k, expected_v = k.clone(), v.clone()
    for row, count in enumerate(counts):
        assert kernel.used[row].tolist() == [count - 1] * kv_heads
        expected_k[row, :, count - 1], expected_v[row, :, count - 1] = new_k[row], new_v[row]
        expected_k[row, :, count:], expected_v[row, :, count:] = 0, 0
    slow = reference.decode_attention(
        q, expected_k, expected_v, Logits(0.3, soft_cap), valid.expand(-1, kv_heads, -1), True
    )
    assert slow.row is not None
    return [out, probs, k.nan_to_num(0), v.nan_to_num(0)], [slow.out, slow.row, expected_k, expected_v]


def check(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 4e-3, "rtol": 1e-2}
    torch.testing.assert_close(found[0], expected[0], **close)
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-4)
    assert torch.equal(found[1] == 0, expected[1] == 0), "nothing where no token is"
    assert torch.equal(found[2], expected[2]), "K: the new token, nothing else"
    assert torch.equal(found[3], expected[3]), "V"


each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.mark.parametrize(
    ("slots", "d", "dtype", "threads"),
    pairs([1, 15, 16, 17, 63, 64, 65, 1000], [16, 64, 80, 128], [torch.float32, torch.bfloat16], [1, 2]),
    indirect=["threads"],
    ids=str,
)
def test_a_step_equals_the_reference(dtype: torch.dtype, d: int, slots: int, threads: int) -> None:
    for group in (1, 2, 3, 8):
        check(*step_of([slots] * 2, 2, group, d, dtype, seed=group), dtype)


@each_dtype
@pytest.mark.parametrize("d", [1, 2, 7, 17, 31, 33, 100, 144, 192, 255, 256, 257, 512, 576, 640])
def test_any_size_of_head(dtype: torch.dtype, d: int) -> None:
    for group in (1, 5):
        check(*step_of([37, 16], 3, group, d, dtype), dtype)


@each_dtype
@pytest.mark.parametrize("soft_cap", [0.05, 1.0, 3.0, 50.0])
def test_soft_caps(dtype: torch.dtype, soft_cap: float) -> None:
    for d, group in ((64, 1), (33, 3), (256, 2)):
        found, expected = step_of([100, 17, 1], 2, group, d, dtype, soft_cap=soft_cap)
        check(found, expected, dtype)
        plain, _ = step_of([100, 17, 1], 2, group, d, dtype)
        assert soft_cap > 10 or not torch.allclose(plain[1], found[1], rtol=1e-2)


@each_dtype
@pytest.mark.parametrize("group", [1, 4, 5, 6, 7, 8, 71])
def test_rows_read_what_they_occupy_and_no_more(dtype: torch.dtype, group: int, threads: int) -> None:
    counts = [1, 40, 16, 500, 33, 2, 17]
    found, expected = step_of(counts, 3, group, 64, dtype)
    check(found, expected, dtype)
    for row, count in enumerate(counts):
        alone, _ = step_of([count], 3, group, 64, dtype)
        assert alone[0].isfinite().all(), f"row {row}"


@each_dtype
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    before, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(step_of([100, 700, 30, 1], 4, 2, 64, dtype)[0] + step_of([6000, 2049, 9], 1, 3, 64, dtype)[0])
    torch.set_num_threads(before)
    assert all(torch.equal(x, y) for other in results[1:] for x, y in zip(results[0], other, strict=True))


@each_dtype
@pytest.mark.parametrize(("slots", "d"), pairs([2047, 2048, 2049, 4097, 7000], [64, 128, 100]))
def test_long_rows_are_shared_out_in_parts(dtype: torch.dtype, slots: int, d: int, threads: int) -> None:
    check(*step_of([slots, 20], 1, 2, d, dtype), dtype)


@each_dtype
@pytest.mark.parametrize("bits", [(8, 8), (4, 3), (4, 4)])
def test_long_packed_rows_are_those_of_their_numbers(dtype: torch.dtype, bits: tuple[int, int]) -> None:
    """Parts have units of their own for weights of values; whoever computes them, bits are the same."""
    generator, heads, slots, d = torch_generator(3), 2, 5000, 64
    packings = tuple(CachePacking(each, d) for each in bits)
    held = [torch.randn(1, heads, slots, d, generator=generator).to(dtype) for _ in "kv"]
    new = [torch.randn(1, n, d, generator=generator).to(dtype) for n in (3 * heads, heads, heads)]
    before, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        errors = RoundingErrors(2, 1, 1, heads, [each.nbytes for each in packings], CPU)
        errors.at = 0
        kernel = NativeAttend([in_order(slots)], (1, heads, slots, d), packings=packings, errors=errors)
        buffers = [pack(x, packing) for x, packing in zip(held, packings, strict=True)]
        kernel.attach(*buffers)
        probs = torch.empty(1, heads, slots)
        results.append((kernel.step(0, tuple(new), Logits(0.3), probs=probs), probs))
    torch.set_num_threads(before)
    k, v = (expand(x, packing, torch.float32) for x, packing in zip(buffers, packings, strict=True))
    for x, lost, packing in zip((k, v), errors.lost, packings, strict=True):
        x[:, :, -1] += expand(lost[:, :, 0], packing, torch.float32)
    wanted = reference.decode_attention(
        new[0].float(), k, v, Logits(0.3), torch.ones(1, heads, slots, dtype=torch.bool), True
    )
    for out, row in results:
        assert torch.equal(out, results[0][0])
        assert torch.equal(row, results[0][1])
    torch.testing.assert_close(results[0][1], wanted.row, atol=1e-5, rtol=2e-2)
    torch.testing.assert_close(
        results[0][0].float(), wanted.out, atol=1e-4 if dtype == torch.float32 else 4e-3, rtol=1e-2
    )


@each_dtype
@pytest.mark.parametrize(
    ("kept", "bits", "group", "soft_cap"),
    pairs([1, 9, 16, 17, 40], [(8, 8), (4, 3), (4, 4), (8, 4)], [1, 3], [None, 2.0]),
    ids=str,
)
def test_rounding_errors_count_for_tokens_that_have_them(
    dtype: torch.dtype, kept: int, bits: tuple[int, int], group: int, soft_cap: float | None, threads: int
) -> None:
    """More than are taken at a time, some of them nowhere any more, of rows that differ in length."""
    generator, counts, heads, d = torch_generator(kept), [50, 2100], 2, 80
    packings = tuple(CachePacking(each, d) for each in bits)
    size = len(counts), heads, max(counts), d
    held = [torch.randn(size, generator=generator) for _ in "kv"]
    new = [torch.randn(2, n, d, generator=generator).to(dtype) for n in (group * heads, heads, heads)]
    errors = RoundingErrors(kept, 0, 2, heads, [each.nbytes for each in packings], CPU)
    for lost, packing in zip(errors.lost, packings, strict=True):
        lost.copy_(pack(0.3 * torch.randn(2, heads, kept, d, generator=generator), packing))
    for row, head in product(range(2), range(heads)):
        places = torch.randperm(counts[row], generator=generator)[:kept]
        errors.slots[row, head] = places.masked_fill(torch.rand(kept, generator=generator) < 0.2, -1)
    errors.at = kept // 2
    kernel = NativeAttend([in_order(n) for n in counts], size, packings=packings, errors=errors)
    buffers = [pack(x, packing) for x, packing in zip(held, packings, strict=True)]
    kernel.attach(*buffers)
    out = kernel.step(0, tuple(new), Logits(0.3, soft_cap))
    assert errors.slots[:, :, errors.at].tolist() == [[n - 1] * heads for n in counts]
    for row, count in enumerate(counts):
        k, v = (expand(x[row, :, :count], packing, torch.float32) for x, packing in zip(buffers, packings, strict=True))
        for head, j in product(range(heads), range(kept)):
            if (slot := int(errors.slots[row, head, j])) >= 0:
                k[head, slot] += expand(errors.lost.k[row, head, j], packings[0], torch.float32)
                v[head, slot] += expand(errors.lost.v[row, head, j], packings[1], torch.float32)
        torch.testing.assert_close(k[:, -1], new[1][row].float(), atol=1e-3 if bits[0] == 8 else 4e-2, rtol=0)
        seen = torch.ones(1, heads, count, dtype=torch.bool)
        wanted = reference.decode_attention(
            new[0][row : row + 1].float(), k[None], v[None], Logits(0.3, soft_cap), seen, True
        )
        close = {"atol": 1e-4, "rtol": 1e-3} if dtype == torch.float32 else {"atol": 4e-3, "rtol": 1e-2}
        torch.testing.assert_close(out[row : row + 1].float(), wanted.out, **close)


@pytest.mark.parametrize("bits", [(8, 8), (4, 3), (4, 4)])
@pytest.mark.parametrize("slots", [300, 2000, 5000])
def test_what_little_a_token_leaves_to_many_others_is_not_lost(slots: int, bits: tuple[int, int]) -> None:
    """A sink takes nearly all attention, and each of the others less than a unit of its whole-numbered weight."""
    generator, d = torch_generator(1), 64
    q, k, v = (torch.randn(1, 1, n, d, generator=generator) for n in (1, slots, slots))
    k *= 0.05
    k[0, 0, 0] = q[0, 0, 0] * 12 / q.square().sum()
    packings = tuple(CachePacking(each, d) for each in bits)
    kernel = NativeAttend([in_order(slots)], (1, 1, slots, d), packings=packings)
    buffers = [pack(x.bfloat16(), packing) for x, packing in zip((k, v), packings, strict=True)]
    kernel.attach(*buffers)
    probs, new = torch.empty(1, 1, slots), tuple(x[:, :, -1].bfloat16() for x in (q, k, v))
    out = kernel.step(0, new, Logits(1.0), probs=probs)[0, 0].float()
    wanted = probs[0, 0] @ expand(buffers[1], packings[1], torch.float32)[0, 0]
    assert probs.max() > 0.9
    torch.testing.assert_close(out, wanted, atol=0.02, rtol=0)


def rows_of_logits(logits: Tensor) -> Tensor:
    """Probabilities of float32 logits (n,), by a head of one dimension whose keys they are."""
    n = len(logits)
    k = torch.zeros(1, 1, n, 1)
    k[0, 0, :, 0] = logits
    kernel = NativeAttend([in_order(n)], (1, 1, n, 1))
    kernel.attach(k, torch.zeros_like(k))
    probs, one = torch.empty(1, 1, n), torch.ones(1, 1, 1)
    kernel.step(0, (one, k[:, :, -1].clone(), one), Logits(1.0), probs=probs)
    return probs[0, 0]


def test_exponentials_are_exact_to_a_millionth() -> None:
    logits = torch.cat([torch.linspace(-75, 0, 5000), -torch.logspace(-8, 1.87, 999), torch.zeros(1)])
    exact = logits.double().softmax(0)
    assert ((rows_of_logits(logits).double() - exact).abs() / exact).max() < 1e-6
    far = rows_of_logits(torch.tensor([-1e4, -200.0, -105.0, -88.0, -86.5, 0.0]))
    assert far.tolist()[:4] == [0, 0, 0, 0], "in place of denormal numbers"
    assert 0 < far[4] < 1e-37
    assert far[5] == 1
    assert rows_of_logits(torch.tensor([3e38, -3e38])).tolist() == [1, 0]
    assert rows_of_logits(torch.tensor([float("-inf"), 5.0])).tolist() == [0, 1]


@each_dtype
@pytest.mark.parametrize("d", [4, 16, 80, 128])
@pytest.mark.parametrize("slots", [5, 16, 31, 100])
def test_equal_keys_get_equal_probabilities_wherever_they_lie(dtype: torch.dtype, d: int, slots: int) -> None:
    one, new = torch.randn(1, 2, 1, d).to(dtype), torch.randn(1, 4, d).to(dtype)
    kernel = NativeAttend([in_order(slots)], (1, 2, slots, d))
    kernel.attach(one.repeat(1, 1, slots, 1), one.repeat(1, 1, slots, 1))
    k = one.repeat(1, 1, slots, 1)
    kernel.attach(k, k)
    probs = torch.empty(1, 2, slots)
    kernel.step(0, (new, one[:, :, 0], one[:, :, 0]), Logits(0.5), probs=probs)
    assert (probs == probs[..., :1]).all()


def victims_by_hand(score: Tensor, pos: Tensor, counts: list[int], recent: int, now: int, left: range) -> list[int]:
    """Slot by (row, head): of positions that have `left` the window the last, else the lowest unprotected score, the
    newest of equals."""
    chosen = []
    for row, count in enumerate(counts):
        for scores, positions in zip(score[row].tolist(), pos[row].tolist(), strict=True):
            if gone := [position for position in positions[:count] if position in left]:
                chosen.append(positions.index(max(gone)))
                continue
            allowed = [slot for slot in range(count) if positions[slot] <= now - recent]
            chosen.append(min(allowed, key=lambda slot: (scores[slot], -positions[slot])))
    return chosen


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    counts=st.lists(st.integers(2, 70), min_size=1, max_size=4),
    levels=st.integers(1, 4),
    recent=st.integers(0, 1),
    window=st.none() | st.integers(30, 120),
    sinks=st.integers(0, 1),
    adds=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_ties_and_windows_choose_as_by_hand(
    counts: list[int], levels: int, recent: int, window: int | None, sinks: int, adds: bool, seed: int
) -> None:
    """Few different scores; all keys are equal, so that what is added is the same for all slots of a head."""
    generator = torch_generator(seed)
    rows, heads, capacity, now = len(counts), 2, max(counts) + 1, 99
    score = torch.full((rows, heads, capacity), torch.inf)
    pos = torch.full((rows, heads, capacity), -1, dtype=torch.int32)
    for row, count in enumerate(counts):
        for head in range(heads):
            score[row, head, :count] = torch.randint(levels, (count,), generator=generator).float()
            pos[row, head, :count] = torch.randperm(now, generator=generator)[:count].to(torch.int32)
    score[pos < sinks] = torch.inf
    free = torch.arange(rows * heads) * capacity + torch.tensor(counts).repeat_interleave(heads) - 1
    rules = [SlotRule(n - 1, n, now, sinks, sinks, 0, recent, 0) for n in counts]
    before = score.clone()
    kernel = NativeAttend(
        rules, (rows, heads, capacity, 4), window=window, ranking=Ranking(score, pos, free), adds=adds
    )
    zeros, new = torch.zeros(rows, heads, capacity, 4), torch.zeros(rows, heads, 4)
    kernel.attach(zeros, zeros.clone())
    kernel.step(0, (new, new, new), Logits(1.0))
    for row, count in enumerate(counts):
        before[row, :, count - 1] = 0
        before[row, :, :count] += 1 / count if adds else 0
        assert (pos[row, :, count - 1] == now).all()
    torch.testing.assert_close(score, before, atol=1e-6, rtol=1e-6)
    left = range(sinks, 0 if window is None else now + 2 - window)
    base = torch.arange(rows * heads) * capacity
    assert (free - base).tolist() == victims_by_hand(score, pos, counts, recent, now, left)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("by", ["difference", "steady", "mean", "fading", "rare"])
@each_dtype
def test_rules_of_its_own_choose_as_torch_does(dtype: torch.dtype, by: RankedBy, seed: int) -> None:
    """Rows that differ in how much they hold and protect; some keys are equal, and so are some deviations."""
    generator, counts, heads, d, now = torch_generator(seed), [3, 16, 37, 70], 2, (64, 24)[seed % 2], 99
    rows, capacity, sinks, recent = len(counts), 72, seed % 3, (0, 5)[seed % 2]
    pos = torch.full((rows, heads, capacity), -1, dtype=torch.int32)
    for row, head in product(range(rows), range(heads)):
        pos[row, head, : counts[row]] = torch.randperm(now, generator=generator)[: counts[row]].to(torch.int32)
    score, squares = torch.rand(2, rows, heads, capacity, generator=generator)
    squares[:, :, ::2] = 0  # deviations of 0
    score[pos < sinks] = torch.inf
    scopes = torch.tensor([1, 5, 30, 90])
    free = torch.arange(rows * heads) * capacity + torch.tensor(counts).repeat_interleave(heads) - 1
    k = torch.randn(rows, heads, capacity, d, generator=generator).to(dtype)
    k[:, :, 1] = k[:, :, 0]
    rules = [SlotRule(n - 1, n, now, sinks, sinks, 0, min(recent, n - 1), 0) for n in counts]
    how: dict[str, Any] = {"ranking": Ranking(score, pos, free), "rule": RankRule(by, squares, scopes)}
    kernel = NativeAttend(rules, (rows, heads, capacity, d), adds=by != "difference", **how)
    kernel.attach(k, torch.randn(k.shape, generator=generator).to(dtype))
    before, old = squares.clone(), score.clone()
    probs, new = torch.empty(rows, heads, max(counts)), torch.randn(3, rows, heads, d, generator=generator).to(dtype)
    kernel.step(0, tuple(new), Logits(0.3), probs=probs)
    at = torch.tensor(now).view(1, 1, 1)
    for row, count in enumerate(counts):
        before[row, :, count - 1] = 0
        some, held = slice(row, row + 1), pos[row : row + 1, :, :count]
        fixed = (held < sinks) | (held > now - rules[row].recent)
        if by == "difference":
            ranks = keydiff._difference(k[some, :, :count], None)
        elif by == "mean":
            ranks = score[some, :, :count] / (at + 1 - held)
        elif by in ("fading", "rare"):
            old[row, :, count - 1] = 0
            step = SimpleNamespace(score=old[some, :, :count], received=probs[some, :, :count], now=at)
            (InertiaPolicy if by == "fading" else ScissorhandsPolicy)().update(cast(AttendedStep, step))
            ranks = score[some, :, :count]
            torch.testing.assert_close(ranks, step.score)
        else:
            expected = before[some, :, :count] + probs[some, :, :count].square()
            torch.testing.assert_close(squares[some, :, :count], expected)
            sums = score[some, :, :count]
            ranks = roco._ranks(sums, squares[some, :, :count], held, at, int(scopes[row]), fixed)
        ranks = ranks.masked_fill(fixed, torch.inf)[0]
        for head in range(heads):
            slot = int(free[row * heads + head]) - (row * heads + head) * capacity
            assert slot < count
            assert not fixed[0, head, slot]
            lowest = ranks[head].min()
            assert ranks[head, slot] <= lowest + (2e-6 if by == "difference" else 0)
            if by != "difference":
                assert held[0, head, slot] == held[0, head][ranks[head] == lowest].max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("centred", [False, True])
def test_packed_keys_are_centred_and_scaled_as_a_caller_would(dtype: torch.dtype, centred: bool) -> None:
    generator, rows, heads, group, d = torch_generator(5), 2, 3, 2, 48
    of = torch.randint(-8, 9, (rows, heads, d), generator=generator).float().exp2().to(dtype)
    mean = torch.randn(rows, heads, d, generator=generator).to(dtype) if centred else None
    q, k, v = (torch.randn(rows, n, d, generator=generator).to(dtype) for n in (heads * group, heads, heads))
    asked = (q.unflatten(1, (heads, group)) / of.unsqueeze(2)).flatten(1, 2)
    kept = (k if mean is None else k - mean) * of
    packings, found = (CachePacking(4, d), CachePacking(3, d)), []
    for new in ((q, k, v), (asked, kept, v)):
        errors = RoundingErrors(1, 0, rows, heads, [each.nbytes for each in packings], CPU)
        errors.at = 0
        kernel = NativeAttend([in_order(21)] * rows, (rows, heads, 21, d), packings=packings, errors=errors)
        held = [torch.randn(rows, heads, 21, d, generator=torch_generator(6)).to(dtype) for _ in "kv"]
        buffers = [pack(x, packing) for x, packing in zip(held, packings, strict=True)]
        kernel.attach(*buffers)
        if new[0] is q:
            kernel.scale_keys(of, mean)
        found.append([kernel.step(0, new, Logits(0.3)), *buffers, *errors.lost])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    kernel.scale_keys(of.double(), None)
    with pytest.raises(ValueError, match="scaled in another dtype"):
        kernel.step(0, (q, k, v), Logits(0.3))
    with pytest.raises(ValueError, match=r"needed .2, 3, 48., contiguous"):
        kernel.scale_keys(of[:1], mean)


def test_what_does_not_fit_is_refused() -> None:
    kernel = NativeAttend([in_order(3)], (1, 2, 3, 4))
    with pytest.raises(ValueError, match="needed one of"):
        kernel.attach(*torch.zeros(2, 1, 2, 3, 4, dtype=torch.float16))
    for size in ((2, 1, 2, 2, 4), (2, 2, 2, 3, 4)):
        with pytest.raises(ValueError, match=r"needed .1, 2, 3, 4., contiguous"):
            kernel.attach(*torch.zeros(*size))
    with pytest.raises(ValueError, match="contiguous"):
        kernel.attach(*torch.zeros(2, 1, 3, 2, 4).transpose(2, 3))
    kernel.attach(*torch.zeros(2, 1, 2, 3, 4))
    new = (torch.zeros(1, 2, 4),) * 3
    occupied = in_order(3).held + 1
    with pytest.raises(ValueError, match=f"{occupied} are occupied"):
        kernel.step(0, new, Logits(1.0), probs=torch.zeros(1, 2, occupied - 1))
    kernel.detach()
    with pytest.raises(RuntimeError, match="no K and V"):
        kernel.step(0, (torch.zeros(1, 2, 4),) * 3, Logits(1.0))
    kernel.attach(*torch.zeros(2, 1, 2, 3, 4))
    q, k = torch.zeros(1, 3, 4), torch.zeros(1, 2, 4)
    with pytest.raises(ValueError, match="for new tokens"):
        kernel.step(0, (q, k, k), Logits(1.0))
    with pytest.raises(ValueError, match="for new tokens"):
        kernel.step(0, (k, k[:, :1], k), Logits(1.0))
    with pytest.raises(ValueError, match="no kernel for"):
        NativeAttend([in_order(3)], (1, 2, 3, 641))
    assert not available(torch.float16, 64, CPU)
    assert not available(torch.float32, 641, CPU)
    assert not available(torch.float32, 64, torch.device("meta"))
