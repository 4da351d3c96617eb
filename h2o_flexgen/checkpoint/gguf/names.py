"""Where a GGUF file keeps a canonical tensor. The names are those of llama.cpp (its docs/gguf.md, "Standardized")."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from h2o_flexgen.checkpoint.files import Problems
from h2o_flexgen.checkpoint.gguf.architectures import ARCHITECTURES
from h2o_flexgen.checkpoint.gguf.blocks import FORMATS
from h2o_flexgen.checkpoint.gguf.config import MODULES
from h2o_flexgen.checkpoint.gguf.header import NEEDED, GgufHeader, GgufTensor
from h2o_flexgen.config.model.modules import ModuleSpec
from h2o_flexgen.config.model.packing import Packing
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.errors import ModelError
from h2o_flexgen.models.llama_like import PARTS

_OUTER = {
    "embed.tokens": "token_embd.weight",
    "head.norm.weight": "output_norm.weight",
    "head.norm.bias": "output_norm.bias",
    "head.vocab": "output.weight",
}
_ALONE = {"attn.sinks": "attn_sinks.weight", "mlp.choice": "exp_probs_b.bias"}
"""Names of what is no part of a module."""
_SHARED = {"shared_gate": "ffn_gate_inp_shexp", **{part: f"ffn_{part}_shexp" for part in ("up", "gate", "down")}}
"""Names of the shared expert, which all tokens go through."""
ROTARY_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that belong to the config: the divisors of the rotary frequencies."""


class StoredRows(NamedTuple):
    """Rows of a stored tensor that are a canonical one, or some of its rows: `take` of every `turns`, from `turn` on.

    start   the first of them
    rows    of the stored tensor in all
    heads   where it is not 0: rows come head by head, and within a head the two halves that are rotated against each
            other take turns, as llama.cpp keeps q and k of Llama; `rotated` are the first rows of a head, others stay
    offset  to be added to every number: GGUF has norms with the 1 that Gemma adds to them
    lists   of numbers that the stored tensor has one below the other, of which one is meant
    decay   whether the numbers are rates of decay: the canonical ones are the logarithms of what they are below 0
    columns where it is not 0: the rows that are taken together are that many stored rows' columns
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
    take: int = 1
    decay: bool = False
    columns: int = 0


class StoredTensor(NamedTuple):
    """A canonical tensor of the shape `whole`, or some of its rows: `place` in the stored `tensor`, as `shape`."""

    tensor: GgufTensor
    place: StoredRows
    shape: tuple[int, ...]
    whole: tuple[int, ...]


def bind(header: GgufHeader, spec: ModelSpec) -> dict[str, tuple[StoredTensor, ...]]:
    """Where each canonical tensor of `spec` is: in one stored tensor, or in some whose rows take turns.

    ModelError with all that is missing, misshapen or too much.
    """
    problems, found = Problems(), {}
    architecture = str(header.metadata.get("general.architecture"))
    shapes = {tensor.name: tuple(tensor.shape) for group in spec.weight_groups for tensor in group.tensors}
    count, used = spec.arch.experts.count if spec.arch.experts else 1, set[str]()
    for name, shape in shapes.items():
        first, *rest = _places(header, spec, name, shape)
        bare = first.name.removesuffix(".weight")  # as Falcon-H1's files have one
        if not rest and first.name not in header.tensors and bare in header.tensors:
            first = first._replace(name=bare)
        places = [_joint(header, place, count) for place in (first, *rest)]
        used.update(place.name for place in places)
        parts = [_bound(header, name, place, shape, problems) for place in places]
        found[name] = tuple(part for part in parts if part is not None)
    predicting = header.metadata.get(f"{architecture}.nextn_predict_layers", 0)
    behind = tuple(f"blk.{spec.num_layers + layer}." for layer in range(predicting))
    for name in header.tensors:
        if name not in used and name not in ROTARY_FACTORS and not name.startswith(behind):
            problems.add(f"tensor {name!r} is not part of this model")
    problems.raise_any(header.path, NEEDED.replace("GGUF file", "GGUF file of a model whose weights fit its metadata"))
    return found


def _joint(header: GgufHeader, place: StoredRows, count: int) -> StoredRows:
    """The rows of `place` in files that join tensors: all queries, then keys, then values; or all of an expert's gate,
    then all of its up."""
    found = re.fullmatch(r"(blk\.\d+\.attn_)([qkv])(\.\w+)", place.name)
    whole = header.tensors.get(f"{found[1]}qkv{found[3]}") if found and place.name not in header.tensors else None
    if found and whole:
        start = 0 if found[2] == "q" else whole.shape[0] - place.rows * (1 + (found[2] == "k"))
        return place._replace(name=f"{found[1]}qkv{found[3]}", start=start, rows=whole.shape[0])
    found = re.fullmatch(r"(blk\.\d+\.ffn_)(gate|up)(_exps\.\w+)", place.name)
    if found is None or place.name in header.tensors or f"{found[1]}gate_up{found[3]}" not in header.tensors:
        return place
    start = 2 * place.start + place.rows // count * (found[2] == "up")
    return place._replace(name=f"{found[1]}gate_up{found[3]}", start=start, rows=2 * place.rows)


def _bound(
    header: GgufHeader, name: str, place: StoredRows, shape: tuple[int, ...], problems: Problems
) -> StoredTensor | None:
    """The rows of canonical `name` that `place` has, of a tensor that is there and fits; None: a problem is added."""
    tensor = header.tensors.get(place.name)
    if tensor is None:
        problems.add(f"tensor {place.name!r} ({name}) is missing", download=True)
        return None
    stored = (place.rows, *shape[1:]) if place.lists == 1 else (place.lists, place.rows // place.lists)
    own = (shape[0] // place.turns * place.take, *shape[1:])
    if place.columns:
        stored = own = (shape[0] // place.turns * place.columns, place.take)
    if len(shape) == 1 and FORMATS[tensor.kind].dtype is None:
        problems.add(f"tensor {place.name!r} is a list in blocks of {tensor.kind}: needed floats")
    elif _flat(tensor.shape) == _flat(stored) or (
        place.lists == len(shape) == 1 and math.prod(tensor.shape) == shape[0]
    ):
        return StoredTensor(tensor, place, own, shape)
    else:
        problems.add(f"tensor {place.name!r}: expected shape {stored} from the metadata, found {tensor.shape}")
    return None


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A matrix's shape for those of all experts, one below the other; lists are matrices of one row."""
    return (1, *shape) if len(shape) == 1 else (math.prod(shape[:-1]), shape[-1])


def packings_of(header: GgufHeader, spec: ModelSpec) -> tuple[tuple[str, Packing], ...]:
    """The layouts that the tensors in blocks are converted to, by canonical name. ModelError as `bind` raises it.

    Where rows of several kinds take turns there is no layout for all of them, nor where rows are columns.
    """
    packings = (
        (name, {None if part.place.columns else FORMATS[part.tensor.kind].packing for part in parts})
        for name, parts in sorted(bind(header, spec).items())
    )
    whole = ((name, next(iter(kinds))) for name, kinds in packings if len(kinds) == 1)
    return tuple((name, packing) for name, packing in whole if packing is not None)


def _places(header: GgufHeader, spec: ModelSpec, name: str, shape: tuple[int, ...]) -> tuple[StoredRows, ...]:
    """Where the canonical tensor `name` of this shape is: in gpt-oss' experts rows of gate and up take turns."""
    architecture, rows = str(header.metadata.get("general.architecture")), shape[0]
    if isinstance(spec, ModuleSpec):
        place = _module_place(architecture, spec, name, rows)
        return _in_pieces(header, json.loads(spec.config), place, shape)
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


_MODULES = {
    "token_embd": "embed_tokens wte embeddings",
    "position_embd": "wpe",
    "output_norm": "norm final_layernorm ln_f norm_f",
    "token_embd_norm": "embedding_norm",
    "output": "lm_head",
}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm ln_1 operator_norm norm",
    "attn_q": "self_attn.q_proj mixer.q_proj",
    "attn_k": "self_attn.k_proj mixer.k_proj",
    "attn_v": "self_attn.v_proj mixer.v_proj",
    "attn_output": "self_attn.o_proj self_attn.dense self_attn.out_proj attn.c_proj mixer.o_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_q_norm": "self_attn.q_norm self_attn.q_layernorm self_attn.q_layernorm.norms",
    "attn_k_norm": "self_attn.k_norm self_attn.k_layernorm self_attn.k_layernorm.norms",
    "ffn_norm": "post_attention_layernorm ln_2 ffn_norm pre_ff_layernorm",
    "ffn_gate": "mlp.gate_proj feed_forward.w1 feed_forward.gate_proj",
    "ffn_up": "mlp.up_proj mlp.c_fc mlp.fc1 feed_forward.w3 feed_forward.up_proj mixer.up_proj",
    "ffn_down": "mlp.down_proj mlp.c_proj mlp.fc2 feed_forward.w2 feed_forward.down_proj mixer.down_proj",
    "ffn_gate_inp": "mlp.gate feed_forward.gate mixer.gate block_sparse_moe.router block_sparse_moe.router.layer",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj mlp.shared_expert.gate_proj shared_mlp.input_linear",
    "ffn_up_shexp": "mlp.shared_experts.up_proj mlp.shared_expert.up_proj mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj mlp.shared_expert.down_proj mixer.shared_experts.down_proj "
    "shared_mlp.output_linear",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ssm_in": "mixer.in_proj mamba.in_proj",
    "ssm_conv1d": "mixer.conv1d mamba.conv1d linear_attn.conv1d",
    "ssm_x": "mixer.x_proj",
    "ssm_dt": "mixer.dt_proj mamba.dt_proj",
    "ssm_out": "mixer.out_proj mamba.out_proj linear_attn.out_proj",
    "ssm_norm": "mixer.norm mamba.norm linear_attn.norm",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "attn_qkv": "attn.c_attn linear_attn.in_proj_qkv linear_attn.in_proj_qkvz",
    "attn_gate": "linear_attn.in_proj_z",
}
"""GGUF's names of transformers' modules, with those that they have there: outside of layers, and in them."""
_ALONE_THERE = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias"}
_ALONE_THERE |= dict.fromkeys(("e_score_correction_bias", "expert_bias"), "exp_probs_b.bias")
"""Of parameters that are no module's weight or bias."""


def _by_module(table: dict[str, str]) -> dict[str, str]:
    return {module: name for name, modules in table.items() for module in modules.split()}


_MODULE_OF, _LAYER_MODULE_OF = _by_module(_MODULES), _by_module(_LAYER_MODULES)
_PARTS = {part: _LAYER_MODULE_OF[module] for part, module in {**PARTS, "mlp.router": "mlp.gate"}.items()}
_PARTS |= {"attn.post_norm": "post_attention_norm", "mlp.post_norm": "post_ffw_norm"}
"""GGUF's names of the parts of a layer of our families."""


class GgufName(NamedTuple):
    """GGUF's name of a parameter, the layer that it is in, and which of several lists of one tensor it is."""

    name: str
    layer: int | None = None
    turn: int | None = None


def gguf_name(parameter: str) -> GgufName | None:
    """Of a parameter of transformers' modules; None: it is not known."""
    found = re.search(r"(?:^|\.)(?:layers|h)\.(\d+)\.(.+)$", parameter)
    if found is None:
        module, _, suffix = parameter.rpartition(".")
        outer = _MODULE_OF.get(module.rpartition(".")[2])
        return None if outer is None else GgufName(f"{outer}.{suffix}")
    layer, (module, _, suffix) = int(found[1]), found[2].rpartition(".")
    if suffix in _ALONE_THERE:
        return GgufName(f"blk.{layer}.{_ALONE_THERE[suffix]}", layer)
    stem, _, turn = module.rpartition(".")
    several = turn.isdecimal()
    name = _LAYER_MODULE_OF.get(stem if several else module)
    return None if name is None else GgufName(f"blk.{layer}.{name}.{suffix}", layer, int(turn) if several else None)


def _module_place(architecture: str, spec: ModuleSpec, name: str, rows: int) -> StoredRows:
    """As `_place`, of a tensor of transformers' modules. ModelError for one that GGUF has no name for."""
    each, row = spec.tensors[name], MODULES[architecture]
    if each.expert is not None and spec.arch.experts is not None:
        layer, kind = re.search(r"\.(\d+)\.", each.parameter), name.split(".")[-2]
        if kind == "joint" and each.parameter.endswith(".up_proj"):  # without a gate
            kind = "up"
        if layer is not None and kind in ("gate", "up", "down"):
            stored = f"blk.{layer[1]}.ffn_{kind}_exps.weight"
            return StoredRows(stored, each.expert * rows, spec.arch.experts.count * rows)
    found = gguf_name(each.parameter)
    if found is None:
        raise ModelError(f"{spec.name}: GGUF has no name for {each.parameter}", "needed the model's safetensors")
    if found.turn is not None:
        stem = each.parameter.removesuffix(f"{found.turn}.weight")
        lists = sum(other.parameter.startswith(stem) for other in spec.tensors.values())
        return StoredRows(found.name, found.turn * rows, lists * rows, lists=lists)
    stored = ".".join(row.names.get(word, word) for word in found.name.split("."))
    offset = -row.offset if stored.endswith("norm.weight") and ".ssm_norm." not in stored else 0.0
    place = StoredRows(stored, 0, rows, 0, offset, decay=stored.endswith("ssm_a"))
    part = re.search(r"\.attn_([qk])\.", stored)
    if part is None or found.layer is None or not row.turned:
        return place
    heads = spec.layers[found.layer].heads
    count = heads.queries if part[1] == "q" else heads.keys
    return place._replace(heads=count, rotated=rows // count)


def _in_pieces(
    header: GgufHeader, config: Mapping[str, Any], place: StoredRows, shape: tuple[int, ...]
) -> tuple[StoredRows, ...]:
    """Where a tensor of transformers' modules is that has its `place` but where a file has it in several pieces."""
    blk, _, part = place.name.partition(".attn_kv_b")
    if part and place.name not in header.tensors:  # newer files have both for each head, those of keys on their side
        nope, own, rank = config["qk_nope_head_dim"], config["v_head_dim"], shape[1]
        both = place._replace(turns=nope + own)
        keys = both._replace(name=f"{blk}.attn_k_b{part}", take=nope, columns=rank)
        rows = shape[0] // (nope + own) * own
        return keys, both._replace(name=f"{blk}.attn_v_b{part}", rows=rows, turn=nope, take=own)
    architecture = header.metadata.get("general.architecture")
    blk, shared, part = place.name.partition("_shexp")
    if shared and architecture == "granitehybrid":
        if place.name not in header.tensors:  # the only one, then
            place = place._replace(name=f"{blk}{part}")
        if ".ffn_gate" not in place.name:
            return (place,)
        gate = place._replace(rows=shape[0] // 2, turns=shape[0], take=shape[0] // 2)
        return gate, gate._replace(name=place.name.replace("ffn_gate", "ffn_up"), turn=shape[0] // 2)
    blk, _, part = place.name.partition(".attn_qkv")
    if architecture not in ("qwen3next", "qwen35", "qwen35moe") or not (part or ".ssm_conv1d." in place.name):
        return (place,)
    key_heads, value_heads = header.metadata[f"{architecture}.ssm.group_count"], config["linear_num_value_heads"]
    key, value = config["linear_key_head_dim"], config["linear_value_head_dim"] * value_heads
    keys, times = key_heads * key, value_heads // key_heads
    stored = place._replace(rows=2 * keys + value)
    old = f"{blk}.ssm_in{part}"
    if architecture == "qwen3next" and old in header.tensors:
        return (place._replace(name=old),)
    if architecture == "qwen3next":  # modules have a key head's queries, keys, values and gates together
        if not part:
            return (place,)
        own = value // key_heads
        period = stored._replace(turns=2 * (key + own))
        queries, whole = period._replace(take=key), period._replace(start=keys, turn=key, take=key)
        values = period._replace(start=2 * keys, turn=2 * key, take=own)
        gates = period._replace(name=f"{blk}.attn_gate{part}", rows=value, turn=2 * key + own, take=own)
        return queries, whole, values, gates
    period, each = stored._replace(turns=2 * times * keys + value), range(times)
    starts = ((half * keys, (half * times + i) * keys) for half in (0, 1) for i in each)
    pieces = (period._replace(start=start, turn=turn, take=keys) for start, turn in starts)
    return (*pieces, period._replace(start=2 * keys, turn=2 * times * keys, take=value))
