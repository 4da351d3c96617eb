"""Mixtures of experts in all families: the fields of their config.json, and where checkpoints keep experts.

No torch. On the hub each expert has tensors of its own; transformers 5 keeps the experts of a layer in one tensor of
three dimensions, gate and up one after the other.
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
"""The names in transformers 5 of the tensors of all experts of a layer."""
SLOPE = 1.702
"""Of the sigmoid in gpt-oss's gates: `clamped` in kernels/native/rows.c has it as well."""
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "moe_k")
"""The names that families have for how many experts there are, and how many of them a token chooses."""


def read_experts(read: ConfigReader, count: int, active: int, ffn_size: int, **switches: Any) -> ExpertSpec:
    """The experts of a config.json whose family has `count` by default, of which tokens choose `active`. ModelError."""
    key = next((key for key in _COUNTS if key in read), _COUNTS[0])
    chosen = next((key for key in _ACTIVE if key in read), _ACTIVE[0])
    made = ExpertSpec(read.whole(key, count), read.whole(chosen, active), ffn_size, **switches)
    if made.active > made.count:
        raise read.error(chosen, f"at most {key}, {made.count}")
    return made


def mixture_names(spec: ModelSpec, parts: Mapping[str, str] = EXPERTS, fused: Mapping[str, str] = FUSED) -> Names:
    """Where a checkpoint may keep every canonical tensor, experts one by one where `parts` names them so.

    fused   the tensors of all experts of a layer: "gate_up" (experts, 2 x ffn, hidden), "down" (experts, hidden, ffn)
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
