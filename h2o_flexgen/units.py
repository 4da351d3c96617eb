"""Bytes and seconds as people write and read them."""

from __future__ import annotations

import math
import re

from h2o_flexgen.errors import UsageError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_FACTORS = {"": GIB, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _FACTORS[_letter] = _FACTORS[f"{_letter}IB"] = 1 << (10 * _power)
    _FACTORS[f"{_letter}B"] = 1000**_power


def parse_bytes(value: str | int | float) -> int:
    """Bytes in "8GiB", "8G", "8GB", "512MiB" or a bare number.

    A bare number counts GiB, as FlexGen's `--gpu-mem` does; K, M, G, T are powers of 1024, KB, MB, GB, TB of 1000.
    Raises UsageError for anything else, negative numbers and nan.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]*)\s*", str(value))
    factor = _FACTORS.get(match.group(2).upper()) if match else None
    if match is None or factor is None or not math.isfinite(float(match.group(1))):
        raise UsageError(f"{value!r} is not a size", "needed a number of GiB, or a number with a unit: 8, 8GiB, 512MB")
    return int(float(match.group(1)) * factor)


def format_bytes(nbytes: float) -> str:
    """`nbytes` with a binary unit and three digits: "13.3 GiB"."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 999.5 else f"{size:.3g} {unit}"


def size_at_least(nbytes: int) -> str:
    """A size to type that is no smaller than `nbytes`."""
    if nbytes < 10 * GIB:
        return f"{-(-nbytes // MIB)}MiB"
    return f"{-(-10 * nbytes // GIB) / 10:.1f}GiB"


def format_seconds(seconds: float) -> str:
    """Seconds with a fitting unit: "350 us", "12.5 ms", "3.42 s", "2 min 05 s"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def format_rate(bytes_per_second: float) -> str:
    """A bandwidth in decimal GB/s, the unit of data sheets."""
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def counted(number: int, one: str, many: str = "") -> str:
    """So many of a thing: "1 request", "2,000 requests"; `many` is its plural, where that is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def format_speed(tokens_per_second: float | None, what: str = "tokens") -> str:
    """A throughput of `what`: "1,024 tokens/s", "8.31 tokens/s"; "-" for None."""
    if tokens_per_second is None:
        return "-"
    return f"{tokens_per_second:,.0f} {what}/s" if tokens_per_second >= 100 else f"{tokens_per_second:.3g} {what}/s"
