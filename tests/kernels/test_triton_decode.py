"""The Triton decode step against the slow kernel and the record of slots in torch, and against the eviction oracles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (before Triton is imported)

from h2o_flexgen.kernels import triton_decode
from h2o_flexgen.kernels.triton_decode import SCAN, TritonAttend, candidates
from h2o_flexgen.kernels.types import Logits
from h2o_flexgen.quant import Quantised, dequantise, quantise
from tests.cache.harness import budget_of, compare, make_stream
from tests.kernels.triton_pair import CLOSE, Pair, Row, copies, holds, keeps
from tests.oracles import attention as reference
from tests.policy_matrix import POLICIES, PolicyRow
from tests.seeds import moved, torch_generator

pytestmark = pytest.mark.turns


@pytest.mark.parametrize(
    ("group", "splits"), [(1, 3), (2, 1), (3, 3), (4, 1), (5, 3), (6, 1), (7, 3), (8, 1), (16, 1), (16, 3)]
)
def test_every_group_size(group: int, splits: int) -> None:
    pair = Pair([(40, keeps(33, 10))], group=group, splits=splits)
    for _ in range(2):
        pair.step()
    pair.check_contents()


@pytest.mark.parametrize("slots", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("splits", [1, None])
def test_odd_numbers_of_slots(slots: int, splits: int | None) -> None:
    recent = slots // 3
    pair = Pair([(slots + 5, keeps(slots, recent))], kv_heads=1, group=2, splits=splits)
    for _ in range(2):
        pair.step()
    pair.check_contents()


@pytest.mark.parametrize(("dim", "group"), [(6, 1), (12, 2), (16, 1), (80, 2), (128, 1), (256, 2)])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_every_dimension_and_dtype(dim: int, group: int, dtype: torch.dtype) -> None:
    pair = Pair([(20, keeps(17, 5)), (4, keeps(17, 5))], kv_heads=1, group=group, dim=dim, dtype=dtype)
    pair.step()
    pair.check_contents()


@pytest.mark.parametrize(("group", "splits"), [(1, 2), (4, 1)])
@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_soft_caps(soft_cap: float, group: int, splits: int) -> None:
    pair = Pair([(40, keeps(33, 10)), (9, holds(13))], group=group, splits=splits, soft_cap=soft_cap)
    for _ in range(2):
        pair.step()
    pair.check_contents()


@pytest.mark.parametrize("choice", range(3))
@pytest.mark.parametrize(("group", "splits"), [(1, 2), (4, 1)])
def test_every_candidate(choice: int, group: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each configuration that tuning chooses from, on rows that fill several of its tiles, and part of one."""
    config = candidates(128, torch.float32)[choice]
    monkeypatch.setattr(triton_decode, "candidates", lambda *_: [config])
    rows = [(100, keeps(90, 30)), (9, keeps(90, 30))]
    pair = Pair(rows, kv_heads=1, group=group, dim=128, splits=splits)
    for _ in range(2):
        pair.step()
    pair.check_contents()


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("splits", [1, 3])
def test_more_slots_than_are_scored_at_a_time(group: int, splits: int) -> None:
    slots = 2 * SCAN + 70
    pair = Pair(
        [(slots + 5, keeps(slots, slots // 3)), (30, keeps(slots, 700))], kv_heads=1, group=group, splits=splits
    )
    for _ in range(2):
        pair.step()
    pair.check_contents()


RAGGED: list[Row] = [
    (30, keeps(20, 6)),
    (3, keeps(12, 4, sinks=4)),
    (11, keeps(12, 12)),
    (9, holds(13)),
    (40, keeps(40, 0, sinks=3)),
    (1, keeps(70, 30)),
]


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("group", [1, 3])
def test_rows_of_their_own(splits: int, group: int) -> None:
    """Prompts, budgets and counts differ; rows begin to evict at different steps; one runs past its end."""
    pair = Pair(RAGGED, kv_heads=1, group=group, splits=splits, counts=group == 3)
    for _ in range(6):
        pair.step()
    pair.check_contents()


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 3])
def test_a_window_and_sinks_that_leave_it(splits: int) -> None:
    rows = [(30, keeps(20, 6, sinks=5)), (18, keeps(12, 4, sinks=2)), (24, keeps(19, 9)), (3, keeps(20, 6, sinks=1))]
    pair = Pair(rows, kv_heads=1, window=24, splits=splits, counts=True)
    for _ in range(8):
        pair.step()
    pair.check_contents()


@pytest.mark.parametrize("seed", range(2))
def test_ties_go_by_position(seed: int) -> None:
    """Equal keys at a zero query: every probability is the same, and scores of a few values, so that ties abound."""
    pair = Pair([(50, keeps(40, 7)), (45, keeps(30, 0))], splits=1 + seed % 2)
    pair.random.manual_seed(moved(seed))
    few = torch.randint(0, 3, pair.slots.score.shape, generator=pair.random).float()
    occupied = pair.slots.score.isfinite()
    pair.slots.score[occupied] = few[occupied]
    shuffled = torch.rand(*pair.size[:2], 30, generator=pair.random).argsort(-1)
    pos = pair.slots._pos[..., :30]
    pos.copy_(pos.gather(-1, shuffled))
    for ours, theirs in zip(pair.state, pair.slots.ranking, strict=True):
        ours.copy_(theirs)
    pair.new = lambda: tuple(torch.zeros_like(x) for x in Pair.new(pair))  # type: ignore[method-assign]
    for _ in range(4):
        pair.step()
    assert len(pair.state[0][0, 0].unique()) < 20, "there were no ties"


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_equal_keys_get_equal_probabilities_wherever_they_lie(group: int, dtype: torch.dtype) -> None:
    kernel = TritonAttend([(0, 200, 199, 199, 0, 0, 0, 1 << 62)], (1, 1, 200, 64), DEVICE, splits=3)
    k, v = torch.randn(64).to(dtype).expand(1, 1, 200, 64), torch.randn(1, 1, 200, 64).to(dtype)
    held = [x.contiguous() for x in copies(k, v)]
    kernel.attach(*held)
    (row,) = copies(torch.empty(1, 1, 200))
    kernel.step(199, copies(torch.randn(1, group, 64).to(dtype), k[:, :, 0], v[:, :, 0]), Logits(0.3), probs=row)
    assert len(row.unique()) == 1


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("group", "width"), [(1, 37), (4, 37), (4, 50)])
def test_the_row_for_policies_that_want_it(group: int, width: int, splits: int) -> None:
    """Slots of the caller's choice, no ranking; what is not occupied has probability 0 and is never read."""
    random = torch_generator(group)
    size, counts = (2, 2, 50, 32), (37, 20)
    k, v = (torch.full(size, torch.nan) for _ in "kv")
    for row, count in enumerate(counts):
        for held in (k, v):
            held[row, :, :count] = torch.randn(2, count, 32, generator=random)
    rules = [(count - 1, count, 60, count - 1, 0, 0, 5, 1 << 62) for count in counts]
    kernel = TritonAttend(rules, size, DEVICE, splits=splits)
    held_k, held_v = copies(k, v)
    kernel.attach(held_k, held_v)
    q, new_k, new_v = (torch.randn(2, n, 32, generator=random) for n in (2 * group, 2, 2))
    slots = torch.tensor([5, 50 + 7, 100 + 19, 150])
    given, probs = copies(slots, torch.full((2, 2, width), torch.nan))
    out = kernel.step(0, copies(q, new_k, new_v), Logits(0.3), slots=given, probs=probs).cpu()
    for held, written, new in ((k, held_k, new_k), (v, held_v, new_v)):
        held.view(-1, 32)[slots] = new.view(-1, 32)
        torch.testing.assert_close(written.cpu(), held, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(kernel.used.cpu().view(-1), slots % 50)
    valid = (torch.arange(50) < torch.tensor(counts).view(2, 1, 1)).expand(2, 2, 50)
    exact = reference.decode_attention(q, k.nan_to_num(), v.nan_to_num(), Logits(0.3), valid, True)
    torch.testing.assert_close(out, exact.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(probs.cpu(), exact.row[..., :width], atol=1e-6, rtol=1e-5)
    assert not probs[1, :, 20:].any()


@pytest.mark.parametrize("dim", [16, 48, 64, 80, 128, 192])
@pytest.mark.parametrize(("group", "splits"), [(1, 2), (3, 1)])
def test_packed_keys_and_values(dim: int, group: int, splits: int) -> None:
    """What is attended to is what the reference unpacks, with the new token packed like the others."""
    random = torch_generator(dim)
    size = (2, 1, 40, dim)
    held = [quantise(torch.randn(size, generator=random)) for _ in "kv"]
    score, pos = torch.rand(2, 1, 40, generator=random), torch.arange(40, dtype=torch.int32).repeat(2, 1, 1)
    free = torch.tensor([33, 40 + 2])
    rules = [(39, 40, 60, 0, 0, 0, 3, 0)] * 2
    state = copies(score, pos, free)
    kernel = TritonAttend(rules, size, DEVICE, ranking=state, adds=True, splits=splits)
    packed = [Quantised(*copies(*one)) for one in held]
    kernel.attach_packed(*packed)
    q, *new = (torch.randn(2, n, dim, generator=random) for n in (group, 1, 1))
    out = kernel.step(0, copies(q, *new), Logits(0.3)).cpu()
    rows = []
    for one, fresh, after in zip(held, new, packed, strict=True):
        for part, small, written in zip(one, quantise(fresh), after, strict=True):
            part.view(80, -1)[[33, 42]] = small.view(2, -1)
            assert torch.equal(part, written.cpu())
        rows.append(dequantise(Quantised(*one), torch.float32))
    exact = reference.decode_attention(q, *rows, Logits(0.3), None, True)
    torch.testing.assert_close(out, exact.out, atol=1e-5, rtol=1e-5)
    score.view(-1)[[33, 42]] = 0
    torch.testing.assert_close(state[0].cpu(), score + exact.row, atol=1e-6, rtol=1e-5)


needs_host_memory = pytest.mark.skipif(DEVICE != "cpu", reason="the cache of this test lies in host memory")


@pytest.fixture
def in_the_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TritonAttend]]:
    """The kernels that caches made."""
    made: list[TritonAttend] = []

    class Noted(TritonAttend):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(triton_decode, "TritonAttend", Noted)
    monkeypatch.setenv("H2O_FLEXGEN_TRITON", "1")
    yield made
    assert made, "the caches did without the kernel"


@needs_host_memory
@pytest.mark.parametrize(
    ("policy", "window"),
    [(row, window) for row in POLICIES for window in ((None,) if row.name == "full" else (None, 9))],
    ids=lambda value: getattr(value, "name", value),
)
def test_streams_equal_the_oracles(policy: PolicyRow, window: int | None, in_the_cache: list[TritonAttend]) -> None:
    """A cache as the engine uses it, two rows of their own, every policy."""
    streams = [make_stream(prompt, 6, kv_heads=1, group=2, d=16, seed=prompt) for prompt in (12, 4)]
    budgets = [
        budget_of(policy, total, stream.prompt, 6, sinks=1).within(window)
        for stream, total in zip(streams, (7, 5), strict=True)
    ]
    compared = compare(policy, policy.eviction(), streams, budgets, 6, window=window)
    assert compared > 10


@needs_host_memory
def test_what_is_refused() -> None:
    rule = (0, 8, 4, 7, 0, 0, 0, 1 << 62)
    with pytest.raises(ValueError, match="at most 256"):
        TritonAttend([rule], (1, 1, 8, 257), "cpu")
    with pytest.raises(ValueError, match="no ranking"):
        TritonAttend([rule], (1, 1, 8, 16), "cpu", adds=True)
    kernel = TritonAttend([rule], (1, 1, 8, 16), "cpu")
    new = torch.randn(3, 1, 1, 16).unbind(0)
    with pytest.raises(RuntimeError, match="attached"):
        kernel.step(0, new, Logits(1.0))
    with pytest.raises(ValueError, match="needed contiguous"):
        kernel.attach(torch.zeros(1, 1, 8, 16), torch.zeros(1, 1, 9, 16))
    kernel.attach(torch.zeros(1, 1, 8, 16), torch.zeros(1, 1, 8, 16))
    with pytest.raises(ValueError, match="for a cache of"):
        kernel.step(0, (new[0], new[1].squeeze(1).unsqueeze(1).repeat(1, 2, 1), new[2]), Logits(1.0))
    with pytest.raises(ValueError, match="17 query heads"):
        kernel.step(0, (torch.zeros(1, 17, 16), new[1], new[2]), Logits(1.0))
    with pytest.raises(ValueError, match="3 are occupied"):
        kernel.step(2, new, Logits(1.0), probs=torch.zeros(1, 1, 2))
