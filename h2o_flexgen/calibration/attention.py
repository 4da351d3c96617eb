"""Attention of decode steps through real caches, and of prompts through the kernel and the ranking that follows."""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor

from h2o_flexgen.cache.eviction import make_policy
from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.cache.shape import CacheShape
from h2o_flexgen.calibration.bench import Bench, largest_cache
from h2o_flexgen.calibration.timing import Sample
from h2o_flexgen.config.eviction import Budget, EvictionConfig
from h2o_flexgen.config.hardware.rates import Curve
from h2o_flexgen.kernels.prompt import prefill_attention
from h2o_flexgen.kernels.types import Logits

SLOTS = (128, 512)
"""Tokens per cache: about the budget and about the full length of FlexGen's workload at 20 %."""
BATCHES = (1, 4, 16, 64)
"""Rows; four times the rows of short caches read as much as long ones do."""
KEYS = (64, 128, 256, 512, 1024, 2048)
"""Tokens per prompt."""
_STEPS = 4  # that one cache does in a sample
_MOST_CACHES = 96
_ROTATION = 2  # how many times the processor's largest cache takes turns
_BEYOND = 32  # tokens of a prompt that its budget does not hold
_SURE_KEYS = 512  # measured however long it takes
_KEPT = 5  # a fifth of a prompt is kept where it is ranked


@torch.inference_mode()
def decode_curves(bench: Bench, seconds: float) -> dict[str, Curve]:
    """Seconds of one `KVCache.attend` over the bytes of K and V it reads: of full caches, and of H2O that evicts.

    Several caches take turns, so that each has left the processor's caches when it comes again, as layers do.
    """
    spec = bench.spec
    token = 2 * spec.num_kv_heads * spec.head_dim * bench.itemsize
    places = [(batch, slots) for slots in SLOTS for batch in BATCHES if batch * slots * token <= len(bench.arena)]
    kinds = ("plain", "scored")
    budget = bench.timer.budget(seconds, dict.fromkeys(product(kinds, places), 1.0))
    curves = {}
    for kind in kinds:
        by_bytes: dict[int, list[float]] = {}
        for place in places:
            sample = _decode_sample(bench, *place, budget.take((kind, place)), scored=kind == "scored")
            by_bytes.setdefault(math.prod(place) * token, []).append(sample.seconds)
        # As many bytes in few long caches and in many short ones: between the two.
        curves[kind] = Curve(tuple((size, math.prod(y) ** (1 / len(y))) for size, y in sorted(by_bytes.items())))
    return curves


def _decode_sample(bench: Bench, batch: int, slots: int, seconds: float, *, scored: bool) -> Sample:
    """One `KVCache.attend` of `batch` rows whose buffers have `slots` slots.

    plain: a full cache a few tokens before its end. scored: H2O in the steady state, with a slot that is free.
    """
    config = EvictionConfig("h2o", budget=slots - 1) if scored else EvictionConfig()
    length = slots + _BEYOND if scored else slots - _STEPS
    budget = config.resolve(length, 1 if scored else _STEPS)
    prompts = _PromptCaches(bench, config, [budget] * batch, length)
    q, k, v = _packed(bench, batch)
    logits = Logits(bench.spec.head_dim**-0.5)
    caches: list[KVCache] = []

    def prepare() -> None:  # a full cache comes to its end, one that evicts never does
        caches[:] = [prompts.fill(prompts.empty(place)) for place in prompts.places]

    def steps() -> None:
        for _ in range(_STEPS):
            for cache in caches:
                cache.attend(q, k, v, logits)

    if scored:
        prepare()
    per = _STEPS * len(prompts.places)
    return bench.measure("attention, decode", steps, seconds, per=per, prepare=None if scored else prepare)


class _PromptCaches:
    """Caches of one kind that take turns in the arena, and the prompts that fill them."""

    def __init__(self, bench: Bench, config: EvictionConfig, budgets: list[Budget], length: int) -> None:
        spec = bench.spec
        self._bench, self._budgets, self._policy = bench, budgets, make_policy(config)
        self._shape = shape = CacheShape.of(budgets, spec.num_kv_heads, spec.head_dim)
        self._size = (shape.batch, shape.kv_heads, shape.capacity, shape.head_dim)
        nbytes = 2 * math.prod(self._size) * bench.itemsize
        self.places = bench.places(nbytes, min(_MOST_CACHES, 2 + _ROTATION * largest_cache() // nbytes))
        # As the engine's prompts lie in memory: tokens first, then heads.
        kv = [bench.noise(shape.batch, length, shape.kv_heads, shape.head_dim) for _ in "kv"]
        self._k, self._v = (part.transpose(1, 2) for part in kv)
        self._sums = torch.rand(shape.batch, shape.kv_heads, length, device=bench.device)

    def empty(self, place: Tensor) -> KVCache:
        """A cache in a place of the arena that waits for its prompts."""
        rows, device = range(self._shape.batch), self._bench.device
        cache = KVCache(self._shape, self._budgets, self._policy, layer=0, row_ids=rows, device=device)
        k, v = place.view(self._bench.dtype).view(2, *self._size)
        cache.attach(k, v)
        return cache

    def fill(self, cache: KVCache) -> KVCache:
        """The cache with all rows' prompts, which come at once."""
        sums = self._sums if cache.wants_column_sums else None
        cache.fill(range(self._shape.batch), self._k, self._v, sums)
        return cache


@torch.inference_mode()
def prefill_curves(bench: Bench, seconds: float) -> dict[str, Curve]:
    """FLOP/s of one kernel call over the keys per query; scored: with column sums, and with ranking the tokens."""
    spec = bench.spec
    lengths = [keys for keys in KEYS if keys <= spec.max_positions] or [spec.max_positions]
    # All calls have as many tokens and therefore take longer with more keys; the longest are soon measured.
    budget = bench.timer.budget(seconds, {keys: 1.0 + keys / 512 for keys in lengths})
    curves: dict[str, list[tuple[int, float]]] = {"plain": [], "scored": []}
    last = 0.0
    for keys in lengths:
        share = budget.take(keys)
        if keys > _SURE_KEYS and 4 * last > seconds - budget.elapsed:
            break  # both kinds, each to warm up and to be timed, take twice as long as at the length before
        rows = max(1, bench.chunk // keys)
        flops = 4 * rows * keys * keys * spec.num_heads * spec.head_dim
        plain, scored = (_kernel(bench, rows, keys, share * 0.35, sums=sums) for sums in (False, True))
        last = plain.seconds + scored.seconds
        ranking = _ranking(bench, rows, keys, share * 0.3) if keys >= _KEPT else 0.0
        curves["plain"].append((keys, flops / plain.seconds))
        curves["scored"].append((keys, flops / (scored.seconds + ranking)))
    return {kind: Curve(tuple(points)) for kind, points in curves.items()}


def _kernel(bench: Bench, rows: int, keys: int, seconds: float, *, sums: bool) -> Sample:
    q, k, v = (part.unflatten(0, (rows, keys)).transpose(1, 2) for part in _packed(bench, rows * keys))
    logits = Logits(bench.spec.head_dim**-0.5)
    return bench.measure("attention, prompts", lambda: prefill_attention(q, k, v, logits, sums), seconds)


def _ranking(bench: Bench, rows: int, keys: int, seconds: float) -> float:
    """Seconds that filling caches of a fifth of the prompt takes longer where it is chosen by score.

    Copying what is kept is not included: that is priced as any other copy.
    """
    taken = []
    for name in ("h2o", "local"):
        config = EvictionConfig(name, budget=keys // _KEPT)
        prompts = _PromptCaches(bench, config, [config.resolve(keys, 1)] * rows, keys)
        taken.append(_filling(bench, prompts, seconds / 2))
    return max(0.0, taken[0] - taken[1])


def _filling(bench: Bench, prompts: _PromptCaches, seconds: float) -> float:
    empty: list[KVCache] = []

    def prepare() -> None:
        empty[:] = [prompts.empty(prompts.places[0])]

    return bench.timer.measure(lambda: prompts.fill(empty[0]), seconds, prepare=prepare).seconds


def _packed(bench: Bench, tokens: int) -> list[Tensor]:
    """q (T, heads, d), k and v (T, kv_heads, d) of packed tokens: parts of one product, as in the decoder."""
    spec = bench.spec
    widths = [count * spec.head_dim for count in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
    parts = bench.noise(tokens, sum(widths)).split(widths, dim=-1)
    return [part.unflatten(-1, (-1, spec.head_dim)) for part in parts]
