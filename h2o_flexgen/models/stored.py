"""Where a checkpoint keeps a canonical tensor: a whole tensor of its own, or rows of a larger one. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from h2o_flexgen.config.model.spec import ModelSpec


@dataclass(frozen=True)
class Stored:
    """Tensor `name` of a checkpoint, or the rows of it that make up a canonical tensor.

    spans   [start, stop) of rows (the first dimension, of biases too), one after another; None: all of it
    rows    how many rows the stored tensor has in all; read only with spans
    shape   of the stored tensor, where it has more dimensions: `rows` are those of all but the last one together
    transposed  its rows are the canonical tensor's columns

    Fused projections are rows of one tensor: in Phi-3 one span for each of q, k and v, in GPT-NeoX one per head.
    """

    name: str
    spans: tuple[tuple[int, int], ...] | None = None
    rows: int = 0
    shape: tuple[int, ...] = ()
    transposed: bool = False


Names = dict[str, tuple[str | Stored, ...]]
"""For every canonical tensor where a checkpoint may keep it, the usual place first; a str is a whole tensor."""


def fused(names: Iterable[str | Stored], spans: Iterable[tuple[int, int]], rows: int) -> tuple[Stored, ...]:
    """The same rows of a fused tensor under each of the names it may have."""
    kept = tuple(spans)
    return tuple(Stored(str(name), kept, rows) for name in names)


def one_after_another(names: Names, sizes: Mapping[str, int]) -> Names:
    """`names` where the parts of a layer that have `sizes` in rows ("mlp.gate") lie in one tensor, in this order.

    Parts of one half of a layer have the same name.
    """
    starts, ends = dict[str, int](), dict[str, int]()
    for part, rows in sizes.items():
        half = part.split(".")[0]
        starts[part] = ends.get(half, 0)
        ends[half] = starts[part] + rows
    found = dict(names)
    for name, places in names.items():
        part = ".".join(name.split(".")[2:4])
        if part in sizes:
            found[name] = fused(places, [(starts[part], starts[part] + sizes[part])], ends[part.split(".")[0]])
    return found


def pairs_apart(spec: ModelSpec, names: Names) -> Names:
    """The same for checkpoints whose rotated pairs lie side by side in a head, not half a rotation apart: q and k have
    the rows of each head in that other order here."""
    dim, turned = spec.head_dim, 0 if spec.arch.rotary is None else spec.arch.rotary.dim
    order = [*range(0, turned, 2), *range(1, turned, 2)]

    def turned_heads(heads: int) -> tuple[tuple[int, int], ...]:
        spans: list[tuple[int, int]] = []
        for start in range(0, heads * dim, dim):
            spans += [(start + row, start + row + 1) for row in order]
            spans.append((start + turned, start + dim))
        return tuple(spans)

    spans = {"q": turned_heads(spec.num_heads), "k": turned_heads(spec.num_kv_heads)}  # the same in all layers
    found = dict(names)
    for name, places in names.items():
        _, layer, *part = name.split(".") if name.startswith("layers.") else ("", "0", "")
        if part[:2] not in (["attn", "q"], ["attn", "k"]) or int(layer) in spec.arch.unrotated:
            continue
        heads = spec.num_heads if part[1] == "q" else spec.num_kv_heads
        found[name] = fused(places, spans[part[1]], heads * dim)
    return found


def named(
    spec: ModelSpec,
    prefixes: tuple[str, ...],
    outer: Mapping[str, str],
    parts: Mapping[str, str],
    head: tuple[str, ...] = ("lm_head.weight",),
) -> Names:
    """For every canonical tensor the names that it may have in a checkpoint, all behind each of `prefixes`.

    outer   the names outside of the layers, by the canonical ones
    parts   what the parts of a layer are called, such as "self_attn.q_proj" for "attn.q"; {} stands for an expert's
            number. Experts that are not there have no name of their own
    head    the names of an untied output head, without a prefix
    """

    def inner(canonical: str) -> str:
        if canonical in outer:
            return outer[canonical]
        _, layer, half, *part, suffix = canonical.split(".")
        if not part:  # a tensor of its own, of no module
            return f"layers.{layer}.{parts[f'{half}.{suffix}']}"
        if part[0] == "experts":
            return f"layers.{layer}.{parts[f'{half}.experts.{part[2]}'].format(part[1])}.{suffix}"
        return f"layers.{layer}.{parts[f'{half}.{part[0]}']}.{suffix}"

    def names(canonical: str) -> tuple[str | Stored, ...]:
        if ".experts." in canonical and "mlp.experts.down" not in parts:
            return ()
        return head if canonical == "head.vocab" else tuple(prefix + inner(canonical) for prefix in prefixes)

    return {tensor.name: names(tensor.name) for group in spec.weight_groups for tensor in group.tensors}
