"""The kernel in C for prompts against the slow, obvious one in float32, on the layouts in which the engine asks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.model.arch import ArchSpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.kernels import prompt, torch_attention
from h2o_flexgen.kernels.native import why_not
from h2o_flexgen.kernels.types import KeysValues, Logits, PrefillAttention
from h2o_flexgen.schedule import workspace
from h2o_flexgen.schedule.request import BlockShape, Caps, PlanRequest
from tests.oracles import attention as reference
from tests.schedule.test_workspace import Live
from tests.seeds import torch_generator

native = pytest.mark.skipif(why_not() is not None, reason=f"no native kernels: {why_not()}")
GROUPS = [(2, 2), (4, 2), (3, 1), (4, 1), (5, 1), (12, 2), (7, 1), (8, 1)]


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked must be computed in C."""

    def refuse(*_: object, **__: object) -> PrefillAttention:
        raise AssertionError("this went to torch")

    monkeypatch.setattr(torch_attention, "prefill_attention", refuse)


@pytest.fixture
def threads() -> Iterator[None]:
    """Tests that change the number of threads give it back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make(n: int, heads: int, kv_heads: int, length: int, d: int, seed: int = 0) -> list[Tensor]:
    """q, k, v as a fused projection leaves them: tokens first, then the heads of all three."""
    generator = torch_generator(seed)
    widths = [heads * d, kv_heads * d, kv_heads * d]
    fused = torch.randn(n * length, sum(widths), generator=generator).bfloat16()
    parts = (part.unflatten(-1, (-1, d)).unflatten(0, (n, length)) for part in fused.split(widths, dim=-1))
    return [part.transpose(1, 2) for part in parts]


def make_past(kv_heads: int, before: int, d: int) -> KeysValues | None:
    generator = torch_generator(before)
    return KeysValues(*torch.randn(2, kv_heads, before, d, generator=generator).bfloat16()) if before else None


def check(
    qkv: list[Tensor],
    scale: float,
    past: KeysValues | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """Output within the rounding of weights and output to bfloat16, column sums as exact as float32 has them."""
    exact_past = None if past is None else KeysValues(*(t.float() for t in past))
    logits = Logits(scale, soft_cap)
    slow = reference.prefill_attention(*(t.float() for t in qkv), logits, True, past=exact_past, window=window)
    fast = prompt.prefill_attention(*qkv, logits, True, past=past, window=window)
    assert fast.out.dtype == torch.bfloat16
    assert fast.column_sums is not None
    torch.testing.assert_close(fast.out.float(), slow.out, atol=0.01, rtol=0.01)
    torch.testing.assert_close(fast.column_sums, slow.column_sums, atol=2e-5, rtol=1e-5)
    silent = prompt.prefill_attention(*qkv, logits, False, past=past, window=window)
    assert silent.column_sums is None
    assert torch.equal(silent.out, fast.out)


@native
@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 300])
@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
def test_it_equals_the_reference(heads: int, kv_heads: int, length: int) -> None:
    for n in (1, 2, 3):
        check(make(n, heads, kv_heads, length, 64, seed=length + n), 0.125)


@native
@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("before", [0, 1, 16, 40])
@pytest.mark.parametrize("window", [None, 1, 5, 17, 40, 1000, 1 << 32, 3_000_000_000])
@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS[::3])
def test_after_a_past_and_within_a_window(heads: int, kv_heads: int, before: int, window: int | None) -> None:
    for length in (1, 17, 64, 130):
        for n in (1, 3):
            check(make(n, heads, kv_heads, length, 32), 0.2, make_past(kv_heads, before, 32), window)


@native
@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("soft_cap", [0.1, 2.0, 50.0])
@pytest.mark.parametrize(("before", "window"), [(0, None), (40, None), (16, 17), (0, 5)])
def test_soft_caps(soft_cap: float, before: int, window: int | None) -> None:
    for n, heads, kv_heads, length in ((1, 4, 2, 130), (3, 3, 1, 17)):
        check(make(n, heads, kv_heads, length, 32), 1.5, make_past(kv_heads, before, 32), window, soft_cap)
    check(make(1, 4, 2, 1100, 16), 0.7, None, window, soft_cap)  # in parts


@native
@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("d", [16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 240, 256])
def test_every_size_of_a_head(d: int) -> None:
    check(make(2, 4, 2, 70, d), d**-0.5, make_past(2, 20, d), 50)


@native
@pytest.mark.usefixtures("no_torch", "threads")
@pytest.mark.parametrize("window", [None, 100])
def test_a_long_prompt_is_divided_and_threads_change_no_bit(window: int | None) -> None:
    qkv, past = make(1, 4, 2, 1100, 16), make_past(2, 40, 16)
    assert prompt._task(*qkv, Logits(0.25), past, window).parts > 1
    check(qkv, 0.25, past, window)
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(prompt.prefill_attention(*qkv, Logits(0.25), True, past=past, window=window))
    assert all(torch.equal(other.out, found[0].out) for other in found)
    assert all(torch.equal(other.column_sums, found[0].column_sums) for other in found)


@native
@pytest.mark.usefixtures("no_torch", "threads")
def test_more_threads_than_scratch_and_tasks() -> None:
    for shape in ((1, 2, 2, 5), (2, 1, 1, 30), (3, 4, 2, 80)):
        qkv = make(*shape, 64)
        torch.set_num_threads(1)
        one = prompt.prefill_attention(*qkv, Logits(0.1), True)
        torch.set_num_threads(4)
        four = prompt.prefill_attention(*qkv, Logits(0.1), True)
        assert torch.equal(one.out, four.out)
        assert torch.equal(one.column_sums, four.column_sums)


@native
@pytest.mark.usefixtures("no_torch")
def test_other_layouts() -> None:
    """Heads before tokens, every second token of a buffer, rows of equal memory, a past that is a view."""
    n, heads, kv_heads, length, d = 2, 4, 2, 33, 32
    dense = [t.contiguous() for t in make(n, heads, kv_heads, length, d)]
    sparse = [t[:, :, ::2] for t in make(n, heads, kv_heads, 2 * length, d)]
    same = [t[:1].expand(n, -1, -1, -1) for t in dense]
    wide = make_past(kv_heads, 50, 2 * d)
    assert wide is not None
    past = KeysValues(wide.k[:, ::2, d:], wide.v.transpose(0, 1).contiguous().transpose(0, 1)[:, :25, :d])
    for qkv in (dense, sparse, same):
        check(qkv, 0.2, past)


@native
@pytest.mark.usefixtures("no_torch")
def test_probabilities_are_those_of_float64() -> None:
    """One query whose logits are exact. Far below the largest, a logit's own rounding in float32 shows."""
    keys = 4096
    k = torch.zeros(1, 1, keys, 16).bfloat16()
    k[..., 0] = torch.linspace(-80, 3, keys).view(1, 1, keys)
    q = torch.zeros(1, 1, keys, 16).bfloat16()
    q[..., 0] = 1.0
    past = KeysValues(k[0], k[0])
    sums = prompt.prefill_attention(q[:, :, :1], k[:, :, :1], k[:, :, :1], Logits(1.0), True, past=past).column_sums
    exact = torch.cat([k[0, 0, :, 0], k[0, 0, :1, 0]]).double().softmax(-1)
    error = (sums.flatten() - exact).abs() / exact
    assert error[exact > 1e-6].max() < 1e-6
    assert error.max() < 6e-6


@native
@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("size", [30.0, 1e4, 1e9, 1e17])
def test_large_logits(size: float) -> None:
    """Up to the largest that float32 holds; ordinary numbers would overflow in the exponential."""
    q, k, v = make(2, 2, 2, 90, 64)
    q, k = (q.float() * size).bfloat16(), (k.float() * size).bfloat16()
    slow = reference.prefill_attention(q.double(), k.double(), v.double(), Logits(0.125), True)
    fast = prompt.prefill_attention(q, k, v, Logits(0.125), True)
    assert fast.out.isfinite().all()
    # The softmax is close to a choice of one key: a choice between equals may fall otherwise, but seldom.
    assert ((fast.out.float() - slow.out).abs() > 0.05).float().mean() < 0.01
    assert fast.column_sums.sum() == pytest.approx(2 * 2 * 90, rel=1e-5)


@native
@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_stays_visible(value: float) -> None:
    """In the queries that saw it, and in no other."""
    q, k, v = make(2, 4, 2, 70, 32)
    q[1, 1, 30, 3] = value
    k[0, 1, 50, 7] = value
    slow = reference.prefill_attention(q.float(), k.float(), v.float(), Logits(0.2), True)
    fast = prompt.prefill_attention(q, k, v, Logits(0.2), True)
    if value != value:
        assert torch.equal(fast.out.isnan(), slow.out.isnan())
        assert fast.column_sums[1, 0, :31].isnan().all()
        assert fast.column_sums[0, 1, :51].isnan().all()
    assert fast.column_sums.isfinite()[[0, 1], [0, 1]].all()
    assert fast.out[1, 1, 30].isnan().all()
    assert not fast.out[1, [0, 2, 3]].isnan().any()
    assert not fast.out[0, :, :50].isnan().any()


def test_torch_has_what_is_not_for_this_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    in_torch = torch_attention.prefill_attention

    def spy(*args, **kwargs) -> PrefillAttention:
        seen.append(args[0])
        return in_torch(*args, **kwargs)

    monkeypatch.setattr(torch_attention, "prefill_attention", spy)
    odd = [t[..., :24] for t in make(1, 2, 2, 20, 32)]
    single = [t.float() for t in make(1, 2, 2, 20, 32)]
    turned = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in make(1, 2, 2, 20, 32)]
    for qkv in (odd, single, turned):
        slow = reference.prefill_attention(*(t.float() for t in qkv), Logits(0.2), True)
        fast = prompt.prefill_attention(*qkv, Logits(0.2), True)
        assert seen.pop() is qkv[0]
        torch.testing.assert_close(fast.column_sums, slow.column_sums, atol=0.02, rtol=0.02)
    monkeypatch.setattr(prompt, "library", lambda: None)
    qkv = make(1, 2, 2, 20, 32)
    prompt.prefill_attention(*qkv, Logits(0.2), True)
    assert seen.pop() is qkv[0]


@native
@pytest.mark.usefixtures("no_torch", "threads")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "n", "length", "before"),
    [
        (*heads, *lengths)
        for i, heads in enumerate(((4, 4, 16), (1, 1, 128), (12, 12, 64), (14, 2, 64), (71, 1, 64)))
        for j, lengths in enumerate(
            ((1, 8, 0), (32, 8, 0), (1, 1000, 0), (4, 100, 300), (1, 40, 5000), (1, 2000, 6000))
        )
        if (i + j) % 2 == 0
    ],
)
def test_the_footprint_allows_what_it_takes(
    heads: int, kv_heads: int, d: int, n: int, length: int, before: int
) -> None:
    total = before + length
    spec = ModelSpec(
        name="tiny",
        vocab_size=10,
        hidden_size=heads * d,
        ffn_size=8,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=d,
        embed_dim=heads * d,
        max_positions=total,
        arch=ArchSpec("opt", position_offset=2),
        bos_token_id=2,
        eos_token_id=2,
        pad_token_id=1,
    )
    policy = OffloadPolicy(n, prefill_chunk=max(16, n * length))
    asked = PlanRequest(spec, Workload(total, 1, n), EvictionConfig(), "bfloat16", Caps(), "cpu")
    block = BlockShape(asked, policy)
    torch.set_num_threads(64)  # on any number of cores
    qkv, past = make(n, heads, kv_heads, length, d), make_past(kv_heads, before, d)
    with Live() as live:
        out, sums = prompt.prefill_attention(*qkv, Logits(0.1), True, past=past)
    assert sums is not None
    assert live.peak - out.nbytes - sums.nbytes <= workspace._prompt_kernel(block)


@native
@pytest.mark.parametrize("window", [None, 7])
def test_logits_of_sinks_take_their_share(window: int | None) -> None:
    q, k, v = make(2, 6, 2, 45, 32)
    sinks = 2 * torch.randn(6, generator=torch_generator(3))
    ours = prompt.prefill_attention(q, k, v, Logits(0.2, sinks=sinks), True, window=window)
    theirs = torch_attention.prefill_attention(
        q.float(), k.float(), v.float(), Logits(0.2, sinks=sinks), True, window=window
    )
    torch.testing.assert_close(ours.out.float(), theirs.out, rtol=0, atol=2e-2)
    assert ours.column_sums is not None
    assert theirs.column_sums is not None
    torch.testing.assert_close(ours.column_sums, theirs.column_sums, rtol=0, atol=2e-3)
    without = prompt.prefill_attention(q, k, v, Logits(0.2), True, window=window)
    assert (without.out - ours.out).abs().max() > 0.05
