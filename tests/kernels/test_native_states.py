"""Recurrences of layers that keep states, in C, against loops in float64 and transformers' own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba import modeling_mamba as mamba1
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from h2o_flexgen.kernels import states
from h2o_flexgen.kernels.native import why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

SIZES = [
    # tokens, key heads, heads, K, V
    (1, 1, 1, 1, 1),
    (1, 2, 6, 24, 40),
    (1, 2, 4, 128, 128),
    (2, 1, 2, 16, 17),
    (5, 2, 2, 33, 64),
    (9, 1, 3, 7, 100),
    (131, 2, 4, 64, 48),
    (300, 1, 1, 130, 33),
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def delta_inputs(size: tuple[int, ...], rows: int = 2, by_channel: bool = False) -> tuple[Tensor, ...]:
    tokens, key_heads, heads, key_dim, value_dim = size
    q, k = (torch.randn(rows, tokens, key_heads, key_dim) for _ in range(2))
    v = torch.randn(rows, tokens, heads, value_dim)
    decay = -torch.rand(rows, tokens, heads, *([key_dim] if by_channel else [])) * 3
    decay[0, 0] = -200.0  # all is forgotten
    return q, k, v, decay, torch.rand(rows, tokens, heads) * 2, torch.randn(rows, heads, key_dim, value_dim)


def slow_delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token and head by head in float64."""
    q, k, v, decay, beta, state = (x.double() for x in (q, k, v, decay, beta, state))
    out, state = torch.zeros_like(v), state.clone()
    rows, tokens, heads = v.shape[:3]
    for row in range(rows):
        for head in range(heads):
            own = state[row, head]
            for token in range(tokens):
                key, query = (x[row, token, head * k.shape[2] // heads] for x in (k, q))
                key, query = (x / (x.square().sum() + 1e-6).sqrt() for x in (key, query))
                own.mul_(decay[row, token, head].exp().reshape(-1, 1))
                new = beta[row, token, head] * (v[row, token, head] - key @ own)
                own += key[:, None] * new
                out[row, token, head] = query @ own / key.shape[0] ** 0.5
    return out, state


def near(found: Tensor, expected: Tensor, bits: int = 0) -> None:
    """To float32's rounding of sums as large as they are; `bits` of bfloat16 where it is rounded to."""
    size = expected.abs().max().item() + 1e-3
    torch.testing.assert_close(found.double(), expected.double(), rtol=2.0**-bits if bits else 0, atol=1e-5 * size)


def run(inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    state = inputs[5].clone()
    return states.delta_rule(*inputs[:5], state, scale=inputs[1].shape[-1] ** -0.5, normed=True), state


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("by_channel", [False, True])
def test_it_is_the_delta_rule(size: tuple[int, ...], by_channel: bool) -> None:
    inputs = delta_inputs(size, by_channel=by_channel)
    for found, expected in zip(run(inputs), slow_delta(*inputs), strict=True):
        near(found, expected)


@pytest.mark.parametrize("size", SIZES)
def test_as_transformers_has_it(size: tuple[int, ...]) -> None:
    q, k, v, decay, beta, state = delta_inputs(size)
    given = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    for function in (qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule):
        for found, expected in zip(
            run((q, k, v, decay, beta, state)), function(q, k, v, decay, beta, **given), strict=True
        ):
            near(found, expected)
    if size[1] == size[2]:
        slow = decay[..., None] * torch.rand(q.shape[-1])
        for function in (kimi.chunk_kimi_delta_attention, kimi.recurrent_kimi_delta_attention):
            expected_pair = function(q, k, v, slow, beta, **given)
            for found, expected in zip(run((q, k, v, slow, beta, state)), expected_pair, strict=True):
                near(found, expected)


@pytest.mark.parametrize("tokens", [1, 20])
def test_sixteen_bits_and_rows_apart(tokens: int) -> None:
    """Queries, keys and values as parts of wider tensors, as projections leave them."""
    q, k, v, decay, beta, state = delta_inputs((tokens, 2, 4, 24, 40))
    wide = torch.cat([x.flatten(2) for x in (q, k, v)], -1).bfloat16()
    parts = wide.split([48, 48, 160], -1)
    q, k, v = (x.unflatten(-1, (-1, dim)) for x, dim in zip(parts, (24, 24, 40), strict=True))
    (found, after), (expected, expected_after) = (
        run((q, k, v, decay, beta, state)),
        slow_delta(q, k, v, decay, beta, state),
    )
    assert found.dtype is torch.bfloat16
    near(found, expected, 8)
    near(after, expected_after)
    apart = q.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(run((apart, k, v, decay, beta, state))[0], found)


def scan_inputs(size: tuple[int, ...], rows: int = 2) -> tuple[Tensor, ...]:
    tokens, groups, heads, state_dim, head_dim = size
    c, b = (torch.randn(rows, tokens, groups, state_dim) for _ in range(2))
    x, dt = torch.randn(rows, tokens, heads, head_dim), torch.rand(rows, tokens, heads) * 2
    return c, b, x, dt * -torch.rand(heads), dt, torch.randn(rows, heads, head_dim, state_dim), torch.randn(heads)


def slow_scan(
    c: Tensor, b: Tensor, x: Tensor, decay: Tensor, dt: Tensor, state: Tensor, skip: Tensor
) -> tuple[Tensor, Tensor]:
    c, b, x, decay, dt, state, skip = (each.double() for each in (c, b, x, decay, dt, state, skip))
    heads = x.shape[2]
    c, b = (each.repeat_interleave(heads // each.shape[2], 2) for each in (c, b))
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        state = state * decay[:, t, :, None, None].exp() + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        out[:, t] = (state * c[:, t, :, None]).sum(-1) + skip[:, None] * x[:, t]
    return out, state


@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_scan(size: tuple[int, ...]) -> None:
    inputs = scan_inputs(size)
    state = inputs[5].clone()
    found = states.scan(*inputs[:5], state, inputs[6])
    expected, after = slow_scan(*inputs)
    near(found, expected)
    near(state, after)
    c, b, x, _, dt, before, skip = inputs
    rates = -torch.rand(x.shape[2])
    given = {"D": skip, "initial_states": before, "return_final_states": True}
    expected, after = mamba2.mamba2_chunk_scan(x, dt, rates, b, c, 32, **given)
    state = before.clone()
    near(states.scan(c, b, x, dt * rates, dt, state, skip), expected)
    near(state, after)


@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("kind", ["delta", "scan"])
def test_rows_do_not_depend_on_each_other_nor_on_threads(kind: str, tokens: int) -> None:
    """Bit for bit."""
    size = (tokens, 2, 4, 64, 72)
    inputs = delta_inputs(size, rows=5) if kind == "delta" else scan_inputs(size, rows=5)[:6]

    def compute(rows: slice) -> tuple[Tensor, Tensor]:
        own = tuple(x[rows].clone() for x in inputs)
        return run(own) if kind == "delta" else (states.scan(*own, None), own[5])

    threads, whole = torch.get_num_threads(), compute(slice(None))
    try:
        for row in range(5):
            torch.set_num_threads(1 + row % 2)
            alone = compute(slice(row, row + 1))
            assert all(torch.equal(one[0], many[row]) for one, many in zip(alone, whole, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("tokens", "channels", "numbers"), [(1, 1, 1), (1, 70, 16), (3, 16, 5), (40, 33, 16), (9, 130, 40)]
)
def test_the_selective_scan(tokens: int, channels: int, numbers: int) -> None:
    x, dt = torch.randn(3, tokens, channels), torch.rand(3, tokens, channels) * 2
    rates, skip = -torch.rand(channels, numbers) * 4, torch.randn(channels)
    b, c = (torch.randn(3, tokens, numbers) for _ in range(2))
    before = torch.randn(3, channels, numbers)
    state, slow, outs = before.clone(), before.double(), list[Tensor]()
    found = states.selective_scan(x, dt, rates, b, c, state, skip)
    for t in range(tokens):
        own = x[:, t].double()
        slow = slow * (dt[:, t, :, None].double() * rates).exp() + (dt[:, t] * own)[..., None] * b[:, t, None].double()
        outs.append((slow * c[:, t, None]).sum(-1) + skip * own)
    near(found, torch.stack(outs, 1))
    near(state, slow)
    alone = before[1:2].clone()
    assert torch.equal(states.selective_scan(x[1:2], dt[1:2], rates, b[1:2], c[1:2], alone, skip), found[1:2])
    assert torch.equal(alone, state[1:2])
    across = [each.transpose(1, 2) for each in (x, dt)]
    expected = mamba1.mamba_selective_scan(
        *across, rates, b.transpose(1, 2), c.transpose(1, 2), skip, return_last_state=True
    )
    state = torch.zeros_like(before)
    near(states.selective_scan(x, dt, rates, b, c, state, skip), expected[0].transpose(1, 2))
    near(state, expected[1])


def test_a_prompt_in_parts() -> None:
    inputs = delta_inputs((150, 1, 2, 32, 48))
    whole, after = run(inputs)
    state, found = inputs[5].clone(), []
    for part in (slice(0, 61), slice(61, 62), slice(62, 150)):
        found.append(states.delta_rule(*(x[:, part] for x in inputs[:5]), state, scale=32**-0.5, normed=True))
    near(torch.cat(found, 1), whole)
    near(state, after)


def test_shapes_that_do_not_fit() -> None:
    q, k, v, decay, beta, state = delta_inputs((2, 2, 4, 8, 16))
    for change in ({"q": q[..., :4]}, {"v": v[:, :, :3]}, {"beta": beta[:1]}, {"state": state[:, :, :4]}):
        given: dict[str, Any] = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta, "state": state, **change}
        with pytest.raises(ValueError, match="do not fit"):
            states.delta_rule(**given, scale=1.0, normed=False)
    assert not states.serves(q, k.bfloat16())
    assert not states.serves(q.double())
    assert not states.serves_state(state.bfloat16(), 8)
    assert not states.serves_state(state.transpose(2, 3), 8)
    assert not states.serves_state(state, 2048)


ACTIVATIONS: dict[bool, Callable[[Tensor], Tensor]] = {False: lambda x: x, True: F.silu}


@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("channels", "tokens"), [(1, 3), (16, 1), (50, 7), (700, 150)])
def test_short_convolutions(channels: int, tokens: int, silu: bool, taps: int) -> None:
    x, weight, before = torch.randn(3, channels, tokens), torch.randn(channels, taps), torch.randn(3, channels, taps)
    for bias in (None, torch.randn(channels)):
        wide = F.conv1d(
            x.double(),
            weight.double()[:, None],
            None if bias is None else bias.double(),
            padding=taps - 1,
            groups=channels,
        )
        expected = ACTIVATIONS[silu](wide[..., :tokens])
        near(states.short_conv(x, weight, bias, None, silu=silu), expected)
        apart = x.transpose(1, 2).contiguous().transpose(1, 2)
        assert torch.equal(
            states.short_conv(apart, weight, bias, None, silu=silu), states.short_conv(x, weight, bias, None, silu=silu)
        )
        state, found = before.clone(), []
        for token in x.unbind(-1):
            found.append(states.short_conv(token[..., None], weight, bias, state, silu=silu))
        theirs = before.clone()
        activation = "silu" if silu else None
        expected = qwen.causal_conv1d_update(x, theirs, weight, bias, activation)
        near(torch.cat(found, -1), expected)
        assert torch.equal(state, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("silu", [False, True])
def test_short_convolutions_of_sixteen_bits(silu: bool, dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((2, 40, 9), (40, 4), (40,)))
    activation = "silu" if silu else None
    expected = qwen.causal_conv1d_fn(x, weight, bias, activation)
    found = states.short_conv(x, weight, bias, None, silu=silu)
    assert found.dtype is dtype
    near(found, expected, 7)
    held = torch.randn(2, 40, 6).to(dtype)
    theirs = held.clone()
    expected = qwen.causal_conv1d_update(x[..., :1], theirs, weight, bias, activation)
    near(states.short_conv(x[..., :1], weight, bias, held, silu=silu), expected, 7)
    assert torch.equal(held, theirs)
