"""Every eviction policy that there is: tests that should hold for all of them run over these rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.splits import SPLITS
from tests.oracles.eviction import (
    EvictionOracle,
    FullOracle,
    H2OOracle,
    HeavyOracle,
    LocalOracle,
    RandomOracle,
    StreamingOracle,
)
from tests.oracles.policies import (
    DefensiveOracle,
    ExpectedAttentionOracle,
    H2OMeanOracle,
    InertiaOracle,
    KeyDiffOracle,
    KnormOracle,
    KVzipOracle,
    NaclOracle,
    PyramidKVOracle,
    RKVOracle,
    RoCoOracle,
    ScissorhandsOracle,
    SnapKVDecodeOracle,
    SnapKVOracle,
    TovaOracle,
    VaseOracle,
    then_h2o,
)


@dataclass(frozen=True)
class PolicyRow:
    """A policy by name, the budget to try it at and the oracle that says what it should do."""

    name: str
    oracle: type[EvictionOracle]
    config: dict[str, Any] = field(default_factory=lambda: {"ratio": 0.3})

    def eviction(self, **changes: Any) -> EvictionConfig:
        """The config, with `changes`; a budget in tokens takes the place of the ratio."""
        config = {key: value for key, value in self.config.items() if key != "ratio" or "budget" not in changes}
        return EvictionConfig(**{"name": self.name, **config, **changes})


POLICIES = (
    PolicyRow("full", FullOracle, {}),
    PolicyRow("h2o", H2OOracle),
    PolicyRow("streaming", StreamingOracle, {"ratio": 0.3, "sinks": 2}),
    PolicyRow("local", LocalOracle),
    PolicyRow("heavy", HeavyOracle),
    PolicyRow("random", RandomOracle, {"ratio": 0.3, "seed": 7}),
)
EVICTING = tuple(row for row in POLICIES if row.name != "full")
SCORED = tuple(row for row in POLICIES if row.name in ("h2o", "heavy", "random"))
LATER = (
    PolicyRow("tova", TovaOracle),
    PolicyRow("knorm", KnormOracle),
    PolicyRow("keydiff", KeyDiffOracle),
    PolicyRow("h2o_mean", H2OMeanOracle),
    PolicyRow("inertiakv", InertiaOracle),
    PolicyRow("roco", RoCoOracle),
    PolicyRow("scissorhands", ScissorhandsOracle),
    PolicyRow("rkv", RKVOracle),
    PolicyRow("vase", VaseOracle, {"ratio": 0.3, "seed": 7}),
    PolicyRow("snapkv_decode", SnapKVDecodeOracle),
    PolicyRow("snapkv", SnapKVOracle, {"ratio": 0.6}),
    PolicyRow("pyramidkv", PyramidKVOracle, {"ratio": 0.6, "recent": 2}),
    PolicyRow("nacl", NaclOracle, {"ratio": 0.6, "seed": 7}),
    PolicyRow("defensivekv", DefensiveOracle, {"ratio": 0.6}),
    PolicyRow("kvzip", KVzipOracle, {"ratio": 0.6, "sinks": 1}),
    PolicyRow("expected_attention", ExpectedAttentionOracle, {"ratio": 0.6, "sinks": 1}),
)
"""Newer policies. They go through the same cache as the first ones: some pairs with the rest are enough."""
PROMPT_ONLY = tuple(row for row in LATER if SPLITS.get(row.name).prompt_only)
THEN_H2O = tuple(
    PolicyRow(f"{row.name}+h2o", then_h2o(row.oracle), {**row.config, "ratio": 0.3}) for row in PROMPT_ONLY
)
