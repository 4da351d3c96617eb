"""The one decoder layer, driven by an ArchSpec: embedding, attention half, MLP half, output head.

Each method computes one unit for one GPU batch. Tokens are packed: during the prompt `hidden` is (T, hidden_size) with
the sequences one after another and no padding; while decoding T is the number of rows. All branches on the
architecture are taken here, at construction; the tensors of a unit arrive bound by `bind`, wherever they live.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.config.model import ModelSpec

Weights = Mapping[str, Tensor]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q (T, heads, d), k (T, kv_heads, d), v (T, kv_heads, d)) -> (T, heads, d); keeps the cache."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def bind(views: Weights) -> dict[str, Tensor]:
    """The tensors of a weight group under names without the layer ("q.weight"), plus "qkv.*" where these adjoin.

    A fused projection is a view over the unit's buffer, made only if the three tensors lie back to back in it: then
    one GEMM does the work of three. Straight-from-checkpoint units usually cannot be fused; they keep three GEMMs.
    """
    bound = {(name.split(".", 3)[3] if name.startswith("layers.") else name): tensor for name, tensor in views.items()}
    for part in ("weight", "bias"):
        parts = [bound[f"{p}.{part}"] for p in "qkv" if f"{p}.{part}" in bound]
        if len(parts) == 3 and _adjacent(parts):
            rows = sum(p.shape[0] for p in parts)
            first = parts[0]
            bound[f"qkv.{part}"] = first.as_strided((rows, *first.shape[1:]), first.stride())
    if "qkv.weight" in bound and "q.bias" in bound and "qkv.bias" not in bound:
        del bound["qkv.weight"]
    return bound


def _adjacent(tensors: list[Tensor]) -> bool:
    pairs = pairwise(tensors)
    return all(b.data_ptr() == a.data_ptr() + a.numel() * a.element_size() for a, b in pairs)


class Decoder:
    """Computes units of one model. Stateless apart from the choices made at construction; safe to share."""

    def __init__(self, spec: ModelSpec) -> None:
        arch = spec.arch
        if arch.positions != "learned" or arch.norm != "layernorm" or arch.gated_mlp:
            raise NotImplementedError(f"{arch.family}: only learned positions, LayerNorm and plain MLPs are built yet")
        self.spec = spec
        self._activation = _ACTIVATIONS[arch.activation]
        self._eps = arch.norm_eps
        self._half = self._pre_norm_half if arch.pre_norm else self._post_norm_half
        self._position_offset = arch.position_offset
        self._head_name = "embed.tokens" if arch.tied_head else "head.vocab"
        self._final_norm = arch.final_norm
        self._sizes = [n * spec.head_dim for n in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
        self.scale = spec.head_dim**-0.5

    def embed(self, w: Weights, tokens: Tensor, positions: Tensor) -> Tensor:
        """(T,) token ids and (T,) absolute positions to hidden states (T, hidden_size)."""
        hidden = F.embedding(tokens, w["embed.tokens"])
        if "embed.project_in" in w:
            hidden = F.linear(hidden, w["embed.project_in"])
        return hidden + F.embedding(positions + self._position_offset, w["embed.positions"])

    def attn(self, w: Weights, hidden: Tensor, attention: Attention) -> None:
        """The attention half of a layer, residual included: updates hidden (T, hidden_size) in place."""
        self._half(w, hidden, lambda x: self._attend(w, x, attention))

    def mlp(self, w: Weights, hidden: Tensor) -> None:
        """The MLP half of a layer, residual included: updates hidden (T, hidden_size) in place."""
        self._half(w, hidden, lambda x: self._feed_forward(w, x))

    def head(self, w: Weights, hidden: Tensor) -> Tensor:
        """Logits (T, vocab_size) in float32."""
        if self._final_norm:
            hidden = self._norm(w, "head.norm", hidden)
        if "head.project_out" in w:
            hidden = F.linear(hidden, w["head.project_out"])
        return F.linear(hidden, w[self._head_name]).float()

    def _norm(self, w: Weights, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), w.get(f"{name}.weight"), w.get(f"{name}.bias"), self._eps)

    def _pre_norm_half(self, w: Weights, hidden: Tensor, inner: Callable[[Tensor], Tensor]) -> None:
        hidden.add_(inner(self._norm(w, "norm", hidden)))

    def _post_norm_half(self, w: Weights, hidden: Tensor, inner: Callable[[Tensor], Tensor]) -> None:
        hidden.copy_(self._norm(w, "norm", inner(hidden).add_(hidden)))

    def _attend(self, w: Weights, x: Tensor, attention: Attention) -> Tensor:
        if "qkv.weight" in w:
            q, k, v = F.linear(x, w["qkv.weight"], w.get("qkv.bias")).split(self._sizes, dim=-1)
        else:
            q, k, v = (F.linear(x, w[f"{p}.weight"], w.get(f"{p}.bias")) for p in "qkv")
        q, k, v = (t.unflatten(-1, (-1, self.spec.head_dim)) for t in (q, k, v))
        return F.linear(attention(q, k, v).flatten(1), w["o.weight"], w.get("o.bias"))

    def _feed_forward(self, w: Weights, x: Tensor) -> Tensor:
        up = self._activation(F.linear(x, w["up.weight"], w.get("up.bias")))
        return F.linear(up, w["down.weight"], w.get("down.bias"))
