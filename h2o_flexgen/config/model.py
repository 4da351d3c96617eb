"""The shape of a model: its tensors, its units, and what they cost in bytes and FLOPs. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from h2o_flexgen.config.checks import whole
from h2o_flexgen.errors import ModelError, UsageError
from h2o_flexgen.registry import suggestion

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]

DTYPES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per number."""

TENSOR_ALIGN = 64
"""Where a tensor may start in its unit's buffer: a cache line, and any SIMD load."""
PAGE = 4096
"""What a unit's buffer is rounded up to: a memory page, and the unit of O_DIRECT."""


def dtype_bytes(dtype: str) -> int:
    """Bytes per number of `dtype`; a dtype that is not in DTYPES raises UsageError."""
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}", f"needed one of {', '.join(DTYPES)}", suggestion(dtype, DTYPES))
    return DTYPES[dtype]


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class ArchSpec:
    """What one decoder layer is made of, apart from its sizes."""

    family: str
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = 1e-5
    norm_affine: bool = True
    """The norms have a weight (and a bias, if `norm` is layernorm)."""
    pre_norm: bool = True
    """False: the norm follows the residual addition, as in OPT-350m."""
    final_norm: bool = True
    activation: Activation = "relu"
    gated_mlp: bool = False
    attention_bias: bool = True
    mlp_bias: bool = True
    positions: Literal["learned", "rotary"] = "learned"
    position_offset: int = 0
    """Rows of the position table before that of position 0."""
    tied_head: bool = True


@dataclass(frozen=True)
class TensorSpec:
    """One weight by its canonical name; linear weights have the shape (out, in) of nn.Linear."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        product = 1
        for size in self.shape:
            product *= size
        return product

    def nbytes(self, dtype: str) -> int:
        """Its bytes in `dtype`."""
        return self.numel * dtype_bytes(dtype)


@dataclass(frozen=True)
class UnitSpec:
    """One position of the computation, and the key of the weight group that it needs."""

    index: int
    name: str
    kind: Literal["embed", "attn", "mlp", "head"]
    layer: int | None
    weights: str


@dataclass(frozen=True)
class WeightGroup:
    """The tensors that are loaded at once, as one contiguous buffer, in the order of that buffer."""

    key: str
    tensors: tuple[TensorSpec, ...]

    def nbytes(self, dtype: str) -> int:
        """The bytes of the tensors alone."""
        return sum(tensor.nbytes(dtype) for tensor in self.tensors)

    def buffer_bytes(self, dtype: str) -> int:
        """The bytes of the buffer: tensors start at multiples of TENSOR_ALIGN, the whole is a multiple of PAGE."""
        return round_up(sum(round_up(tensor.nbytes(dtype), TENSOR_ALIGN) for tensor in self.tensors), PAGE)


class FlopTerms(NamedTuple):
    """Matmul FLOPs (2 m n k for each) of one pass over the model, by what they are spent on."""

    projections: int
    """q, k, v and o."""
    attention: int
    """Scores and weighted values, causality not deducted."""
    mlp: int
    head: int
    """The output head at one position of each sequence, with project_out."""
    embedding: int
    """project_in; 0 for most models."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


@dataclass(frozen=True)
class ModelSpec:
    """The sizes of one model. Weights and costs follow from them; a size that cannot be raises ModelError."""

    name: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    embed_dim: int
    """Width of the token embedding; where it differs from hidden_size, project_in and project_out bridge them."""
    max_positions: int
    arch: ArchSpec
    bos_token_id: int
    eos_token_id: int | tuple[int, ...]
    pad_token_id: int | None
    dtype: str = "float16"

    def __post_init__(self) -> None:
        try:
            for name in ("vocab_size", "hidden_size", "ffn_size", "num_layers", "num_heads", "num_kv_heads"):
                whole(getattr(self, name), name, 1)
            for name in ("head_dim", "embed_dim", "max_positions"):
                whole(getattr(self, name), name, 1)
            dtype_bytes(self.dtype)
        except UsageError as error:
            raise ModelError(f"{self.name}: {error.found}", error.needed, error.change) from None
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.name}: {self.num_heads} query heads do not divide among {self.num_kv_heads} KV heads",
                "needed a whole number of query heads per KV head",
            )

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a sequence, as a tuple in every case."""
        return (self.eos_token_id,) if isinstance(self.eos_token_id, int) else self.eos_token_id

    @cached_property
    def units(self) -> tuple[UnitSpec, ...]:
        """Embedding, then each layer's attention and MLP half, then the output head."""
        first, last = ("vocab", "vocab") if self.arch.tied_head else ("embed", "head")
        units = [UnitSpec(0, "embed", "embed", None, first)]
        for layer in range(self.num_layers):
            for kind in ("attn", "mlp"):
                name = f"layers.{layer}.{kind}"
                units.append(UnitSpec(len(units), name, "attn" if kind == "attn" else "mlp", layer, name))
        units.append(UnitSpec(len(units), "head", "head", None, last))
        return tuple(units)

    @cached_property
    def weight_groups(self) -> tuple[WeightGroup, ...]:
        """What the units need, each group once, in the order of first use."""
        embed, head = self._embed_tensors(), self._head_tensors()
        tied = self.arch.tied_head
        groups = [WeightGroup("vocab", embed + head) if tied else WeightGroup("embed", embed)]
        for layer in range(self.num_layers):
            groups.append(WeightGroup(f"layers.{layer}.attn", self._attn_tensors(f"layers.{layer}.attn")))
            groups.append(WeightGroup(f"layers.{layer}.mlp", self._mlp_tensors(f"layers.{layer}.mlp")))
        return (*groups,) if tied else (*groups, WeightGroup("head", head))

    @cached_property
    def groups_by_key(self) -> dict[str, WeightGroup]:
        """The weight groups by their keys."""
        return {group.key: group for group in self.weight_groups}

    @cached_property
    def num_parameters(self) -> int:
        """Numbers in all weights, shared ones counted once."""
        return sum(tensor.numel for group in self.weight_groups for tensor in group.tensors)

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all weights, without the padding of buffers."""
        return self.num_parameters * dtype_bytes(dtype)

    def kv_bytes_per_token_and_layer(self, dtype: str) -> int:
        """Bytes of one token's key and value in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * dtype_bytes(dtype)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self.num_layers * self.kv_bytes_per_token_and_layer(dtype)

    def hidden_bytes(self, tokens: int, dtype: str) -> int:
        """Bytes of the hidden states of `tokens` tokens."""
        return tokens * self.hidden_size * dtype_bytes(dtype)

    def prefill_terms(self, prompt_len: int, batch: int = 1) -> FlopTerms:
        """FLOPs of `batch` prompts of `prompt_len` tokens; logits are made at the last position only."""
        return self._terms(tokens=batch * prompt_len, attended=batch * prompt_len * prompt_len, batch=batch)

    def decode_terms(self, batch: int, context: int) -> FlopTerms:
        """FLOPs of one step of `batch` sequences that attend to `context` tokens each, the new one included."""
        return self._terms(tokens=batch, attended=batch * context, batch=batch)

    def prefill_flops(self, prompt_len: int, batch: int = 1) -> int:
        """The sum of `prefill_terms`."""
        return self.prefill_terms(prompt_len, batch).total

    def decode_flops(self, batch: int, context: int) -> int:
        """The sum of `decode_terms`."""
        return self.decode_terms(batch, context).total

    def _terms(self, *, tokens: int, attended: int, batch: int) -> FlopTerms:
        hidden, bridge = self.hidden_size, self._bridged * self.hidden_size * self.embed_dim
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return FlopTerms(
            projections=self.num_layers * 2 * tokens * hidden * (2 * query + 2 * kv),
            attention=self.num_layers * 4 * attended * query,
            mlp=self.num_layers * 2 * tokens * hidden * self.ffn_size * (3 if self.arch.gated_mlp else 2),
            head=2 * batch * (self.embed_dim * self.vocab_size + bridge),
            embedding=2 * tokens * bridge,
        )

    @property
    def _bridged(self) -> bool:
        return self.embed_dim != self.hidden_size

    def _norm_tensors(self, prefix: str) -> tuple[TensorSpec, ...]:
        if not self.arch.norm_affine:
            return ()
        names = ("weight", "bias") if self.arch.norm == "layernorm" else ("weight",)
        return tuple(TensorSpec(f"{prefix}.norm.{name}", (self.hidden_size,)) for name in names)

    def _embed_tensors(self) -> tuple[TensorSpec, ...]:
        tensors = [TensorSpec("embed.tokens", (self.vocab_size, self.embed_dim))]
        if self.arch.positions == "learned":
            rows = self.max_positions + self.arch.position_offset
            tensors.append(TensorSpec("embed.positions", (rows, self.hidden_size)))
        if self._bridged:
            tensors.append(TensorSpec("embed.project_in", (self.hidden_size, self.embed_dim)))
        return tuple(tensors)

    def _head_tensors(self) -> tuple[TensorSpec, ...]:
        tensors = [TensorSpec("head.project_out", (self.embed_dim, self.hidden_size))] if self._bridged else []
        if self.arch.final_norm:
            tensors.extend(self._norm_tensors("head"))
        if not self.arch.tied_head:
            tensors.append(TensorSpec("head.vocab", (self.vocab_size, self.embed_dim)))
        return tuple(tensors)

    def _attn_tensors(self, prefix: str) -> tuple[TensorSpec, ...]:
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        widths = (("q", query), ("k", kv), ("v", kv))
        # q, k and v lie side by side, so that one view of the buffer is the fused projection.
        tensors = [TensorSpec(f"{prefix}.{name}.weight", (width, self.hidden_size)) for name, width in widths]
        if self.arch.attention_bias:
            tensors.extend(TensorSpec(f"{prefix}.{name}.bias", (width,)) for name, width in widths)
        tensors.append(TensorSpec(f"{prefix}.o.weight", (self.hidden_size, query)))
        if self.arch.attention_bias:
            tensors.append(TensorSpec(f"{prefix}.o.bias", (self.hidden_size,)))
        return (*self._norm_tensors(prefix), *tensors)

    def _mlp_tensors(self, prefix: str) -> tuple[TensorSpec, ...]:
        wide = ("up", "gate") if self.arch.gated_mlp else ("up",)
        tensors = [TensorSpec(f"{prefix}.{name}.weight", (self.ffn_size, self.hidden_size)) for name in wide]
        tensors.append(TensorSpec(f"{prefix}.down.weight", (self.hidden_size, self.ffn_size)))
        if self.arch.mlp_bias:
            tensors.extend(TensorSpec(f"{prefix}.{name}.bias", (self.ffn_size,)) for name in wide)
            tensors.append(TensorSpec(f"{prefix}.down.bias", (self.hidden_size,)))
        return (*self._norm_tensors(prefix), *tensors)
