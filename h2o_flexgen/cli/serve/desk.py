"""Files and batches of the service, in small JSON files that are always whole.

    DIR/lock                      held by the process that serves
    DIR/files/file-...            an uploaded file, or the results of a batch; `.json` beside it: its entry
    DIR/batches/batch_....json    a batch as clients see it
    DIR/batches/batch_.../        results of one in progress, and their journal: these are the truth about it

Names are made here: no path ever comes from a client. Fields that begin with `_` are not shown to clients.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from h2o_flexgen.errors import LockedError, StorageError
from h2o_flexgen.folders import locked, synced_file
from h2o_flexgen.jobs.files import storage_failure
from h2o_flexgen.jobs.openai import CHAT, COMPLETIONS
from h2o_flexgen.jobs.requests import Refused
from h2o_flexgen.jobs.source import BadLine, Source, load_json

ENDPOINTS = (CHAT, COMPLETIONS)
OUTPUT, ERRORS = "output.jsonl", "errors.jsonl"
"""The results of a batch in progress, in its folder."""
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
UPLOADING = ".upload-"
LOOKED_AT = 20
"""Lines of a file, from which it is told what it is."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MOST_PAIRS, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512
_LONGEST_WAIT = 366 * 86400
_SAVED_EVERY = 5.0

Entry = dict[str, Any]


class ApiError(Refused):
    """An answer of another status than 200."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, code, status=status, param=param)


class Desk:
    """Files and batches of one folder. Any thread may call all methods; clients' threads only read returned entries.

    `changed` is told of everything that the engine's thread may wait for, and `news` is true then until that thread
    has looked. `called`: ids of models by their names; a batch that names none is for the first. LockedError where
    another process has the folder, StorageError where it cannot be used.
    """

    def __init__(self, folder: Path, called: Mapping[str, str]) -> None:
        self.changed, self.news = threading.Condition(threading.RLock()), False
        self.files: dict[str, Entry] = {}
        self.batches: dict[str, Entry] = {}
        self._folder, self._called = folder, called
        self._held: dict[str, float] = {}
        self._saved: dict[str, float] = {}
        try:
            for each in (folder, self.file_folder, self._batch_folder):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = self._locked()
            self._load()
        except OSError as error:
            raise error if isinstance(error, StorageError) else storage_failure(f"--data-dir {folder}", error) from None

    @property
    def file_folder(self) -> Path:
        return self._folder / "files"

    @property
    def _batch_folder(self) -> Path:
        return self._folder / "batches"

    def close(self) -> None:
        """Another process may serve the folder now."""
        os.close(self._lock)

    # Files

    def new_upload(self) -> Path:
        return self.file_folder / f"{UPLOADING}{secrets.token_hex(16)}"

    def add_file(self, uploaded: Path, name: str, purpose: str, lives_s: int | None = None) -> Entry:
        with self._writing():
            entry = self._file(f"file-{secrets.token_hex(16)}", uploaded.stat().st_size, name, purpose, lives_s)
            os.replace(uploaded, self.file_folder / entry["id"])
            self._keep_file(entry)
            return entry

    def file(self, name: str) -> Entry:
        """ApiError 404 where there is no such file."""
        self.sweep()
        with self.changed:
            if name not in self.files:
                raise ApiError(404, f"No such File object: {name[:80]}", "id")
            return self.files[name]

    def content(self, name: str) -> Path:
        """Where the bytes of a file lie. ApiError as above."""
        return self.file_folder / str(self.file(name)["id"])

    def delete_file(self, name: str) -> None:
        """ApiError 409 for one that a batch still reads."""
        with self._writing():
            self.file(name)
            user = self._user_of(name)
            if user is not None:
                raise ApiError(409, f"{name} is read by {user}, which is not finished: cancel that first", "id")
            self._forget_file(name)

    def list_files(self, query: Mapping[str, str]) -> Entry:
        """A page of files, as `query` asks: purpose, after, limit, order. ApiError 400 where it makes no sense."""
        self.sweep()
        purpose = query.get("purpose")
        with self.changed:
            every = [each for each in self.files.values() if purpose in (None, each["purpose"])]
        return _page(every, query, 10_000, 10_000)

    # Batches

    def create_batch(self, body: Any) -> Entry:
        """ApiError 400 or 404 for a body that makes no sense."""
        known = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after")
        if not isinstance(body, dict):
            raise ApiError(400, "the body is not a JSON object")
        for name in body:
            if name not in known:
                raise ApiError(400, f"Unknown parameter: {name[:80]!r}", name[:80], "unknown_parameter")
        if body.get("endpoint") not in ENDPOINTS:
            raise ApiError(400, f"endpoint must be one of {', '.join(ENDPOINTS)}", "endpoint")
        window = _seconds(body.get("completion_window"))
        metadata, lives_s = _pairs(body.get("metadata")), expiry_of(body.get("output_expires_after"))
        given = body.get("input_file_id")
        if not isinstance(given, str):
            raise ApiError(400, "input_file_id must be the id of a file", "input_file_id")
        with self._writing():
            if self.file(given)["purpose"] != "batch":
                raise ApiError(400, f"the purpose of {given} is not 'batch'", "input_file_id")
            now = int(time.time())
            batch = {
                "id": f"batch_{secrets.token_hex(16)}",
                "object": "batch",
                "endpoint": body["endpoint"],
                "model": self._model_of(self.file_folder / given),
                "errors": None,
                "input_file_id": given,
                "completion_window": body["completion_window"],
                "status": "validating",
                "output_file_id": None,
                "error_file_id": None,
                "created_at": now,
                "expires_at": now + window,
                **dict.fromkeys(f"{word}_at" for word in ("in_progress", "finalizing", "completed", "failed")),
                **dict.fromkeys(f"{word}_at" for word in ("expired", "cancelling", "cancelled")),
                "request_counts": {"total": 0, "completed": 0, "failed": 0},
                "metadata": metadata,
                "forecast": None,
                "_number": self._number(),
                "_lives_s": lives_s,
                "_files": {name: f"file-{secrets.token_hex(16)}" for name in (OUTPUT, ERRORS)},
            }
            self._save_batch(batch)
            self.batches[batch["id"]] = batch
            return dict(batch)  # as it was made, whatever is done with it by now

    def batch(self, name: str) -> Entry:
        """ApiError 404 where there is no such batch."""
        self.sweep()
        with self.changed:
            if name not in self.batches:
                raise ApiError(404, f"No batch found with id '{name[:80]}'.", "id")
            return self.batches[name]

    def list_batches(self, query: Mapping[str, str]) -> Entry:
        """A page of batches, the newest first, as `query` asks: after, limit. ApiError 400 where it makes no sense."""
        self.sweep()
        with self.changed:
            every = list(self.batches.values())
        return _page(every, {**query, "order": "desc"}, 20, 100)

    def cancel(self, name: str) -> Entry:
        """Cancels a batch: at once if it has not begun, else when the engine looks next. ApiError 409 if it is over."""
        with self._writing():
            batch, now = self.batch(name), int(time.time())
            if batch["status"] == "cancelling":
                return batch
            if batch["status"] not in ("validating", "in_progress"):
                raise ApiError(409, f"Cannot cancel a batch with status '{batch['status']}'.", "id")
            self._held.pop(name, None)
            begun = batch["in_progress_at"] is not None
            change = {"status": "cancelling"} if begun else {"status": "cancelled", "cancelled_at": now}
            return self.update(batch, **change, cancelling_at=now, forecast=None)

    # For the engine's thread

    def next_batch(self, model: str | None = None) -> Entry | None:
        """The one that came first of those that can be gone on with, of this `model` if there are any. Half of its time
        having gone by, a batch of another one waits no longer than those that came later."""
        return next(iter(self.queue(model)), None)

    def queue(self, model: str | None = None) -> list[Entry]:
        """All that can be gone on with, in the order in which that is done; `model`: as above."""
        with self.changed:
            now, date = time.monotonic(), time.time()
            open_ones = [batch for batch in self.batches.values() if batch["status"] in UNFINISHED]
            ready = [batch for batch in open_ones if self._held.get(batch["id"], 0.0) <= now]

            def turn(batch: Entry) -> tuple[bool, int]:
                late = 2 * date > batch["created_at"] + batch["expires_at"]
                return model not in (None, batch["model"]) and not late, int(batch["_number"])

            return sorted(ready, key=turn)

    def update(self, batch: Entry, **changes: Any) -> Entry:
        """Changes a batch, on the disk too."""
        with self._writing():
            batch.update(changes)
            self._save_batch(batch)
            return batch

    def count(self, batch: Entry, total: int, completed: int, failed: int) -> None:
        """How far a batch is; on the disk now and then, since the journal has it."""
        with self.changed:
            batch["request_counts"] = {"total": total, "completed": completed, "failed": failed}
            if time.monotonic() - self._saved.get(batch["id"], 0.0) > _SAVED_EVERY:
                with suppress(OSError):
                    self._save_batch(batch)

    def foretell(self, batch: Entry, forecast: Entry) -> None:
        with self.changed:
            if batch["status"] in UNFINISHED:
                batch["forecast"] = forecast

    def hold(self, batch: Entry, why: str, seconds: float = float("inf")) -> None:
        """Puts a batch off for so many seconds, by default until this process ends. Its results stay."""
        self._held[batch["id"]] = time.monotonic() + seconds
        with suppress(StorageError):  # which may be why
            self.update(batch, errors=error_list([("waiting", self.told(why), None)]), forecast=None)

    def told(self, message: str) -> str:
        """`message` for clients: without the path of this folder."""
        for folder in (self._folder.resolve(), self._folder):
            message = message.replace(f"{folder}/", "")
        return message

    def ending(self, batch: Entry) -> str | None:
        """Why a batch is to be stopped: "cancelled" or "expired"."""
        if batch["status"] == "cancelling":
            return "cancelled"
        return "expired" if time.time() >= batch["expires_at"] else None

    def folder_of(self, batch: Entry) -> Path:
        return self._batch_folder / str(batch["id"])

    def publish(self, batch: Entry, end: str) -> None:
        """Makes files of a batch's results; from then on its status is `end`. Called again after a kill, it goes on."""
        with self._writing():
            now, folder = int(time.time()), self.folder_of(batch)
            status = "finalizing" if end == "completed" else batch["status"]
            self.update(batch, status=status, finalizing_at=now if end == "completed" else None, _end=end)
            made: Entry = {}
            for name, field in ((OUTPUT, "output_file_id"), (ERRORS, "error_file_id")):
                made[field] = self._publish(batch, folder / name, batch["_files"][name])
            forecast = batch["forecast"] if end == "completed" else None
            self.update(batch, status=end, **{f"{end}_at": now}, **made, forecast=forecast)
        shutil.rmtree(folder, ignore_errors=True)

    def _publish(self, batch: Entry, written: Path, name: str) -> str | None:
        target = self.file_folder / name
        if written.exists() and written.stat().st_size:
            os.replace(written, target)
        if not target.exists():
            return None
        if name not in self.files:
            word = written.stem.removesuffix("s")
            entry = self._file(
                name, target.stat().st_size, f"{batch['id']}_{word}.jsonl", "batch_output", batch["_lives_s"]
            )
            self._keep_file(entry)
        return name

    # Keeping

    def sweep(self) -> None:
        """Forgets files whose time is over, and ends batches that never began in theirs."""
        now = time.time()
        with self.changed:
            late = [name for name, each in self.files.items() if each["expires_at"] and now >= each["expires_at"]]
            for name in late:
                if self._user_of(name) is None:
                    self._forget_file(name)
            for batch in self.batches.values():
                waiting = batch["status"] == "validating" and batch["in_progress_at"] is None
                if waiting and now >= batch["expires_at"]:
                    self.update(batch, status="expired", expired_at=int(now), forecast=None)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """All belongs to this thread within it, and who waits is told; StorageError where the disk fails."""
        with self.changed:
            try:
                yield
            except OSError as error:
                raise error if isinstance(error, StorageError) else storage_failure("the data folder", error) from error
            self.news = True
            self.changed.notify_all()

    def _user_of(self, name: str) -> str | None:
        users = (b["id"] for b in self.batches.values() if b["input_file_id"] == name and b["status"] in UNFINISHED)
        return next(users, None)

    def _model_of(self, path: Path) -> str:
        """The id of the model that the first line with a known one names; lines that name others are refused."""
        for record in islice(Source(path, "openai").records(), LOOKED_AT):
            with suppress(BadLine):
                line = load_json(record.data)
                body = line.get("body") if isinstance(line, dict) else None
                name = body.get("model") if isinstance(body, dict) else None
                if isinstance(name, str) and name in self._called:
                    return self._called[name]
        return next(iter(self._called.values()))

    def _number(self) -> int:
        every = (*self.files.values(), *self.batches.values())
        return 1 + max((int(each["_number"]) for each in every), default=0)

    def _file(self, name: str, size: int, shown: str, purpose: str, lives_s: int | None) -> Entry:
        now = int(time.time())
        return {
            "id": name,
            "object": "file",
            "bytes": size,
            "created_at": now,
            "expires_at": None if lives_s is None else now + lives_s,
            "filename": shown,
            "purpose": purpose,
            "status": "processed",
            "status_details": None,
            "_number": self._number(),
        }

    def _keep_file(self, entry: Entry) -> None:
        self._save(self.file_folder / f"{entry['id']}.json", entry)
        self.files[entry["id"]] = entry

    def _forget_file(self, name: str) -> None:
        del self.files[name]
        for path in (self.file_folder / f"{name}.json", self.file_folder / name):
            path.unlink(missing_ok=True)

    def _save_batch(self, batch: Entry) -> None:
        self._saved[batch["id"]] = time.monotonic()
        self._save(self._batch_folder / f"{batch['id']}.json", batch)

    def _save(self, path: Path, value: Entry) -> None:
        with synced_file(path) as file:
            file.write(json.dumps(value).encode())

    def _locked(self) -> int:
        fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        if not locked(fd):
            os.close(fd)
            raise LockedError(f"--data-dir {self._folder} is served by another process", "one at a time may do that")
        return fd

    def _load(self) -> None:
        """Reads all files and batches, and removes what a kill left half done."""
        for folder, entries in ((self.file_folder, self.files), (self._batch_folder, self.batches)):
            for path in folder.glob("*.tmp"):
                path.unlink()
            for path in sorted(folder.glob("*.json")):
                try:
                    entries[path.stem] = json.loads(path.read_bytes())
                except ValueError:
                    found = f"{path} is not what the service wrote"
                    raise StorageError(found, change="move it away, with what belongs to it") from None
        for name in [name for name in self.files if not (self.file_folder / name).exists()]:
            self._forget_file(name)
        unfinished = [batch for batch in self.batches.values() if batch["status"] in UNFINISHED]
        for batch in unfinished:
            batch["forecast"] = None  # of the process that was
        wanted = {name for batch in unfinished for name in batch["_files"].values()}
        for path in self.file_folder.iterdir():
            if path.suffix != ".json" and path.name not in self.files and path.name not in wanted:
                path.unlink()


def shown(entry: Entry) -> Entry:
    return {name: value for name, value in entry.items() if not name.startswith("_")}


def error_list(errors: Sequence[tuple[str, str, int | None]]) -> Entry:
    """The `errors` of a batch: code, message, and line of each."""
    data = [{"code": code, "message": message, "line": line, "param": None} for code, message, line in errors]
    return {"object": "list", "data": data}


def expiry_of(given: Any) -> int | None:
    """The seconds of {"anchor": "created_at", "seconds": N}. ApiError 400 for anything else but null."""
    if given is None:
        return None
    seconds = given.get("seconds") if isinstance(given, dict) else None
    if type(seconds) is not int or given.get("anchor") != "created_at" or not 0 < seconds <= _LONGEST_WAIT:
        needed = '{"anchor": "created_at", "seconds": N}, N up to a year'
        raise ApiError(400, f"expires_after is not {needed}", "expires_after")
    return seconds


def _page(every: list[Entry], query: Mapping[str, str], usual: int, most: int) -> Entry:
    text, order = query.get("limit", str(usual)), query.get("order", "desc")
    if not (text.isdecimal() and text.isascii() and len(text) < 9 and 1 <= int(text) <= most):
        raise ApiError(400, f"limit must be a whole number from 1 to {most}", "limit")
    if order not in ("asc", "desc"):
        raise ApiError(400, "order must be 'asc' or 'desc'", "order")
    every = sorted(every, key=lambda each: int(each["_number"]), reverse=order == "desc")
    names = [each["id"] for each in every]
    if "after" in query:
        if query["after"] not in names:
            raise ApiError(404, f"nothing with the id {query['after'][:80]!r} is listed", "after")
        every = every[names.index(query["after"]) + 1 :]
    data = [shown(each) for each in every[: int(text)]]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(every) > len(data)}


def _seconds(window: Any) -> int:
    """The seconds of a time such as "24h". ApiError 400 for anything else, and above 366 days."""
    found = re.fullmatch(r"([0-9]{1,8})([smhd])", window) if isinstance(window, str) else None
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= _LONGEST_WAIT:
        raise ApiError(400, "completion_window must be a time like '24h' or '7d', up to a year", "completion_window")
    return seconds


def _pairs(metadata: Any) -> dict[str, str] | None:
    """ApiError 400 for anything but a few short texts by name."""
    if metadata is None:
        return None
    fits = isinstance(metadata, dict) and len(metadata) <= _MOST_PAIRS
    for name, value in metadata.items() if fits else ():
        fits = fits and len(name) <= _LONGEST_KEY and isinstance(value, str) and len(value) <= _LONGEST_VALUE
    if not fits:
        most = f"{_MOST_PAIRS} texts of up to {_LONGEST_VALUE} characters, by names of up to {_LONGEST_KEY}"
        raise ApiError(400, f"metadata must be an object of up to {most}", "metadata")
    return dict(metadata)
