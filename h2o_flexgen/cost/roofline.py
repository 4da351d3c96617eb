"""The least time that a run's counted work takes at known rates, and how near to it the run came.

Products and attention of the computing thread follow each other: their seconds add up. Links work beside it and beside
each other: the bound is the largest of these sums. docs/roofline.md says how each number is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.config.hardware.rates import ComputeRates
from h2o_flexgen.config.model.products import products
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import dtype_bytes
from h2o_flexgen.config.work import ARITHMETIC, READS, PhaseWork, Window, Work, reads_of
from h2o_flexgen.config.workload import Workload

HERE = "this run"
"""Whose rate it is where the profile has none: that of a link while it was busy in the run itself."""


@dataclass(frozen=True)
class Ran:
    """What ran: a model, the longest lengths of the call, and where it was computed."""

    spec: ModelSpec
    workload: Workload
    eviction: EvictionConfig
    dtype: str
    compute_tier: str

    def ranks(self, window: Window) -> bool:
        """Whether the caches of layers with this window choose by score."""
        budget = self.eviction.resolve(self.workload.prompt_len, self.workload.gen_len).within(window)
        return bool(budget.heavy) and not budget.full


class _Spent(NamedTuple):
    """Seconds of calls at their calibrated rates, and what such calls wait for."""

    kind: str
    resource: str
    seconds: float


class Rooflines:
    """Prices counted work. profile: the machine's rates; None: not calibrated. bandwidth: bytes per second of each link
    in the run itself, for links that the profile does not have."""

    def __init__(
        self, ran: Ran, profile: HardwareProfile | None, bandwidth: Mapping[str, float | None] | None = None
    ) -> None:
        self._ran, self._profile, self._bandwidth = ran, profile, bandwidth or {}
        self._size = dtype_bytes(ran.dtype)
        windows = [ran.spec.arch.window_of(layer) for layer in range(ran.spec.num_layers)]
        self._layers = Counter(windows)

    def priced(self, unpriced: Mapping[str, Any], work: Work) -> dict[str, Any]:
        """The `roofline` object of a record as the engine left it, with rates and seconds where they are known."""
        return {phase: self._phase(unpriced[phase], each) for phase, each in work.phases.items()}

    def _phase(self, entry: Mapping[str, Any], work: PhaseWork) -> dict[str, Any]:
        resources = {name: self._resource(name, each) for name, each in entry["resources"].items()}
        priced = {**entry, "resources": resources}
        if self._profile is None or not resources or not self._knows_devices(work):
            return priced
        kinds, waits = dict.fromkeys(("products", "attention"), 0.0), dict[str, float]()
        for kind, resource, seconds in (*self._products(work), *self._caches(work), *self._prompts(work)):
            kinds[kind] += seconds
            waits[resource] = waits.get(resource, 0.0) + seconds
        # One resource speaks for the computing thread: the one that its calls wait for longest.
        bounds = {max(waits, key=lambda name: waits[name]): sum(waits.values())} if waits else {}
        bounds |= {name: each["seconds"] for name, each in resources.items() if "->" in name and each["seconds"]}
        resource = max(bounds, key=lambda name: bounds[name])
        measured = entry["measured_s"]
        return {
            **priced,
            "kernels_s": kinds,
            "bound": {"resource": resource, "seconds": bounds[resource]},
            "achieved": bounds[resource] / measured if measured else None,
        }

    def _resource(self, name: str, amounts: Mapping[str, Any]) -> dict[str, Any]:
        """With the rate at its best, whose rate that is, and the seconds at this rate."""
        rate, source = self._rate(name), None if self._profile is None else self._profile.name
        if rate is None and self._bandwidth.get(name):
            rate, source = self._bandwidth[name], HERE
        if rate is None:
            return dict(amounts)
        amount = sum(amounts["flops" if name == ARITHMETIC else "bytes"].values())
        return {**amounts, "rate": rate, "of": source, "seconds": amount / rate}

    def _rate(self, name: str) -> float | None:
        if self._profile is None:
            return None
        if "->" in name:
            return self._profile.links[name].bytes_per_s if name in self._profile.links else None
        tier = self._ran.compute_tier
        device = next((each for each in self._profile.compute if name == reads_of(each, tier)), tier)
        rates = self._profile.compute.get(device)
        if rates is None or (name.startswith(READS) and name != reads_of(device, tier)):
            return None
        return peak_flops(rates) if name == ARITHMETIC else rates.memory_bytes_per_s

    def _knows_devices(self, work: PhaseWork) -> bool:
        needed = {self._ran.compute_tier, *(device for _, device in work.cache_tokens)}
        return self._profile is not None and needed <= set(self._profile.compute)

    def _rates(self, device: str) -> ComputeRates:
        if self._profile is None:
            raise ValueError(f"there are no rates of the {device}")
        return self._profile.rates(device)

    def _products(self, work: PhaseWork) -> Iterator[_Spent]:
        rates = self._rates(self._ran.compute_tier)
        # Up to so many rows a matrix is multiplied with sooner than it is read.
        few = self._size * peak_flops(rates) / (2 * rates.memory_bytes_per_s)
        for (kind, rows), calls in work.products.items():
            seconds = sum(rates.gemm_seconds(rows, *each, self._size) for each in products(self._ran.spec, kind))
            yield _Spent("products", READS if rows <= few else ARITHMETIC, calls * seconds)

    def _caches(self, work: PhaseWork) -> Iterator[_Spent]:
        """Attention of decode steps; every call as large as they are on average."""
        token = self._ran.spec.kv_bytes_per_token_and_layer(self._ran.dtype)
        for (window, device), tokens in work.cache_tokens.items():
            calls = work.cache_calls.get((window, device), 0.0)
            if calls > 0:
                curve = self._rates(device).decode_attention["scored" if self._ran.ranks(window) else "plain"]
                resource = reads_of(device, self._ran.compute_tier)
                yield _Spent("attention", resource, calls * curve.time_at(tokens * token / calls))

    def _prompts(self, work: PhaseWork) -> Iterator[_Spent]:
        rates, spec = self._rates(self._ran.compute_tier).prefill_attention, self._ran.spec
        for (window, keys), pairs in work.prompt_pairs.items():
            sums = self._ran.ranks(window) and self._ran.eviction.name != "random"
            flops = 4 * spec.num_heads * spec.head_dim * pairs * self._layers[window]
            yield _Spent("attention", ARITHMETIC, flops / rates["scored" if sums else "plain"].at(keys))


def peak_flops(rates: ComputeRates) -> float:
    """The most FLOPs per second that any product reached when the device was calibrated."""
    general = [flops for _, flops in rates.gemm_flops.points]
    shapes = [
        2 * rows * shape.out_features * shape.in_features / seconds
        for shape in rates.shapes
        for rows, seconds in shape.seconds.points
    ]
    return max(general + shapes)
