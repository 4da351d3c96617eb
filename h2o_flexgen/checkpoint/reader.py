"""Checkpoints on disk: found, checked in every respect before any memory is taken, then read tensor by tensor.

safetensors and `pytorch_model.bin`, single or in shards. Both are read with pread in chunks, so that a file that
shrinks is an error, the page cache does not fill, and converting costs one chunk of memory beyond the destination.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from h2o_flexgen.checkpoint.files import CheckpointFile
from h2o_flexgen.checkpoint.pickled import bin_table
from h2o_flexgen.checkpoint.problems import Problems
from h2o_flexgen.checkpoint.shards import Shards, find_shards
from h2o_flexgen.checkpoint.source import WEIGHT_DTYPES, convert, flat_out
from h2o_flexgen.checkpoint.tables import Entry, safetensors_table
from h2o_flexgen.config.model import PAGE
from h2o_flexgen.memory.disk import host_view
from h2o_flexgen.memory.handle import Location, torch_dtype
from h2o_flexgen.memory.pages import HostMemory

if TYPE_CHECKING:
    from h2o_flexgen.config.model import ModelSpec

log = logging.getLogger(__name__)

CHUNK = 4 << 20  # bytes read at once, and all that a conversion needs beside its destination
_TIED_HEADS = ("lm_head.weight", "embed_out.weight")


def open_checkpoint(
    folder: str | os.PathLike[str],
    spec: ModelSpec,
    names: Mapping[str, Sequence[str]],
    ignored: Iterable[str | re.Pattern[str]] = (),
) -> CheckpointSource:
    """The checkpoint in `folder`, ready to be read as the model of `spec`.

    `names`: canonical name -> the names it may have in a checkpoint, one of which must be there. Tensors that match one
    of the patterns `ignored` (searched for, as re.search does) are left alone. Links to files elsewhere are followed,
    as the Hugging Face cache needs it. Takes no weight memory.

    Raises ModelError with the complete list of what is wrong: missing, doubled, unknown, misshapen or unusable tensors,
    missing or foreign files, damaged ones. StorageError where the disk fails.
    """
    root = os.fspath(folder)
    problems = Problems()
    files: list[CheckpointFile] = []
    try:
        shards = find_shards(root, problems)
        if shards is not None:
            patterns = tuple(re.compile(pattern) for pattern in ignored)
            binding = _Binding(spec, names, patterns, problems)
            tables = _read_tables(root, shards, files, binding)
            entries = binding.bind(shards, tables)
        problems.raise_any(root)
        return CheckpointSource(entries, files)
    except BaseException:
        for file in files:
            file.close()
        raise


def _read_tables(
    root: str, shards: Shards, files: list[CheckpointFile], binding: _Binding
) -> dict[str, dict[str, Entry]]:
    """The table of every shard that has one; opened files are appended to `files`."""
    tables, problems = {}, binding.problems
    for name in shards.files:
        if name not in shards.present:
            continue
        try:
            file = CheckpointFile(os.path.join(root, name))
        except OSError as error:
            problems.add(f"{name} cannot be opened: {error.strerror}", download=True)
            continue
        files.append(file)
        if shards.kind == "safetensors":
            table = safetensors_table(file, problems)
        else:
            table = bin_table(file, problems, binding.least_bytes(shards, name))
        if table is not None:
            tables[name] = table
    return tables


class _Binding:
    """Matches what the files hold with what the model needs, noting every difference."""

    def __init__(
        self,
        spec: ModelSpec,
        names: Mapping[str, Sequence[str]],
        ignored: tuple[re.Pattern[str], ...],
        problems: Problems,
    ) -> None:
        self._needed = {tensor.name: tuple(tensor.shape) for group in spec.weight_groups for tensor in group.tensors}
        self._names = {name: tuple(names[name]) for name in self._needed}
        self._canonical = {stored: name for name, options in self._names.items() for stored in options}
        self._ignored = ignored
        self._tied = spec.arch.tied_head
        self._vocab_shape = (spec.vocab_size, spec.embed_dim)
        self.problems = problems

    def least_bytes(self, shards: Shards, shard: str) -> int:
        """What the weights that `shard` should hold take in 16 bits."""
        index = shards.index
        held = (
            self._canonical.values()
            if index is None
            else [name for stored, name in self._canonical.items() if index.get(stored) == shard]
        )
        return 2 * sum(math.prod(self._needed[name]) for name in set(held))

    def bind(self, shards: Shards, tables: Mapping[str, Mapping[str, Entry]]) -> dict[str, Entry]:
        """Canonical name -> where its bytes are, for all tensors that are fine."""
        where: dict[str, list[str]] = {}
        for shard, table in tables.items():
            for stored in table:
                where.setdefault(stored, []).append(shard)
        self._check_index(shards, tables, where)
        found: dict[str, tuple[str, Entry]] = {}
        for stored, holders in where.items():
            if self._is_ignored(stored):
                continue
            if len(holders) > 1:
                self.problems.add(f"tensor {stored!r} is in {' and in '.join(holders)}")
            entry = tables[holders[0]][stored]
            name = self._canonical.get(stored)
            if name is None:
                self._unknown(stored, holders[0], entry)
            elif name in found:
                self.problems.add(f"tensors {found[name][0]!r} and {stored!r} are both {name}")
            else:
                found[name] = (stored, entry)
                self._check_tensor(stored, self._needed[name], entry)
        if len(tables) == len(shards.files):
            self._check_missing(found)
        elif shards.index is not None:
            lost = {stored for stored, shard in shards.index.items() if shard not in tables}
            self._check_missing(found, lost)
        return {name: entry for name, (_, entry) in found.items()}

    def _is_ignored(self, stored: str) -> bool:
        return stored not in self._canonical and any(pattern.search(stored) for pattern in self._ignored)

    def _check_index(
        self, shards: Shards, tables: Mapping[str, Mapping[str, Entry]], where: Mapping[str, list[str]]
    ) -> None:
        if shards.index is None:
            return
        for stored, shard in shards.index.items():
            if shard in tables and stored not in tables[shard]:
                self.problems.add(f"tensor {stored!r} is not in {shard}, where the index has it", download=True)
        for stored, holders in where.items():
            if stored not in shards.index and not self._is_ignored(stored):
                self.problems.add(f"tensor {stored!r} of {holders[0]} is not in the index", download=True)

    def _unknown(self, stored: str, shard: str, entry: Entry) -> None:
        if not (self._tied and stored in _TIED_HEADS):
            self.problems.add(f"tensor {stored!r} of {shard} is not part of this model")
        elif entry.shape != self._vocab_shape:
            self._check_tensor(stored, self._vocab_shape, entry)
        else:
            log.info("%s is not read: the model's head is its token embedding", stored)

    def _check_tensor(self, stored: str, shape: tuple[int, ...], entry: Entry) -> None:
        if entry.shape != shape:
            self.problems.add(f"tensor {stored!r}: expected shape {shape} from config.json, found {entry.shape}")
        if entry.dtype not in WEIGHT_DTYPES:
            self.problems.add(f"tensor {stored!r}: expected dtype {', '.join(WEIGHT_DTYPES)}, found {entry.dtype}")

    def _check_missing(self, found: Mapping[str, object], excused: Iterable[str] = ()) -> None:
        """Note what is missing, but for tensors that a file already reported would hold."""
        for name, options in self._names.items():
            if name not in found and not set(options) & set(excused):
                self.problems.add(f"tensor {options[0]!r} ({name}) is missing", download=True)


class CheckpointSource:
    """The weights of an open checkpoint: a WeightSource. It owns the open files; reading is thread-safe.

    Every read checks afterwards that the file is still the one that was opened: ModelError otherwise.
    """

    dummy = False

    def __init__(self, entries: Mapping[str, Entry], files: Sequence[CheckpointFile]) -> None:
        self._entries = dict(entries)
        self._files = tuple(files)
        sizes: Counter[str] = Counter()
        for entry in self._entries.values():
            sizes[entry.dtype] += entry.nbytes
        self.dtype = max(sizes, key=lambda dtype: (sizes[dtype], dtype))
        self.fingerprint = _fingerprint(self._files)
        self._staging: list[torch.Tensor] = []  # one per thread that has ever converted

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` with tensor `name`; see WeightSource. Raises ModelError, StorageError or ValueError."""
        entry = self._entries[name]
        if entry.file.closed:
            raise ValueError(f"the checkpoint is closed, {name} cannot be read")
        flat = flat_out(name, entry.shape, out)
        if entry.dtype == str(flat.dtype).removeprefix("torch.") and flat.device.type == "cpu":
            self._read_plain(name, entry, flat.view(torch.uint8))
        else:
            self._read_converted(name, entry, flat)
        entry.file.check()

    def location(self, name: str) -> Location | None:
        """Where the bytes of `name` lie, if they are of this source's dtype and start on a multiple of its size."""
        entry = self._entries[name]
        if entry.dtype != self.dtype or entry.offset % torch_dtype(self.dtype).itemsize:
            return None
        return Location(entry.file.path, entry.offset, entry.nbytes)

    def close(self) -> None:
        """Close the files; closing twice is fine."""
        for file in self._files:
            file.close()
        self._staging.clear()

    def __enter__(self) -> CheckpointSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read_plain(self, name: str, entry: Entry, out: torch.Tensor) -> None:
        """The bytes of `entry` into `out`, uint8, on the CPU."""
        view = host_view(out)
        for start in range(0, entry.nbytes, CHUNK):
            nbytes = min(CHUNK, entry.nbytes - start)
            entry.file.read(view, start, entry.offset + start, nbytes, f"tensor {name}")

    def _spare_staging(self) -> torch.Tensor:
        try:
            return self._staging.pop()
        except IndexError:
            return HostMemory().allocate(CHUNK + PAGE).tensor

    def _read_converted(self, name: str, entry: Entry, flat: torch.Tensor) -> None:
        """The values of `entry` into `flat`, by way of one chunk."""
        staging = self._spare_staging()
        view, stored, place = host_view(staging), torch_dtype(entry.dtype), entry.offset % PAGE
        # A chunk lies in its pages as it does in the file's, so that they are read in place; odd offsets go elsewhere.
        place -= place % stored.itemsize
        for start in range(0, entry.nbytes, CHUNK):
            nbytes = min(CHUNK, entry.nbytes - start)
            entry.file.read(view, place, entry.offset + start, nbytes, f"tensor {name}")
            values = staging[place : place + nbytes].view(stored)
            convert(flat.narrow(0, start // stored.itemsize, values.numel()), values)
        self._staging.append(staging)


def _fingerprint(files: Iterable[CheckpointFile]) -> str:
    """A digest of which files these are and when they were last written to."""
    facts = [(os.path.realpath(file.path), file.size, file.mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(facts).encode(errors="surrogateescape")).hexdigest()
