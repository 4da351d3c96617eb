"""The files of a checkpoint, which are not to be trusted: opened once, read with checks, every fault noted."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from h2o_flexgen.config.checks import no_number
from h2o_flexgen.errors import ModelError
from h2o_flexgen.memory.disk import DirectFile, HostView

_SHOWN = 20  # faults: with the lines around them one screen
_NEEDED = "needed all weights of the model that config.json describes, and no others"
_DRIVE = re.compile(r"[A-Za-z]:")


class CheckpointFile(DirectFile):
    """An open file of a checkpoint, read around the page cache. Any number of threads may read at once."""

    def __init__(self, path: str) -> None:
        """Open `path` for reading, following links; OSError when it is missing, unreadable or not a regular file."""
        # Without O_NONBLOCK, opening a named pipe would wait for a writer for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", path)
        super().__init__(path, fd)
        self.name, self.size, self.mtime_ns = os.path.basename(path), info.st_size, info.st_mtime_ns

    @property
    def closed(self) -> bool:
        return self.fd < 0

    def head(self, nbytes: int, offset: int = 0) -> bytes:
        """Up to `nbytes` bytes from `offset`, fewer only at the end of the file. StorageError, ModelError: see read."""
        nbytes = max(0, min(nbytes, self.size - offset)) if offset >= 0 else 0
        buffer = np.empty(nbytes, np.uint8)
        self.read(HostView(buffer.data, buffer.ctypes.data), 0, offset, nbytes, "the header")
        return buffer.tobytes()


class Fault(Exception):
    """Why a whole file cannot be used; the message goes on after its name. `download`: as of Problems."""

    def __init__(self, text: str, *, download: bool = True) -> None:
        super().__init__(text)
        self.download = download

    def of(self, name: str) -> str:
        return f"{name}{'' if str(self).startswith(':') else ' '}{self}"


class Problems:
    """The faults found so far, in the order in which they were found."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._download = False

    def add(self, text: str, *, download: bool = False) -> None:
        """Note one fault; `download` says that fetching the files again is the cure."""
        self.texts.append(text)
        self._download = self._download or download

    def raise_any(self, folder: str, needed: str = _NEEDED) -> None:
        """Raise one ModelError that lists the faults (the first of them), if there are any."""
        if not self.texts:
            return
        shown = self.texts[:_SHOWN]
        if len(self.texts) > _SHOWN:
            shown = [*shown, f"and {len(self.texts) - _SHOWN} more"]
        many = "one problem" if len(self.texts) == 1 else f"{len(self.texts)} problems"
        advice = "download again what is damaged or missing" if self._download else "check that they belong together"
        raise ModelError(
            f"the checkpoint in {folder} cannot be used, {many}",
            needed,
            f"{advice}:\n  " + "\n  ".join(shown),
        )


def name_fault(name: object) -> str | None:
    """Why `name` may not name a tensor or a shard, None when it may.

    Such names come from untrusted files, and none of them has a reason to look like a path.
    """
    if not isinstance(name, str) or not name:
        return "is not a name"
    if "/" in name or "\\" in name:
        return "has a path separator"
    if ".." in name or name == ".":
        return "has '..'" if ".." in name else "is a folder"
    if _DRIVE.match(name):
        return "has a drive letter"
    if not name.isprintable():
        return "has a NUL or another unprintable character"
    return None


def strict_json(text: bytes) -> Any:
    """JSON as the standard has it; ValueError for doubled keys, NaN, broken UTF-8 and endless nesting too."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key occurs twice")
        return found

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_number)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def json_of_model(path: Path, parse_float: Callable[[str], float] | None = None) -> Any:
    """The value of a file of JSON, which may begin with a byte order mark. ModelError where it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"), parse_float=parse_float)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}", "needed JSON", "download it again") from error


def generation_settings(path: Path) -> dict[str, Any]:
    """The object of generation settings in a JSON file, empty without one, as transformers reads it: token ids and
    counts may be written as floats (2.0). ModelError where it cannot be read."""

    def number(text: str) -> float:
        value = float(text)
        return int(value) if value.is_integer() else value

    said = json_of_model(path, number) if path.exists() else {}
    if not isinstance(said, dict):
        raise ModelError(f"{path} is not a JSON object", "needed generation settings", "download it again")
    return said


def refuse_foreign(file: CheckpointFile) -> None:
    """Fault where a file is something that gets saved instead of weights."""
    head = file.head(200)
    if file.size == 0:
        raise Fault("is empty")
    if head.startswith(b"version https://git-lfs"):
        expected = re.search(rb"\nsize (\d{1,18})", head)
        sizes = f": expected {int(expected[1])} bytes, found {file.size}" if expected else f" of {file.size} bytes"
        raise Fault(f"is a Git LFS pointer, not the file it stands for{sizes}")
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:9].lower()
    if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise Fault(f"is a web page of {file.size} bytes, not weights")
    if start.startswith((b"entry not", b"invalid u", b"not found", b"access to")):
        raise Fault(f"is an error message of a download of {file.size} bytes, not weights")
