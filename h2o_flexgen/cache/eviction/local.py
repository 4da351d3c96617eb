"""The sliding window."""

from __future__ import annotations

from h2o_flexgen.cache.eviction.base import EvictionPolicy


class LocalPolicy(EvictionPolicy):
    """Keeps the last `recent` tokens."""

    name = "local"
