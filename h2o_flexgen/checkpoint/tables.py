"""The table of a weight file's tensors, checked against the bytes that are really there.

safetensors files have one at their start. Of `pytorch_model.bin` torch's restricted unpickler reads it, and no code in
the file ever runs: the zip archives that torch.save writes hold every tensor's bytes uncompressed, so that their place
is all we need, and the weights are read with pread, or from the disk tier in place, as those of safetensors are.
"""

from __future__ import annotations

import math
import pickle
import sys
import zipfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from h2o_flexgen.checkpoint.files import CheckpointFile, Fault, Problems, name_fault, strict_json
from h2o_flexgen.checkpoint.wanted import Range
from h2o_flexgen.errors import H2OFlexGenError, first_line

if TYPE_CHECKING:
    import torch

MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors library itself
_PREFIX = 8  # bytes of the little-endian header length

_ITEMSIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
_ITEMSIZE |= {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}
_WORDS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F8_E4M3": "float8_e4m3fn"}
_WORDS |= {"I64": "int64", "I32": "int32", "I8": "int8", "U8": "uint8", "F8_E8M0": "float8_e8m0fnu"}
_LOCAL_HEADER = 30  # bytes before the name in a zip entry
_CONVERT = "load it with transformers elsewhere and save_pretrained it, which writes safetensors"


class FileTensor(NamedTuple):
    """A tensor in a file: the bytes of its `runs`, one after another, are its rows, row-major.

    runs    [start, stop) bytes of the file, in the order of the rows; none follows the one before it without a gap
    dtype   torch's word where we use it: one of WEIGHT_DTYPES, but for the parts of quantised matrices
    transposed  they are the columns instead
    """

    file: CheckpointFile
    runs: tuple[Range, ...]
    dtype: str
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def offset(self) -> int:
        return self.runs[0][0]

    @property
    def nbytes(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    def as_bytes(self) -> FileTensor:
        """Its bytes, one a row, whatever numbers they are."""
        return self._replace(dtype="uint8", shape=(self.nbytes, 1))

    def rows(self, start: int, stop: int) -> FileTensor:
        """Rows [start, stop) of a tensor in one run."""
        row = self.nbytes // self.shape[0]
        run = (self.offset + start * row, self.offset + stop * row)
        return self._replace(runs=(run,), shape=(stop - start, *self.shape[1:]))


def safetensors_table(file: CheckpointFile, problems: Problems) -> dict[str, FileTensor]:
    """The tensors of a safetensors file by name. Fault for a header that is too long, torn or not as the format has it.

    Other faults go into `problems`: unsafe names, offsets that overlap, leave holes or lie outside, a wrong size.
    """
    length = int.from_bytes(file.head(_PREFIX), "little")
    if length > MAX_HEADER or file.head(1, _PREFIX) not in (b"{", b""):
        raise Fault(f"({file.size} bytes) is not a safetensors file: header length {length}")
    data_start = _PREFIX + length
    if file.size < data_start or length < 2:
        raise Fault(f"is truncated: expected at least {max(data_start, 10)} bytes, found {file.size}")
    try:
        header = strict_json(file.head(length, _PREFIX))
    except ValueError as error:
        raise Fault(f": the header is not valid JSON ({error})") from None
    if not isinstance(header, dict):
        raise Fault(": the header is not a JSON object")
    header.pop("__metadata__", None)
    table = {}
    for name, info in header.items():
        fault = name_fault(name) or _info_fault(info)
        if fault:
            problems.add(f"{file.name}: tensor {name!r} {fault}", download=name_fault(name) is None)
            continue
        start, stop = info["data_offsets"]
        dtype, run = _WORDS.get(info["dtype"], info["dtype"]), (data_start + start, data_start + stop)
        table[name] = FileTensor(file, (run,), dtype, tuple(info["shape"]))
    if len(table) == len(header):
        _check_extents(file, data_start, table, problems)
    return table


def _info_fault(info: Any) -> str | None:
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


def _check_extents(file: CheckpointFile, data_start: int, table: dict[str, FileTensor], problems: Problems) -> None:
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


def bin_table(file: CheckpointFile, problems: Problems, at_least: int) -> dict[str, FileTensor]:
    """The tensors of a torch.save archive by name; unusable ones go into `problems`. Fault for any other file.

    `at_least`: the bytes that its tensors take in 16 bits, for the message about a truncated file.
    """
    if not file.head(4).startswith(b"PK\x03\x04"):
        raise Fault(f"({file.size} bytes) is not an archive of torch 1.6 or later: {_CONVERT}", download=False)
    try:
        places = _data_places(file)
    except H2OFlexGenError:
        raise
    except Exception as error:  # zipfile, too, raises nearly anything for a damaged archive
        raise Fault(
            f"is truncated or damaged ({error}): expected more than {at_least} bytes with a zip directory at their "
            f"end, found {file.size}"
        ) from None
    tensors = _load(file)
    base = _mapping_base(tensors.values(), places)
    if base is None:
        raise Fault(f": its tensors do not match the archive's entries: {_CONVERT}")
    table = {}
    for name, tensor in tensors.items():
        fault = name_fault(name)
        if fault is None and not tensor.is_contiguous():
            fault = f"is not stored row by row: {_CONVERT}"
        if fault:
            problems.add(f"{file.name}: tensor {name!r} {fault}")
            continue
        offset = tensor.data_ptr() - base if tensor.numel() else 0
        run = (offset, offset + tensor.numel() * tensor.itemsize)
        table[name] = FileTensor(file, (run,), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    return table


def _load(file: CheckpointFile) -> dict[str, torch.Tensor]:
    """The state dict with its tensors mapped, not read. Fault for what is none."""
    import torch  # here: the tables of safetensors are read without it

    try:
        state = torch.load(file.path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        reason = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "class" in line), "")
        why = f" ({reason[:200]})" if reason else ""
        refused = f"holds more than tensors and could run code when loaded, so it is refused{why}"
        raise Fault(f"{refused}: use a safetensors version of the model", download=False) from None
    except Exception as error:  # for a damaged archive torch.load raises nearly anything
        raise Fault(f"cannot be read: {first_line(error)}") from None
    plain = isinstance(state, Mapping) and all(isinstance(value, torch.Tensor) for value in state.values())
    if not plain or any(value.device.type != "cpu" or value.layout != torch.strided for value in state.values()):
        raise Fault(f"is not a flat dictionary of dense tensors: {_CONVERT}", download=False)
    return dict(state)


def _data_places(file: CheckpointFile) -> dict[int, int]:
    """File offset -> bytes of every stored entry; ValueError for a compressed or foreign-endian archive."""
    places = {}
    with zipfile.ZipFile(file.path) as archive:
        for info in archive.infolist():
            leaf = info.filename.rpartition("/")[2]
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError("its tensors are compressed")
            if leaf == "byteorder" and archive.read(info).strip() != sys.byteorder.encode():
                raise ValueError("its bytes are in the order of another kind of machine")
            header = file.head(_LOCAL_HEADER, info.header_offset)
            if len(header) < _LOCAL_HEADER or not header.startswith(b"PK\x03\x04"):
                raise ValueError(f"entry {leaf!r} is not where the directory has it")
            skip = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
            offset = info.header_offset + _LOCAL_HEADER + skip
            if offset + info.file_size > file.size:
                raise ValueError(f"entry {leaf!r} ends behind the file")
            places[offset] = info.file_size
    return places


def _mapping_base(tensors: Any, places: dict[int, int]) -> int | None:
    """The address at which torch mapped the file: the one for which every storage is an entry of its own size."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (tensor.untyped_storage() for tensor in tensors)
        if storage.nbytes()
    }
    if not storages:
        return 0
    lowest = min(storages)
    fits = [
        lowest - offset
        for offset, nbytes in places.items()
        if nbytes == storages[lowest]
        and all(places.get(pointer - lowest + offset) == size for pointer, size in storages.items())
    ]
    return fits[0] if len(fits) == 1 else None
