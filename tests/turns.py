"""Tests and cases that do not run with each commit: each of them does with one of a few commits in a row."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

TURNS = 4
"""Parts of the cases of a test marked `turns`."""
KERNELS = ("torch", "native")
"""Cases that differ in these alone go together: what they are held against is worked out once."""


def left_out(items: Iterable[Any], part: int, parts: int) -> set[Any]:
    """Of pytest's items those for which it is not the turn of `part` of `parts`: of those marked slow all but each
    `parts`-th, and of the cases of each test marked turns all but about a quarter, drawn by their names: some case is
    left. With parts = 1 nothing is left out."""
    slow, tests = list[Any](), defaultdict[str, dict[str, list[Any]]](lambda: defaultdict(list))
    for item in items:
        if item.get_closest_marker("slow") is not None:
            slow.append(item)
        elif item.get_closest_marker("turns") is not None:
            name, _, case = item.nodeid.partition("[")
            tests[name]["-".join(word for word in case.rstrip("]").split("-") if word not in KERNELS)].append(item)
    left = {item for number, item in enumerate(slow) if number % parts != part % parts}
    for cases in tests.values():
        turns = min(parts, TURNS, len(cases))
        for number, case in enumerate(sorted(cases, key=lambda case: zlib.crc32(case.encode()))):
            if number % turns != part % turns:
                left.update(cases[case])
    return left
