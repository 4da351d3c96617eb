"""Mixtures of experts in all families: the fields of their config.json, and where checkpoints keep experts.

No torch. On the hub each expert has tensors of its own; transformers 5 keeps the experts of a layer in one tensor of
three dimensions, gate and up one after the other.
"""

from __future__ import annotations

from typing import Any

from h2o_flexgen.config.model.arch import ExpertSpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.errors import required
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import PARTS, plain_names
from h2o_flexgen.models.stored import Names, Parts, Stored, either

EXPERTS = {
    **PARTS,
    "mlp.router": "mlp.gate",
    **{f"mlp.experts.{part}.weight": f"mlp.experts.{{}}.{part}_proj.weight" for part in ("up", "gate", "down")},
}
"""The parts of a layer, as most checkpoints call them."""

FUSED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
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


def mixture_names(spec: ModelSpec, tables: tuple[Parts, ...] = (EXPERTS,)) -> Names:
    """Where a checkpoint may keep every tensor: by any of `tables`, or experts in transformers' own two of a layer."""
    return plain_names(spec, either(*tables, {**tables[-1], **in_one(spec, *FUSED)}))


def in_one(spec: ModelSpec, gate_up: str, down: str) -> dict[str, Stored]:
    """Experts in tensors `gate_up` (experts, 2 x ffn, hidden) and `down` (experts, hidden, ffn) of a layer."""
    experts = required(spec.arch.experts, "the model has no experts")
    count, ffn, hidden = experts.count, experts.ffn_size, spec.hidden_size
    wide, back = (count, 2 * ffn, hidden), (count, hidden, ffn)
    return {
        "mlp.experts.gate.weight": Stored(gate_up, ((0, ffn),), 2 * ffn * count, wide),
        "mlp.experts.up.weight": Stored(gate_up, ((ffn, 2 * ffn),), 2 * ffn * count, wide),
        "mlp.experts.down.weight": Stored(down, ((0, hidden),), hidden * count, back),
    }
