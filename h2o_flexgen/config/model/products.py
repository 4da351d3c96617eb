"""The matrix products of a unit: what calibration measures and the cost model prices. No torch."""

from __future__ import annotations

from typing import NamedTuple

from h2o_flexgen.config.model.spec import ModelSpec


class Product(NamedTuple):
    """x (rows, in_features) times a weight (out_features, in_features)."""

    out_features: int
    in_features: int


def products(spec: ModelSpec, kind: str) -> tuple[Product, ...]:
    """The products of one unit, "embed", "attn", "mlp" or "head", in the order of computation.

    Projections of one input are one product, as they are where the engine lays out the buffer itself.
    """
    hidden, query, kv = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if kind == "embed":
        return (Product(hidden, spec.embed_dim),) if spec.bridged else ()
    if kind == "attn":
        return Product(query + 2 * kv, hidden), Product(hidden, query)
    if kind == "mlp":
        return Product(spec.ffn_size * (2 if spec.arch.gated_mlp else 1), hidden), Product(hidden, spec.ffn_size)
    vocab = Product(spec.vocab_size, spec.embed_dim)
    return (Product(spec.embed_dim, hidden), vocab) if spec.bridged else (vocab,)


def all_products(spec: ModelSpec) -> tuple[Product, ...]:
    """The products of all units, each shape once."""
    return tuple(
        dict.fromkeys(product for kind in ("attn", "mlp", "head", "embed") for product in products(spec, kind))
    )
