"""What the tests of ten ways to get KV eviction wrong without noticing share."""

from __future__ import annotations

from typing import Any

import pytest

from h2o_flexgen.cache.eviction import make_policy
from tests.cache.harness import CacheRun, Stream
from tests.policy_matrix import EVICTING, POLICIES, PolicyRow

each_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda row: row.name)
each_evicting = pytest.mark.parametrize("policy", EVICTING, ids=lambda row: row.name)


def run_of(policy: PolicyRow, streams: list[Stream], gen: int, **options: Any) -> CacheRun:
    config = policy.eviction()
    return CacheRun(streams, [config.resolve(s.prompt, gen) for s in streams], make_policy(config), **options)
