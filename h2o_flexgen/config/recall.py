"""Recall in numbers: where evicted tokens wait, how often and how many of them come back. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from h2o_flexgen.config.budget import Budget
from h2o_flexgen.config.model.packing import CachePacking
from h2o_flexgen.config.model.tensors import page_ceil
from h2o_flexgen.config.offload import elsewhere
from h2o_flexgen.errors import UsageError

if TYPE_CHECKING:
    from h2o_flexgen.config.model.spec import ModelSpec

RecallTier = Literal["cpu", "disk"]
EVERY = 4
"""Steps of a row from one look through what is away to the next, unless asked for."""
FIRST = 16
"""A row's first steps, each of which looks: tokens that a question needs are away when it comes, and do not all come
back at one look."""
STATIC = 4
"""First tokens that never leave, unless asked for."""
INDEX_BITS = 4
"""Of a number of a key in the index."""
NEAR = 3
"""Tokens before and after one that is wanted which are wanted as much."""
RATED = 8
"""One look of so many is rated for the record's hit rate, as finding the most that could be had takes time."""
SHELF_BUFFER = 4 << 20
"""Bytes of the host buffer through which evicted tokens go to disk and come back."""
MOST = 64
"""Tokens that come back to a row and KV head at one look, at most: MOST_MOVED in recall.c."""


def most_moved(budget: Budget) -> int:
    """Tokens that come back at one look, at most: a quarter of those chosen by score."""
    return min(MOST, max(1, budget.heavy // 4))


def index_packing(dim: int) -> CachePacking:
    """How the index keeps a key of `dim` numbers."""
    return CachePacking(INDEX_BITS, dim)


def index_blocks(length: int, dim: int) -> tuple[int, int]:
    """Of the index of so many keys of a KV head the blocks of 16, and the bytes of each: words of 4 bytes, in C."""
    return -(-length // 16), 16 * 4 * -(-index_packing(dim).nbytes // 4)


def looks(taken: int, every: int) -> bool:
    """Whether a row that has taken so many steps looks through what is away in its next."""
    return taken < FIRST or taken % every == 0


def is_rated(taken: int, every: int, rates: int) -> bool:
    """Whether the look of that step is rated: one of `rates` of a row's first ones, and of its later ones."""
    return (taken if taken < FIRST else taken // every) % rates == 0


def share_of_looks(taken: int, every: int) -> float:
    """Looks of that step, where those of later steps are spread evenly."""
    return 1.0 if taken < FIRST else 1 / every


def coming_back(budget: Budget, window: int | None, before: int) -> int:
    """Tokens that one look of a row and KV head brings back, as planned: as many as may, while so many are away.

    before: tokens before the newest, whose query sees those of the `window`."""
    seen = before if window is None else min(before, window - 1)
    return min(most_moved(budget), max(0, seen - budget.total)) if budget.scored else 0


def shelf_bytes(tier: str | None, token: int) -> int:
    """Bytes that a token, keys and values of a layer, takes on that tier: on disk whole pages of its own."""
    return page_ceil(token) if tier == "disk" else token


class Reading(NamedTuple):
    """How a layer's evicted tokens are read."""

    tier: str | None
    heads: int
    """KV heads."""
    share: float | None = None
    """Of the most that may be read: each head its own tokens, as many as may come back. None: not known."""

    def tokens(self, budget: Budget, window: int | None, before: int) -> float:
        """Tokens, of all heads, that one look of a row reads from its shelf, as planned: see `coming_back`. From disk
        come the pages of every token that any head wants; where the share is not known, as if as many came back as may,
        and each head chose by itself among all that are away."""
        back = coming_back(budget, window, before)
        if self.share is not None:
            return self.share * back * (self.heads if self.tier == "disk" else 1)
        if self.tier != "disk" or not back:
            return back
        away = (before if window is None else min(before, window - 1)) - budget.total
        return away * (1 - (1 - back / away) ** self.heads)


def shelved_tokens(
    budget: Budget, window: int | None, prompt: int, new: int, every: int, reading: Reading
) -> tuple[int, float]:
    """Of a sequence of `new` tokens after a prompt those that are written to its shelf, and those that are read from
    there, as planned. The last token goes nowhere."""
    if not budget.scored:
        return 0, 0
    steps = (step for step in range(new - 1) if looks(step, every))
    return prompt + new - 1, sum(reading.tokens(budget, window, prompt + step) for step in steps)


def check_recall(spec: ModelSpec, tier: str | None) -> None:
    """UsageError where what is evicted from caches of `spec` is to wait on `tier`, and cannot."""
    if tier is None:
        return
    layers = [layer for layer in range(spec.num_layers) if spec.attends(layer)]
    kinds = {
        f"the keys of {spec.name} are its values as well": any(spec.heads_of(layer).joint for layer in layers),
        f"layers of {spec.name} attend by chunks": spec.arch.chunked,
        f"layers of {spec.name} read the caches of others": any(spec.source_of(layer) != layer for layer in layers),
        f"heads of {spec.name} have {spec.head_dim} numbers, no multiple of 4": bool(spec.head_dim % 4),
        f"{spec.name} runs row by row": not spec.keeps_caches,
        f"keys of {spec.name} have biases by distance (ALiBi)": spec.arch.positions == "biases",
    }
    for found, given in kinds.items():
        if given:
            raise UsageError(
                f"--recall {tier} is given, and {found}",
                "needed a cache for each layer, with keys and values of its own",
                "leave --recall out",
            )


def with_caches_near(fixed: Mapping[str, Any], tier: str | None, compute_tier: str) -> dict[str, Any]:
    """The `fixed` fields of a policy where evicted tokens are to wait on `tier`: caches stay where they are computed
    with. UsageError where they were to be elsewhere, or the tier is not behind them."""
    if tier is None:
        return dict(fixed)
    if away := elsewhere(fixed.get("cache", {}), compute_tier):
        raise UsageError(
            f"--recall {tier} is given with caches on {', '.join(away)}",
            f"needed them on {compute_tier}, with which they are computed",
            "leave --cache-placement out",
        )
    if fixed.get("cpu_cache_compute") and compute_tier != "cpu":
        raise UsageError(f"--recall {tier} is given with --cpu-cache-compute", "needed one of them")
    return {**fixed, "cache": {compute_tier: 1.0}, "cpu_cache_compute": False}
