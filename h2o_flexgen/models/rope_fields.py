"""How a config.json describes rotary positions, old keys and new, resolved into a RotarySpec. No torch.

Old files have `rope_theta` beside `rope_scaling`, whose kind is `type` or `rope_type`; transformers 5 writes all into
one object, `rope_parameters`. Values mean what they mean in transformers 5.23 (modeling_rope_utils): linear
(kaiokendev), dynamic NTK (bloc97, emozilla), llama3 (Llama 3.1), YaRN (Peng et al., arXiv 2309.00071) and LongRoPE
(Ding et al., arXiv 2402.13753).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from h2o_flexgen.config.model.arch import RotarySpec
from h2o_flexgen.models.fields import ConfigReader


def rope_section(read: ConfigReader) -> ConfigReader:
    """The object with the scaling's fields: `rope_scaling` before `rope_parameters`, as transformers has it."""
    key = "rope_scaling" if read.section("rope_scaling").values() else "rope_parameters"
    fields = read.section(key)
    if any(isinstance(value, dict) for value in fields.values().values()):
        raise read.error(key, "one set of fields for all layers")
    return fields


def read_rotary(
    read: ConfigReader,
    head_dim: int,
    positions: int,
    theta: float = 10000.0,
    share: float | None = None,
    usual: Mapping[str, Any] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> RotarySpec:
    """The rotary positions of a family whose layers turn alike; `theta`: where none is given.

    share: of each head's dimensions that turn where the file does not say; None: heads of the family turn whole.
    usual: the fields of a file that has none.
    kinds: see `rotary_spec`.
    """
    fields = rope_section(read)
    fields = (fields if fields.values() else fields.filled(**usual or {})).filled(
        rope_theta=read.number("rope_theta", theta),
        partial_rotary_factor=read.number("partial_rotary_factor", share or 1.0),
    )
    if share is None:
        check_whole(fields, head_dim)
    original = read.whole_or_null("original_max_position_embeddings", None)
    return rotary_spec(fields, turned_dimensions(fields, head_dim), positions, original, kinds)


def check_whole(fields: ConfigReader, head_dim: int) -> None:
    """ModelError for heads that turn in part, where a family has none such, or that cannot be cut in two halves."""
    if fields.number("partial_rotary_factor", 1.0) != 1:
        raise fields.error("partial_rotary_factor", "1: this family turns whole heads")
    turned_dimensions(fields, head_dim)


def turned_dimensions(fields: ConfigReader, head_dim: int) -> int:
    """The leading dimensions of a head that turn: `partial_rotary_factor` of them, rounded down. ModelError."""
    dim = int(head_dim * fields.number("partial_rotary_factor", 1.0))
    if dim < 2 or dim % 2 or dim > head_dim:
        needed = f"a share of head_dim {head_dim} that is an even number of dimensions, at least 2 and at most all"
        raise fields.error("partial_rotary_factor", needed)
    return dim


def rotary_spec(
    fields: ConfigReader,
    dim: int,
    positions: int,
    original: int | None = None,
    kinds: Mapping[str, str] | None = None,
) -> RotarySpec:
    """The RotarySpec of an object with rotary fields, of which rope_theta has to be there.

    dim         dimensions of a head that turn
    positions   max_position_embeddings
    original    original_max_position_embeddings as given outside of the object, where it goes before the inner one
    kinds       the rope_type, a key of KINDS, for each of the file's words; None: these are the same
    """
    inner = original or fields.whole("original_max_position_embeddings", positions)
    base = RotarySpec(dim, fields.number("rope_theta"), original_positions=inner)
    key = "rope_type" if "rope_type" in fields else "type"
    return KINDS[fields.choice(key, "default", kinds or {name: name for name in KINDS})](fields, base, positions)


def context(rotary: RotarySpec, positions: int) -> int:
    """The longest sequence: `positions`, stretched where max_position_embeddings is the context before stretching.

    It is that under dynamic scaling by definition, and by custom under linear; YaRN's configs have either.
    """
    if rotary.scaling in ("linear", "dynamic"):
        return int(positions * rotary.factor)
    return max(positions, int(rotary.original_positions * rotary.factor)) if rotary.scaling == "yarn" else positions


def _dynamic(fields: ConfigReader, base: RotarySpec, positions: int) -> RotarySpec:
    if base.dim <= 2:
        raise fields.error("rope_type", f"another one: dynamic scaling of {base.dim} dimensions is undefined")
    return replace(base, scaling="dynamic", factor=fields.number("factor"), original_positions=positions)


def _llama3(fields: ConfigReader, base: RotarySpec, positions: int) -> RotarySpec:
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if high <= low:
        raise fields.error("high_freq_factor", f"more than low_freq_factor {low:g}")
    factor = fields.number("factor")
    return replace(base, scaling="llama3", factor=factor, low_freq_factor=low, high_freq_factor=high)


def _yarn(fields: ConfigReader, base: RotarySpec, positions: int) -> RotarySpec:
    fields = fields.without_zeros("mscale", "mscale_all_dim", "beta_fast", "beta_slow")
    if base.theta == 1:
        raise fields.error("rope_theta", "another base than 1, whose logarithm yarn divides by")
    factor = fields.number("factor", positions / base.original_positions)
    if "attention_factor" in fields:
        attention = fields.number("attention_factor")
    elif "mscale" in fields and "mscale_all_dim" in fields:
        attention = _yarn_scale(factor, fields.number("mscale")) / _yarn_scale(factor, fields.number("mscale_all_dim"))
    else:
        attention = _yarn_scale(factor, 1.0)
    return replace(
        base,
        scaling="yarn",
        factor=factor,
        attention_factor=attention,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        truncate=fields.flag("truncate", True),
    )


def _yarn_scale(factor: float, weight: float) -> float:
    """How much larger logits are to be when the context is stretched by `factor` (YaRN, equation 22)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(fields: ConfigReader, base: RotarySpec, positions: int) -> RotarySpec:
    original = base.original_positions
    if original < 2:
        raise fields.error("original_max_position_embeddings", "at least 2")
    factor = fields.number("factor", positions / original)
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return replace(
        base,
        scaling="longrope",
        factor=factor,
        attention_factor=fields.number("attention_factor", scale),
        short_factors=fields.numbers("short_factor", base.dim // 2),
        long_factors=fields.numbers("long_factor", base.dim // 2),
    )


KINDS: dict[str, Callable[[ConfigReader, RotarySpec, int], RotarySpec]] = {
    "default": lambda fields, base, positions: replace(base, original_positions=0),
    "linear": lambda fields, base, positions: replace(
        base, scaling="linear", factor=fields.number("factor"), original_positions=0
    ),
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
"""By every supported rope_type: adds its fields to a RotarySpec, given max_position_embeddings."""
