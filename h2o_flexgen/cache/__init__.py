"""KV caches at a fixed budget and the policies that keep them there."""

from h2o_flexgen.cache.eviction import EVICTION_POLICIES, EvictionPolicy, make_policy
from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.cache.lengths import slots_needed
from h2o_flexgen.cache.shape import CacheShape

__all__ = ["EVICTION_POLICIES", "CacheShape", "EvictionPolicy", "KVCache", "make_policy", "slots_needed"]
