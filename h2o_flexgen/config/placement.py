"""Which weight group, cache and GPU batch lives where: the shares of an OffloadPolicy, in whole units."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.offload import TIERS, OffloadPolicy

KINDS = ("weights", "cache", "hidden")
"""The kinds of tensors that are placed."""
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Placement:
    """The tier of every weight group (by key), of every cache (by layer and GPU batch) and of every GPU batch.

    slots: the size of a row's cache, layer by layer, in any unit: windowed layers have smaller ones. Empty: all are
    alike.
    """

    weights: Mapping[str, str]
    cache: Mapping[tuple[int, int], str]
    hidden: Mapping[int, str]
    slots: tuple[int, ...] = ()

    @property
    def tiers(self) -> set[str]:
        return {*self.weights.values(), *self.cache.values(), *self.hidden.values()}

    def achieved(self, spec: ModelSpec, dtype: str) -> dict[str, dict[str, float]]:
        """The shares really placed, by kind and tier; tiers that hold nothing are left out."""
        groups = spec.groups_by_key
        return {
            "weights": _shares((tier, groups[key].nbytes(dtype)) for key, tier in self.weights.items()),
            "cache": _shares((tier, self.slots[layer] if self.slots else 1) for (layer, _), tier in self.cache.items()),
            "hidden": _shares((tier, 1) for tier in self.hidden.values()),
        }


def place(spec: ModelSpec, policy: OffloadPolicy, dtype: str, slots: tuple[int, ...] = ()) -> Placement:
    """Spread the units of each kind over the tiers, evenly over the depth, as close to the shares as whole units come.

    Weights go by bytes in the order of use, those of the vocabulary before the layers', see `_place_weights`; caches in
    the order of compute (layer, then GPU batch), by bytes as well where `slots` says how large each layer's are.
    """
    layers, batches = range(spec.num_layers), range(policy.num_gpu_batches)
    # Caches that are all alike are placed alike, however many slots they have.
    sizes = [count // math.gcd(*slots) for count in slots] or [1] * spec.num_layers
    return Placement(
        weights=_place_weights(spec, policy.weights, dtype),
        cache=_spread([((layer, batch), sizes[layer]) for layer in layers for batch in batches], policy.cache),
        hidden=_spread([(batch, 1) for batch in batches], policy.hidden),
        slots=slots,
    )


def _place_weights(spec: ModelSpec, shares: Mapping[str, float], dtype: str) -> dict[str, str]:
    """Groups of the vocabulary go to the fastest tier whose share has room for them, layers share what is left.

    Streamed, the vocabulary needs a buffer as large as itself, several times as large as a layer's: each of
    its bytes that is resident instead saves most of another one.
    """
    sizes = {group.key: group.nbytes(dtype) for group in spec.weight_groups}
    left = {tier: shares.get(tier, 0.0) * sum(sizes.values()) for tier in TIERS}
    first: dict[str, str] = {}
    for key in dict.fromkeys(unit.weights for unit in spec.units if unit.layer is None):
        # Shares are rounded, so that a whole one may lack a part of a byte.
        fitting = next((tier for tier in TIERS if left[tier] >= sizes[key] * (1 - 1e-6)), None)
        if fitting is not None:
            first[key] = fitting
            left[fitting] = max(0.0, left[fitting] - sizes[key])
    rest = [(key, nbytes) for key, nbytes in sizes.items() if key not in first]
    whole = sum(left.values())
    spread = _spread(rest, {tier: nbytes / whole for tier, nbytes in left.items() if nbytes})
    return {key: first.get(key) or spread[key] for key in sizes}


def _spread(items: Iterable[tuple[K, int]], shares: Mapping[str, float]) -> dict[K, str]:
    """Error diffusion: each item goes to the tier that lags furthest behind its share; ties go to the faster tier."""
    tiers = [tier for tier in TIERS if shares.get(tier)]
    lag = dict.fromkeys(tiers, 0.0)
    placed: dict[K, str] = {}
    for key, size in items:
        for tier in tiers:
            lag[tier] += shares[tier] * size
        chosen = max(tiers, key=lambda tier: lag[tier])
        lag[chosen] -= size
        placed[key] = chosen
    return placed


def _shares(sizes: Iterable[tuple[str, int]]) -> dict[str, float]:
    totals: dict[str, int] = {}
    for tier, size in sizes:
        totals[tier] = totals.get(tier, 0) + size
    whole = sum(totals.values())
    return {tier: totals[tier] / whole for tier in TIERS if tier in totals}
