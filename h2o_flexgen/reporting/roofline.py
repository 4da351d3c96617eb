"""The roofline of a run, two lines per phase."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from h2o_flexgen.units import format_rate, format_seconds

ARITHMETIC = "arithmetic"


def roofline_lines(roofline: Mapping[str, Any]) -> Iterator[str]:
    """Of each phase that took time and whose rates are known: how near it came to its bound, and what that is made
    of."""
    for phase, each in roofline.items():
        if not each["resources"] or not each["measured_s"] or each["bound"] is None:
            continue
        measured = f"{phase}: {format_seconds(each['measured_s'])}"
        name, seconds = each["bound"]["resource"], each["bound"]["seconds"]
        found = each["resources"][name]
        at = f"{_amount(name, found)} at {_rate(name, _total(found) / seconds)}"
        yield f"{measured}, bound {format_seconds(seconds)} by {name} ({at}), {each['achieved']:.0%}"
        kernels = ", ".join(f"{kind} {format_seconds(took)}" for kind, took in each["kernels_s"].items() if took)
        best = ", ".join(_at_best(name, found) for name, found in each["resources"].items())
        yield f"{' ' * len(phase)}  kernels as calibrated: {kernels}; at best rates: {best}"


def _at_best(name: str, found: Mapping[str, Any]) -> str:
    if found["seconds"] is None:
        return f"{name} {_amount(name, found)}"
    return f"{name} {format_seconds(found['seconds'])} at {_rate(name, found['rate'])}"


def _total(found: Mapping[str, Any]) -> float:
    return sum((found.get("bytes") or found["flops"]).values())


def _amount(name: str, found: Mapping[str, Any]) -> str:
    return _scaled(_total(found), "FLOP" if name == ARITHMETIC else "B")


def _rate(name: str, rate: float) -> str:
    return _scaled(rate, "FLOP/s") if name == ARITHMETIC else format_rate(rate)


def _scaled(value: float, unit: str) -> str:
    """With a decimal prefix, as rates have it: "24.1 GB"."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} P{unit}"
