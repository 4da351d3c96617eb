"""tests.pairs: no pair is missing, and rows are few."""

from __future__ import annotations

from itertools import combinations, product

from tests.pairs import pairs

VALUES = ("abcdef", [1, 2, 3], [False, True], [None, 7])


def _met(rows: list[tuple[object, ...]]) -> set[object]:
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


def test_every_pair_occurs_in_few_rows() -> None:
    assert _met(pairs(*VALUES)) == _met(list(product(*VALUES)))
    assert len(pairs(*VALUES)) == 18
    assert pairs("ab", [1, 2]) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


def test_rows_that_cannot_be_are_left_out() -> None:
    def where(letter: str, *rest: object) -> bool:
        return letter != "a" or True not in rest

    rows = pairs(*VALUES, where=where)
    assert all(where(*row) for row in rows)
    assert _met(rows) == _met([row for row in product(*VALUES) if where(*row)])
