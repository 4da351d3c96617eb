"""tests.turns: in a few commits everything runs, and with each of them something of every test."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.turns import TURNS, left_out


class Item(NamedTuple):
    """As much of pytest's as is looked at."""

    nodeid: str
    mark: str

    def get_closest_marker(self, name: str) -> str | None:
        return name if name == self.mark else None


SLOW = [Item(f"test_slow.py::test[{number}]", "slow") for number in range(13)]
FEW = [Item("test_few.py::test_of_one_case", "turns"), *(Item(f"test_few.py::test[{x}]", "turns") for x in "ab")]
MANY = [Item(f"test_many.py::test[{x}-{kernel}-h2o]", "turns") for kernel in ("torch", "native") for x in range(28)]
ALWAYS = [Item("test_always.py::test[1]", "gpu"), Item("test_always.py::test[2]", "")]
ITEMS = [*SLOW, *FEW, *MANY, *ALWAYS]


def test_without_parts_all_run() -> None:
    assert left_out(ITEMS, 0, 1) == set()


@pytest.mark.parametrize("parts", [2, 6, 12])
def test_every_case_has_its_turn(parts: int) -> None:
    kept = [set(ITEMS) - left_out(ITEMS, part, parts) for part in range(parts)]
    assert set.union(*kept) == set(ITEMS)
    for found in kept:
        assert found.issuperset(ALWAYS)
        assert FEW[0] in found
        assert len(found.intersection(FEW)) == 2
        assert len(found.intersection(SLOW)) <= -(-len(SLOW) // parts)
        assert len(found.intersection(MANY)) <= 2 * -(-28 // min(parts, TURNS))
        for item in found.intersection(MANY[:28]):
            assert Item(item.nodeid.replace("torch", "native"), "turns") in found


def test_turns_do_not_follow_the_order_of_cases() -> None:
    """Where a parameter changes with every third case, its values would never meet all others' with one commit."""
    kept = [item for item in MANY[:28] if item not in left_out(ITEMS, 0, 12)]
    assert len({MANY.index(item) % TURNS for item in kept}) == TURNS
