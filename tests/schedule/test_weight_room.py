"""Places of streamed weights: neighbours apart, no bytes for what is not there at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_flexgen.config.model.tensors import PAGE
from h2o_flexgen.schedule.weight_room import WeightRoom, weight_room

pages = st.integers(1, 40).map(lambda count: count * PAGE)


def _check(room: WeightRoom, sizes: dict[str, int], lookahead: int) -> None:
    """Every lookahead + 1 loads in a row, of passes without end, are in places that are apart."""
    keys, cycle = list(sizes), room.cycle
    assert len(cycle) % len(keys) == 0
    for index, place in enumerate(cycle):
        assert (place.key, place.nbytes) == (keys[index % len(keys)], sizes[place.key])
        assert place.start % PAGE == 0
        for step in range(1, min(lookahead, len(keys) - 1) + 1):
            later = cycle[(index + step) % len(cycle)]
            assert place.start + place.nbytes <= later.start or later.start + later.nbytes <= place.start
            assert place.overlaps(later) is later.overlaps(place) is False
    at_once = min(lookahead + 1, len(keys))
    assert room.nbytes <= (lookahead + 1) * max(sizes.values())
    assert room.nbytes >= max(sum(sizes[keys[(i + j) % len(keys)]] for j in range(at_once)) for i in range(len(keys)))


@pytest.mark.slow
@given(st.lists(pages, min_size=1, max_size=12), st.integers(1, 4))
def test_neighbours_are_apart(numbers: list[int], lookahead: int) -> None:
    sizes = {f"group {index}": nbytes for index, nbytes in enumerate(numbers)}
    _check(weight_room(sizes, lookahead), sizes, lookahead)


@pytest.mark.parametrize(
    ("numbers", "lookahead", "most"),
    [
        ([1, 2] * 4, 1, 3),  # attention and MLP in turn
        ([1, 2] * 4, 2, 6),  # two MLPs, and two attentions of which one is there
        ([1, 2] * 4, 3, 6),
        ([3, *[1, 2] * 4], 1, 5),  # and the vocabulary
        ([2] * 5, 1, 4),  # an odd number of equal ones
        ([2] * 7, 2, 6),
        ([7], 3, 7),
        ([], 1, 0),
    ],
)
def test_how_much_room(numbers: list[int], lookahead: int, most: int) -> None:
    sizes = {f"group {index}": count * PAGE for index, count in enumerate(numbers)}
    assert weight_room(sizes, lookahead).nbytes == most * PAGE


def test_sizes_are_rounded_to_pages() -> None:
    assert [place.nbytes for place in weight_room({"a": 1, "b": PAGE + 1}, 1).cycle] == [PAGE, 2 * PAGE]


def test_a_pass_may_begin_with_any_group() -> None:
    room = weight_room({"a": 1, "b": 1}, 1)
    assert [room.first[key] for key in "ab"] == [0, 1]
    with pytest.raises(KeyError):
        room.first["c"]
