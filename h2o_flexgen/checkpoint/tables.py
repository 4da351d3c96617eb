"""What a weight file holds: a table of its tensors, checked against the bytes that are really there."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from h2o_flexgen.checkpoint.files import CheckpointFile
from h2o_flexgen.checkpoint.problems import Problems, foreign_content, name_fault, strict_json

MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors library itself
_PREFIX = 8  # bytes of the little-endian header length

_ITEMSIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
_ITEMSIZE |= {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}
_FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}


class Entry(NamedTuple):
    """One tensor in a file: `nbytes` bytes from `offset` on, row-major. `dtype` is torch's word where we use it."""

    file: CheckpointFile
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


def safetensors_table(file: CheckpointFile, problems: Problems) -> dict[str, Entry] | None:
    """The tensors of a safetensors file by name; None where nothing in it can be used.

    Every fault goes into `problems`: something else than a safetensors file, a header that is too long, torn or not as
    the format has it, unsafe names, offsets that overlap, leave holes or lie outside, and a size that does not fit.
    """
    foreign = foreign_content(file.head(200), file.size)
    if foreign:
        problems.add(f"{file.name} {foreign}", download=True)
        return None
    length = int.from_bytes(file.head(_PREFIX), "little")
    if length > MAX_HEADER or file.head(1, _PREFIX) not in (b"{", b""):
        problems.add(f"{file.name} ({file.size} bytes) is no safetensors file: header length {length}", download=True)
        return None
    data_start = _PREFIX + length
    if file.size < data_start or length < 2:
        problems.add(
            f"{file.name} is truncated: expected at least {max(data_start, 10)} bytes, found {file.size}", download=True
        )
        return None
    try:
        header = strict_json(file.head(length, _PREFIX))
    except ValueError as error:
        problems.add(f"{file.name}: the header is not valid JSON ({error})", download=True)
        return None
    if not isinstance(header, dict):
        problems.add(f"{file.name}: the header is not a JSON object", download=True)
        return None
    header.pop("__metadata__", None)
    table = {}
    for name, info in header.items():
        fault = name_fault(name) or _info_fault(info)
        if fault:
            problems.add(f"{file.name}: tensor {name!r} {fault}", download=name_fault(name) is None)
            continue
        start, stop = info["data_offsets"]
        table[name] = Entry(
            file, data_start + start, stop - start, _FLOATS.get(info["dtype"], info["dtype"]), tuple(info["shape"])
        )
    if len(table) == len(header):
        _check_extents(file, data_start, table, problems)
    return table


def _info_fault(info: Any) -> str | None:
    """What is wrong with one tensor's header record."""
    if not isinstance(info, dict) or set(info) != {"dtype", "shape", "data_offsets"}:
        return "has a broken header record"
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    lists = isinstance(shape, list) and len(shape) <= 64 and isinstance(offsets, list) and len(offsets) == 2
    if not isinstance(dtype, str) or not lists or not all(type(n) is int and 0 <= n < 1 << 63 for n in shape + offsets):
        return "has a broken header record"
    held, needed = offsets[1] - offsets[0], math.prod(shape) * _ITEMSIZE.get(dtype, 0)
    if held < 0:
        return f"has offsets that run backwards: {offsets}"
    if dtype in _ITEMSIZE and needed != held:
        return f"of shape {shape} and dtype {dtype} needs {needed} bytes, its offsets hold {held}"
    return None


def _check_extents(file: CheckpointFile, data_start: int, table: dict[str, Entry], problems: Problems) -> None:
    """Tensors must follow one another without overlap or hole, up to the very end of the file."""
    cursor, before = data_start, "the header"
    for name, entry in sorted(table.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset < cursor:
            problems.add(f"{file.name}: tensor {name!r} overlaps {before}", download=True)
        elif entry.offset > cursor:
            hole = entry.offset - cursor
            problems.add(f"{file.name}: a hole of {hole} bytes before tensor {name!r}", download=True)
        cursor, before = max(cursor, entry.offset + entry.nbytes), f"tensor {name!r}"
    if cursor != file.size:
        word = "is truncated" if file.size < cursor else "has bytes after its last tensor"
        problems.add(f"{file.name} {word}: expected {cursor} bytes, found {file.size}", download=True)
