"""Where a GGUF file keeps a canonical tensor. The names are those of llama.cpp (its docs/gguf.md, "Standardized")."""

from __future__ import annotations

import math
from typing import NamedTuple

from h2o_flexgen.checkpoint.files import Problems
from h2o_flexgen.checkpoint.gguf.architectures import ARCHITECTURES
from h2o_flexgen.checkpoint.gguf.blocks import FORMATS
from h2o_flexgen.checkpoint.gguf.header import NEEDED, GgufHeader, GgufTensor
from h2o_flexgen.config.model.packing import Packing
from h2o_flexgen.config.model.spec import ModelSpec

_OUTER = {
    "embed.tokens": "token_embd.weight",
    "head.norm.weight": "output_norm.weight",
    "head.norm.bias": "output_norm.bias",
    "head.vocab": "output.weight",
}
_PARTS = {
    "attn.norm": "attn_norm",
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.o": "attn_output",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn.post_norm": "post_attention_norm",
    "mlp.norm": "ffn_norm",
    "mlp.up": "ffn_up",
    "mlp.gate": "ffn_gate",
    "mlp.down": "ffn_down",
    "mlp.post_norm": "post_ffw_norm",
    "mlp.router": "ffn_gate_inp",
}
_ALONE = {"attn.sinks": "attn_sinks.weight", "mlp.choice": "exp_probs_b.bias"}
"""Names of what is no part of a module."""
_SHARED = {
    "up": "ffn_up_shexp",
    "gate": "ffn_gate_shexp",
    "down": "ffn_down_shexp",
    "shared_gate": "ffn_gate_inp_shexp",
}
"""Names of the shared expert, which all tokens go through."""
ROTARY_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that belong to the config: what the rotary frequencies are divided by."""


class StoredRows(NamedTuple):
    """Rows of a stored tensor that are a canonical one, or those of its rows that are `turn` modulo `turns`.

    start   the first of them
    rows    of the stored tensor in all
    heads   where it is not 0: rows come head by head, and within a head the two halves that are rotated against each
            other take turns, as llama.cpp keeps q and k of Llama; `rotated` are the first rows of a head, others stay
    offset  to be added to every number: GGUF has norms with the 1 that Gemma adds to them
    lists   of numbers that the stored tensor has one below the other, of which one is meant
    """

    name: str
    start: int = 0
    rows: int = 0
    heads: int = 0
    offset: float = 0.0
    lists: int = 1
    rotated: int = 0
    turn: int = 0
    turns: int = 1


class StoredTensor(NamedTuple):
    """A canonical tensor, or the rows of it that a stored one has, of `shape`: `place` in the stored `tensor`."""

    tensor: GgufTensor
    place: StoredRows
    shape: tuple[int, ...]


def bind(header: GgufHeader, spec: ModelSpec) -> dict[str, tuple[StoredTensor, ...]]:
    """Where each canonical tensor of `spec` is: in one stored tensor, or in some whose rows take turns.

    ModelError with all that is missing, misshapen or too much.
    """
    problems, found = Problems(), {}
    architecture = str(header.metadata.get("general.architecture"))
    shapes = {tensor.name: tuple(tensor.shape) for group in spec.weight_groups for tensor in group.tensors}
    places = {name: _places(architecture, spec, name, shape[0]) for name, shape in shapes.items()}
    for name, those in places.items():
        parts = [_bound(header, name, place, shapes[name], problems) for place in those]
        found[name] = tuple(part for part in parts if part is not None)
    used = {place.name for those in places.values() for place in those}
    predicting = header.metadata.get(f"{architecture}.nextn_predict_layers", 0)
    behind = tuple(f"blk.{spec.num_layers + layer}." for layer in range(predicting))
    for name in header.tensors:
        if name not in used and name not in ROTARY_FACTORS and not name.startswith(behind):
            problems.add(f"tensor {name!r} is not part of this model")
    problems.raise_any(header.path, NEEDED.replace("GGUF file", "GGUF file of a model whose weights fit its metadata"))
    return found


def _bound(
    header: GgufHeader, name: str, place: StoredRows, shape: tuple[int, ...], problems: Problems
) -> StoredTensor | None:
    """The rows of canonical `name` that `place` has, of a tensor that is there and fits; None: a problem is added."""
    tensor = header.tensors.get(place.name)
    if tensor is None:
        problems.add(f"tensor {place.name!r} ({name}) is missing", download=True)
        return None
    stored = (place.rows, *shape[1:]) if place.lists == 1 else (place.lists, place.rows // place.lists)
    if len(shape) == 1 and FORMATS[tensor.kind].dtype is None:
        problems.add(f"tensor {place.name!r} is a list in blocks of {tensor.kind}: needed floats")
    elif _flat(tensor.shape) == _flat(stored):
        return StoredTensor(tensor, place, (shape[0] // place.turns, *shape[1:]))
    else:
        problems.add(f"tensor {place.name!r}: expected shape {stored} from the metadata, found {tensor.shape}")
    return None


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A matrix's shape for those of all experts, one below the other; lists are matrices of one row."""
    return (1, *shape) if len(shape) == 1 else (math.prod(shape[:-1]), shape[-1])


def packings_of(header: GgufHeader, spec: ModelSpec) -> tuple[tuple[str, Packing], ...]:
    """The layouts that the tensors in blocks are converted to, by canonical name. ModelError as `bind` raises it.

    Where rows of several kinds take turns, which llama.cpp does not write, there is no layout for all of them.
    """
    packings = (
        (name, {FORMATS[part.tensor.kind].packing for part in parts})
        for name, parts in sorted(bind(header, spec).items())
    )
    whole = ((name, next(iter(kinds))) for name, kinds in packings if len(kinds) == 1)
    return tuple((name, packing) for name, packing in whole if packing is not None)


def _places(architecture: str, spec: ModelSpec, name: str, rows: int) -> tuple[StoredRows, ...]:
    """Where the canonical tensor `name` of so many rows is: in gpt-oss' experts rows of gate and up take turns."""
    if ".gate_up." not in name:
        return (_place(architecture, spec, name, rows),)
    halves = (_place(architecture, spec, name.replace("gate_up", part), rows // 2) for part in ("gate", "up"))
    return tuple(half._replace(turn=turn, turns=2) for turn, half in enumerate(halves))


def _place(architecture: str, spec: ModelSpec, name: str, rows: int) -> StoredRows:
    """Where the canonical tensor `name` of so many rows is, in one stored tensor."""
    if name in _OUTER:
        return StoredRows(_OUTER[name], 0, rows, 0, -spec.arch.norm_offset if "norm" in name else 0.0)
    _, layer, alone = name.split(".", 2)
    if alone in _ALONE:
        return StoredRows(f"blk.{layer}.{_ALONE[alone]}", 0, rows)
    _, layer, half, part, *expert, suffix = name.split(".")
    if expert:  # one below the other
        number, part = int(expert[0]), expert[1]
        count = spec.arch.experts.count if spec.arch.experts else 1
        name = f"blk.{layer}.{_PARTS[f'{half}.{part}']}_exps.{suffix}"
        return StoredRows(name, number * rows, rows * count, lists=count if suffix == "bias" else 1)
    if part in _SHARED and half == "mlp" and spec.arch.experts_of(int(layer)) is not None:
        return StoredRows(f"blk.{layer}.{_SHARED[part]}.{suffix}", 0, rows)
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    row = ARCHITECTURES[architecture]
    stored = row.names.get(f"{half}.{part}", _PARTS[f"{half}.{part}"])
    if list(row.names.values()).count(stored) > 1:
        starts = {"q": 0, "k": query, "v": query + kv, "gate": 0, "up": spec.ffn_size}
        whole = 2 * spec.ffn_size if half == "mlp" else query + 2 * kv
        return StoredRows(f"blk.{layer}.{stored}.{suffix}", starts[part], whole)
    turned = row.turned == "all" or (row.turned == "rotated" and int(layer) not in spec.arch.unrotated)
    heads = {"q": spec.num_heads, "k": spec.num_kv_heads}.get(part, 0) if turned else 0
    offset = -spec.arch.norm_offset if part.endswith("norm") else 0.0
    rotated = spec.arch.rotary.dim if heads and spec.arch.rotary is not None else 0
    return StoredRows(f"blk.{layer}.{stored}.{suffix}", 0, rows, heads, offset, rotated=rotated)
