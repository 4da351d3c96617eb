"""The shape of a model: its tensors, its units, and what they take in bytes. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from h2o_flexgen.config.arch import ArchSpec, RotarySpec
from h2o_flexgen.config.checks import whole
from h2o_flexgen.config.tensors import (
    WeightGroup,
    attn_tensors,
    dtype_bytes,
    embed_tensors,
    head_tensors,
    mlp_tensors,
)
from h2o_flexgen.errors import ModelError, UsageError


@dataclass(frozen=True)
class UnitSpec:
    """One position of the computation, and the key of the weight group that it needs."""

    index: int
    name: str
    kind: Literal["embed", "attn", "mlp", "head"]
    layer: int | None
    weights: str


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
    def shares_prefixes(self) -> bool:
        """Whether equal first tokens have equal keys in every sequence, however long it is."""
        return not self._rotaries_by_length

    @property
    def rolling_slots(self) -> int:
        """Tokens that a cache may hold in a step if positions roll within it: the context.

        Where angles depend on the length it is the trained context: within that they are the same for all neighbours.
        """
        return min([self.max_positions, *(rotary.original_positions for rotary in self._rotaries_by_length)])

    @property
    def _rotaries_by_length(self) -> list[RotarySpec]:
        return [rotary for rotary in (self.arch.rotary, self.arch.local_rotary) if rotary and rotary.by_length]

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
        embed, head = embed_tensors(self), head_tensors(self)
        tied = self.arch.tied_head
        groups = [WeightGroup("vocab", embed + head) if tied else WeightGroup("embed", embed)]
        for layer in range(self.num_layers):
            groups.append(WeightGroup(f"layers.{layer}.attn", attn_tensors(self, f"layers.{layer}.attn")))
            groups.append(WeightGroup(f"layers.{layer}.mlp", mlp_tensors(self, f"layers.{layer}.mlp")))
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

    @property
    def hidden_width(self) -> int:
        """Numbers of one token's hidden state between two units: hidden_size, and beside it the sum that both halves of
        a parallel layer add to."""
        return self.hidden_size * (2 if self.arch.parallel else 1)

    def hidden_bytes(self, tokens: int, dtype: str) -> int:
        """Bytes of the hidden states of `tokens` tokens."""
        return tokens * self.hidden_width * dtype_bytes(dtype)

    @property
    def bridged(self) -> bool:
        """Whether project_in and project_out are there."""
        return self.embed_dim != self.hidden_size
