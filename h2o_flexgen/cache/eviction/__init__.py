"""Eviction policies by name. A new one is a file here, a line below, its split in `config.splits` and its oracle."""

from __future__ import annotations

from h2o_flexgen.cache.eviction.arrival import ArrivalPolicy
from h2o_flexgen.cache.eviction.base import EvictionPolicy, RankedPolicy
from h2o_flexgen.cache.eviction.defensivekv import DefensivePolicy
from h2o_flexgen.cache.eviction.expected_attention import ExpectedAttentionPolicy
from h2o_flexgen.cache.eviction.full import FullPolicy
from h2o_flexgen.cache.eviction.h2o import H2OPolicy
from h2o_flexgen.cache.eviction.h2o_mean import H2OMeanPolicy
from h2o_flexgen.cache.eviction.heavy import HeavyPolicy
from h2o_flexgen.cache.eviction.inertiakv import InertiaPolicy
from h2o_flexgen.cache.eviction.keydiff import KeyDiffPolicy
from h2o_flexgen.cache.eviction.knorm import KnormPolicy
from h2o_flexgen.cache.eviction.kvzip import KVzipPolicy
from h2o_flexgen.cache.eviction.local import LocalPolicy
from h2o_flexgen.cache.eviction.nacl import NaclPolicy
from h2o_flexgen.cache.eviction.pyramidkv import PyramidKVPolicy
from h2o_flexgen.cache.eviction.random import RandomPolicy
from h2o_flexgen.cache.eviction.rkv import RKVPolicy
from h2o_flexgen.cache.eviction.roco import RoCoPolicy
from h2o_flexgen.cache.eviction.scissorhands import ScissorhandsPolicy
from h2o_flexgen.cache.eviction.snapkv import SnapKVPolicy
from h2o_flexgen.cache.eviction.snapkv_decode import SnapKVDecodePolicy
from h2o_flexgen.cache.eviction.streaming import StreamingPolicy
from h2o_flexgen.cache.eviction.then_h2o import ThenH2O
from h2o_flexgen.cache.eviction.tova import TovaPolicy
from h2o_flexgen.cache.eviction.vase import VasePolicy
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.splits import base_of
from h2o_flexgen.registry import Registry

EVICTION_POLICIES: Registry[type[EvictionPolicy]] = Registry("eviction policy")
for _policy in (
    FullPolicy,
    H2OPolicy,
    StreamingPolicy,
    LocalPolicy,
    HeavyPolicy,
    RandomPolicy,
    TovaPolicy,
    SnapKVPolicy,
    PyramidKVPolicy,
    KeyDiffPolicy,
    KnormPolicy,
    ExpectedAttentionPolicy,
    NaclPolicy,
    KVzipPolicy,
    DefensivePolicy,
    RoCoPolicy,
    ScissorhandsPolicy,
    RKVPolicy,
    VasePolicy,
    SnapKVDecodePolicy,
    H2OMeanPolicy,
    InertiaPolicy,
):
    EVICTION_POLICIES.register(_policy.name, _policy)


def make_policy(config: EvictionConfig) -> EvictionPolicy:
    """The policy that `config` names; UsageError with a suggestion for an unknown name."""
    first = EVICTION_POLICIES.get(base_of(config.name))(seed=config.seed)
    if config.spans is not None and config.name != "full" and not isinstance(first, RankedPolicy):
        return ArrivalPolicy()
    if base_of(config.name) == config.name or not isinstance(first, RankedPolicy):
        return first
    return ThenH2O(first)


__all__ = ["EVICTION_POLICIES", "EvictionPolicy", "make_policy"]
