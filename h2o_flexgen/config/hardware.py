"""How fast a machine is: what `calibrate` measures and the cost model predicts from. No torch.

Everything is in SI units: bytes, seconds, FLOP/s (a multiply-add counts two).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from h2o_flexgen.config.checks import known_keys
from h2o_flexgen.errors import UsageError

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Curve:
    """A measured quantity y over a size x, both positive: straight between the points in log-log, as fast as the last
    point beyond them. Raises UsageError for points that are not ascending or not positive.

    Interpolating in logarithms is exact for power laws, which times and rates are over most of their range.
    """

    points: Points

    def __post_init__(self) -> None:
        points = tuple((float(x), float(y)) for x, y in self.points)
        object.__setattr__(self, "points", points)
        if not points or any(not (0 < value < math.inf) for point in points for value in point):
            raise UsageError(f"a curve has the points {list(points)[:4]}", "needed at least one, of positive numbers")
        if any(a[0] >= b[0] for a, b in itertools.pairwise(points)):
            raise UsageError(f"the points of a curve are at {[x for x, _ in points][:6]}", "needed ascending sizes")

    def at(self, x: float) -> float:
        """y at `x`; outside the points the y of the nearest one."""
        points = self.points
        if x <= points[0][0]:
            return points[0][1]
        if x >= points[-1][0]:
            return points[-1][1]
        right = bisect_right(points, (x, math.inf))
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        share = math.log(x / x0) / math.log(x1 / x0)
        return y0 * (y1 / y0) ** share

    def to_json(self) -> list[list[float]]:
        return [list(point) for point in self.points]


@dataclass(frozen=True)
class LinkRate:
    """A link in one direction: a transfer takes `latency_s` + bytes / `bytes_per_s`."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        _positive(self.bytes_per_s, "bytes_per_s")
        if not 0 <= self.latency_s < math.inf:
            raise UsageError(f"latency_s is {self.latency_s!r}", "needed seconds, at least 0")

    def seconds(self, nbytes: float) -> float:
        """Of one transfer; nothing takes no time."""
        return self.latency_s + nbytes / self.bytes_per_s if nbytes else 0.0


@dataclass(frozen=True)
class GemmShape:
    """Seconds of x (rows, in) times a weight (out, in) that is not in any cache, over the number of rows."""

    out_features: int
    in_features: int
    seconds: Curve


@dataclass(frozen=True)
class ComputeRates:
    """One compute device in one dtype.

    gemm_flops          FLOP/s over the number of rows, weights large and not in any cache: for shapes not in `shapes`
    memory_bytes_per_s  of streaming reads
    shapes              products at the shapes of a model, where they were measured
    decode_attention    seconds of one call (all rows and heads of a GPU batch in one layer) over the bytes of K and V
                        it reads; `scored`: with the probability rows and the eviction that follows
    prefill_attention   FLOP/s over the length of the prompt, causality not deducted; `scored`: with column sums
    elementwise_bytes_per_s  of norms, residuals, rotations and copies: bytes read and written
    tick_s              fixed cost of one tick: its tasks issued, its kernels started
    sample_s            of choosing one row's token, beside the output head's product
    """

    gemm_flops: Curve
    memory_bytes_per_s: float
    decode_attention: Mapping[str, Curve]
    prefill_attention: Mapping[str, Curve]
    elementwise_bytes_per_s: float
    tick_s: float
    sample_s: float
    shapes: tuple[GemmShape, ...] = ()

    def __post_init__(self) -> None:
        for name in ("memory_bytes_per_s", "elementwise_bytes_per_s"):
            _positive(getattr(self, name), name)
        for name in ("decode_attention", "prefill_attention"):
            if set(getattr(self, name)) != {"plain", "scored"}:
                raise UsageError(f"{name} has {sorted(getattr(self, name))}", "needed plain and scored")

    def gemm_seconds(self, rows: float, out_features: int, in_features: int) -> float:
        """Of x (rows, in) times (out, in): as measured at this shape, else by the general rate and no faster than the
        weight can be read."""
        for shape in self.shapes:
            if (shape.out_features, shape.in_features) == (out_features, in_features):
                last = shape.seconds.points[-1]
                # Beyond the last point the rate stays what it was there.
                return shape.seconds.at(rows) * max(1.0, rows / last[0])
        return 2 * rows * out_features * in_features / self.gemm_flops.at(rows)


@dataclass(frozen=True)
class HardwareProfile:
    """One machine as the cost model sees it.

    dtype      what the compute rates were measured in
    links      by name: "disk->cpu", "cpu->disk", and with a GPU "cpu->gpu", "gpu->cpu"; a transfer from disk to the GPU
               crosses both
    compute    by device: "cpu", "gpu"
    sources    where each figure comes from: "measured", or a data sheet
    memory     bytes per tier that the machine has, where known
    """

    name: str
    date: str
    dtype: str
    links: Mapping[str, LinkRate]
    compute: Mapping[str, ComputeRates]
    memory: Mapping[str, int] = field(default_factory=dict)
    host: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def link(self, name: str) -> LinkRate:
        """The rate of link `name`; UsageError where the profile does not have it."""
        if name not in self.links:
            raise UsageError(f"the hardware profile {self.name} has no link {name}", f"found {', '.join(self.links)}")
        return self.links[name]

    def rates(self, device: str) -> ComputeRates:
        """The rates of a compute device, "cpu" or "gpu"; UsageError where the profile does not have it."""
        if device not in self.compute:
            raise UsageError(
                f"the hardware profile {self.name} has no rates of the {device}", f"found {', '.join(self.compute)}"
            )
        return self.compute[device]

    def to_json(self) -> dict[str, Any]:
        """Every field, as plain JSON values."""
        plain: dict[str, Any] = _plain(self)
        return plain

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HardwareProfile:
        """The profile of `to_json`; UsageError for keys that are unknown or missing, and for impossible numbers."""
        fields = known_keys(data, cls)
        links = {name: LinkRate(**known_keys(rate, LinkRate)) for name, rate in fields.pop("links").items()}
        compute = {name: _rates(rate) for name, rate in fields.pop("compute").items()}
        return cls(links=links, compute=compute, **fields)

    @classmethod
    def load(cls, path: str | Path) -> HardwareProfile:
        """The profile in a JSON file; UsageError naming the file where it cannot be used."""
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{path} is no hardware profile: {error}", "needed what h2o_flexgen.calibrate writes"
            ) from error


def _rates(data: Mapping[str, Any]) -> ComputeRates:
    fields = known_keys(data, ComputeRates)
    for name in ("decode_attention", "prefill_attention"):
        fields[name] = {kind: Curve(points) for kind, points in fields[name].items()}
    shapes = fields.get("shapes", ())
    fields["shapes"] = tuple(
        GemmShape(shape["out_features"], shape["in_features"], Curve(shape["seconds"])) for shape in shapes
    )
    return ComputeRates(**{**fields, "gemm_flops": Curve(fields["gemm_flops"])})


def _plain(value: Any) -> Any:
    if isinstance(value, Curve):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _positive(value: float, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UsageError(f"{name} is {value!r}", "needed a positive number")
