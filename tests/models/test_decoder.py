"""The decoder unit by unit beside transformers' own modules: what goes into each is caught while its model runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm, Gemma3TextScaledWordEmbedding
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from h2o_flexgen.config.arch import ArchSpec, RotarySpec
from h2o_flexgen.config.model import ModelSpec
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.kernels.native.build import why_not
from h2o_flexgen.models.decoder import Decoder, bind, rms_norm
from h2o_flexgen.models.families import checkpoint_names, spec_from_config
from h2o_flexgen.models.rotary import rotate
from h2o_flexgen.models.stored import Stored
from h2o_flexgen.schedule.tasks import Task, TaskKind
from tests.cost.machines import model_of, profile, rates
from tests.tiny import FAMILIES, VOCAB, make_model

TOKENS = 23
"""Longer than the windows of tests.tiny, and than the context of its row for long sequences."""

NAMES = list(FAMILIES)


class Reference:
    """A tiny model, one prompt, and every module's first input and its output while it ran: (TOKENS, width)."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        self.model: PreTrainedModel = make_model(name).to(dtype)
        self.tokens = torch.randint(3, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(1))
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        for path, module in self.model.named_modules():
            module.register_forward_hook(partial(self._keep, path), with_kwargs=True)
        with torch.no_grad():
            self.logits = self.model(self.tokens.unsqueeze(0), use_cache=False).logits[0]
        self.spec = spec_from_config(self.model.config.to_dict(), name)
        self.state = self.model.state_dict()
        self.names = checkpoint_names(self.spec)

    def _keep(self, path: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        first = args[0] if args else kwargs.get("hidden_states")
        output = output[0] if isinstance(output, tuple) else output
        for kept, tensor in ((self.inputs, first), (self.outputs, output)):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                kept[path] = tensor.flatten(0, -2).clone()

    def stored(self, canonical: str) -> Stored:
        """Where the state_dict has a canonical tensor."""
        places = [Stored(place) if isinstance(place, str) else place for place in self.names[canonical]]
        return next(place for place in places if place.name in self.state)

    def module(self, canonical: str) -> str:
        """The path of the module that owns a canonical tensor."""
        return self.stored(canonical).name.rpartition(".")[0]

    def layer(self, index: int) -> str:
        """The path of a decoder layer."""
        path = self.module(f"layers.{index}.attn.o.weight").split(".")
        return ".".join(path[: path.index("layers") + 2])

    def weights(self, key: str, fused: bool = False) -> dict[str, Tensor]:
        """A weight group, bound; `fused`: its tensors lie back to back in one buffer, else apart."""
        tensors = {t.name: self._tensor(t.name) for t in self.spec.groups_by_key[key].tensors}
        for tensor in self.spec.groups_by_key[key].tensors:
            assert tensors[tensor.name].shape == tensor.shape, tensor.name
        if fused:
            buffer = torch.cat([t.flatten() for t in tensors.values()])
            parts = buffer.split([t.numel() for t in tensors.values()])
            tensors = {name: part.view(tensors[name].shape) for name, part in zip(tensors, parts, strict=True)}
        return bind(tensors)

    def _tensor(self, canonical: str) -> Tensor:
        place = self.stored(canonical)
        whole = self.state[place.name]
        spans = place.spans or ((0, len(whole)),)
        return torch.cat([whole[start:stop] for start, stop in spans])


_made: dict[str, Reference] = {}


def reference(name: str) -> Reference:
    return _made.setdefault(name, Reference(name))


def causal_attention(decoder: Decoder, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The prompt's attention in one piece, by the definition: rotated, causal, windowed, KV heads shared by groups."""
    positions = torch.arange(len(q))
    rotary = decoder.rotary_of(layer)
    if rotary is not None:
        angles = rotary.angles(positions, torch.full_like(positions, len(q)), q.dtype)
        q, k = rotate(q, angles), rotate(k, angles)
    distance = positions.unsqueeze(1) - positions
    unseen = (distance < 0) | (distance >= (decoder.spec.arch.window_of(layer) or len(q)))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * decoder.scale
    shares = logits.masked_fill(unseen, -torch.inf).float().softmax(-1).to(v.dtype)
    return torch.einsum("hqk,khd->qhd", shares, v)


def widened(spec: ModelSpec, x: Tensor) -> Tensor:
    """A layer's input as it lies between units; what stands beside it must not matter."""
    return torch.cat([x, torch.full_like(x, 7.0)], dim=-1) if spec.arch.parallel else x.clone()


def close(ours: Tensor, theirs: Tensor, tolerance: float = 2e-5) -> None:
    scale = float(theirs.abs().max())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * max(scale, 1.0))


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.inference_mode():
        yield


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
        decoder.attn(w, hidden, partial(causal_attention, decoder, layer))
        after = "mlp.norm" if ref.spec.arch.pre_norm and ref.spec.arch.norm_affine else "mlp.up"
        if ref.spec.arch.norm_affine:
            close(hidden[:, :width], ref.inputs[ref.module(f"layers.{layer}.{after}.weight")])
        if ref.spec.arch.parallel:
            close(hidden[:, width:], ref.outputs[ref.module(f"layers.{layer}.attn.o.weight")])
        w = ref.weights(f"layers.{layer}.mlp", fused)
        assert ("gate_up.weight" in w) == (fused and ref.spec.arch.gated_mlp)
        decoder.mlp(w, hidden)
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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_models(name: str, dtype: torch.dtype) -> None:
    ref = reference(name) if dtype == torch.float32 else Reference(name, dtype)
    decoder = Decoder(ref.spec)
    hidden = decoder.embed(ref.weights(ref.spec.units[0].weights), ref.tokens, torch.arange(TOKENS))
    for layer in range(ref.spec.num_layers):
        w = ref.weights(f"layers.{layer}.attn", fused=True)
        decoder.attn(w, hidden, partial(causal_attention, decoder, layer))
        w = ref.weights(f"layers.{layer}.mlp", fused=True)
        # As the executor does it: the half goes through the MLP in parts.
        for part in hidden.split(10):
            decoder.mlp(w, part)
    assert hidden.dtype == dtype
    logits = decoder.head(ref.weights(ref.spec.units[-1].weights), hidden)
    if dtype == torch.float32:
        close(logits, ref.logits, 1e-4)
    else:
        # Eight bits: no more off than transformers itself is from its own float32.
        theirs, exact = ref.logits.float(), reference(name).logits
        assert (logits - exact).norm() < 1.5 * (theirs - exact).norm()


# ---- norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(dtype: torch.dtype, offset: float) -> None:
    torch.manual_seed(0)
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
    torch.manual_seed(0)
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


def test_head_bias() -> None:
    torch.manual_seed(0)
    spec = small(head_bias=True, tied_head=False, final_norm=False)
    hidden, vocab, bias = torch.randn(3, 8), torch.randn(11, 8), torch.randn(11)
    logits = Decoder(spec).head({"head.vocab": vocab, "head.vocab_bias": bias}, hidden)
    torch.testing.assert_close(logits, hidden @ vocab.T + bias)


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
    torch.manual_seed(0)
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


# ---- binding


def laid_out(*names: str, gap: int = 0) -> dict[str, Tensor]:
    """Tensors of layer 0's attention in one buffer, `gap` numbers apart: weights (2, 3), biases (2,)."""
    shapes = [(2, 3) if name.endswith("weight") else (2,) for name in names]
    buffer, views, start = torch.arange(200.0), {}, 0
    for name, shape in zip(names, shapes, strict=True):
        stop = start + torch.Size(shape).numel()
        views[f"layers.0.attn.{name}"] = buffer[start:stop].view(shape)
        start = stop + gap
    return views


WEIGHTS, BIASES = ("q.weight", "k.weight", "v.weight"), ("q.bias", "k.bias", "v.bias")


def test_adjoining_projections_are_one() -> None:
    views = laid_out(*WEIGHTS, *BIASES, "up.weight", "gate.weight", "up.bias", "gate.bias")
    bound = bind(views)
    assert torch.equal(bound["qkv.weight"], torch.cat([bound[name] for name in WEIGHTS]))
    assert torch.equal(bound["qkv.bias"], torch.cat([bound[name] for name in BIASES]))
    assert torch.equal(bound["gate_up.weight"], torch.cat([bound["up.weight"], bound["gate.weight"]]))
    assert torch.equal(bound["gate_up.bias"], torch.cat([bound["up.bias"], bound["gate.bias"]]))
    assert bound["gate_up.weight"].data_ptr() == bound["up.weight"].data_ptr(), "a copy"


@pytest.mark.parametrize(
    "names",
    [
        ("gate.weight", "up.weight"),
        ("up.weight", "up.bias", "gate.weight", "gate.bias"),
        ("up.weight", "gate.weight", "up.bias", "down.bias", "gate.bias"),
        ("q.weight", "v.weight", "k.weight"),
        (*WEIGHTS, "q.bias", "o.bias", "k.bias", "v.bias"),
        ("up.weight", "up.bias"),
    ],
    ids=" ".join,
)
def test_projections_that_do_not_adjoin_stay_apart(names: tuple[str, ...]) -> None:
    bound = bind(laid_out(*names))
    assert not any(name in bound for name in ("qkv.weight", "gate_up.weight"))
    assert not any(name.startswith(("qkv", "gate_up")) for name in bind(laid_out(*names, gap=5)))


def test_neighbours_by_chance_are_no_view() -> None:
    """Two buffers may lie back to back; no view reaches from one into the other."""
    buffer = torch.arange(12.0)
    halves = [torch.frombuffer(memoryview(buffer.numpy())[6 * i : 6 * i + 6], dtype=torch.float32) for i in (0, 1)]
    up, gate = (half.view(2, 3) for half in halves)
    assert gate.data_ptr() == up.data_ptr() + 24
    assert "gate_up.weight" not in bind({"layers.0.mlp.up.weight": up, "layers.0.mlp.gate.weight": gate})


class Seen(TorchDispatchMode):
    """Names of the operations whose result has `numel` numbers."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.names = numel, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() == self.numel:
            self.names.add(func.name().removeprefix("aten::").split(".")[0])
        return result


@pytest.mark.skipif(why_not() is not None, reason="no native products here")
@pytest.mark.parametrize("name", ["opt", "opt-350m", "galactica", "llama-gqa", "gpt-neox", "gemma3"])
def test_passes_that_products_save_are_not_priced(name: str) -> None:
    """ReLU and residual are operations of their own exactly where the cost model says so."""
    reference, rows = Reference(name, torch.bfloat16), 5
    spec = reference.spec
    hidden = torch.ones(rows, spec.hidden_width, dtype=torch.bfloat16)
    with torch.inference_mode(), Seen(rows * spec.hidden_size) as wide, Seen(rows * spec.ffn_size) as inner:
        Decoder(spec).mlp(reference.weights("layers.0.mlp"), hidden)
    saved = 0 if wide.names & {"add", "add_"} else 2 * spec.hidden_size
    if spec.arch.activation == "relu" and not spec.arch.gated_mlp and not inner.names & {"relu", "relu_"}:
        saved += 2 * spec.ffn_size
    slow = rates(elementwise_bytes_per_s=1.0)
    apart, fused = (
        model_of(OffloadPolicy(rows), spec=spec, machine=profile(replace(slow, fused_products=fused)))
        for fused in (False, True)
    )
    task = Task(TaskKind.COMPUTE, 1, 2, 0)
    assert spec.units[2].kind == "mlp"
    assert apart.compute_seconds(task) - fused.compute_seconds(task) == pytest.approx(rows * 2 * saved)
    attn = Task(TaskKind.COMPUTE, 1, 1, 0)
    residual = apart.compute_seconds(attn) - fused.compute_seconds(attn)
    assert residual == pytest.approx(0 if wide.names & {"add", "add_"} else rows * 2 * 2 * spec.hidden_size)
