"""Weights repacked for the disk tier: one file per weight group, read with one request, made once and shared by runs.

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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from h2o_flexgen.checkpoint.files import CheckpointFile, strict_json
from h2o_flexgen.checkpoint.source import WeightSource
from h2o_flexgen.config.model.tensors import WeightGroup
from h2o_flexgen.errors import StorageError, storage_error
from h2o_flexgen.memory.copies import checksum
from h2o_flexgen.memory.disk import DirectFile, host_view
from h2o_flexgen.memory.handle import Extent, TensorSlot, UnitLayout, packed_layout, views
from h2o_flexgen.memory.pages import HostMemory
from h2o_flexgen.memory.rundir import OffloadDir, packed_name

log = logging.getLogger(__name__)

_VERSION = 1
_MANIFEST = "manifest.json"
_STEP = 16 << 20  # bytes between calls of progress
_SLACK = 1 << 20  # bytes for the manifest and the file system's own needs
_UNIT = re.compile(r"unit-\d{4,}\.bin")
_OURS = re.compile(r"unit-\d{4,}\.bin(\.tmp)?|manifest\.json\.tmp")
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
    """The packed files of `groups` in `dtype` by group key: those that earlier runs made, and missing ones made now.

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
            missing = [packed_layout(group, dtype) for group in groups if found[group.key] is None]
            total = sum(layout.nbytes for layout in missing)
            if missing:
                what = f"packing {len(missing)} weight groups as {dtype}"
                offload.require_free(total + _SLACK + reserve, what + (" beside the KV cache" if reserve else ""))
                buffer = HostMemory().allocate(max(layout.nbytes for layout in missing))
                done = 0

                def advance(written: int) -> None:
                    progress(done + written, total)

                try:
                    for layout in missing:
                        _fill(layout, buffer.tensor, source)
                        found[layout.key] = folder.add(layout, buffer.tensor[: layout.nbytes], advance)
                        done += layout.nbytes
                finally:
                    buffer.free()
        except StorageError:
            raise
        except OSError as error:
            raise storage_error(f"packing weights in {path}", error) from error
    return {key: unit for key, unit in found.items() if unit is not None}


def packed_bytes(source: WeightSource, dtype: str, folder: Path) -> int:
    """Bytes that earlier runs packed of `source` in the offload folder `folder`; nothing is made or locked.

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
    """The files of one packed folder, whose lock is held. What the manifest does not name is removed."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self._path, self._identity = path, dict(identity)
        self._units = self._read_manifest()
        named = {str(record["file"]) for record in self._units.values()}
        for name in os.listdir(path):
            if _OURS.fullmatch(name) and name not in named:
                (path / name).unlink()
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
        if size == layout.nbytes == record["nbytes"] and record["slots"] == _slots(layout):
            return _packed(layout, path, bytes.fromhex(record["xxh3_128"]))
        log.warning("%s for %s is not as it was left: it is packed again", path, layout.key)
        return None

    def add(self, layout: UnitLayout, data: torch.Tensor, progress: Callable[[int], None]) -> PackedUnit:
        """Write `data` (uint8, whole pages) as the unit of `layout`, and note it in the manifest."""
        self._counter += 1
        path = self._path / f"unit-{self._counter:04d}.bin"
        temporary = path.with_suffix(".bin.tmp")
        digest = checksum((data,))
        try:
            _write(temporary, data, layout.key, progress)
            os.rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        record = {"file": path.name, "nbytes": layout.nbytes, "xxh3_128": digest.hex(), "slots": _slots(layout)}
        replaced = self._units.get(layout.key)
        self._units[layout.key] = record
        self._write_manifest()
        if replaced is not None:
            (self._path / replaced["file"]).unlink(missing_ok=True)
        return _packed(layout, path, digest)

    def _read_manifest(self) -> dict[str, dict[str, Any]]:
        """Group key -> record. Nothing, with a notice, where the manifest is torn or of something else."""
        path = self._path / _MANIFEST
        try:
            file = CheckpointFile(str(path))
        except FileNotFoundError:
            return {}
        try:
            manifest = strict_json(file.head(file.size))
            units = manifest.pop("units")
            if manifest != self._identity or not all(_is_record(record) for record in units.values()):
                raise ValueError("it is not of these weights")
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            log.warning("%s cannot be used (%s): the weights are packed again", path, error)
            return {}
        finally:
            file.close()
        return dict(units)

    def _write_manifest(self) -> None:
        text = json.dumps({**self._identity, "units": self._units}).encode()
        temporary = self._path / f"{_MANIFEST}.tmp"
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, _CREATE, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(fd)
            os.rename(temporary, self._path / _MANIFEST)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(self._path)


def _is_record(record: Any) -> bool:
    return (
        isinstance(record, dict)
        and set(record) == {"file", "nbytes", "xxh3_128", "slots"}
        and isinstance(record["file"], str)
        and _UNIT.fullmatch(record["file"]) is not None
        and isinstance(record["xxh3_128"], str)
        and re.fullmatch(r"[0-9a-f]{32}", record["xxh3_128"]) is not None
    )


def _slots(layout: UnitLayout) -> list[list[Any]]:
    """The slots of `layout` as JSON gives them back."""
    return [
        [slot.name, list(slot.shape), slot.dtype, slot.offset, slot.nbytes, *_packing_of(slot)] for slot in layout.slots
    ]


def _packing_of(slot: TensorSlot) -> list[Any]:
    return [] if slot.packing is None else [list(dataclasses.astuple(slot.packing))]


def _packed(layout: UnitLayout, path: Path, digest: bytes) -> PackedUnit:
    return PackedUnit(layout, (Extent(str(path), 0, layout.nbytes, 0, layout.key),), digest)


def _write(path: Path, data: torch.Tensor, what: str, progress: Callable[[int], None]) -> None:
    """A new file with `data`, on the disk when this returns."""
    fd = os.open(path, _CREATE, 0o600)
    file = DirectFile(str(path), fd, writable=True, ours=True)
    try:
        view = host_view(data)
        for start in range(0, data.numel(), _STEP):
            nbytes = min(_STEP, data.numel() - start)
            file.write(view, start, start, nbytes, what)
            progress(start + nbytes)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        file.close()


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
