"""The decoder unit by unit beside transformers' own modules; its norms, and the choices that its spec leaves."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm, Gemma3TextScaledWordEmbedding
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from h2o_flexgen.config.model.arch import ArchSpec, RotarySpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.kernels.layers import rms_norm
from h2o_flexgen.models.decoder import Decoder, bind
from h2o_flexgen.models.rotary import rotate
from tests.models.reference import TOKENS, Reference, reference
from tests.tiny import FAMILIES

pytestmark = pytest.mark.usefixtures("no_gradients")

NAMES = list(FAMILIES)


def causal_attention(decoder: Decoder, layer: int, sinks: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The prompt's attention in one piece, by the definition: rotated, causal, windowed, KV heads shared by groups."""
    positions = torch.arange(len(q))
    rotary = decoder.rotary_of(layer)
    if rotary is not None:
        angles = rotary.angles(positions, torch.full_like(positions, len(q)), q.dtype)
        growth = rotary.growth(positions, q.dtype)
        q, k = rotate(q, angles), rotate(k, angles)
        q = q if growth is None else q * growth
    distance = positions.unsqueeze(1) - positions
    unseen = (distance < 0) | (distance >= (decoder.spec.arch.window_of(layer) or len(q)))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * decoder.scale
    if decoder.soft_cap is not None:
        logits = decoder.soft_cap * torch.tanh(logits / decoder.soft_cap)
    logits = logits.masked_fill(unseen, -torch.inf).float()
    if sinks is not None:
        logits = torch.cat([logits, sinks.float().view(-1, 1, 1).expand(-1, len(q), 1)], -1)
    shares = logits.softmax(-1)[..., : len(k)].to(v.dtype)
    return torch.einsum("hqk,khd->qhd", shares, v)


def widened(spec: ModelSpec, x: Tensor) -> Tensor:
    """A layer's input as it lies between units; what stands beside it must not matter."""
    return torch.cat([x, torch.full_like(x, 7.0)], dim=-1) if spec.arch.parallel else x.clone()


def close(ours: Tensor, theirs: Tensor, tolerance: float = 2e-5) -> None:
    scale = float(theirs.abs().max())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * max(scale, 1.0))


@pytest.mark.parametrize("name", NAMES)
def test_embedding(name: str) -> None:
    ref = reference(name)
    hidden = Decoder(ref.spec).embed(ref.weights(ref.spec.units[0].weights), ref.tokens, torch.arange(TOKENS))
    assert hidden.shape == (TOKENS, ref.spec.hidden_width)
    close(hidden[:, : ref.spec.hidden_size], ref.inputs[ref.layer(0)])
    assert hidden.isfinite().all()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_layers(name: str, fused: bool) -> None:
    ref = reference(name)
    decoder, width = Decoder(ref.spec), ref.spec.hidden_size
    for layer in range(ref.spec.num_layers):
        path = ref.layer(layer)
        hidden = widened(ref.spec, ref.inputs[path])
        w = ref.weights(f"layers.{layer}.attn", fused)
        assert ("qkv.weight" in w) == fused
        decoder.attn(w, hidden, partial(causal_attention, decoder, layer, w.get("sinks")))
        after = "mlp.norm" if ref.spec.arch.pre_norm and ref.spec.arch.norm_affine else "mlp.up"
        if ref.spec.arch.norm_affine:
            close(hidden[:, :width], ref.inputs[ref.module(f"layers.{layer}.{after}.weight")])
        if ref.spec.arch.parallel:
            close(hidden[:, width:], ref.outputs[ref.module(f"layers.{layer}.attn.o.weight")])
        if ref.spec.arch.experts is None:
            w = ref.weights(f"layers.{layer}.mlp", fused)
            assert ("gate_up.weight" in w) == (fused and ref.spec.arch.gated_mlp)
        ref.mlp(decoder, layer, hidden, fused)
        close(hidden[:, :width], ref.outputs[path])


@pytest.mark.parametrize("name", NAMES)
def test_head(name: str) -> None:
    ref = reference(name)
    hidden = widened(ref.spec, ref.outputs[ref.layer(ref.spec.num_layers - 1)])
    before = hidden.clone()
    logits = Decoder(ref.spec).head(ref.weights(ref.spec.units[-1].weights), hidden)
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    close(logits, ref.logits)
    assert torch.equal(hidden, before)


@pytest.mark.turns
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_models(name: str, dtype: torch.dtype) -> None:
    ref = reference(name) if dtype == torch.float32 else Reference(name, dtype)
    decoder = Decoder(ref.spec)
    hidden = decoder.embed(ref.weights(ref.spec.units[0].weights), ref.tokens, torch.arange(TOKENS))
    for layer in range(ref.spec.num_layers):
        w = ref.weights(f"layers.{layer}.attn", fused=True)
        decoder.attn(w, hidden, partial(causal_attention, decoder, layer, w.get("sinks")))
        # As the executor does it: the half goes through the MLP in parts.
        for part in hidden.split(10):
            ref.mlp(decoder, layer, part, fused=True)
    assert hidden.dtype == dtype
    logits = decoder.head(ref.weights(ref.spec.units[-1].weights), hidden)
    if dtype == torch.float32:
        close(logits, ref.logits, 1e-4)
    else:
        # Eight bits: hardly more off than transformers itself is from its own float32. By the geometric mean over
        # tokens: one at which attention hangs on a rounding can be further off than all others together.
        exact = reference(name).logits
        ours, theirs = ((x.float() - exact).norm(dim=-1).log().mean() for x in (logits, ref.logits))
        assert ours.exp() < 1.3 * theirs.exp()


# ---- norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(dtype: torch.dtype, offset: float) -> None:
    # Wide values: their squares overflow float16 and are lost in bfloat16.
    x = (torch.randn(5, 3, 160) * torch.tensor([1e-3, 1.0, 300.0]).view(3, 1)).to(dtype)
    module = (Gemma3RMSNorm if offset else LlamaRMSNorm)(160, eps=1e-6).to(dtype)
    module.weight.data = torch.randn(160).to(dtype)
    before = x.clone()
    ours = rms_norm(x, module.weight, 1e-6, offset)
    assert ours.dtype == dtype
    # One unit in the last place: a mean of squares is summed in another order.
    torch.testing.assert_close(ours, module(x), rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=1e-7)
    assert torch.equal(x, before)
    strided = x.transpose(0, 1)
    torch.testing.assert_close(rms_norm(strided, module.weight, 1e-6, offset).transpose(0, 1), ours)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_on_cuda(dtype: torch.dtype, offset: float) -> None:
    x, weight = torch.randn(5, 160).to(dtype), torch.randn(160).to(dtype)
    ours = rms_norm(x.cuda(), weight.cuda(), 1e-6, offset).cpu()
    torch.testing.assert_close(ours, rms_norm(x, weight, 1e-6, offset), rtol=2**-6, atol=1e-5)


def test_rms_norm_without_a_weight() -> None:
    x = torch.tensor([[3.0, 4.0]])
    torch.testing.assert_close(rms_norm(x, None, 0.0, 1.0), x / 12.5**0.5)


# ---- choices


def small(**arch: Any) -> ModelSpec:
    return ModelSpec(
        name="small",
        vocab_size=11,
        hidden_size=8,
        ffn_size=12,
        num_layers=3,
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        embed_dim=8,
        max_positions=16,
        arch=ArchSpec("small", **arch),
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
    )


def test_rotaries_are_made_once_per_kind() -> None:
    far, near = RotarySpec(4, theta=1e6), RotarySpec(4)
    decoder = Decoder(small(positions="rotary", rotary=far, local_rotary=near, window=3, window_layers=(0, 2)))
    made = [decoder.rotary_of(layer) for layer in range(3)]
    assert [rotary.spec for rotary in made if rotary is not None] == [near, far, near]
    assert made[0] is made[2]
    assert Decoder(small()).rotary_of(0) is None


def test_scale_of_attention() -> None:
    assert Decoder(small()).scale == 0.5
    assert Decoder(small(attention_scale=0.3)).scale == 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_are_scaled_by_a_rounded_number(dtype: torch.dtype) -> None:
    module = Gemma3TextScaledWordEmbedding(11, 8, 0, embed_scale=3072**0.5).to(dtype)
    decoder = Decoder(small(positions="rotary", rotary=RotarySpec(4), embed_scale=3072**0.5))
    tokens = torch.arange(11)
    before = module.weight.clone()
    assert torch.equal(decoder.embed({"embed.tokens": module.weight}, tokens, tokens), module(tokens))
    assert torch.equal(module.weight, before)


@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("gated", [True, False])
def test_activations(name: str, gated: bool) -> None:
    known = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "silu": F.silu}
    decoder = Decoder(small(activation=name, gated_mlp=gated, norm_affine=False, mlp_bias=False))
    up, gate, down = torch.randn(12, 8), torch.randn(12, 8), torch.randn(8, 12)
    w = {"layers.0.mlp.up.weight": up, "layers.0.mlp.gate.weight": gate, "layers.0.mlp.down.weight": down}
    hidden = torch.randn(5, 8)
    x = F.layer_norm(hidden, (8,))
    wide = known[name](x @ gate.T) * (x @ up.T) if gated else known[name](x @ up.T)
    want = hidden + wide @ down.T
    decoder.mlp(bind(w), hidden)
    torch.testing.assert_close(hidden, want)
