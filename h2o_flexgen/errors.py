"""The errors a user can meet. Each says what was found, what was needed, what to change, and carries an exit code."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Self, TypeVar

_Value = TypeVar("_Value")


def required(value: _Value | None, missing: str) -> _Value:
    """`value`, which only a mistake of ours leaves None: RuntimeError with `missing` then."""
    if value is None:
        raise RuntimeError(missing)
    return value


def first_line(error: BaseException) -> str:
    """The first line of another library's error, up to 300 characters; its type's name if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


@cache
def warn_once(text: str) -> None:
    """A warning about a model's files, which are read more than once."""
    logging.getLogger(__name__).warning("%s", text)


class H2OFlexGenError(Exception):
    """Base of every error raised on purpose.

    `found`, `needed` and `change` are sentences without a final full stop; empty parts are left out of the message.
    """

    exit_code = 1

    def __init__(self, found: str, needed: str = "", change: str = "") -> None:
        self.found, self.needed, self.change = found, needed, change
        super().__init__(". ".join(part.rstrip(".") for part in (found, needed, change) if part).replace("?. ", "? "))

    def reworded(self, words: Callable[[str], str]) -> Self:
        """The same error, each of its parts as `words` puts it."""
        return type(self)(words(self.found), words(self.needed), words(self.change))


class UsageError(H2OFlexGenError, ValueError):
    """Flags, arguments or prompts that make no sense."""

    exit_code = 2


class ContextLengthError(UsageError):
    """A prompt is too long for the model."""


class ModelError(H2OFlexGenError):
    """A model, its config.json or its checkpoint cannot be used."""

    exit_code = 4


class OwnHeadError(ModelError):
    """A checkpoint has an output head of its own beside the token embedding, to which config.json ties it."""


UNREACHABLE = (errno.EACCES, errno.ENAMETOOLONG)
"""Errors of a check whether a file is there: a folder before it may not be entered, or its name is too long."""


def place_of(error: OSError) -> str:
    """The file that `error` is about, and what is wrong with it."""
    return f"{os.fsdecode(error.filename or 'a file')}: {error.strerror}"


@contextmanager
def finding_model() -> Iterator[None]:
    """Raises ModelError where a model's files are UNREACHABLE."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNREACHABLE or isinstance(error, H2OFlexGenError):
            raise
        raise ModelError(place_of(error), "needed a model whose files can be read") from None


class PlanError(H2OFlexGenError):
    """A plan does not fit its memory caps."""

    exit_code = 5


class MemoryRefused(PlanError):
    """The system refused memory that a plan counted on: less is free than its caps say."""


class StorageError(H2OFlexGenError, OSError):
    """The file system is full or failing."""

    exit_code = 6

    def __str__(self) -> str:
        return str(self.args[0])


def storage_error(found: str, error: OSError, other: str = "") -> StorageError:
    """The StorageError for the system's answer, with advice; `other`: a place instead of the offload folder."""
    room = "free some space, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    other = other or f"another{' folder' if room else ''} with --offload-dir"
    return StorageError(f"{found}: {error.strerror or error}", change=f"{room}name {other}")


@contextmanager
def writing(path: object, other: str = "a file on another disk") -> Iterator[None]:
    """Raises StorageError where `path`, a file of results, cannot be written meanwhile; `other` is a place instead."""
    try:
        yield
    except BrokenPipeError:  # who read it has gone
        raise
    except OSError as error:
        raise storage_error(f"cannot write {path}", error, other) from error


class LockedError(H2OFlexGenError):
    """Another process works in the same place."""

    exit_code = 7


_REFUSALS = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, torch or the system refused memory. torch's own types are not named, so that this needs none."""
    if isinstance(error, MemoryError | MemoryRefused) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _REFUSALS)
