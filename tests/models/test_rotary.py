"""Rotary angles beside transformers' own rotary modules, for every scaling, within the trained context and beyond."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig, LlamaConfig, Phi3Config
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from h2o_flexgen.config.model.arch import RotarySpec
from h2o_flexgen.kernels.layers import rotate_heads
from h2o_flexgen.kernels.native import why_not
from h2o_flexgen.models.rotary import Angles, Rotary, rotate, rotate_both

HEADS, HEAD_DIM, CONTEXT = 2, 32, 64
FAR = 100_000

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHORT = tuple(1 + 0.1 * i for i in range(HEAD_DIM // 2))
LONG = tuple(1.5 + 0.4 * i for i in range(HEAD_DIM // 2))

SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({"rope_type": "default"}, {}),
    "large theta": ({"rope_type": "default", "rope_theta": 1e6}, {"theta": 1e6}),
    "linear": ({"rope_type": "linear", "factor": 3.0}, {"scaling": "linear", "factor": 3.0}),
    "llama3": (
        {"rope_type": "llama3", "original_max_position_embeddings": CONTEXT, **LLAMA3},
        {"scaling": "llama3", "original_positions": CONTEXT, **LLAMA3},
    ),
    "llama3, short waves only": (
        {"rope_type": "llama3", "original_max_position_embeddings": 10**7, **LLAMA3},
        {"scaling": "llama3", "original_positions": 10**7, **LLAMA3},
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT},
        {"scaling": "yarn", "factor": 4.0, "original_positions": CONTEXT},
    ),
    "yarn, fractions kept": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT, "truncate": False},
        {"scaling": "yarn", "factor": 4.0, "original_positions": CONTEXT, "truncate": False},
    ),
    "yarn, no ramp": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 4,
            "beta_fast": 0.9,
            "beta_slow": 0.65,
        },
        {"scaling": "yarn", "factor": 4.0, "original_positions": 4, "beta_fast": 0.9, "beta_slow": 0.65},
    ),
    "yarn, own betas": (
        {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 48.0,
            "beta_slow": 2.0,
            "attention_factor": 0.8,
        },
        {"scaling": "yarn", "factor": 16.0, "original_positions": 4096, "beta_fast": 48.0, "beta_slow": 2.0},
    ),
}
"""Scalings by position alone: transformers' rope_parameters, and the fields of our RotarySpec."""


def llama_rotary(**parameters: Any) -> LlamaRotaryEmbedding:
    """transformers' module, with CONTEXT positions."""
    config = LlamaConfig(
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_theta": 10000.0, **parameters},
    )
    return LlamaRotaryEmbedding(config)


def phi3_rotary(share: float) -> Phi3RotaryEmbedding:
    """transformers' module with longrope factors, of heads that turn by `share`."""
    turned = int(HEAD_DIM * share) // 2
    config = Phi3Config(
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        max_position_embeddings=16 * CONTEXT,
        original_max_position_embeddings=CONTEXT,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": share,
            "short_factor": list(SHORT[:turned]),
            "long_factor": list(LONG[:turned]),
            "original_max_position_embeddings": CONTEXT,
        },
    )
    return Phi3RotaryEmbedding(config)


def expected(module: torch.nn.Module, positions: torch.Tensor, dtype: torch.dtype = torch.float32) -> Angles:
    """What transformers has for tokens at `positions` that go through the model together."""
    cos, sin = module(torch.zeros(1, dtype=dtype), positions.unsqueeze(0))
    return Angles(cos[0], sin[0])


def assert_angles(ours: Angles, theirs: Angles, atol: float = 1e-6) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, rtol=0, atol=atol)


POSITIONS = torch.cat([torch.arange(3 * CONTEXT), torch.tensor([1000, 4095, 4096, 65_537, FAR])])


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_angles_are_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    parameters, fields = SCALINGS[name]
    module = llama_rotary(**parameters)
    rotary = Rotary(RotarySpec(HEAD_DIM, attention_factor=module.attention_scaling, **fields), CONTEXT)
    lengths = torch.full_like(POSITIONS, FAR)
    assert_angles(rotary.angles(POSITIONS, lengths, dtype), expected(module, POSITIONS, dtype))


def test_a_scaling_stretches_what_it_is_for() -> None:
    """Not one of the rows above is without effect."""
    plain = Rotary(RotarySpec(HEAD_DIM), CONTEXT).table(CONTEXT, torch.float32, torch.device("cpu"))
    same = [
        name
        for name, (_, fields) in SCALINGS.items()
        if torch.equal(
            Rotary(RotarySpec(HEAD_DIM, **fields), CONTEXT).table(CONTEXT, torch.float32, torch.device("cpu")).cos,
            plain.cos,
        )
    ]
    assert same == ["none", "llama3, short waves only"]


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_part_of_a_head(share: float) -> None:
    config = GPTNeoXConfig(hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, rotary_pct=share)
    rotary = Rotary(RotarySpec(int(HEAD_DIM * share)), CONTEXT)
    ours = rotary.angles(POSITIONS, POSITIONS + 1, torch.float32)
    assert_angles(ours, expected(GPTNeoXRotaryEmbedding(config), POSITIONS))


LENGTHS = (1, 2, CONTEXT - 1, CONTEXT, CONTEXT + 1, CONTEXT + 2, 2 * CONTEXT, 10 * CONTEXT, 3001)


@pytest.mark.parametrize("length", LENGTHS)
def test_dynamic_prompts(length: int) -> None:
    module = llama_rotary(rope_type="dynamic", factor=4.0)
    for original in (CONTEXT, 0):
        rotary = Rotary(RotarySpec(HEAD_DIM, scaling="dynamic", factor=4.0, original_positions=original), CONTEXT)
        ours = rotary.table(length, torch.float32, torch.device("cpu"))
        # Frequencies go through a power of the length: a rounding there is a few 1e-7 of the angle.
        assert_angles(ours, expected(module, torch.arange(length)), atol=1e-6 + 2e-7 * length)


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("length", LENGTHS)
def test_longrope_prompts(share: float, length: int) -> None:
    module, dim = phi3_rotary(share), int(HEAD_DIM * share)
    rotary = Rotary(longrope(dim, module.attention_scaling), 16 * CONTEXT)
    ours = rotary.table(length, torch.float32, torch.device("cpu"))
    assert_angles(ours, expected(module, torch.arange(length)))


def longrope(dim: int, attention_factor: float) -> RotarySpec:
    return RotarySpec(
        dim,
        scaling="longrope",
        factor=16.0,
        original_positions=CONTEXT,
        attention_factor=attention_factor,
        short_factors=SHORT[: dim // 2],
        long_factors=LONG[: dim // 2],
    )


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_rows_of_different_lengths_in_one_call(scaling: str) -> None:
    """A decode step: every row its own sequence, whose new token has its length - 1 as position."""
    dynamic = RotarySpec(HEAD_DIM, scaling="dynamic", factor=4.0, original_positions=CONTEXT)
    rotary = Rotary(dynamic if scaling == "dynamic" else longrope(HEAD_DIM, 1.2), CONTEXT)
    lengths = torch.tensor(LENGTHS)
    together = rotary.angles(lengths - 1, lengths, torch.float32)
    for row, length in enumerate(LENGTHS):
        alone = rotary.table(length, torch.float32, torch.device("cpu"))
        assert_angles(Angles(together.cos[row], together.sin[row]), Angles(alone.cos[-1], alone.sin[-1]), atol=1e-5)


def test_lengths_are_read_only_where_they_matter() -> None:
    rotary = Rotary(RotarySpec(HEAD_DIM, scaling="linear", factor=2.0), CONTEXT)
    positions = torch.arange(9)
    ours = [rotary.angles(positions, torch.full((9,), n), torch.float32).cos for n in (9, 10 * CONTEXT)]
    assert torch.equal(*ours)


def test_a_table_is_the_angles_of_its_positions() -> None:
    rotary = Rotary(RotarySpec(HEAD_DIM, theta=500.0), CONTEXT)
    positions = torch.tensor([0, 3, 3, 17])
    table = rotary.table(18, torch.bfloat16, torch.device("cpu"))
    ours = rotary.angles(positions, positions + 1, torch.bfloat16)
    assert table.cos.shape == (18, HEAD_DIM)
    assert torch.equal(table.cos[positions], ours.cos)
    assert torch.equal(table.sin[positions], ours.sin)


# ---- rotate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [HEAD_DIM, HEAD_DIM // 2, 8])
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_rotation_is_that_of_transformers(dtype: torch.dtype, dim: int, tokens: int) -> None:
    # q and k are views of a fused projection of q, k and v.
    fused = torch.randn(tokens, 3 * HEADS * HEAD_DIM).to(dtype)
    before = fused.clone()
    q, k = (part.unflatten(-1, (HEADS, HEAD_DIM)) for part in fused.chunk(3, dim=-1)[:2])
    angles = Rotary(RotarySpec(dim), CONTEXT).table(tokens, dtype, torch.device("cpu"))
    theirs = apply_rotary_pos_emb(q[..., :dim], k[..., :dim], *angles)
    for x, turned in zip((q, k), theirs, strict=True):
        ours = rotate(x, angles)
        assert ours.is_contiguous()
        assert ours.dtype == dtype
        atol = 1e-6 if dtype == torch.float32 else 0.04  # two roundings where transformers has three
        torch.testing.assert_close(ours[..., :dim], turned, rtol=0, atol=atol)
        assert torch.equal(ours[..., dim:], x[..., dim:])
    if dtype is torch.bfloat16 and why_not() is None:
        both = rotate_heads(q, k, *angles)
        assert both is not None
        for ours, turned, x in zip(both, theirs, (q, k), strict=True):
            assert torch.equal(ours, torch.cat([turned, x[..., dim:]], -1))
        assert torch.equal(rotate_both(q, k, angles)[1], both[1])
    assert torch.equal(fused, before)


def test_other_rotations_are_not_done_in_c() -> None:
    q, cos = torch.randn(3, 2, 16).bfloat16(), torch.randn(3, 16).bfloat16()
    assert rotate_heads(q.float(), None, cos, cos) is None
    assert rotate_heads(q, None, cos.float(), cos.float()) is None
    assert rotate_heads(q, None, cos[:2], cos[:2]) is None
    assert rotate_heads(q, None, cos[:, :5], cos[:, :5]) is None
    assert rotate_heads(q, q[:, :, :8], cos, cos) is None
    assert rotate_heads(q[:0], None, cos[:0], cos[:0]) is None


def test_products_depend_on_distances_alone() -> None:
    q, k = torch.randn(1, 1, HEAD_DIM), torch.randn(1, 1, HEAD_DIM)
    angles = Rotary(RotarySpec(HEAD_DIM), CONTEXT).table(40, torch.float32, torch.device("cpu"))

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(x, Angles(*(t[position : position + 1] for t in angles))).flatten()

    torch.testing.assert_close(at(q, 30) @ at(k, 21), at(q, 9) @ at(k, 0), rtol=1e-4, atol=1e-5)


def test_rotation_of_more_dimensions() -> None:
    """A cache turns (rows, slots, kv_heads, head_dim) by one table for all rows, or by one per row."""
    x = torch.randn(3, 5, HEADS, HEAD_DIM)
    table = Rotary(RotarySpec(16), CONTEXT).table(5, torch.float32, torch.device("cpu"))
    alone = torch.stack([rotate(row, table) for row in x])
    assert torch.equal(rotate(x, table), alone)
    assert torch.equal(rotate(x, Angles(*(t.expand(3, 5, 16) for t in table))), alone)
