"""Digests of a checkpoint's content: the same in any folder, with any names and times of its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from h2o_flexgen.checkpoint.files import json_of_model
from h2o_flexgen.checkpoint.hub import TOKENIZER_SIDE_FILES, ResolvedModel
from h2o_flexgen.checkpoint.source import WeightSource
from h2o_flexgen.checkpoint.tables import FileTensor
from h2o_flexgen.checkpoint.wanted import Range
from h2o_flexgen.errors import ModelError

WHOLE = 128 << 20  # bytes of a checkpoint of which all are looked at; of a larger one:
_PIECE, _STRETCH = 16 << 20, 16 << 10  # of each piece of a tensor as large a share as adds up to WHOLE, or so much
_CHUNK = 4 << 20
_READERS = 4
_ABOUT_FILES = ("_name_or_path", "name_or_path", "transformers_version", "_commit_hash")
"""Keys of config.json and generation_config.json that say where and by what they were written."""


def content_digest(tensors: Mapping[str, tuple[object, FileTensor]]) -> str:
    """A digest of `tensors`: for each name what else numbers depend on, by its repr, and where its bytes are.

    Of a small checkpoint all bytes count, of a large one a stretch of every 16 MiB of every tensor, 128 MiB together or
    16 KiB each: training, merging or quantising anew changes all of a matrix. Raises what reading raises.
    """
    places = {(part.file.path, part.runs): part for _, part in tensors.values()}
    total = sum(part.nbytes for part in places.values())
    stretch = None if total <= WHOLE else max(_STRETCH, _PIECE * WHOLE // total)
    with ThreadPoolExecutor(_READERS, thread_name_prefix="checkpoint-digest") as pool:
        found = dict(zip(places, pool.map(lambda part: _digest(part, stretch), places.values()), strict=True))
    facts = [
        (name, repr(fact), part.dtype, part.shape, part.transposed, found[part.file.path, part.runs])
        for name, (fact, part) in sorted(tensors.items())
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def model_content(found: ResolvedModel, source: WeightSource) -> dict[str, str]:
    """Digests of all that answers depend on in a model's files, by the names that a user knows them by."""
    config = {key: value for key, value in found.config.items() if key not in _ABOUT_FILES}
    digests = {"checkpoint": source.content(), "config.json": _of_json(config)}
    if found.folder is not None:
        digests["generation_config.json"] = _of_generation(Path(found.folder) / "generation_config.json")
    if found.gguf is not None:
        own = {key: value for key, value in found.gguf.metadata.items() if key.startswith("tokenizer.")}
        digests["tokenizer"] = _of_json(own)
    elif found.tokenizer_folder is not None:
        folder = Path(found.tokenizer_folder)
        digest = hashlib.sha256()
        for name in sorted(TOKENIZER_SIDE_FILES):
            try:
                data = (folder / name).read_bytes()
            except FileNotFoundError:
                continue
            except OSError as error:
                unread = f"{folder / name} cannot be read: {error.strerror}"
                raise ModelError(unread, change="download it again") from error
            digest.update(f"{name} {len(data)}\n".encode() + data)
        digests["tokenizer"] = digest.hexdigest()
    return digests


def _digest(part: FileTensor, stretch: int | None) -> str:
    """Of all bytes, or of a stretch of so many of each piece."""
    found = hashlib.sha256()
    stretches = [(0, part.nbytes)] if stretch is None else _stretches(part.nbytes, stretch)
    for start, stop in _in_file(part.runs, stretches):
        for at in range(start, stop, _CHUNK):
            found.update(part.file.head(min(_CHUNK, stop - at), at))
    part.file.check()
    return found.hexdigest()


def _stretches(nbytes: int, stretch: int) -> Iterator[Range]:
    """Which bytes of a tensor of `nbytes` are looked at: of each piece `stretch`, elsewhere in each."""
    for number, start in enumerate(range(0, nbytes, _PIECE)):
        room = max(1, min(_PIECE, nbytes - start) - stretch)
        at = start + int.from_bytes(hashlib.sha256(f"{nbytes} {number}".encode()).digest()[:8]) % room
        yield at, min(at + stretch, start + _PIECE, nbytes)


def _in_file(runs: Iterable[Range], stretches: Iterable[Range]) -> Iterator[Range]:
    """The bytes of a file that are the `stretches` of what its `runs` are one after another, both in order."""
    wanted, done = list(stretches), 0
    for first, last in runs:
        length = last - first
        for start, stop in wanted:
            low, high = max(start, done), min(stop, done + length)
            if low < high:
                yield first + low - done, first + high - done
        done += length
        wanted = [each for each in wanted if each[1] > done]


def _of_json(value: Any) -> str:
    def plain(other: Any) -> Any:
        return other.tolist() if isinstance(other, np.ndarray | np.generic) else repr(other)

    return hashlib.sha256(json.dumps(value, sort_keys=True, default=plain).encode()).hexdigest()


def _of_generation(path: Path) -> str:
    if not path.exists():
        return ""
    settings = json_of_model(path)
    if isinstance(settings, dict):
        settings = {key: value for key, value in settings.items() if key not in _ABOUT_FILES}
    return _of_json(settings)
