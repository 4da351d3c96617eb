"""Checkpoints on disk: found, checked in every respect before any memory is taken, then read tensor by tensor.

safetensors and `pytorch_model.bin`, single or in shards. Both are read with pread in chunks, so that a file that
shrinks is an error, the page cache does not fill, and loading takes two chunks of memory beyond the destination.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from h2o_flexgen.checkpoint.binding import Binding
from h2o_flexgen.checkpoint.chunks import ChunkReader
from h2o_flexgen.checkpoint.files import CheckpointFile
from h2o_flexgen.checkpoint.pickled import bin_table
from h2o_flexgen.checkpoint.problems import Problems
from h2o_flexgen.checkpoint.shards import Shards, find_shards
from h2o_flexgen.checkpoint.source import convert, copy, flat_out
from h2o_flexgen.checkpoint.tables import Entry, safetensors_table
from h2o_flexgen.memory.handle import Location, torch_dtype

if TYPE_CHECKING:
    from h2o_flexgen.config.model import ModelSpec


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
            binding = Binding(spec, names, patterns, problems)
            tables = _read_tables(root, shards, files, binding)
            entries = binding.bind(shards, tables)
        problems.raise_any(root)
        return CheckpointSource(entries, files)
    except BaseException:
        for file in files:
            file.close()
        raise


def _read_tables(
    root: str, shards: Shards, files: list[CheckpointFile], binding: Binding
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
        self._chunks = ChunkReader()

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` with tensor `name`; see WeightSource. Raises ModelError, StorageError or ValueError."""
        entry = self._entries[name]
        if entry.file.closed:
            raise ValueError(f"the checkpoint is closed, {name} cannot be read")
        flat = flat_out(name, entry.shape, out)
        stored = torch_dtype(entry.dtype)
        move = copy if flat.dtype == stored else convert
        for start, chunk in self._chunks.stream(entry, f"tensor {name}"):
            values = chunk.view(stored)
            move(flat.narrow(0, start // stored.itemsize, values.numel()), values)
        entry.file.check()

    def location(self, name: str) -> Location | None:
        """Where the bytes of `name` lie, if they are of this source's dtype and start on a multiple of its size.

        ModelError where the file is no longer the one that was opened.
        """
        entry = self._entries[name]
        entry.file.check()
        if entry.dtype != self.dtype or entry.offset % torch_dtype(self.dtype).itemsize:
            return None
        return Location(entry.file.path, entry.offset, entry.nbytes)

    def close(self) -> None:
        """Close the files; closing twice is fine."""
        self._chunks.close()
        for file in self._files:
            file.close()

    def __enter__(self) -> CheckpointSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _fingerprint(files: Iterable[CheckpointFile]) -> str:
    """A digest of which files these are and when they were last written to."""
    facts = [(os.path.realpath(file.path), file.size, file.mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
