"""The results of a job, and the journal beside them by which a job that was killed goes on.

`FILE.journal` begins with the job as a JSON object. Then it has a line for each finished request, in the order of the
results, such as `ok 17 812 9f0c33d1` or `failed ...`: its line of the input, the bytes of its result, and a checksum
of both. A result is appended first and then its line here. `synced` says that all before it was on the disk. When a
job goes on, all results are read again: results for which the journal has no line are cut off, and their requests run
again. The journal is the job's lock, too.
"""

from __future__ import annotations

import array
import errno
import json
import os
import socket
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from h2o_flexgen.errors import H2OFlexGenError, LockedError, UsageError, required
from h2o_flexgen.folders import Closing, ask_for, locked, sync_folder
from h2o_flexgen.jobs.files import AppendedFile, storage_failure

VERSION = 1
SYNC_EVERY = 5.0
"""Seconds after which finished requests are safe from a loss of power; from a kill they are at once."""
_SYNCED = b"synced\n"
_NAMED = {"h2o_flexgen": "journal of a batch job"}
OK, FAILED = 1, 2
"""The states of a request; 0 is that of one that is not finished."""
_WORDS = {OK: "ok", FAILED: "failed"}
_BARRED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENAMETOOLONG)
"""Why a file cannot be made in a place, however often it is tried."""
_STATES = {word.encode(): state for state, word in _WORDS.items()}


class FinishedEntry(NamedTuple):
    """A finished request: its line of the input, OK or FAILED, and the bytes of its result."""

    line: int
    state: int
    size: int


class JobResults(Closing):
    """Output files of one job that are locked as long as this lives. A context manager.

    `error_file`: the one of failed requests, if not `output`. Before `begin` only a killed rewrite is finished. `state`
    has a byte for each line of the input. UsageError for files that are not a job's, LockedError where another process
    has them, StorageError where the file system fails: the same command then goes on.
    """

    def __init__(self, output: Path, error_file: Path | None = None, *, overwrite: bool = False) -> None:
        named = (("--output", output), ("--error-file", error_file))
        with _failing(f"cannot write {output}", begun=False):
            self.paths = [_regular(path, flag) for flag, path in named if path is not None]
        if len(set(self.paths)) < len(self.paths):
            raise UsageError(f"--output and --error-file are both {output}", "needed two files")
        self._beside = Path(f"{self.paths[0]}.journal")
        self._overwrite = overwrite
        self._journal: AppendedFile | None = None
        self._outputs: list[AppendedFile] = []
        self._unsynced, self._synced_at = 0, time.monotonic()
        self.header: dict[str, Any] | None = None
        """The first line of the journal, None where there is no job to go on with."""
        self.state = bytearray()
        try:
            with _failing(f"cannot open {self._beside}", begun=False):
                self._look()
        except BaseException:
            self.close()  # the lock, too
            raise

    def begin(self, job: Mapping[str, Any], lines: int) -> None:
        """Goes on, or starts anew, with requests in lines 1 to `lines`. `job` is what must be the same for both: JSON.

        UsageError naming what differs.
        """
        self.state = bytearray(lines + 1)
        with _failing(f"cannot write {self._beside}", begun=False):
            if self.header is None:
                self._create(job)
                return
            _require_same(self.header["job"], dict(job), self.paths[0])
            durable, signed = self._last_sync()
            for path in self.paths:
                if signed and not path.exists():
                    raise _changed(path)
                if not signed and path.exists() and path.stat().st_size:
                    raise _not_ours(path)  # killed before its files were made
                self._outputs.append(AppendedFile(path, os.O_RDWR | (0 if signed else os.O_CREAT)))
            self._recover(durable)
            self._sign()

    @property
    def resumed(self) -> bool:
        return self.header is not None

    def add(self, line: int, text: str, failed: bool) -> None:
        """The result of a request, a line that ends in \\n; from now on a kill does not lose it."""
        data, state = text.encode(), FAILED if failed else OK
        output = self._outputs[self._place(state)]
        end, entries = output.size, self._log.size
        with _failing(f"cannot write {output.path}"):
            try:
                output.append(data)
                self._log.append(_entry(line, state, data))
            except BaseException:  # full, or told to stop between the two
                if self._log.size == entries and output.size > end:
                    with suppress(OSError):
                        output.cut(end)
                raise
        self.state[line] = state
        self._unsynced += 1
        if time.monotonic() - self._synced_at >= SYNC_EVERY:
            self.sync()

    def sync(self) -> None:
        """All that is finished is on the disk."""
        with _failing(f"cannot write {self.paths[0]}"):
            self._sync()

    def rewrite(self, *, ordered: bool, keep_failed: bool = True) -> None:
        """The results in the order of the input, or without those that failed, which then are to be run again.

        New files take the place of the old ones at once: a kill leaves the one or the other.
        """
        with _failing(f"cannot write beside {self.paths[0]}"):
            self._sync()
            self._rewrite(ordered, keep_failed)

    def close(self) -> None:
        """Puts finished results on the disk, if that can be done, and closes the files."""
        if self._outputs and self._unsynced:
            with suppress(OSError):
                self._sync()
        for file in (*self._outputs, self._journal):
            if file is not None:
                file.close()
        self._outputs, self._journal = [], None

    # Opening

    def _look(self) -> None:
        """Locks the journal if there is one, and reads how it begins."""
        ask_for(self._beside)
        while self._beside.exists():
            journal = AppendedFile(self._beside, os.O_RDWR)
            if not locked(journal.fd):
                holder = _holder(journal)
                journal.close()
                raise LockedError(f"{self.paths[0]} is being written by {holder}", "one process at a time may do that")
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(journal.fd), os.stat(self._beside)):
                    self._journal = journal
                    break
            journal.close()  # it was replaced meanwhile
        header = None if self._journal is None else _header(self._journal)
        if header is None:
            there = [path for path in self.paths if os.path.lexists(path)]
            if there and not self._overwrite:
                raise _not_ours(there[0])
        elif not self._overwrite:
            self._finish_rewrite()
            self.header = header

    def _create(self, job: Mapping[str, Any]) -> None:
        """New files; with `overwrite` in the place of old ones."""
        if self._journal is None:
            with suppress(FileExistsError):
                self._journal = AppendedFile(self._beside, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            if self._journal is None or not locked(self._journal.fd):
                raise LockedError(f"{self.paths[0]} has just been begun by another process")
        if self._overwrite:
            _remove(*self.paths, *self._aside())
        header = {**_NAMED, "version": VERSION, "created": int(time.time()), "job": job}
        self._log.cut(0)
        self._log.append(json.dumps(header).encode() + b"\n")
        self._log.sync()
        self.header, flags = header, os.O_RDWR | os.O_CREAT | os.O_EXCL
        for path in self.paths:
            try:
                self._outputs.append(AppendedFile(path, flags))
            except FileExistsError:
                raise _not_ours(path) from None
        self._sign()

    def _sign(self) -> None:
        """Who writes from now on, for other processes that would."""
        self._log.append(_signature())
        self._sync()
        sync_folder(self._beside.parent)

    # Going on

    def _recover(self, durable: int) -> None:
        """Reads all results that the journal vouches for, and cuts off what follows: at least `durable` bytes of it
        were on the disk."""
        readers = [file.lines() for file in self._outputs]
        at, ends = 0, [0] * len(readers)
        for record in self._log.lines():
            entry = _parsed(record)
            note = at == 0 or record == _SYNCED or record.startswith(b"opened ")
            if not record.endswith(b"\n") or (entry is None and not note):
                break
            if entry is not None:
                place = self._place(entry.state)
                found = next(readers[place], b"")
                whole = entry.line < len(self.state) and record == _entry(entry.line, entry.state, found)
                if not whole:
                    break
                ends[place] += entry.size
                self.state[entry.line] = entry.state
            at += len(record)
        if at < durable:
            raise _changed(self.paths[0])
        self._log.cut(at)
        for file, end in zip(self._outputs, ends, strict=True):
            file.cut(end)

    def _last_sync(self) -> tuple[int, bool]:
        """The bytes of the journal up to the last sync, and whether it was ever signed."""
        at = last = 0
        signed = False
        for record in self._log.lines():
            at += len(record)
            signed = signed or record.startswith(b"opened ")
            if record == _SYNCED:
                last = at
        return last, signed

    def _sync(self) -> None:
        for file in (*self._outputs, self._log):
            file.require_in_place()
        for file in self._outputs:
            file.require_unchanged()
            file.sync()
        self._log.append(_SYNCED)
        self._log.sync()
        self._unsynced, self._synced_at = 0, time.monotonic()

    # Rewriting

    def _aside(self) -> list[Path]:
        """Names of new files until all are whole: of the outputs, of the journal, and of the journal in the making."""
        ends = [*(f"new-{number}" for number in range(len(self.paths))), "new", "part"]
        return [Path(f"{self._beside}.{end}") for end in ends]

    def _rewrite(self, ordered: bool, keep_failed: bool) -> None:
        *aside, whole, part = self._aside()
        _remove(*aside, part)
        made = list[AppendedFile]()
        try:
            for path in (*aside, part):
                made.append(AppendedFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
            *outputs, journal = made
            locked(journal.fd)
            journal.append(json.dumps(self.header).encode() + b"\n" + _signature())
            for entry, data in self._finished(ordered):
                if entry.state == FAILED and not keep_failed:
                    self.state[entry.line] = 0
                    continue
                outputs[self._place(entry.state)].append(data)
                journal.append(_entry(entry.line, entry.state, data))
            for file in outputs:
                file.sync()
            journal.append(_SYNCED)
            journal.sync()
            os.replace(part, whole)
            sync_folder(self._beside.parent)
        except BaseException:
            for file in made:
                file.close()
            if not whole.exists():
                with suppress(OSError):
                    _remove(*aside, part)
            raise
        for file in (*self._outputs, self._log):
            file.close()
        self._outputs, self._journal = outputs, journal
        self._finish_rewrite()

    def _finish_rewrite(self) -> None:
        """Puts new files that are whole in the place of the old ones, and removes what is not."""
        *aside, whole, part = self._aside()
        if whole.exists():
            for path, final in zip(aside, self.paths, strict=True):
                if path.exists():
                    os.replace(path, final)
            replaced = self._log
            if not os.path.samestat(os.fstat(replaced.fd), os.stat(whole)):
                self._journal = AppendedFile(whole, os.O_RDWR)
                locked(self._journal.fd)
                replaced.close()
            os.replace(whole, self._beside)
            sync_folder(self._beside.parent)
            self._log.path, self._log.size = self._beside, os.fstat(self._log.fd).st_size
            for file, path in zip(self._outputs, self.paths, strict=False):
                file.path = path
        _remove(*aside, part)

    def _finished(self, ordered: bool) -> Iterator[tuple[FinishedEntry, bytes]]:
        """All entries with their results, as they were written or in the order of the input, in 25 bytes each."""
        lines, offsets, sizes, states = (array.array(kind) for kind in "QQQB")
        ends = [0] * len(self._outputs)
        for record in self._log.lines():
            entry = _parsed(record)
            if entry is not None:
                place = self._place(entry.state)
                lines.append(entry.line)
                offsets.append(ends[place])
                sizes.append(entry.size)
                states.append(entry.state)
                ends[place] += entry.size
        order = sorted(range(len(lines)), key=lines.__getitem__) if ordered else range(len(lines))
        for i in order:
            entry = FinishedEntry(lines[i], states[i], sizes[i])
            yield entry, self._outputs[self._place(entry.state)].piece(offsets[i], entry.size)

    def _place(self, state: int) -> int:
        """Which of the outputs a result goes to."""
        return 1 if state == FAILED and len(self.paths) > 1 else 0

    @property
    def _log(self) -> AppendedFile:
        return required(self._journal, "these results are not begun, or closed")


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _entry(line: int, state: int, data: bytes) -> bytes:
    start = f"{_WORDS[state]} {line} {len(data)} ".encode()
    return start + f"{zlib.crc32(data, zlib.crc32(start)):08x}\n".encode()


def _parsed(record: bytes) -> FinishedEntry | None:
    """None for what is no entry."""
    words = record.split()
    if len(words) != 4 or words[0] not in _STATES or not (words[1].isdigit() and words[2].isdigit()):
        return None
    return FinishedEntry(int(words[1]), _STATES[words[0]], int(words[2]))


def _header(journal: AppendedFile) -> dict[str, Any] | None:
    """How the journal begins; None where its maker was killed before that was written. UsageError for a file that is
    not one."""
    first = next(journal.lines(), b"")
    if not first.strip(b"\0") or (not first.endswith(b"\n") and first.startswith(json.dumps(_NAMED).encode()[:-1])):
        return None
    with suppress(ValueError, RecursionError):
        header = json.loads(first)
        if isinstance(header, dict) and header.get("version") == VERSION and isinstance(header.get("job"), dict):
            journal.size = os.fstat(journal.fd).st_size
            return header
    found = f"{journal.path} is not the journal of a job, or another version's, and stands where this job's has to be"
    raise UsageError(found, "--overwrite replaces jobs only", "move it away, or name another --output")


def _require_same(begun: Mapping[str, Any], job: dict[str, Any], path: Path) -> None:
    job = json.loads(json.dumps(job))  # as it comes back from a file
    for name in {**begun, **job}:
        if begun.get(name) != job.get(name):
            raise UsageError(
                f"{path} was begun with {name} {begun.get(name)!r}, and now it is {job.get(name)!r}",
                "a job goes on as it was begun",
                "name another --output, or start anew with --overwrite",
            )


def _regular(path: Path, flag: str) -> Path:
    """Where `path` leads, which is a regular file, or nothing yet. UsageError for anything else."""
    ask_for(path)
    real = Path(os.path.realpath(path))
    if str(path) == "-" or (path.exists() and not path.is_file()):  # a pipe's real path is no place
        raise UsageError(f"{flag} {path} is not a file", "needed one on a disk, which a job can go on with")
    if not real.parent.is_dir():
        needed = "needed a file that can be written"
        raise UsageError(f"{flag} {path}: the folder {real.parent} is not there", needed, "make the folder first")
    if not os.access(real if real.exists() else real.parent, os.W_OK):
        raise UsageError(f"{flag} {path}: permission denied", "needed a file that can be written")
    return real


def _not_ours(path: Path) -> UsageError:
    return UsageError(
        f"{path} exists, and no journal of a job is beside it",
        "nothing is overwritten unasked",
        "name another file, or add --overwrite",
    )


def _changed(path: Path) -> UsageError:
    return UsageError(
        f"{path} is no longer what was written: the journal has results that are not in it",
        "needed both as they were left",
        "name another --output, or start anew with --overwrite",
    )


def _signature() -> bytes:
    return f"opened {os.getpid()} {socket.gethostname()} {int(time.time())}\n".encode()


def _holder(journal: AppendedFile) -> str:
    words: list[bytes] = []
    for record in journal.lines():
        if record.startswith(b"opened "):
            words = record.split()
    return f"process {words[1].decode()} on {words[2].decode()}" if len(words) == 4 else "another process"


@contextmanager
def _failing(what: str, *, begun: bool = True) -> Iterator[None]:
    """Within it the file system's errors become StorageErrors that say what could not be done; before anything is
    `begun`, UsageErrors where a file may not be made there at all."""
    try:
        yield
    except H2OFlexGenError:
        raise
    except OSError as error:
        if not begun and error.errno in _BARRED:
            found, change = f"{what}: {error.strerror}", "name another --output"
            raise UsageError(found, "needed a file that can be written", change) from error
        raise storage_failure(what, error) from error
