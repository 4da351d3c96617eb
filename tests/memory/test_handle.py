from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_flexgen.config.model.tensors import DTYPES, TensorSpec, WeightGroup
from h2o_flexgen.errors import ModelError
from h2o_flexgen.memory.handle import (
    Location,
    direct_layout,
    direct_obstacle,
    packed_layout,
    page_ceil,
    page_floor,
    torch_dtype,
    views,
)

shapes = st.lists(st.integers(1, 70), min_size=1, max_size=2).map(tuple)
dtypes = st.sampled_from(sorted(DTYPES))


def group_of(sizes: list[tuple[int, ...]]) -> WeightGroup:
    return WeightGroup("unit", tuple(TensorSpec(f"t{i}", shape) for i, shape in enumerate(sizes)))


@given(st.lists(shapes, min_size=1, max_size=12), dtypes)
def test_packed_layout_is_the_groups_own_arithmetic(sizes: list[tuple[int, ...]], dtype: str) -> None:
    group = group_of(sizes)
    layout = packed_layout(group, dtype)
    assert layout.nbytes == group.buffer_bytes(dtype)
    assert layout.nbytes % 4096 == 0
    assert [slot.name for slot in layout.slots] == [tensor.name for tensor in group.tensors]
    end = 0
    for slot in layout.slots:
        assert slot.offset % 64 == 0
        assert end <= slot.offset < end + 64, "slots follow each other without holes"
        end = slot.offset + slot.nbytes
    assert end <= layout.nbytes


@st.composite
def located_groups(draw: st.DrawFn) -> tuple[WeightGroup, str, dict[str, Location]]:
    """Tensors scattered over up to three files, touching or apart, in any order."""
    dtype = draw(dtypes)
    group = group_of(draw(st.lists(shapes, min_size=1, max_size=12)))
    item = DTYPES[dtype]
    cursors = {path: draw(st.integers(0, 3000)) * item for path in ("a", "b", "c")}
    locations = {}
    for tensor in draw(st.permutations(group.tensors)):
        path = draw(st.sampled_from(sorted(cursors)))
        gap = draw(st.sampled_from((0, 0, 1, 7, 2048, 5000)))
        start = cursors[path] + gap * item
        locations[tensor.name] = Location(path, start, tensor.nbytes(dtype))
        cursors[path] = start + tensor.nbytes(dtype)
    return group, dtype, locations


@pytest.mark.slow
@settings(max_examples=100)
@given(located_groups())
def test_direct_layout_keeps_offsets_modulo_the_page(case: tuple[WeightGroup, str, dict[str, Location]]) -> None:
    group, dtype, locations = case
    layout, extents = direct_layout(group, dtype, locations)
    assert [slot.name for slot in layout.slots] == [tensor.name for tensor in group.tensors]
    assert layout.nbytes % 4096 == 0

    pages = []
    for extent in extents:
        assert (extent.file_offset - extent.buffer_offset) % 4096 == 0
        pages.append((page_floor(extent.buffer_offset), page_ceil(extent.buffer_offset + extent.nbytes)))
    for (_, before), (after, _) in zip(sorted(pages), sorted(pages)[1:], strict=False):
        assert before <= after, "pages of different extents overlap"
    assert max(end for _, end in pages) == layout.nbytes

    for slot in layout.slots:
        path, offset, nbytes = locations[slot.name]
        assert slot.nbytes == nbytes
        inside = [
            extent
            for extent in extents
            if extent.path == path
            and extent.file_offset <= offset
            and offset + nbytes <= extent.file_offset + extent.nbytes
            and slot.offset - extent.buffer_offset == offset - extent.file_offset
        ]
        assert len(inside) == 1, f"{slot.name} must come from exactly one extent"


def test_neighbours_in_the_file_share_one_extent() -> None:
    group = group_of([(100,), (200,), (50,)])
    places = {"t2": Location("f", 1000, 200), "t0": Location("f", 1200, 400), "t1": Location("f", 1600, 800)}
    layout, extents = direct_layout(group, "float32", places)
    assert [(extent.file_offset, extent.nbytes, extent.name) for extent in extents] == [(1000, 1400, "t2 .. t1")]
    assert [slot.offset for slot in layout.slots] == [1200, 1600, 1000]

    far = {**places, "t1": Location("f", 4096 * 3, 800)}
    _, extents = direct_layout(group, "float32", far)
    assert [(extent.name, extent.nbytes) for extent in extents] == [("t2 .. t0", 600), ("t1", 800)]


def test_two_names_for_the_same_bytes() -> None:
    group = group_of([(8,), (8,)])
    layout, extents = direct_layout(group, "float32", {"t0": Location("f", 64, 32), "t1": Location("f", 64, 32)})
    assert layout.slots[0].offset == layout.slots[1].offset
    assert len(extents) == 1


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ({}, "no single run"),
        ({"t0": Location("f", 64, 31)}, "31 bytes in f, 32 as float32"),
        ({"t0": Location("f", 66, 32)}, "starts at byte 66"),
    ],
)
def test_what_cannot_be_read_in_place(places: dict[str, Location], words: str) -> None:
    group = group_of([(8,)])
    assert words in (direct_obstacle(group, "float32", places) or "")
    with pytest.raises(ModelError, match=words):
        direct_layout(group, "float32", places)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_views_share_the_buffer(dtype: str) -> None:
    layout = packed_layout(group_of([(3, 5), (7,), (2, 2)]), dtype)
    buffer = torch.zeros(layout.nbytes + 4096, dtype=torch.uint8)
    tensors = views(layout, buffer)
    assert [tuple(tensor.shape) for tensor in tensors.values()] == [(3, 5), (7,), (2, 2)]
    for number, tensor in enumerate(tensors.values(), start=1):
        assert tensor.dtype == torch_dtype(dtype)
        assert tensor.is_contiguous()
        tensor.fill_(number)
    again = views(layout, buffer)
    for number, tensor in enumerate(again.values(), start=1):
        assert bool((tensor == number).all()), "a write to one tensor reached another"


def test_views_refuse_a_wrong_buffer() -> None:
    layout = packed_layout(group_of([(3, 5)]), "float32")
    for bad in (torch.zeros(100, dtype=torch.uint8), torch.zeros(9999), torch.zeros(2, 4096, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="flat uint8 buffer"):
            views(layout, bad)


def test_unknown_dtype() -> None:
    with pytest.raises(ValueError, match="float7"):
        torch_dtype("float7")
