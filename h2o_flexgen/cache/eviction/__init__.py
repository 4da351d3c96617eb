"""Eviction policies by name. A new one is a file here, its name below, its split in `config.splits` and its oracle."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from h2o_flexgen.cache.eviction.base import ArrivalPolicy, EvictionPolicy, RankedPolicy
from h2o_flexgen.cache.eviction.then_h2o import ThenH2O
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.splits import base_of
from h2o_flexgen.registry import Registry

EVICTION_POLICIES: Registry[Callable[..., EvictionPolicy]] = Registry("eviction policy")
for _name in (
    *("full", "h2o", "streaming", "local", "heavy", "random", "tova", "snapkv", "pyramidkv", "keydiff", "knorm"),
    *("expected_attention", "nacl", "kvzip", "defensivekv", "roco", "scissorhands", "rkv", "vase", "snapkv_decode"),
    *("h2o_mean", "inertiakv"),
):
    _classes = vars(import_module(f"{__name__}.{_name}")).values()
    EVICTION_POLICIES.register(_name, next(each for each in _classes if getattr(each, "name", None) == _name))


def make_policy(config: EvictionConfig) -> EvictionPolicy:
    """The policy that `config` names; UsageError with a suggestion for an unknown name."""
    first = EVICTION_POLICIES.get(base_of(config.name))(seed=config.seed)
    if config.spans is not None and config.name != "full" and not isinstance(first, RankedPolicy):
        return ArrivalPolicy()
    if base_of(config.name) == config.name or not isinstance(first, RankedPolicy):
        return first
    return ThenH2O(first)


__all__ = ["EVICTION_POLICIES", "EvictionPolicy", "make_policy"]
