"""SnapKV with budgets that shrink from layer to layer (Cai et al. 2024, arXiv 2406.02069, "PyramidKV")."""

from __future__ import annotations

from h2o_flexgen.cache.eviction.snapkv import SnapKVPolicy


class PyramidKVPolicy(SnapKVPolicy):
    """SnapKV's choice; `EvictionConfig.by_layer` gives it more tokens in the first layers than in the last."""

    name = "pyramidkv"
