"""The requests of a file, one after another: lines of text, of JSON, or rows of Parquet."""

from __future__ import annotations

import hashlib
import json
import math
import os
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from h2o_flexgen.config.checks import is_text, json_fault, no_number
from h2o_flexgen.errors import UsageError
from h2o_flexgen.folders import ask_for

FORMATS = ("openai", "jsonl", "text", "parquet")
LONGEST_LINE = 16 << 20
"""Bytes; a longer line is refused as a request, and never held in memory."""
_CHUNK = 1 << 20
_NO_LINES = {
    b"\x1f\x8b": "is compressed by gzip",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd",
    b"\xfd7zXZ": "is compressed by xz",
    b"PK\x03\x04": "is a ZIP archive",
    b"\xff\xfe": "is UTF-16 text",
    b"\xfe\xff": "is UTF-16 text",
}
"""First bytes of files that people take for lines."""


class BadLine(ValueError):
    """A line that is no request at all."""


class Record(NamedTuple):
    """A request as it stands in the file: its line or row, from 1, and its bytes, None for a line that is too long, or
    the columns that can be read: text that is not UTF-8 cannot."""

    line: int
    data: Any


@dataclass
class Scan:
    """All that must be known of a file before its first request is run.

    `lines`: the number of the last one; `requests`: how many of the shard are not blank. `doubled`: the lines whose
    custom_id stood in an earlier one.
    """

    sha256: str
    size: int
    lines: int = 0
    requests: int = 0
    doubled: frozenset[int] = field(default_factory=frozenset)


class Source:
    """A file of requests. UsageError where it cannot be read, or is another one than when it was first read."""

    def __init__(
        self, path: Path, format: str = "auto", *, columns: tuple[str, ...] = (), shard: tuple[int, int] = (1, 1)
    ) -> None:
        """`columns`: the columns that are read of Parquet, the one of prompts first. `shard` (i, n): of every n
        requests in a row only the i-th."""
        ask_for(path)
        if not path.is_file():
            raise UsageError(f"{path} is not a file", "needed a file of requests, which can be read again")
        self.path, self._columns, self._shard = path, columns, shard
        self._identity: tuple[int, ...] | None = None
        self.format = _guessed(path, columns[:1]) if format == "auto" else format
        if self.format == "parquet":
            _parquet()

    def scan(self) -> Scan:
        digest, size = hashlib.sha256(), 0
        with self._opened() as file:
            while data := file.read(_CHUNK):
                digest.update(data)
                size += len(data)
        scan, ids = Scan(digest.hexdigest(), size), array("Q")
        if self.format == "parquet":
            scan.lines = self._parquet_file().metadata.num_rows
            scan.requests = sum(map(self._mine, range(1, scan.lines + 1)))
            return scan
        for record in self._lines():
            scan.lines = record.line
            scan.requests += self._mine(record.line)
            if self.format == "openai":
                ids.extend(_noted(record))
        scan.doubled = _doubled(ids)
        return scan

    def records(self) -> Iterator[Record]:
        """The requests of the shard in their order; blank lines and a byte order mark are passed over."""
        every = self._rows() if self.format == "parquet" else self._lines()
        return (record for record in every if self._mine(record.line))

    def some(self, count: int) -> tuple[list[Record], int]:
        """About so many requests of a file of lines, spread over it, whose numbers are not their lines'; and how many
        there are, about."""
        size = self.path.stat().st_size
        if size <= _CHUNK:
            every = list(self._lines())
            return every[:: max(1, len(every) // count)], len(every)
        found, read = list[bytes](), 0
        with self._opened() as file:
            for part in range(count):
                file.seek(size * part // count)
                read += len(file.readline(LONGEST_LINE)) if part else 0
                line = file.readline(LONGEST_LINE)
                read += len(line)
                found += [line] if line.strip() else []
                if read > LONGEST_LINE:
                    break
        bytes_ = sum(map(len, found)) or 1
        return [Record(place, line) for place, line in enumerate(found, 1)], size * len(found) // bytes_

    def _mine(self, line: int) -> bool:
        part, parts = self._shard
        return (line - part) % parts == 0

    def _lines(self) -> Iterator[Record]:
        with self._opened() as file:
            number = 0
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                whole: bytes | None = line
                while line and not line.endswith(b"\n") and len(line) > LONGEST_LINE:
                    whole, line = None, file.readline(LONGEST_LINE + 1)
                if number == 1 and whole is not None:
                    whole = whole.removeprefix(b"\xef\xbb\xbf")
                if whole is None or whole.strip():
                    yield Record(number, whole)
                if number % 1024 == 0:
                    self._require_unchanged(os.fstat(file.fileno()))
            self._require_unchanged(os.fstat(file.fileno()))

    def _rows(self) -> Iterator[Record]:
        file, number = self._parquet_file(), 0
        try:
            for batch in file.iter_batches(batch_size=1024, columns=list(self._columns)):
                for row in _values(batch):
                    number += 1
                    yield Record(number, row)
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.path} cannot be read as Parquet behind row {number}: {error}") from None

    def _parquet_file(self) -> Any:
        module = _parquet()
        try:
            status, file = self.path.stat(), module.ParquetFile(self.path)
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.path} cannot be read as Parquet: {error}") from None
        self._require_unchanged(status)
        for name in self._columns:
            if name not in file.schema_arrow.names:
                there = ", ".join(file.schema_arrow.names)
                change = "see --prompt-column and --id-column"
                raise UsageError(f"{self.path} has no column {name!r}", f"it has {there}", change)
        return file

    def _opened(self) -> Any:
        try:
            self._require_unchanged(self.path.stat())
            return self.path.open("rb")
        except OSError as error:
            raise UsageError(f"{self.path}: {error.strerror}", "needed a readable file") from None

    def _require_unchanged(self, status: os.stat_result) -> None:
        now = status.st_ino, status.st_size, status.st_mtime_ns
        if now != (self._identity or now):
            raise UsageError(f"{self.path} was written to while its requests were run", "needed a file that stays")
        self._identity = now


def _values(rows: Any) -> list[dict[str, Any]]:
    """Of Parquet's rows the columns of each by name, but for those whose text is not UTF-8."""
    try:
        found: list[dict[str, Any]] = rows.to_pylist()
        return found
    except UnicodeDecodeError:
        if len(rows) > 1:
            return [each for i in range(len(rows)) for each in _values(rows.slice(i, 1))]
        names = rows.schema.names
        return [{} if len(names) == 1 else {k: v for name in names for k, v in _values(rows.select([name]))[0].items()}]


def load_json(data: bytes | None) -> Any:
    """The value of one line. BadLine for anything that is not JSON by the standard, or not Unicode text."""
    if data is None:
        raise BadLine(f"is longer than {LONGEST_LINE >> 20} MiB")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLine(f"is not UTF-8 text: byte {error.start}") from None
    try:
        value = _JSON.decode(text)
    except RecursionError:
        raise BadLine("is nested too deeply") from None
    except ValueError as error:
        raise BadLine(f"is not JSON ({json_fault(error)})") from None
    if "\\ud" in text.lower() and not is_text(json.dumps(value, ensure_ascii=False)):
        raise BadLine("holds half a surrogate pair, which is not text")
    return value


def custom_id_of(record: Record) -> str | None:
    """The custom_id of a line of a batch file, if it has one that is a text."""
    with suppress(BadLine):
        entry = load_json(record.data)
        name = entry.get("custom_id") if isinstance(entry, dict) else None
        return name if isinstance(name, str) and name else None
    return None


def _noted(record: Record) -> tuple[int, ...]:
    """A custom_id as two numbers, and its line: 24 bytes. () for a line without one."""
    name = custom_id_of(record)
    if name is None:
        return ()
    digest = xxhash.xxh3_128_intdigest(name.encode())
    return digest >> 64, digest & (2**64 - 1), record.line


def _doubled(ids: array[int]) -> frozenset[int]:
    """The lines whose custom_id stood in an earlier one, of what was noted of all."""
    high, low, lines = np.array(ids).reshape(-1, 3).T
    order = np.lexsort((lines, low, high))
    same = (high[order][1:] == high[order][:-1]) & (low[order][1:] == low[order][:-1])
    return frozenset(lines[order][1:][same].tolist())


def _guessed(path: Path, prompts: tuple[str, ...]) -> str:
    """By the name of the file, and of JSON lines by the first that is one. `prompts`: other names of a column of
    prompts."""
    ending = path.suffix.lower()
    if ending in (".parquet", ".pq"):
        return "parquet"
    lines = Source(path, "text")
    with lines._opened() as file:
        head = file.read(8)
    for first, why in _NO_LINES.items():
        if head.startswith(first):
            raise UsageError(f"{path} {why}", "needed lines in UTF-8, or Parquet")
    if ending not in (".jsonl", ".ndjson", ".json"):
        return "text"
    line = None
    for line in lines._lines():
        with suppress(BadLine):
            entry = load_json(line.data)
            plain = not isinstance(entry, dict) or {"prompt", "messages", *prompts} & entry.keys()
            return "jsonl" if plain else "openai"
    return "jsonl" if line is None else "openai"


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        found = "Parquet is read by pyarrow, which is not installed"
        raise UsageError(found, change="pip install 'h2o_flexgen[parquet]'") from None
    return pyarrow.parquet


def _finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise ValueError(f"{word} is beyond every number")
    return value


_JSON = json.JSONDecoder(parse_constant=no_number, parse_float=_finite)
