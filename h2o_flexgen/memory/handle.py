"""Where the tensors of one weight group lie: in a buffer, and in files.

A `UnitLayout` is the map of one buffer. `packed_layout` is our own order; `direct_layout` follows the user's
safetensors files, so that whole pages can be read by O_DIRECT straight to where the tensors are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from h2o_flexgen.config.model.packing import Packing
from h2o_flexgen.config.model.tensors import PAGE, TENSOR_ALIGN, WeightGroup, page_ceil, page_floor, round_up
from h2o_flexgen.errors import ModelError
from h2o_flexgen.quant import PackedWeight, Weight


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of that name; ValueError for a word that does not name one."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype


class Location(NamedTuple):
    """The raw row-major bytes of one tensor in a file."""

    path: str
    file_offset: int
    nbytes: int


@dataclass(frozen=True)
class TensorSlot:
    """One tensor in a buffer: bytes [offset, offset + nbytes). A packed one is used in `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int
    packing: Packing | None = None


@dataclass(frozen=True)
class UnitLayout:
    """The map of one weight group's buffer. `nbytes` is a multiple of PAGE; slots are in the group's order."""

    key: str
    slots: tuple[TensorSlot, ...]
    nbytes: int


@dataclass(frozen=True)
class Extent:
    """A run of file bytes and where it goes in a buffer.

    Readable in place by O_DIRECT when (file_offset - buffer_offset) % PAGE == 0 and the buffer starts on a page. The
    pages of the buffer that an extent touches are its own: a read may overwrite all of them. `name` says which tensors.
    """

    path: str
    file_offset: int
    nbytes: int
    buffer_offset: int
    name: str


def packed_layout(group: WeightGroup, dtype: str) -> UnitLayout:
    """The canonical layout: the group's order, each tensor on TENSOR_ALIGN; nbytes equals group.buffer_bytes(dtype)."""
    slots, cursor = [], 0
    for tensor in group.tensors:
        nbytes = tensor.nbytes(dtype)
        slots.append(TensorSlot(tensor.name, tuple(tensor.shape), tensor.dtype(dtype), cursor, nbytes, tensor.packing))
        cursor = round_up(cursor + nbytes, TENSOR_ALIGN)
    return UnitLayout(group.key, tuple(slots), page_ceil(cursor))


def direct_obstacle(group: WeightGroup, dtype: str, locations: Mapping[str, tuple[str, int, int]]) -> str | None:
    """Why the group cannot be read straight out of `locations`, or None where it can.

    The caller still has to know that the bytes are of `dtype`: bfloat16 and float16 have the same size.
    """
    itemsize = torch_dtype(dtype).itemsize
    for tensor in group.tensors:
        if tensor.packing is not None:
            return f"{tensor.name} is packed"
        if tensor.wide and dtype != "float32":
            return f"{tensor.name} is kept in float32"
        if tensor.name not in locations:
            return f"{tensor.name} has no single run of bytes in a file"
        path, offset, nbytes = locations[tensor.name]
        if nbytes != tensor.nbytes(dtype):
            return f"{tensor.name} has {nbytes} bytes in {path}, {tensor.nbytes(dtype)} as {dtype}"
        if offset % itemsize:
            return f"{tensor.name} starts at byte {offset} of {path}, which no {dtype} may"
    return None


def direct_layout(
    group: WeightGroup, dtype: str, locations: Mapping[str, tuple[str, int, int]]
) -> tuple[UnitLayout, tuple[Extent, ...]]:
    """A layout whose slots keep their file offset modulo PAGE, and the extents that fill it.

    `locations`: tensor name -> (path, file offset, nbytes). Tensors whose pages touch in the file share one extent, so
    no page is read twice; the pages of different extents never overlap. ModelError where `direct_obstacle` finds one.
    """
    obstacle = direct_obstacle(group, dtype, locations)
    if obstacle is not None:
        raise ModelError(f"{group.key} cannot be read in place: {obstacle}", change="pack the weights first")
    placed: dict[str, int] = {}
    extents, cursor = [], 0
    for run in _runs({tensor.name: Location(*locations[tensor.name]) for tensor in group.tensors}):
        start = run[0][1].file_offset
        stop = max(where.file_offset + where.nbytes for _, where in run)
        base = cursor + start % PAGE
        for name, where in run:
            placed[name] = base + where.file_offset - start
        label = run[0][0] if len(run) == 1 else f"{run[0][0]} .. {run[-1][0]}"
        extents.append(Extent(run[0][1].path, start, stop - start, base, label))
        cursor = page_ceil(base + stop - start)
    slots = tuple(
        TensorSlot(tensor.name, tuple(tensor.shape), dtype, placed[tensor.name], tensor.nbytes(dtype))
        for tensor in group.tensors
    )
    return UnitLayout(group.key, slots, cursor), tuple(extents)


def views(layout: UnitLayout, buffer: torch.Tensor) -> dict[str, Weight]:
    """The layout's tensors over `buffer` (1-D uint8, at least layout.nbytes), without a copy, in slot order."""
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.numel() < layout.nbytes:
        raise ValueError(
            f"{layout.key} needs a flat uint8 buffer of {layout.nbytes} bytes, got {buffer.dtype} {tuple(buffer.shape)}"
        )
    return {slot.name: _view(slot, buffer.narrow(0, slot.offset, slot.nbytes)) for slot in layout.slots}


def _view(slot: TensorSlot, data: torch.Tensor) -> Weight:
    dtype = torch_dtype(slot.dtype)
    if slot.packing is not None:
        return PackedWeight.over(slot.packing, slot.shape, data, dtype)
    return data.view(dtype).view(slot.shape)


def _runs(locations: Mapping[str, Location]) -> list[list[tuple[str, Location]]]:
    """Tensors in file order, cut wherever a whole untouched page or another file lies between two of them."""
    runs: list[list[tuple[str, Location]]] = []
    stop = 0
    for name, where in sorted(locations.items(), key=lambda item: item[1]):
        if not runs or runs[-1][0][1].path != where.path or page_floor(where.file_offset) > page_ceil(stop):
            runs.append([])
            stop = 0
        runs[-1].append((name, where))
        stop = max(stop, where.file_offset + where.nbytes)
    return runs
