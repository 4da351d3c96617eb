"""Where a checkpoint keeps a canonical tensor: a whole tensor of its own, or rows of a larger one. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

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


def one_after_another(name: str, sizes: Mapping[str, int]) -> dict[str, Stored]:
    """The parts of a layer that lie in its module `name`, one after another, by their `sizes` in rows ("mlp.gate")."""
    ends = list(accumulate(sizes.values()))
    return {
        part: Stored(name, ((end - rows, end),), ends[-1])
        for (part, rows), end in zip(sizes.items(), ends, strict=True)
    }


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
        found[name] = tuple(Stored(str(place), spans[part[1]], heads * dim) for place in places)
    return found


Parts = Mapping[str, str | Stored | tuple[str | Stored, ...]]
"""Where the parts of a layer are in it, such as "self_attn.q_proj" for "attn.q", or the rows of such a module: the
usual place first of several. A key with "weight" or another ending is of that tensor alone, whose place is given in
full, and one with "mlp.shared" of the MLP of all tokens in layers with experts. {} stands for an expert's number; rows
of a tensor that is all experts' are those of the first."""


def named(
    spec: ModelSpec,
    prefixes: tuple[str, ...],
    outer: Mapping[str, str],
    parts: Parts,
    head: tuple[str, ...] = ("lm_head.weight",),
) -> Names:
    """For every canonical tensor the names that it may have in a checkpoint, all behind each of `prefixes`.

    outer   the names outside of the layers, by the canonical ones
    head    the names of an untied output head, without a prefix
    """

    def places(canonical: str) -> tuple[str | Stored, ...]:
        if canonical == "head.vocab":
            return head
        if canonical in outer:
            return tuple(prefix + outer[canonical] for prefix in prefixes)
        _, layer, *words = canonical.split(".")
        expert = int(words.pop(2)) if words[1] == "experts" else 0
        if f"{words[0]}.shared.{words[1]}" in parts and spec.arch.experts_of(int(layer)) is not None:
            words.insert(1, "shared")
        whole, module = ".".join(words), ".".join(words[:-1])
        ways, ending = (parts[whole], "") if whole in parts else (parts[module], f".{words[-1]}")
        layers = [f"{prefix}layers.{layer}." for prefix in prefixes]
        return tuple(_within(layer, way, expert, ending) for way in _each(ways) for layer in layers)

    return {tensor.name: places(tensor.name) for group in spec.weight_groups for tensor in group.tensors}


def either(*tables: Parts) -> Parts:
    """The parts of a layer by any of these tables, which have the same ones."""
    ways = {part: [way for table in tables for way in _each(table[part])] for part in tables[0]}
    return {part: tuple(dict.fromkeys(each)) for part, each in ways.items()}


def _each(ways: str | Stored | tuple[str | Stored, ...]) -> tuple[str | Stored, ...]:
    return ways if isinstance(ways, tuple) else (ways,)


def _within(layer: str, way: str | Stored, expert: int, ending: str) -> str | Stored:
    if isinstance(way, str):
        return layer + way.format(expert) + ending
    before = expert * way.shape[1] if expert else 0
    spans = None if way.spans is None else tuple((start + before, stop + before) for start, stop in way.spans)
    return Stored(layer + way.name + ending, spans, way.rows, way.shape, way.transposed)
