"""A hardware profile as a table that a person reads. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.config.hardware.rates import ComputeRates, Curve
from h2o_flexgen.cores import sharing_warning
from h2o_flexgen.units import format_bytes, format_rate, format_seconds


def profile_table(profile: HardwareProfile) -> str:
    """Rates by device and link, what they were measured from, and how much they disturb each other."""
    lines = [f"{profile.name}: {profile.dtype}, {profile.date}"]
    for device, rates in profile.compute.items():
        if device == "gpu" and rates == profile.compute.get("cpu"):
            continue  # emulated: the CPU's own
        lines += [*_device(device, rates)]
    lines += ["", *_aligned([("link", "rate", "latency"), *_links(profile)])]
    if profile.slowdown:
        pairs = [(a, b, f"{factor:.2f} x as long") for a, row in profile.slowdown.items() for b, factor in row.items()]
        lines += ["", *_aligned([("slowed down", "by", ""), *pairs])]
    lines += ["", *_aligned([("figure", "source"), *profile.sources.items()])]
    if (said := sharing_warning(profile.host.get("shared"))) is not None:
        lines += ["", f"warning: {said}"]
    return "\n".join(lines)


def _links(profile: HardwareProfile) -> Iterator[tuple[str, str, str]]:
    for name, rate in profile.links.items():
        yield name, format_rate(rate.bytes_per_s), format_seconds(rate.latency_s)


def _device(device: str, rates: ComputeRates) -> Iterator[str]:
    yield ""
    shapes = [(f"{shape.out_features} x {shape.in_features}", shape) for shape in rates.shapes]
    counts = sorted({rows for _, shape in shapes for rows, _ in shape.seconds.points})
    heads = [f"{device}: products, TFLOP/s by rows", *(f"{count:g}" for count in counts)]
    table = [heads]
    for label, shape in shapes:
        known = dict(shape.seconds.points)
        flops = {n: 2 * n * shape.out_features * shape.in_features / known[n] for n in known}
        table.append([label, *(f"{flops[n] / 1e12:.3g}" if n in flops else "-" for n in counts)])
    general = dict(rates.gemm_flops.points)
    table.append(["others", *(f"{general[n] / 1e12:.3g}" if n in general else "-" for n in counts)])
    yield from _aligned(table)
    yield ""
    yield from _aligned(_decode(device, rates))
    yield ""
    curves = rates.prefill_attention
    keys = [x for x, _ in curves["plain"].points]
    rows = [[f"  {kind}", *(f"{curves[kind].at(n) / 1e12:.3g}" for n in keys)] for kind in ("plain", "scored")]
    yield from _aligned([[f"{device}: attention of prompts, TFLOP/s by keys", *(f"{n:g}" for n in keys)], *rows])
    yield ""
    ticks = ", ".join(f"{kind} {_tick(seconds)}" for kind, seconds in rates.tick_s.items())
    memory, elementwise = format_rate(rates.memory_bytes_per_s), format_rate(rates.elementwise_bytes_per_s)
    yield f"{device}: memory {memory}, elementwise {elementwise}; sampling {format_seconds(rates.sample_s)} per row"
    if rates.fresh_bytes_per_s is not None:
        yield f"{device}: first touch of new memory {format_rate(rates.fresh_bytes_per_s)}"
    if rates.graph_tick_s is not None:
        by = ", ".join(f"{x:g}" for x, _ in rates.graph_tick_s.points)
        yield f"{device}: ticks of recorded steps beyond that by {by} rows: {_tick(rates.graph_tick_s)}"
    curve = rates.tick_s["attn"]
    by = f" by {', '.join(f'{x:g}' for x, _ in curve.points)} rows" if isinstance(curve, Curve) else ""
    yield f"{device}: ticks beyond all that{by}: {ticks}"


def _tick(seconds: float | Curve) -> str:
    """One figure, or those of the curve's points."""
    points = seconds.points if isinstance(seconds, Curve) else ((1, seconds),)
    return " ".join(format_seconds(y) for _, y in points)


def _decode(device: str, rates: ComputeRates) -> list[list[str]]:
    curves = rates.decode_attention
    sizes = sorted({x for curve in curves.values() for x, _ in curve.points})
    table = [[f"{device}: attention of a decode step, by K and V", *(format_bytes(size) for size in sizes)]]
    for kind in ("plain", "scored"):
        table.append([f"  {kind}", *(_time(curves[kind], size) for size in sizes)])
    return table


def _time(curve: Curve, size: float) -> str:
    seconds = curve.time_at(size)
    return f"{format_seconds(seconds)}, {format_rate(size / seconds)}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell, the first to the left, the others to the right if all are numbers."""
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]
