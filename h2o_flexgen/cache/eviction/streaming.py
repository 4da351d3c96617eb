"""StreamingLLM: attention sinks and a sliding window (Xiao et al. 2023, section 3.2)."""

from __future__ import annotations

from h2o_flexgen.cache.eviction.base import EvictionPolicy


class StreamingPolicy(EvictionPolicy):
    """Keeps the first `sinks` and the last `recent` tokens, at their absolute positions."""

    name = "streaming"
