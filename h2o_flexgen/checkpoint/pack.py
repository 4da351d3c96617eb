"""Weights repacked for the disk tier: one file per weight group, read with one request, made once and shared by runs.
The experts of a layer, which are read one by one, are in one file.

Needed where the user's own files cannot be read in place: another dtype is wanted, or weights are random. A folder
belongs to one content and dtype. Its files are complete and named in manifest.json, or they are nothing: both come into
being by rename, after fsync, so that an interrupted packing keeps what it finished. File names are our own counters.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from h2o_flexgen.checkpoint.files import CheckpointFile, strict_json
from h2o_flexgen.checkpoint.source import WeightSource
from h2o_flexgen.config.model.tensors import WeightGroup
from h2o_flexgen.errors import StorageError, storage_error
from h2o_flexgen.folders import synced_file, whole_file
from h2o_flexgen.memory.copies import checksum
from h2o_flexgen.memory.disk import DirectFile, host_view
from h2o_flexgen.memory.handle import Extent, UnitLayout, packed_layout, views
from h2o_flexgen.memory.rundir import OffloadDir, packed_name
from h2o_flexgen.memory.tiers import HostMemory

log = logging.getLogger(__name__)

_VERSION = 1
_MANIFEST = "manifest.json"
_STEP = 16 << 20  # bytes between calls of progress
_SLACK = 1 << 20  # bytes for the manifest and the file system's own needs
_UNIT = re.compile(r"unit-\d{4,}\.bin")
_OURS = re.compile(r"unit-\d{4,}\.bin|\.?(unit-\d{4,}\.bin|manifest\.json)(\.\d+)?\.tmp")
_FILE_OF = re.compile(r"(?<=\.experts)\.\d+$")
"""The part of a weight group's key that the name of its packed file leaves out."""
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class PackedUnit(NamedTuple):
    """A weight group on disk: its map, the runs of bytes that fill it, and their `memory.copies.checksum`.

    `checksum` is None for extents of the user's own files.
    """

    layout: UnitLayout
    extents: tuple[Extent, ...]
    checksum: bytes | None


def ensure_packed(
    groups: Iterable[WeightGroup],
    source: WeightSource,
    dtype: str,
    offload: OffloadDir,
    progress: Callable[[int, int], None] = lambda done, total: None,
    reserve: int = 0,
) -> dict[str, PackedUnit]:
    """The packed files of `groups` in `dtype` by group key: files of earlier runs, and missing ones made now.

    Waits for another run that is packing the same weights. Takes one buffer of the largest group to be packed, and no
    page cache. `progress` hears of the bytes packed so far, and of all to be packed.

    Raises StorageError where the disk fails or has no room for the packed weights and `reserve` bytes more (before
    anything is written, if that can be known), and what `source` raises.
    """
    groups = tuple(groups)
    with offload.packed(_identity(source, dtype)) as path:
        try:
            folder = _Folder(path, {"version": _VERSION, "fingerprint": source.fingerprint, "dtype": dtype})
            found = {group.key: folder.unit(packed_layout(group, dtype)) for group in groups}
            files: dict[str, list[UnitLayout]] = {}
            for group in (group for group in groups if found[group.key] is None):
                files.setdefault(_FILE_OF.sub("", group.key), []).append(packed_layout(group, dtype))
            missing = [layout for layouts in files.values() for layout in layouts]
            total = sum(layout.nbytes for layout in missing)
            if missing:
                what = f"packing {len(missing)} weight groups as {dtype}"
                offload.require_free(total + _SLACK + reserve, what + (" beside the KV cache" if reserve else ""))
                buffer = HostMemory().allocate(max(layout.nbytes for layout in missing))
                done = 0

                def advance(written: int) -> None:
                    progress(done + written, total)

                def filled(layout: UnitLayout) -> torch.Tensor:
                    _fill(layout, buffer.tensor, source)
                    return buffer.tensor[: layout.nbytes]

                try:
                    for layouts in files.values():
                        found |= folder.add(layouts, filled, advance)
                        done += sum(layout.nbytes for layout in layouts)
                finally:
                    buffer.free()
        except StorageError:
            raise
        except OSError as error:
            raise storage_error(f"packing weights in {path}", error) from error
    return {key: unit for key, unit in found.items() if unit is not None}


def packed_bytes(source: WeightSource, dtype: str, folder: Path) -> int:
    """Bytes that earlier runs packed of `source` in the offload folder `folder`, without making or locking any file.

    0 where the folder cannot be read: `ensure_packed` says why.
    """
    try:
        files = (folder / packed_name(_identity(source, dtype))).glob("unit-*.bin")
        return sum(path.stat().st_size for path in files)
    except OSError:
        return 0


def _identity(source: WeightSource, dtype: str) -> str:
    return f"{source.fingerprint} {dtype}"


def discard(unit: PackedUnit) -> None:
    """Remove the file of a packed unit that turned out to be damaged, so that the next run packs it anew."""
    if unit.checksum is not None:
        for extent in unit.extents:
            Path(extent.path).unlink(missing_ok=True)


def _fill(layout: UnitLayout, buffer: torch.Tensor, source: WeightSource) -> None:
    """The group's tensors where `layout` has them, and zeros between them."""
    end = 0
    for slot in layout.slots:
        buffer[end : slot.offset].zero_()
        end = slot.offset + slot.nbytes
    buffer[end : layout.nbytes].zero_()
    for name, view in views(layout, buffer).items():
        source.read_into(name, view)


class _Folder:
    """The files of one packed folder, whose lock is held. Files of ours that the manifest does not name are removed."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self._path, self._identity = path, dict(identity)
        self._units = self._read_manifest()
        named = {str(record["file"]) for record in self._units.values()}
        for name in os.listdir(path):
            if _OURS.fullmatch(name) and name not in named:
                (path / name).unlink()
        self._sizes = Counter[str]()
        for record in self._units.values():
            self._sizes[record["file"]] += record["nbytes"]
        self._counter = max((int(re.sub(r"\D", "", name)) for name in named), default=0)

    def unit(self, layout: UnitLayout) -> PackedUnit | None:
        """The unit of an earlier run, None where it is missing or not what it should be."""
        record = self._units.get(layout.key)
        if record is None:
            return None
        path = self._path / record["file"]
        try:
            size = path.lstat().st_size
        except FileNotFoundError:
            size = -1
        sound = size == self._sizes[record["file"]] and layout.nbytes == record["nbytes"]
        if sound and record["slots"] == _slots(layout):
            return _packed(layout, path, record.get("offset", 0), bytes.fromhex(record["xxh3_128"]))
        log.warning("%s for %s is not as it was left: it is packed again", path, layout.key)
        return None

    def add(
        self,
        layouts: Sequence[UnitLayout],
        filled: Callable[[UnitLayout], torch.Tensor],
        progress: Callable[[int], None],
    ) -> dict[str, PackedUnit]:
        """Write the units of `layouts` one after the other as one file, and note them in the manifest.

        filled: gives the bytes of each (uint8, whole pages), which are valid until the next is asked for.
        """
        self._counter += 1
        path = self._path / f"unit-{self._counter:04d}.bin"
        with whole_file(path) as temporary:
            digests = _write(temporary, layouts, filled, progress)
        replaced = {self._units[layout.key]["file"] for layout in layouts if layout.key in self._units}
        found, offset = {}, 0
        for layout, digest in zip(layouts, digests, strict=True):
            record = {"file": path.name, "nbytes": layout.nbytes, "xxh3_128": digest.hex(), "slots": _slots(layout)}
            self._units[layout.key] = {**record, **({"offset": offset} if offset else {})}
            found[layout.key] = _packed(layout, path, offset, digest)
            offset += layout.nbytes
        self._sizes[path.name] = offset
        with synced_file(self._path / _MANIFEST) as file:
            file.write(json.dumps({**self._identity, "units": self._units}).encode())
        for name in replaced - {str(record["file"]) for record in self._units.values()}:
            (self._path / name).unlink(missing_ok=True)
        return found

    def _read_manifest(self) -> dict[str, dict[str, Any]]:
        """Group key -> record. Empty where the manifest is missing or, with a notice, torn or of other weights."""
        path = self._path / _MANIFEST
        try:
            with CheckpointFile(str(path)) as file:
                manifest = strict_json(file.head(file.size))
            units = manifest.pop("units")
            if manifest != self._identity or not all(_is_record(record) for record in units.values()):
                raise ValueError("it is not of these weights")
        except FileNotFoundError:
            return {}
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            log.warning("%s cannot be used (%s): the weights are packed again", path, error)
            return {}
        return dict(units)


def _is_record(record: Any) -> bool:
    return (
        isinstance(record, dict)
        and set(record) - {"offset"} == {"file", "nbytes", "xxh3_128", "slots"}
        and all(type(record.get(key, 0)) is int for key in ("nbytes", "offset"))
        and isinstance(record["file"], str)
        and _UNIT.fullmatch(record["file"]) is not None
        and isinstance(record["xxh3_128"], str)
        and re.fullmatch(r"[0-9a-f]{32}", record["xxh3_128"]) is not None
    )


def _slots(layout: UnitLayout) -> list[list[Any]]:
    """The slots of `layout` as JSON gives them back."""
    return [
        [slot.name, list(slot.shape), slot.dtype, slot.offset, slot.nbytes]
        + ([] if slot.packing is None else [list(dataclasses.astuple(slot.packing))])
        for slot in layout.slots
    ]


def _packed(layout: UnitLayout, path: Path, offset: int, digest: bytes) -> PackedUnit:
    return PackedUnit(layout, (Extent(str(path), offset, layout.nbytes, 0, layout.key),), digest)


def _write(
    path: Path,
    layouts: Sequence[UnitLayout],
    filled: Callable[[UnitLayout], torch.Tensor],
    progress: Callable[[int], None],
) -> list[bytes]:
    """A new file with what `filled` gives for each of `layouts`, on the disk when this returns; their checksums."""
    fd = os.open(path, _CREATE, 0o600)
    digests, done = [], 0
    with DirectFile(str(path), fd, writable=True, ours=True) as file:
        for layout in layouts:
            data = filled(layout)
            digests.append(checksum((data,)))
            view = host_view(data)
            for start in range(0, data.numel(), _STEP):
                nbytes = min(_STEP, data.numel() - start)
                file.write(view, start, done, nbytes, layout.key)
                done += nbytes
                progress(done)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return digests
