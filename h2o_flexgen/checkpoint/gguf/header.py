"""The header of a GGUF file: typed metadata and a table of tensors, checked against the file's bytes.

The format is described in ggml's docs/gguf.md: little-endian, versions 2 and 3. A length that the file gives is
compared with what is left of the file before anything is allocated for it.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any, NamedTuple

import numpy as np

from h2o_flexgen.checkpoint.files import CheckpointFile, Fault, Problems, name_fault, refuse_foreign
from h2o_flexgen.checkpoint.gguf.blocks import FORMATS, REMOVED, TYPE_NAMES
from h2o_flexgen.errors import ModelError

NEEDED = "needed a whole GGUF file of version 2 or 3, little-endian"

_MAGIC = b"GGUF"
_MAX_HEADER = 256 << 20  # bytes; the largest vocabularies take 15 MiB
_STEP = 1 << 20  # bytes read at a time
_MOST_PARTS = 4096
_MOST_DIMENSIONS = 4
_LONGEST_KEY = 65535  # bytes, as the format has it
_LONGEST_NAME = 256  # bytes; llama.cpp takes 63
_ALIGNMENT = 32  # bytes, where the metadata has no other
_LEAST_RECORD = 8 + 4 + 8 + 4 + 8  # bytes of a tensor in the table

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", _BOOL: "<B", 10: "<Q", 11: "<q", 12: "<d"}

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf")


class GgufTensor(NamedTuple):
    """One tensor in a file: `nbytes` bytes from `offset` on of part number `part`.

    kind    ggml's name of its type
    shape   as torch has it: the last dimension is that of neighbouring numbers
    """

    part: int
    offset: int
    nbytes: int
    kind: str
    shape: tuple[int, ...]


class GgufPart(NamedTuple):
    """A file as it was when its header was read."""

    path: str
    size: int
    mtime_ns: int


class GgufHeader(NamedTuple):
    """The headers of a model's files, which are closed again.

    metadata    by key: int, float, bool, str, a list of str, or a numpy array
    """

    path: str
    parts: tuple[GgufPart, ...]
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_header(path: str | os.PathLike[str]) -> GgufHeader:
    """The header of the GGUF file at `path`, with those of all parts where it is one of a split model.

    Raises ModelError with what is wrong: another kind of file, another version or byte order, a length or an offset
    that does not fit the file, keys or names that occur twice, text that is not UTF-8, types that are not known.
    """
    problems, root = Problems(), os.fspath(path)
    parts: list[GgufPart] = []
    tensors: dict[str, GgufTensor] = {}
    metadata: dict[str, Any] = {}
    for number, name in enumerate(_part_paths(root)):
        try:
            file = CheckpointFile(name)
        except OSError as error:
            problems.add(f"{os.path.basename(name)} cannot be opened: {error.strerror}", download=True)
            continue
        try:
            own, table = _read_one(file, number)
            if not parts:
                metadata = own
            parts.append(GgufPart(os.path.realpath(name), file.size, file.mtime_ns))
            for tensor in sorted(tensors.keys() & table.keys()):
                problems.add(f"tensor {tensor!r} is in {file.name} and in a part before it")
            tensors.update(table)
        except Fault as fault:
            problems.add(fault.of(file.name), download=fault.download)
        finally:
            file.close()
    problems.raise_any(root, NEEDED)
    _check_split(root, metadata, parts, tensors)
    return GgufHeader(root, tuple(parts), metadata, tensors)


def part_number(name: str) -> int | None:
    """Which part of a split model a file of this name is, from 1 on; None: it is a whole one."""
    found = _PART.fullmatch(name)
    return int(found["number"]) if found else None


def _part_paths(path: str) -> list[str]:
    folder, name = os.path.split(path)
    found = _PART.fullmatch(name)
    if found is None:
        return [path]
    total = int(found["total"])
    if not 1 <= int(found["number"]) <= total <= _MOST_PARTS:
        raise ModelError(f"{path} is part {found['number']} of {found['total']}", "needed a part of a split model")
    return [os.path.join(folder, f"{found['stem']}-{n:05d}-of-{total:05d}.gguf") for n in range(1, total + 1)]


def _check_split(path: str, metadata: dict[str, Any], parts: list[GgufPart], tensors: dict[str, GgufTensor]) -> None:
    """ModelError where the files that were read are not all that belong together."""
    count, total = metadata.get("split.count", 1), metadata.get("split.tensors.count", len(tensors))
    if (count or 1) != len(parts):
        raise ModelError(
            f"{path} is one of {count} files of a model, and {len(parts)} were found by its name",
            "needed all of them in one folder, named NAME-00001-of-0000N.gguf",
        )
    if total != len(tensors):
        found = f"the files of {path} hold {len(tensors)} tensors"
        raise ModelError(found, f"needed {total}", "download them again")


def _read_one(file: CheckpointFile, number: int) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Metadata and tensors of one file. Raises Fault."""
    cursor = _Cursor(file)
    tensor_count, key_count = _read_start(cursor)
    if tensor_count > file.size // _LEAST_RECORD or key_count > file.size // (8 + 4 + 1):
        raise Fault(f"of {file.size} bytes claims {tensor_count} tensors and {key_count} keys")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = _key(cursor)
        if key in metadata:
            raise Fault(f"has the key {key!r} twice")
        metadata[key] = _value(cursor, key)
    if metadata.get("split.no", 0) != number:
        raise Fault(f"is part {metadata.get('split.no', 0)} of its model, by its name {number}", download=False)
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise Fault(f"has an alignment of {alignment}, needed a power of two from 8 on")
    tensors: dict[str, GgufTensor] = {}
    for _ in range(tensor_count):
        name, tensor = _tensor(cursor, number)
        if name in tensors:
            raise Fault(f"has tensor {name!r} twice")
        tensors[name] = tensor
    start = -(-cursor.at // alignment) * alignment
    placed = {name: each._replace(offset=each.offset + start) for name, each in tensors.items()}
    _check_places(file, start, alignment, placed)
    return metadata, placed


def _read_start(cursor: _Cursor) -> tuple[int, int]:
    """How many tensors and keys there are."""
    file = cursor.file
    refuse_foreign(file)
    head = file.head(4)
    if head != _MAGIC:
        raise Fault(f"({file.size} bytes) is not a GGUF file: it starts with {head!r}")
    _, version = cursor.numbers("<I", 2).tolist()
    if version == 1:
        raise Fault("is of GGUF version 1, which is not read: convert it anew", download=False)
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in (1, 2, 3):
            raise Fault("is a big-endian GGUF file, which is not read: convert it anew", download=False)
        raise Fault(f"is of GGUF version {version}, which is not known", download=False)
    return cursor.number("<Q"), cursor.number("<Q")


class _Cursor:
    """Reads on in a header, step by step. Owns the bytes read so far; Fault for what the file does not hold."""

    def __init__(self, file: CheckpointFile) -> None:
        self.file, self.at = file, 0
        self._data = bytearray()

    def number(self, layout: str) -> Any:
        return self.numbers(layout, 1)[0].item()

    def text(self, what: str) -> str:
        """The next string. `what` names it in faults."""
        return self.texts(1, what)[0]

    def numbers(self, layout: str, count: int) -> np.ndarray:
        """The next `count` numbers, as an array of its own."""
        dtype = np.dtype(layout)
        start, stop = self.at, self.at + count * dtype.itemsize
        if stop > len(self._data):
            self._load(stop)
        self.at = stop
        return np.frombuffer(bytes(self._data[start:stop]), dtype)

    def texts(self, count: int, what: str) -> list[str]:
        found, data = [], self._data
        try:
            for _ in range(count):  # there may be hundreds of thousands
                start = self.at + 8
                if start > len(data):
                    self._load(start)
                self.at = start + int.from_bytes(data[start - 8 : start], "little")
                if self.at > len(data):
                    self._load(self.at)
                found.append(data[start : self.at].decode("utf-8"))
        except UnicodeDecodeError as error:
            raise Fault(f"has {what} that is not UTF-8: {error.reason}") from error
        return found

    def _load(self, stop: int) -> None:
        """Read at least up to byte `stop` of the file."""
        if stop > self.file.size:
            raise Fault(f"is truncated: expected at least {stop} bytes, found {self.file.size}")
        if stop > _MAX_HEADER:
            raise Fault(f"has a header of more than {_MAX_HEADER} bytes")
        wanted = min(max(_STEP, stop - len(self._data)), _MAX_HEADER - len(self._data))
        self._data += self.file.head(wanted, len(self._data))


def _key(cursor: _Cursor) -> str:
    key = cursor.text("a key")
    if not key or len(key) > _LONGEST_KEY or not key.isprintable():
        raise Fault(f"has the key {key[:80]!r}, which is none")
    return key


def _value(cursor: _Cursor, key: str) -> Any:
    kind, what = cursor.number("<I"), f"the value of {key!r}"
    if kind == _STRING:
        return cursor.text(what)
    if kind != _ARRAY:
        value = _numbers(cursor, kind, 1, what)[0].item()
        if isinstance(value, float) and not math.isfinite(value):
            raise Fault(f"has {what} that is not finite")
        return value
    kind, count = cursor.number("<I"), cursor.number("<Q")
    if kind == _ARRAY:
        raise Fault(f"has an array of arrays as {what}")
    if kind != _STRING:
        return _numbers(cursor, kind, count, what)
    if count > (cursor.file.size - cursor.at) // 8:
        raise Fault(f"of {cursor.file.size} bytes claims {count} strings in {what}")
    return cursor.texts(count, what)


def _numbers(cursor: _Cursor, kind: int, count: int, what: str) -> np.ndarray:
    if kind not in _SCALARS:
        raise Fault(f"has {what} of the unknown type {kind}")
    values = cursor.numbers(_SCALARS[kind], count)
    if kind != _BOOL:
        return values
    if (values > 1).any():
        raise Fault(f"has {what} that is neither true nor false")
    return values.astype(bool)


def _tensor(cursor: _Cursor, part: int) -> tuple[str, GgufTensor]:
    """The next record of the table; its offset counts from the start of the weights."""
    name = cursor.text("the name of a tensor")
    fault = name_fault(name) or ("is too long" if len(name) > _LONGEST_NAME else None)
    if fault:
        raise Fault(f"has a tensor {name[:80]!r}, which {fault}")
    rank = cursor.number("<I")
    if not 1 <= rank <= _MOST_DIMENSIONS:
        raise Fault(f"has tensor {name!r} of {rank} dimensions")
    shape = tuple(cursor.number("<Q") for _ in range(rank))[::-1]
    kind, offset = cursor.number("<I"), cursor.number("<Q")
    if kind in REMOVED:
        gone = f"of type {REMOVED[kind]}, which ggml no longer has: get the model in another type, such as Q4_0"
        raise Fault(f"has tensor {name!r} {gone}", download=False)
    if kind not in TYPE_NAMES:
        raise Fault(f"has tensor {name!r} of the unknown type {kind}", download=False)
    word = TYPE_NAMES[kind]
    if word not in FORMATS:
        raise Fault(f"has tensor {name!r} of type {word}; those read are {', '.join(FORMATS)}", download=False)
    size, nbytes = FORMATS[word].numbers, FORMATS[word].nbytes
    numbers = math.prod(shape)
    if not 0 < numbers < 1 << 62 or offset >= 1 << 62:
        raise Fault(f"has tensor {name!r} of shape {shape} at byte {offset}")
    if shape[-1] % size:
        raise Fault(f"has tensor {name!r} with rows of {shape[-1]} numbers, needed a multiple of {size} for {word}")
    return name, GgufTensor(part, offset, numbers // size * nbytes, word, shape)


def _check_places(file: CheckpointFile, start: int, alignment: int, tensors: dict[str, GgufTensor]) -> None:
    """Tensors follow one another, each from the next multiple of the alignment on, and end within the file."""
    cursor, before = start, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset != cursor:
            word = "overlaps" if tensor.offset < cursor else "has a hole between it and"
            raise Fault(f"has tensor {name!r} at byte {tensor.offset}, expected {cursor}: it {word} {before}")
        cursor, before = cursor + -(-tensor.nbytes // alignment) * alignment, f"tensor {name!r}"
        stop = tensor.offset + tensor.nbytes
        if stop > file.size:
            raise Fault(f"is truncated: tensor {name!r} ends at byte {stop}, found {file.size} bytes")
