"""What families with mixtures of experts share: the fields of their config.json, and where checkpoints keep experts.

No torch. On the hub each expert has tensors of its own; transformers 5 keeps those of a layer in one tensor of three
dimensions, gate and up one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from h2o_flexgen.config.model.arch import ExpertSpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import PARTS, plain_names
from h2o_flexgen.models.stored import Names, Stored

EXPERTS = {
    **PARTS,
    "mlp.router": "mlp.gate",
    "mlp.experts.up": "mlp.experts.{}.up_proj",
    "mlp.experts.gate": "mlp.experts.{}.gate_proj",
    "mlp.experts.down": "mlp.experts.{}.down_proj",
}
"""The parts of a layer, as most checkpoints call them; {} stands for the number of an expert."""

FUSED = {"gate_up": "mlp.experts.gate_up_proj", "down": "mlp.experts.down_proj"}
"""What transformers 5 calls the tensors of all experts of a layer."""


_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "moe_k")
"""The names that families have for how many experts there are, and how many of them a token chooses."""
SHARED = {f"mlp.{part}": f"mlp.shared_experts.{part}_proj" for part in ("up", "gate", "down")}
"""The MLP that all tokens go through, in the families whose router is DeepSeek's."""


def read_experts(read: ConfigReader, count: int, active: int, ffn_size: int, **switches: Any) -> ExpertSpec:
    """The experts of a config.json whose family has `count` by default, of which tokens choose `active`. ModelError."""
    key = next((key for key in _COUNTS if key in read), _COUNTS[0])
    chosen = next((key for key in _ACTIVE if key in read), _ACTIVE[0])
    made = ExpertSpec(read.whole(key, count), read.whole(chosen, active), ffn_size, **switches)
    if made.active > made.count:
        raise read.error(chosen, f"at most {key}, {made.count}")
    return made


def read_groups(
    read: ConfigReader, spec: ModelSpec, count: int, active: int, *, normalised: bool, shared: int, dense: int
) -> ExpertSpec:
    """Experts by DeepSeek's router: a sigmoid of each logit, a bias for the choice, groups, a scale. ModelError.

    count, active, normalised, shared, dense   the family's defaults: of all experts, of those that a token chooses, of
        dividing their weights by the sum, of experts for all tokens, and of plain layers before the others
    """
    size = read.whole("moe_intermediate_size", 1408)
    made = read_experts(
        read,
        count,
        active,
        size,
        normalised=read.flag("norm_topk_prob", normalised),
        shared_size=size * read.count("n_shared_experts", shared),
        shared_gate=False,
        dense=tuple(range(min(read.count("first_k_dense_replace", dense), spec.num_layers))),
        router="each",
        choice_bias=True,
        groups=read.whole("n_group", 1),
        active_groups=read.whole("topk_group", 1),
        scale=read.number("routed_scaling_factor", 1.0),
    )
    size = read.divide("n_routed_experts", made.count, "n_group", made.groups)
    if made.active_groups > made.groups or (made.groups > 1 and size < 2):
        raise read.error("topk_group", f"at most n_group, {made.groups}, whose groups have two experts at least")
    if made.active > made.active_groups * size:
        needed = f"at most the {made.active_groups * size} of {made.active_groups} groups"
        raise read.error("num_experts_per_tok", needed)
    return made


_PREDICTING = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")
"""The names that families have for how many layers predict more tokens at once."""


def predicting_layers(read: ConfigReader) -> int:
    """How many there are behind the others: one where a config.json does not say, of which the checkpoint may be."""
    return read.count(next((key for key in _PREDICTING if key in read), _PREDICTING[0]), 1)


def dense_layers(read: ConfigReader, layers: int) -> tuple[int, ...]:
    """The layers without experts in the Qwen families: `mlp_only_layers`, and all but every `decoder_sparse_step`th."""
    listed = read.whole_list("mlp_only_layers")
    step = read.whole("decoder_sparse_step", 1)
    return tuple(layer for layer in range(layers) if layer in listed or (layer + 1) % step)


def mixture_names(spec: ModelSpec, parts: Mapping[str, str] = EXPERTS, fused: Mapping[str, str] = FUSED) -> Names:
    """Where a checkpoint may keep every canonical tensor, experts one by one where `parts` names them so.

    fused   what the tensors of all experts of a layer together are called: "gate_up" (experts, 2 x ffn, hidden), "down"
            (experts, hidden, ffn)
    """
    names = plain_names(spec, parts)
    experts = spec.arch.experts
    if experts is None:
        return names
    ffn, hidden = experts.ffn_size, spec.hidden_size
    kept = {
        "gate": ("gate_up", 0, ffn, (experts.count, 2 * ffn, hidden)),
        "up": ("gate_up", ffn, 2 * ffn, (experts.count, 2 * ffn, hidden)),
        "down": ("down", 0, hidden, (experts.count, hidden, ffn)),
    }
    for name in (name for name in names if ".experts." in name):
        _, layer, _, _, number, part, _ = name.split(".")
        whole, first, last, shape = kept[part]
        start = int(number) * shape[1]
        places = tuple(
            Stored(
                f"{prefix}layers.{layer}.{fused[whole]}",
                ((start + first, start + last),),
                shape[0] * shape[1],
                shape,
            )
            for prefix in ("model.", "")
        )
        names[name] = (*names[name], *places)
    return names


def names_beside_dense(spec: ModelSpec, parts: Mapping[str, str]) -> Names:
    """`mixture_names` where some layers have a plain MLP under the usual names, and `parts` are of the other layers."""
    names, plain = (mixture_names(spec, each) for each in (parts, {**parts, **PARTS}))
    dense = {f"layers.{layer}." for layer in range(spec.num_layers) if spec.arch.experts_of(layer) is None}
    return {name: plain[name] if name.startswith(tuple(dense)) else places for name, places in names.items()}


def either(first: Names, second: Names) -> Names:
    """Where a checkpoint may keep every tensor by one of two sets of names."""
    return {name: tuple(dict.fromkeys((*places, *second[name]))) for name, places in first.items()}
