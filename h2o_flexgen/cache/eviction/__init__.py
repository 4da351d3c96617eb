"""Eviction policies by name. A new one is a file here, a line below, its split in `config.eviction` and its oracle."""

from __future__ import annotations

from h2o_flexgen.cache.eviction.base import EvictionPolicy
from h2o_flexgen.cache.eviction.full import FullPolicy
from h2o_flexgen.cache.eviction.h2o import H2OPolicy
from h2o_flexgen.cache.eviction.heavy import HeavyPolicy
from h2o_flexgen.cache.eviction.local import LocalPolicy
from h2o_flexgen.cache.eviction.random import RandomPolicy
from h2o_flexgen.cache.eviction.streaming import StreamingPolicy
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.registry import Registry

EVICTION_POLICIES: Registry[type[EvictionPolicy]] = Registry("eviction policy")
for _policy in (FullPolicy, H2OPolicy, StreamingPolicy, LocalPolicy, HeavyPolicy, RandomPolicy):
    EVICTION_POLICIES.register(_policy.name, _policy)


def make_policy(config: EvictionConfig) -> EvictionPolicy:
    """The policy that `config` names; UsageError with a suggestion for an unknown name."""
    return EVICTION_POLICIES.get(config.name)(seed=config.seed)


__all__ = ["EVICTION_POLICIES", "EvictionPolicy", "make_policy"]
