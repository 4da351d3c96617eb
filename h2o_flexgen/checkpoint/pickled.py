"""The tables of `pytorch_model.bin` files: torch's restricted unpickler reads them, and no code in them ever runs.

The zip archives that torch.save writes hold every tensor's bytes uncompressed, so that their place in the file is all
we need: the weights are then read with pread, and from the disk tier in place, as those of safetensors files are.
"""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from collections.abc import Mapping
from typing import Any

import torch

from h2o_flexgen.checkpoint.files import CheckpointFile
from h2o_flexgen.checkpoint.problems import Problems, foreign_content, name_fault
from h2o_flexgen.checkpoint.tables import Entry
from h2o_flexgen.errors import H2OFlexGenError

_LOCAL_HEADER = 30  # bytes before the name in a zip entry
_CONVERT = "load it with transformers elsewhere and save_pretrained it, which writes safetensors"


def bin_table(file: CheckpointFile, problems: Problems, at_least: int) -> dict[str, Entry] | None:
    """The tensors of a torch.save archive by name; None where nothing in it can be used. Faults go into `problems`.

    `at_least`: the bytes that its tensors take in 16 bits, for the message about a truncated file.
    """
    head = file.head(200)
    foreign = foreign_content(head, file.size)
    if foreign:
        problems.add(f"{file.name} {foreign}", download=True)
        return None
    if not head.startswith(b"PK\x03\x04"):
        problems.add(f"{file.name} ({file.size} bytes) is not an archive of torch 1.6 or later: {_CONVERT}")
        return None
    try:
        places = _data_places(file)
    except H2OFlexGenError:
        raise
    except Exception as error:  # zipfile, too, raises nearly anything for a damaged archive
        problems.add(
            f"{file.name} is truncated or damaged ({error}): expected more than {at_least} bytes with a zip directory "
            f"at their end, found {file.size}",
            download=True,
        )
        return None
    tensors = _load(file, problems)
    if tensors is None:
        return None
    base = _mapping_base(tensors.values(), places)
    if base is None:
        problems.add(f"{file.name}: its tensors do not match the archive's entries: {_CONVERT}", download=True)
        return None
    table = {}
    for name, tensor in tensors.items():
        fault = name_fault(name)
        if fault is None and not tensor.is_contiguous():
            fault = f"is not stored row by row: {_CONVERT}"
        if fault:
            problems.add(f"{file.name}: tensor {name!r} {fault}")
            continue
        offset = tensor.data_ptr() - base if tensor.numel() else 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        table[name] = Entry(file, offset, tensor.numel() * tensor.itemsize, dtype, tuple(tensor.shape))
    return table


def _load(file: CheckpointFile, problems: Problems) -> dict[str, torch.Tensor] | None:
    """The state dict with its tensors mapped, not read."""
    try:
        state = torch.load(file.path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        reason = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "class" in line), "")
        problems.add(
            f"{file.name} holds more than tensors and could run code when loaded, so it is refused"
            + (f" ({reason[:200]})" if reason else "")
            + ": use a safetensors version of the model"
        )
        return None
    except Exception as error:  # for a damaged archive torch.load raises nearly anything
        said = (str(error).strip() or type(error).__name__).splitlines()[0]  # some have no message
        problems.add(f"{file.name} cannot be read: {said[:200]}", download=True)
        return None
    plain = isinstance(state, Mapping) and all(isinstance(value, torch.Tensor) for value in state.values())
    if not plain or any(value.device.type != "cpu" or value.layout != torch.strided for value in state.values()):
        problems.add(f"{file.name} is not a flat dictionary of dense tensors: {_CONVERT}")
        return None
    return dict(state)


def _data_places(file: CheckpointFile) -> dict[int, int]:
    """File offset -> bytes of every stored entry; ValueError for a compressed or foreign-endian archive."""
    places = {}
    with zipfile.ZipFile(_Reader(file)) as archive:
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


class _Reader(io.RawIOBase):
    """A CheckpointFile as the seekable file that zipfile wants."""

    def __init__(self, file: CheckpointFile) -> None:
        self._file, self._at = file, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._file.size)[whence])
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        wanted = self._file.size if size is None or size < 0 else size
        data = self._file.head(wanted, self._at)
        self._at += len(data)
        return data
