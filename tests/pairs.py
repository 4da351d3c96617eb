"""Cases of tests with several parameters: where the product says little more than its pairs, the pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations, product
from typing import Any


def pairs(*values: Iterable[Any], where: Callable[..., bool] = lambda *row: True) -> list[tuple[Any, ...]]:
    """Rows in which every value of a parameter meets every value of each other one, in any row for which `where` holds.

    Greedy, and the same every time: of the product, in its order, always the row with most pairs that are new.
    """
    columns = [list(column) for column in values]
    rows = [row for row in product(*(range(len(column)) for column in columns)) if where(*_row(columns, row))]
    new = {row: set(combinations(enumerate(row), 2)) for row in rows}
    chosen = []
    while new:
        best = max(new, key=lambda row: len(new[row]))
        chosen.append(best)
        covered = new[best]
        new = {row: rest for row, found in new.items() if (rest := found - covered)}
    return [_row(columns, row) for row in sorted(chosen)]


def _row(columns: list[list[Any]], row: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(column[index] for column, index in zip(columns, row, strict=True))
