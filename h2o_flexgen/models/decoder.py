"""The one decoder layer, driven by an ArchSpec: embedding, attention half, MLP half, output head.

Each method computes one unit for one GPU batch. Tokens are packed: during the prompt `hidden` is (T, hidden_width) with
the sequences one after another and no padding; while decoding T is the number of rows. The tensors of a unit arrive
bound by `bind`, wherever they live.

Between the units of a parallel layer `hidden` is twice as wide: columns [:H] hold the layer's input, which both halves
read, and columns [H:] what the attention half has added to it so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.config.model.arch import ArchSpec, ExpertSpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import WeightGroup
from h2o_flexgen.errors import required
from h2o_flexgen.kernels.experts import PLACE, Choices, Gate, add_experts, expert_place
from h2o_flexgen.kernels.halves import PLACE as HALF
from h2o_flexgen.kernels.halves import Form, HalfPlace
from h2o_flexgen.kernels.layers import ACTIVATIONS, gated, layer_norm, linear, rms_norm
from h2o_flexgen.kernels.packed import look_up
from h2o_flexgen.kernels.prompt import prefill_attention
from h2o_flexgen.kernels.types import Logits
from h2o_flexgen.models.mixture import SLOPE
from h2o_flexgen.models.rotary import Angles, Rotary, rotate_both

Weights = Mapping[str, Any]
"""Vectors and tables of positions are tensors, matrices tensors or packed (`kernels.packed.Weight`)."""
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q (T, heads, d), k (T, kv_heads, d), v (T, kv_heads, d)) -> (T, heads, d); rotates q and k, keeps the cache."""

Inner = Callable[[Tensor | None], Tensor]
"""The output of a half: (T, H), newly made, or added in place to what it is given."""
After = Callable[[Weights, Tensor, Inner], None]
"""Adds the output of a half to hidden."""


class Routed(NamedTuple):
    """Tokens after a mixture's router: `x` (T, H), the experts' input; `experts` (T, k) int64, the experts that each
    token chose; `shares` (T, k) float32, their weights; `shared` (T, H), the output of a shared expert.
    """

    x: Tensor
    experts: Tensor
    shares: Tensor
    shared: Tensor | None = None


_FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("up", "gate")}
"""Projections of the same input that one GEMM can do, in the order of their tensors in a unit's buffer."""


def bind(views: Weights) -> dict[str, Any]:
    """The tensors of a weight group under names without the layer and expert ("q.weight"), plus "qkv.*" and "gate_up.*"
    (rows of up, then of gate) where their parts adjoin.

    A fused projection is a view over the unit's buffer, made only if its tensors lie back to back in it: then one GEMM
    does the work of two or three. Straight-from-checkpoint units usually cannot be fused; they keep their own GEMMs.
    """
    bound = {local_name(name): tensor for name, tensor in views.items()}
    for fused, names in _FUSED.items():
        for kind in ("weight", "bias"):
            parts = [bound[f"{name}.{kind}"] for name in names if f"{name}.{kind}" in bound]
            if len(parts) == len(names) and (joined := as_one(parts)) is not None:
                bound[f"{fused}.{kind}"] = joined
        if f"{names[0]}.bias" in bound and f"{fused}.bias" not in bound:
            bound.pop(f"{fused}.weight", None)
    if any(name.split(".")[3:4] == ["experts"] for name in views):
        bound[PLACE] = expert_place(bound)
    return bound


def local_name(name: str) -> str:
    if not name.startswith("layers."):
        return name
    inner = name.split(".", 3)[3]
    return inner.split(".", 2)[2] if inner.startswith("experts.") else inner


def as_one(parts: Sequence[Any]) -> Tensor | None:
    """Tensors, back to back in memory, as one; None where they are not, or any is packed."""
    if not all(isinstance(each, Tensor) for each in parts) or not all(
        b.data_ptr() == a.data_ptr() + a.numel() * a.element_size()
        and b.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
        for a, b in pairwise(parts)
    ):
        return None
    first, rows = parts[0], sum(len(each) for each in parts)
    joint: Tensor = first.as_strided((rows, *first.shape[1:]), first.stride())
    return joint


class Decoder:
    """Computes units of one model. Stateless apart from the choices made at construction; safe to share."""

    def __init__(self, spec: ModelSpec, product: Callable[..., Tensor] = linear) -> None:
        """product: the matrix product, called like `linear`."""
        arch = spec.arch
        self.spec, self._arch, self._linear = spec, arch, product
        self.scale = spec.head_dim**-0.5 if arch.attention_scale is None else arch.attention_scale
        self.soft_cap = arch.attention_cap
        self._after_attn, self._after_mlp = self._halves(arch)
        self._feed_forward = self._gated if arch.gated_mlp else self._plain
        self._gate = Gate(arch.activation, arch.experts.clamp if arch.experts else None)
        self._head_name = "embed.tokens" if arch.tied_head else "head.vocab"
        self._embed_steps, self._head_steps = self._outer_steps(spec)
        self._heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self._form = self._form_of(arch) if product is linear else None
        specs = [arch.rotary_of(layer) for layer in range(spec.num_layers)]
        made = {each: Rotary(each, spec.max_positions) for each in set(specs) if each is not None}
        self._rotaries = [None if each is None else made[each] for each in specs]

    def scale_of(self, layer: int) -> float:
        """The factor of the logits of a layer's attention."""
        return self.scale

    def rotary_of(self, layer: int) -> Rotary | None:
        """How `layer` rotates queries and keys, the same object for all layers that do it alike; None: not at all."""
        return self._rotaries[layer]

    def embed(self, w: Weights, tokens: Tensor, positions: Tensor) -> Tensor:
        """(T,) token ids and (T,) absolute positions to hidden states (T, hidden_width)."""
        hidden = look_up(w["embed.tokens"], tokens)
        for step in self._embed_steps:
            hidden = step(w, hidden, positions)
        return hidden

    def attn(self, w: Weights, hidden: Tensor, attention: Attention, angles: Angles | None = None) -> None:
        """The attention half of a layer, residual included: updates hidden (T, hidden_width) in place.

        `attention` gets what `queries` returns, and `output` what it returns.
        """
        self.output(w, hidden, attention(*self.queries(w, hidden, angles)))

    def queries(self, w: Weights, hidden: Tensor, angles: Angles | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """q (T, heads, d), k and v (T, kv_heads, d) of hidden (T, hidden_width).

        q and k are normed and all are clamped where the model does that; q and k are rotated by `angles` (T, dim).
        """
        d, heads, half = self.spec.head_dim, self._heads, self._half(w, hidden)
        if half is not None and (angles is None or half.turns(angles, hidden.shape[0])):
            q, k, v = half.forward(hidden, angles).view(hidden.shape[0], -1, d).split_with_sizes(heads, 1)
            return q, k, v
        x = self._before(w, hidden)
        if "qkv.weight" in w:
            joined = self._linear(x, w["qkv.weight"], w.get("qkv.bias"))
            q, k, v = joined.view(x.shape[0], -1, d).split_with_sizes(heads, 1)
        else:
            apart = (self._linear(x, w[f"{p}.weight"], w.get(f"{p}.bias")) for p in "qkv")
            q, k, v = (t.view(len(x), count, d) for t, count in zip(apart, heads, strict=True))
        if self._arch.qk_norm:
            q, k = self._norm_heads(w, q, k)
        if (clip := self._arch.clip_qkv) is not None:
            for each in (q, k, v):
                each.clamp_(-clip, clip)
        return (q, k, v) if angles is None else (*rotate_both(q, k, angles), v)

    def output(self, w: Weights, hidden: Tensor, mixed: Tensor) -> None:
        """Brings the mixed values (T, heads, d) into hidden (T, hidden_width), in place.

        Reads no tensor of the unit but those of the output projection and the norms.
        """
        x, product, half = mixed.flatten(1), self._linear, self._half(w, hidden)
        if half is not None and half.takes(x):
            half.back(x, hidden)
            return
        self._after_attn(w, hidden, lambda onto: product(x, w["o.weight"], w.get("o.bias"), onto=onto))

    def mlp(self, w: Weights, hidden: Tensor) -> None:
        """The MLP half of a layer, residual included: updates hidden (T, hidden_width) in place."""
        half = self._half(w, hidden)
        if half is not None:
            half.whole(hidden)
            return
        self._after_mlp(w, hidden, lambda onto: self._feed_forward(w, self._before(w, hidden), onto))

    def route(self, w: Weights, hidden: Tensor) -> Routed:
        """The MLP half of a layer with experts up to the choice, of hidden (T, hidden_width), which stays as it is."""
        x, mixture = self._before(w, hidden), required(self._arch.experts, "the model has no experts")
        logits = self._linear(x, w["router.weight"], w.get("router.bias"), wide=True)
        experts, shares = choose(logits, mixture, w.get("choice"))
        if not mixture.shared_size:
            return Routed(x, experts, shares)
        shared = self._feed_forward(w, x, None)
        if mixture.shared_gate:
            shared.mul_(torch.sigmoid(self._linear(x, w["shared_gate.weight"])))
        return Routed(x, experts, shares, shared)

    def add_experts(
        self, x: Tensor, out: Tensor, choices: Choices, experts: range, weights: Sequence[Weights], most: int
    ) -> None:
        """Adds the outputs of `experts` (places in `choices`) for x (T, H) to `out` (T, H), `most` tokens at a time."""
        add_experts(x, out, choices, experts, weights, self._gate, most, self._expert)

    def add_mixture(self, hidden: Tensor, out: Tensor) -> None:
        """Ends the MLP half of a layer with experts: adds what they made to hidden (T, hidden_width), in place."""
        hidden.add_(out, alpha=self._arch.residual_scale)

    def head(self, w: Weights, hidden: Tensor) -> Tensor:
        """Logits (T, vocab_size) in float32 of hidden (T, hidden_width)."""
        for step in self._head_steps:
            hidden = step(w, hidden)
        logits = self._linear(hidden, w[self._head_name], wide=True)
        if self._arch.logit_scale != 1:
            logits.mul_(self._arch.logit_scale)
        if (cap := self._arch.logit_cap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    # ---- choices made at construction

    def _halves(self, arch: ArchSpec) -> tuple[After, After]:
        if arch.parallel:
            return self._parallel_attn, self._parallel_mlp
        if arch.post_norms:
            return self._add_normed, self._add_normed
        if arch.pre_norm:
            add = self._add if arch.residual_scale == 1 else self._scale_and_add
            return add, add
        return self._post_norm, self._post_norm

    def _outer_steps(
        self, spec: ModelSpec
    ) -> tuple[list[Callable[[Weights, Tensor, Tensor], Tensor]], list[Callable[[Weights, Tensor], Tensor]]]:
        """The steps of `embed` on the token embeddings, and of `head` on the hidden states before the last product."""
        arch, width = spec.arch, spec.hidden_size
        embed = [
            # Rounded to the embeddings' dtype first, as transformers does: in bfloat16 the square root of 3072 is 55.5.
            (arch.embed_scale != 1.0, lambda w, x, at: x.mul_(torch.tensor(arch.embed_scale, dtype=x.dtype).item())),
            (spec.bridged, lambda w, x, at: self._linear(x, w["embed.project_in"])),
            (
                arch.positions == "learned",
                lambda w, x, at: x.add_(F.embedding(at + arch.position_offset, w["embed.positions"])),
            ),
            (arch.parallel, lambda w, x, at: F.pad(x, (0, width))),
        ]
        head = [
            (arch.parallel, lambda w, x: x[:, :width]),
            (arch.final_norm, lambda w, x: self._norm(w, "head.norm", x)),
            (spec.bridged, lambda w, x: self._linear(x, w["head.project_out"])),
        ]
        return [step for wanted, step in embed if wanted], [step for wanted, step in head if wanted]

    # ---- halves in one call

    def _form_of(self, arch: ArchSpec) -> Form | None:
        """None where nothing but single kernels does it."""
        alone = arch.parallel or arch.residual_scale != 1 or arch.clip_qkv is not None
        if alone or not (arch.post_norms or arch.pre_norm):
            return None
        before, after = "norm" if arch.pre_norm else None, "post_norm" if arch.post_norms else None
        norm, heads = (arch.norm, arch.norm_eps, arch.norm_offset), (self.spec.num_heads, self.spec.num_kv_heads)
        return Form(*norm, before, after, arch.activation, arch.gated_mlp, heads, self.spec.head_dim, arch.qk_norm)

    def _half(self, w: Weights, hidden: Tensor) -> HalfPlace | None:
        """The HalfPlace that computes a half in one call for these tokens, or None; made once for a unit's tensors."""
        if self._form is None or not HalfPlace.takes(hidden):
            return None
        if HALF not in w and isinstance(w, dict):
            w[HALF] = HalfPlace.of(w, self._form)
        return w.get(HALF)

    # ---- norms

    def _norm(self, w: Weights, name: str, x: Tensor) -> Tensor:
        if self._arch.norm == "layernorm":
            return layer_norm(x, w.get(f"{name}.weight"), w.get(f"{name}.bias"), self._arch.norm_eps)
        return self._rms_norm(w, name, x)

    def _rms_norm(self, w: Weights, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, w.get(f"{name}.weight"), self._arch.norm_eps, self._arch.norm_offset)

    def _norm_heads(self, w: Weights, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self._arch.qk_norm_joint:
            q, k = ((t.flatten(1).unsqueeze(1)) for t in (q, k))
        normed = self._rms_norm(w, "q_norm", q), self._rms_norm(w, "k_norm", k)
        if not self._arch.qk_norm_joint:
            return normed
        return normed[0].view(len(q), -1, self.spec.head_dim), normed[1].view(len(k), -1, self.spec.head_dim)

    # ---- what comes before a half, and what after it: norms and residuals

    def _before(self, w: Weights, hidden: Tensor) -> Tensor:
        """The input of a half, given hidden: (T, H)."""
        x = hidden.chunk(2, dim=-1)[0] if self._arch.parallel else hidden
        return self._norm(w, "norm", x) if self._arch.pre_norm else x

    def _add(self, w: Weights, hidden: Tensor, inner: Inner) -> None:
        inner(hidden)

    def _scale_and_add(self, w: Weights, hidden: Tensor, inner: Inner) -> None:
        hidden.add_(inner(None), alpha=self._arch.residual_scale)

    def _post_norm(self, w: Weights, hidden: Tensor, inner: Inner) -> None:
        hidden.copy_(self._norm(w, "norm", inner(None).add_(hidden)))

    def _add_normed(self, w: Weights, hidden: Tensor, inner: Inner) -> None:
        hidden.add_(self._norm(w, "post_norm", inner(None)))

    def _parallel_attn(self, w: Weights, hidden: Tensor, inner: Inner) -> None:
        hidden.chunk(2, dim=-1)[1].copy_(inner(None))

    def _parallel_mlp(self, w: Weights, hidden: Tensor, inner: Inner) -> None:
        x, added = hidden.chunk(2, dim=-1)
        x.add_(inner(None).add_(added))

    # ---- what the MLP half computes: x (T, H) -> (T, H), see Inner

    def _plain(self, w: Weights, x: Tensor, onto: Tensor | None) -> Tensor:
        relu = self._arch.activation == "relu"
        up = self._linear(x, w["up.weight"], w.get("up.bias"), relu=relu)
        up = up if relu else ACTIVATIONS[self._arch.activation](up)
        return self._linear(up, w["down.weight"], w.get("down.bias"), onto=onto)

    def _expert(self, w: Weights, x: Tensor) -> Tensor:
        """x (T, H) -> (T, H): one expert."""
        if self._gate.clamp is None:
            return self._gated(w, x, None)
        gate, up = self._linear(x, w["gate_up.weight"], w["gate_up.bias"]).unflatten(1, (-1, 2)).unbind(2)
        gate, up = gate.clamp(max=self._gate.clamp), up.clamp(-self._gate.clamp, self._gate.clamp)
        return self._linear((up + 1) * gate * torch.sigmoid(gate * SLOPE), w["down.weight"], w["down.bias"])

    def _gated(self, w: Weights, x: Tensor, onto: Tensor | None) -> Tensor:
        if "gate_up.weight" in w:
            up, gate = self._linear(x, w["gate_up.weight"], w.get("gate_up.bias")).chunk(2, dim=-1)
        else:
            up, gate = (self._linear(x, w[f"{p}.weight"], w.get(f"{p}.bias")) for p in ("up", "gate"))
        return self._linear(gated(gate, up, self._arch.activation), w["down.weight"], w.get("down.bias"), onto=onto)


def choose(logits: Tensor, mixture: ExpertSpec, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts that tokens choose by their router's `logits` (T, count), and their weights: (T, active) each, int64
    and float32. bias: float32 (count,), of the choice alone."""
    if mixture.router == "chosen":
        best, experts = logits.topk(mixture.active, dim=-1)
        return experts, best.softmax(-1)
    scores = logits.sigmoid() if mixture.router == "each" else logits.softmax(-1)
    wanted = scores if bias is None else scores + bias
    if mixture.groups > 1:
        by_group = wanted.unflatten(-1, (mixture.groups, -1))
        groups = by_group.topk(2, dim=-1).values.sum(-1).topk(mixture.active_groups, dim=-1).indices
        left_out = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(-1, groups, False)
        wanted = by_group.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(-2)
    experts = wanted.topk(mixture.active, dim=-1).indices
    shares = scores.gather(-1, experts)
    if mixture.normalised:
        shares = shares / shares.sum(-1, keepdim=True).clamp(min=1e-20)
    return experts, shares if mixture.scale == 1 else shares * mixture.scale


_TEXTS, _LENGTH = 4, 256
"""More tokens made no difference."""

Read = Callable[[WeightGroup], dict[str, Tensor]]
"""The tensors of a group in the dtype and on the device that are computed with, each in memory of its own."""


def random_tokens(spec: ModelSpec) -> Tensor:
    """Token ids (n, S) to measure with, always the same for a model; each row starts as a text does."""
    size, generator = (_TEXTS, min(_LENGTH, spec.max_positions)), torch.Generator().manual_seed(0)
    tokens = torch.randint(0, spec.vocab_size, size, generator=generator)
    tokens[:, 0] = min(spec.bos_token_id, spec.vocab_size - 1)
    return tokens


def importance(spec: ModelSpec, read: Read, tokens: Tensor) -> dict[str, Tensor]:
    """The mean of the squares of each input, (ins) float32, of every matrix of the layers, by canonical name.
    The model has no experts.

    A rounding error of a weight reaches the output in proportion to its input. Scales that are searched for with these
    means as weights (`quant.weights.pack`) keep the error of the output small rather than that of the weights. They are
    the diagonal of the Hessian of GPTQ (Frantar et al. 2022, arXiv 2210.17323), and a small part of its work. Random
    tokens serve nearly as well as text: which inputs are large is the model's own doing more than its prompt's.

    tokens (n, S): token ids of n texts, where they are computed. Units are read one by one, in their order.
    """
    seen: dict[int, str] = {}
    found: dict[str, Tensor] = {}

    def observed(x: Tensor, weight: Tensor, bias: Tensor | None = None, **how: Any) -> Tensor:
        name = seen.get(id(weight))
        if name is not None:
            found[name] = x.float().square().mean(0)
        return linear(x, weight, bias, **how)

    decoder, (n, length) = Decoder(spec, observed), tokens.shape
    positions = torch.arange(length, device=tokens.device).repeat(n)
    hidden = torch.empty(0)
    for unit in spec.units[:-1]:
        tensors = read(spec.groups_by_key[unit.weights])
        seen = {id(tensor): name for name, tensor in tensors.items() if unit.layer is not None}
        weights = bind(tensors)
        if unit.layer is None:
            hidden = decoder.embed(weights, tokens.flatten(), positions)
        elif unit.kind == "attn":
            decoder.attn(weights, hidden, _attention(decoder, unit.layer, positions, n))
        else:
            decoder.mlp(weights, hidden)
    return found


def _attention(decoder: Decoder, layer: int, positions: Tensor, n: int) -> Attention:
    """Causal attention of n texts of one length to themselves."""
    rotary, window = decoder.rotary_of(layer), decoder.spec.arch.window_of(layer)
    length = len(positions) // n

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if rotary is not None:
            growth = rotary.growth(positions, q.dtype)
            q, k = rotate_both(q, k, rotary.angles(positions, torch.full_like(positions, length), q.dtype))
            q = q if growth is None else q * growth
        q, k, v = (each.unflatten(0, (n, length)).transpose(1, 2) for each in (q, k, v))
        found = prefill_attention(q, k, v, Logits(decoder.scale, decoder.soft_cap), False, window=window)
        return found.out.transpose(1, 2).flatten(0, 1)

    return attend
