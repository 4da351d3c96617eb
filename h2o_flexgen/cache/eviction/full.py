"""No eviction: the reference that every other policy is measured against."""

from __future__ import annotations

from h2o_flexgen.cache.eviction.base import EvictionPolicy


class FullPolicy(EvictionPolicy):
    """Keeps everything; its budgets are as long as the sequences."""

    name = "full"
