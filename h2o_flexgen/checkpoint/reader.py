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
from h2o_flexgen.checkpoint.parts import Part
from h2o_flexgen.checkpoint.pickled import bin_table
from h2o_flexgen.checkpoint.problems import Problems
from h2o_flexgen.checkpoint.shards import Shards, find_shards
from h2o_flexgen.checkpoint.source import convert, copy, flat_out
from h2o_flexgen.checkpoint.tables import Entry, safetensors_table
from h2o_flexgen.errors import ModelError
from h2o_flexgen.memory.handle import Location, torch_dtype
from h2o_flexgen.models.stored import Stored

if TYPE_CHECKING:
    from h2o_flexgen.config.model.spec import ModelSpec


def open_checkpoint(
    folder: str | os.PathLike[str],
    spec: ModelSpec,
    names: Mapping[str, Sequence[str | Stored]],
    ignored: Iterable[str | re.Pattern[str]] = (),
) -> CheckpointSource:
    """The checkpoint in `folder`, ready to be read as the model of `spec`.

    `names`: canonical name -> the tensors of a checkpoint, or rows of them, that it may be; one of them must be there.
    Tensors that match one of the patterns `ignored` (searched for, as re.search does) are left alone. Links to files
    elsewhere are followed, as the Hugging Face cache needs it. Takes no weight memory.

    Raises ModelError with the complete list of what is wrong: missing, doubled, unknown, misshapen or unusable tensors,
    rows of them that are no part of the model, missing or foreign files, damaged ones, a tied output head that is not
    the token embedding. StorageError where the disk fails, ValueError where `names` is not of such a model.
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
            parts = binding.bind(shards, tables)
        problems.raise_any(root)
        source = CheckpointSource(parts, files)
        try:
            _check_tied(source, binding, root)
        except BaseException:
            source.close()
            raise
        return source
    except BaseException:
        for file in files:
            file.close()
        raise


def _check_tied(source: CheckpointSource, binding: Binding, root: str) -> None:
    """ModelError where the head that a tied model's checkpoint has besides the token embedding is another matrix."""
    if binding.tied_copy is not None and not source.equals("embed.tokens", binding.tied_copy[1]):
        raise ModelError(
            f"{binding.tied_copy[0]} in {root} is not the token embedding, to which config.json ties it",
            "needed a config.json that says what the checkpoint is",
            "if the model has a head of its own, set tie_word_embeddings to false in config.json",
        )


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

    def __init__(self, parts: Mapping[str, Part], files: Sequence[CheckpointFile]) -> None:
        self._parts = dict(parts)
        self._files = tuple(files)
        sizes: Counter[str] = Counter()
        for part in self._parts.values():
            sizes[part.dtype] += part.nbytes
        self.dtype = max(sizes, key=lambda dtype: (sizes[dtype], dtype))
        self.fingerprint = _fingerprint(self._files, self._parts)
        self._chunks = ChunkReader()

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` with tensor `name`; see WeightSource. Raises ModelError, StorageError or ValueError."""
        part = self._parts[name]
        if part.file.closed:
            raise ValueError(f"the checkpoint is closed, {name} cannot be read")
        flat = flat_out(name, part.shape, out)
        stored = torch_dtype(part.dtype)
        move = copy if flat.dtype == stored else convert
        for start, chunk in self._chunks.stream(part, f"tensor {name}"):
            values = chunk.view(stored)
            move(flat.narrow(0, start // stored.itemsize, values.numel()), values)
        part.file.check()

    def location(self, name: str) -> Location | None:
        """Where the bytes of `name` lie, if they are one run, of this source's dtype, on a multiple of its size.

        ModelError where the file is no longer the one that was opened.
        """
        part = self._parts[name]
        part.file.check()
        start, stop = part.runs[0]
        if len(part.runs) > 1 or part.dtype != self.dtype or start % torch_dtype(self.dtype).itemsize:
            return None
        return Location(part.file.path, start, stop - start)

    def equals(self, name: str, other: Part) -> bool:
        """Whether `other` holds the same numbers as tensor `name`, to the bit. Raises as read_into does."""
        part = self._parts[name]
        if (part.file, part.runs) == (other.file, other.runs):
            return True
        if (part.dtype, part.shape) != (other.dtype, other.shape):
            return False
        pairs = zip(self._chunks.stream(part, f"tensor {name}"), self._chunks.stream(other, "its copy"), strict=True)
        return all(torch.equal(mine.data, others.data) for mine, others in pairs)

    def close(self) -> None:
        """Close the files; closing twice is fine."""
        self._chunks.close()
        for file in self._files:
            file.close()

    def __enter__(self) -> CheckpointSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _fingerprint(files: Iterable[CheckpointFile], parts: Mapping[str, Part]) -> str:
    """A digest of which files these are, when they were last written to, and which of their bytes are which tensor."""
    facts = [(os.path.realpath(file.path), file.size, file.mtime_ns) for file in files]
    places = {name: (part.file.name, part.runs, part.dtype) for name, part in parts.items()}
    return hashlib.sha256(json.dumps([facts, places], sort_keys=True).encode()).hexdigest()
