"""Memory of large intermediate results: used again, never while somebody looks at it."""

from __future__ import annotations

import torch

from h2o_flexgen.huge import LEAST, LargeMemory

MIB = 1 << 20


def test_tensors_have_the_shape_and_the_bytes_they_are_given() -> None:
    memory = LargeMemory()
    for shape, dtype in (((3, 1000, 700), torch.bfloat16), ((2, LEAST), torch.uint8), ((1 << 19,), torch.float32)):
        made = memory.empty(*shape, dtype=dtype)
        assert made.shape == shape
        assert made.dtype == dtype
        assert made.is_contiguous()
        made.fill_(3)
        assert bool((made == 3).all())


def test_small_ones_are_torchs_own() -> None:
    memory = LargeMemory()
    made = memory.empty(10, 10, dtype=torch.float32)
    del made
    assert memory.free_bytes == 0


def test_pages_are_used_again_once_the_last_view_is_gone() -> None:
    memory = LargeMemory()
    first = memory.empty(4 * MIB, dtype=torch.uint8)
    place, view = first.data_ptr(), first[100:200].fill_(7)
    del first
    second = memory.empty(4 * MIB, dtype=torch.uint8).fill_(1)
    assert second.data_ptr() != place
    assert bool((view == 7).all())
    del view
    assert memory.empty(3 * MIB, dtype=torch.uint8).data_ptr() == place


def test_what_takes_turns_does_not_add_up() -> None:
    memory = LargeMemory()
    for _ in range(5):
        for size in (12, 16, 9, 4, 16, 12):
            memory.empty(size * MIB, dtype=torch.uint8)
    assert memory.free_bytes <= 16 * MIB + 4 * MIB


def test_a_tensor_outlives_the_trim() -> None:
    memory = LargeMemory()
    made = memory.empty(2 * MIB, dtype=torch.uint8).fill_(5)
    memory.empty(4 * MIB, dtype=torch.uint8)
    assert memory.free_bytes == 4 * MIB
    memory.trim()
    assert memory.free_bytes == 0
    assert bool((made == 5).all())
    del made
    assert memory.free_bytes == 2 * MIB
