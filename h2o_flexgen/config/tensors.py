"""The weights of a model: what each tensor is called and how large it is, and how tensors lie in a buffer. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

from h2o_flexgen.errors import UsageError
from h2o_flexgen.registry import suggestion

if TYPE_CHECKING:
    from h2o_flexgen.config.model import ModelSpec

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
class WeightGroup:
    """The tensors that are loaded at once, as one contiguous buffer, in the order of that buffer."""

    key: str
    tensors: tuple[TensorSpec, ...]

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """How many numbers each tensor holds: all that sizes depend on."""
        return tuple(tensor.numel for tensor in self.tensors)

    def nbytes(self, dtype: str) -> int:
        """The bytes of the tensors alone."""
        return sum(self.numels) * dtype_bytes(dtype)

    def buffer_bytes(self, dtype: str) -> int:
        """The bytes of the buffer: tensors start at multiples of TENSOR_ALIGN, the whole is a multiple of PAGE."""
        return _buffer_bytes(self.numels, dtype_bytes(dtype))


@cache  # a search asks for the sizes of the same few shapes many thousand times
def _buffer_bytes(numels: tuple[int, ...], size: int) -> int:
    return round_up(sum(round_up(numel * size, TENSOR_ALIGN) for numel in numels), PAGE)


def embed_tensors(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """Of the input embedding."""
    tensors = [TensorSpec("embed.tokens", (spec.vocab_size, spec.embed_dim))]
    if spec.arch.positions == "learned":
        rows = spec.max_positions + spec.arch.position_offset
        tensors.append(TensorSpec("embed.positions", (rows, spec.hidden_size)))
    if spec.bridged:
        tensors.append(TensorSpec("embed.project_in", (spec.hidden_size, spec.embed_dim)))
    return tuple(tensors)


def head_tensors(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """Of the output head, without the token embedding that a tied head uses."""
    tensors = [TensorSpec("head.project_out", (spec.embed_dim, spec.hidden_size))] if spec.bridged else []
    if spec.arch.final_norm:
        tensors.extend(_norm(spec, "head.norm"))
    if not spec.arch.tied_head:
        tensors.append(TensorSpec("head.vocab", (spec.vocab_size, spec.embed_dim)))
    if spec.arch.head_bias:
        tensors.append(TensorSpec("head.vocab_bias", (spec.vocab_size,)))
    return tuple(tensors)


def attn_tensors(spec: ModelSpec, prefix: str) -> tuple[TensorSpec, ...]:
    """Of a layer's attention half, named from `prefix` on."""
    arch, query, kv = spec.arch, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    widths = (("q", query), ("k", kv), ("v", kv))
    # q, k and v lie side by side, so that one view of the buffer is the fused projection.
    tensors = [TensorSpec(f"{prefix}.{name}.weight", (width, spec.hidden_size)) for name, width in widths]
    if arch.qkv_bias:
        tensors.extend(TensorSpec(f"{prefix}.{name}.bias", (width,)) for name, width in widths)
    tensors.append(TensorSpec(f"{prefix}.o.weight", (spec.hidden_size, query)))
    if arch.output_bias:
        tensors.append(TensorSpec(f"{prefix}.o.bias", (spec.hidden_size,)))
    if arch.qk_norm:
        tensors.extend(TensorSpec(f"{prefix}.{name}_norm.weight", (spec.head_dim,)) for name in "qk")
    return (*_half_norms(spec, prefix), *tensors)


def mlp_tensors(spec: ModelSpec, prefix: str) -> tuple[TensorSpec, ...]:
    """Of a layer's MLP half, named from `prefix` on."""
    wide = ("up", "gate") if spec.arch.gated_mlp else ("up",)
    tensors = [TensorSpec(f"{prefix}.{name}.weight", (spec.ffn_size, spec.hidden_size)) for name in wide]
    tensors.append(TensorSpec(f"{prefix}.down.weight", (spec.hidden_size, spec.ffn_size)))
    if spec.arch.mlp_bias:
        tensors.extend(TensorSpec(f"{prefix}.{name}.bias", (spec.ffn_size,)) for name in wide)
        tensors.append(TensorSpec(f"{prefix}.down.bias", (spec.hidden_size,)))
    return (*_half_norms(spec, prefix), *tensors)


def _half_norms(spec: ModelSpec, prefix: str) -> tuple[TensorSpec, ...]:
    post = _norm(spec, f"{prefix}.post_norm") if spec.arch.post_norms else ()
    return (*_norm(spec, f"{prefix}.norm"), *post)


def _norm(spec: ModelSpec, name: str) -> tuple[TensorSpec, ...]:
    if not spec.arch.norm_affine:
        return ()
    parts = ("weight", "bias") if spec.arch.norm == "layernorm" else ("weight",)
    return tuple(TensorSpec(f"{name}.{part}", (spec.hidden_size,)) for part in parts)
