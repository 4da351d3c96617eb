"""What the blocks of a call had to compute, read and move, counted phase by phase: the amounts of a roofline. No torch.

Counted are sequences that are still going: a row that is finished and not yet removed is no work. Where prompts and
decode rows go through a tick together, both phases get a share of it by tokens, as the clock is divided, so that counts
are not always whole numbers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from h2o_flexgen.config.model.products import products
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import dtype_bytes

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
Window = int | None
READS, ARITHMETIC = "memory reads", "arithmetic"


def _sums() -> defaultdict[Any, float]:
    """Sums that start at nothing."""
    return defaultdict(float)


@dataclass
class PhaseWork:
    """What one phase had to do, in tokens and bytes.

    steps           of the schedule
    products        times that a unit of a kind ("embed", "attn", "mlp", "head") computed so many rows at once
    prompt_pairs    queries times keys of prompts in one layer with a window, by the window and the keys of a query;
                    causality is not deducted
    cache_tokens    tokens that decode steps read from the caches of all rows, over all layers, their own included, by
                    the window of the layers and the device that reads
    cache_calls     how many reads of one GPU batch's cache in one layer that were, likewise
    moved           bytes by link and by what they are ("weights", "cache", "hidden"): the fewest that the placement
                    allows, each streamed weight once per step, and of a cache what it holds, without padding
    """

    steps: float = 0.0
    products: dict[tuple[str, int], float] = field(default_factory=_sums)
    prompt_pairs: dict[tuple[Window, int], float] = field(default_factory=_sums)
    cache_tokens: dict[tuple[Window, str], float] = field(default_factory=_sums)
    cache_calls: dict[tuple[Window, str], float] = field(default_factory=_sums)
    moved: dict[tuple[str, str], float] = field(default_factory=_sums)

    def weight_bytes(self, spec: ModelSpec, dtype: str) -> float:
        """Bytes of the matrices that products read, each time anew."""
        return sum(calls * _numbers(spec, kind) for (kind, _), calls in self.products.items()) * dtype_bytes(dtype)

    def cache_bytes(self, spec: ModelSpec, dtype: str) -> dict[str, float]:
        """Bytes of keys and values that decode steps read, by the device that reads."""
        found: dict[str, float] = _sums()
        for (_, device), tokens in self.cache_tokens.items():
            found[device] += tokens * spec.kv_bytes_per_token_and_layer(dtype)
        return dict(found)

    def product_flops(self, spec: ModelSpec) -> float:
        """Of all products; 2 m n k each."""
        return sum(2 * rows * calls * _numbers(spec, kind) for (kind, rows), calls in self.products.items())

    def attention_flops(self, spec: ModelSpec) -> float:
        """Of scores and weighted values."""
        layers = Counter(spec.arch.window_of(layer) for layer in range(spec.num_layers))
        pairs = sum(layers[window] * count for (window, _), count in self.prompt_pairs.items())
        return 4 * spec.num_heads * spec.head_dim * (pairs + sum(self.cache_tokens.values()))


@dataclass
class Work:
    """Of a call, or of some of its blocks."""

    phases: dict[Phase, PhaseWork] = field(default_factory=lambda: {phase: PhaseWork() for phase in PHASES})

    @property
    def prefill(self) -> PhaseWork:
        return self.phases["prefill"]

    @property
    def decode(self) -> PhaseWork:
        return self.phases["decode"]

    def flops(self, spec: ModelSpec) -> int:
        """Of products and attention in both phases."""
        return round(sum(work.product_flops(spec) + work.attention_flops(spec) for work in self.phases.values()))


def unpriced(
    work: Work, spec: ModelSpec, dtype: str, compute_tier: str, seconds: Mapping[Phase, float]
) -> dict[str, Any]:
    """The `roofline` object of a RunRecord without rates: amounts by phase and resource, everything else None.

    seconds: measured, of each phase. See docs/roofline.md for the keys.
    """
    return {
        phase: {
            "steps": each.steps,
            "measured_s": seconds[phase],
            "resources": _resources(each, spec, dtype, compute_tier),
            "kernels_s": None,
            "bound": None,
            "achieved": None,
        }
        for phase, each in work.phases.items()
    }


def reads_of(device: str, compute_tier: str) -> str:
    """The resource that `device` reads its memory by."""
    return READS if device == compute_tier else f"{READS} of the {device}"


def _resources(work: PhaseWork, spec: ModelSpec, dtype: str, compute_tier: str) -> dict[str, dict[str, Any]]:
    read: dict[str, dict[str, float]] = {READS: {"weights": work.weight_bytes(spec, dtype)}}
    for device, nbytes in work.cache_bytes(spec, dtype).items():
        read.setdefault(reads_of(device, compute_tier), {})["cache"] = nbytes
    for (link, what), nbytes in sorted(work.moved.items()):
        read.setdefault(link, {})[what] = nbytes
    flops = {"products": work.product_flops(spec), "attention": work.attention_flops(spec)}
    amounts = {name: ("bytes", parts) for name, parts in read.items()} | {ARITHMETIC: ("flops", flops)}
    return {
        name: {unit: {part: round(amount) for part, amount in parts.items()}, "rate": None, "of": None, "seconds": None}
        for name, (unit, parts) in amounts.items()
        if any(parts.values())
    }


def _numbers(spec: ModelSpec, kind: str) -> int:
    """In the matrices of a unit of `kind`."""
    return sum(product.out_features * product.in_features for product in products(spec, kind))
