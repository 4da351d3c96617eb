"""The systems that can be compared: which adapter runs each, with which options, and which cannot run yet and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from h2o_flexgen.registry import Registry

Options = Callable[[float], dict[str, Any]]
"""From --hh-ratio to the `options` of a Work."""


@dataclass(frozen=True)
class System:
    """One row of the comparison.

    adapter       module that runs it, None where nothing does
    says          one line on how it is run, printed under the table; where nothing does, why
    own           whether it is this package: then a failure is ours
    """

    adapter: str | None
    says: str
    options: Options = lambda ratio: {}
    own: bool = False


_OWN = "h2o_flexgen.baselines.own"
_LATER = "no adapter yet"

SYSTEMS: Registry[System] = Registry("system")
SYSTEMS.register(
    "h2o",
    System(_OWN, "this package, KV cache at --hh-ratio", lambda ratio: {"name": "h2o", "ratio": ratio}, own=True),
)
SYSTEMS.register("full", System(_OWN, "this package, full KV cache", own=True))
SYSTEMS.register(
    "transformers", System("h2o_flexgen.baselines.transformers", "model.generate, SDPA attention, dynamic KV cache")
)
for _name in ("accelerate", "flexgen", "deepspeed", "kvpress"):
    SYSTEMS.register(_name, System(None, _LATER))
