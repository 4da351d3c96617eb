"""Records of what was measured: JSON objects, one a line or one a file, added to and never overwritten.

`RecordFile` holds what benchmarks and GPU checks measure, `Store` the runs of a comparison, and what it still lacks.

A comparison goes on where its folder is given again. A repetition is whole when every system that can run has a record
in it. Ratios are of runs side by side: a run belongs to a repetition where it follows the one before at once, on the
same machine and at the same commit. Otherwise that repetition is left as it is and another one is begun.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from h2o_flexgen.baselines.work import Outcome
from h2o_flexgen.config.flags import flag_of
from h2o_flexgen.config.reports.record import RATES, Throughput, host_facts, package_version
from h2o_flexgen.errors import StorageError, UsageError, writing
from h2o_flexgen.folders import whole_file

_ROOT = Path(__file__).resolve().parents[2]
KEYS = ("version", "commit", "host")


def origin() -> dict[str, Any]:
    """The present value of each of KEYS."""
    return {"version": package_version(), "commit": commit(_ROOT), "host": _host()}


_host = functools.cache(host_facts)
"""Of this process: the memory of a virtual machine may change while it runs, and it is the same machine yet."""


def commit(root: Path) -> str | None:
    """The commit of a checkout, with a `+` where tracked files of what is measured, or measures,
    differ from it; None where it is none."""
    if not (root / ".git").exists():  # installed, perhaps below a repository that has nothing to do with it
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        changes = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "h2o_flexgen", "benchmarks"], check=False)
    except OSError:  # no git
        return None
    return f"{head.stdout.strip()}{'+' if changes.returncode else ''}" if head.returncode == 0 else None


def place(record_origin: dict[str, Any]) -> tuple[Any, ...]:
    """The commit and the machine: two runs may be compared where these are the same."""
    return (record_origin.get("commit"), *machine(record_origin))


def machine(record_origin: dict[str, Any]) -> tuple[Any, ...]:
    """The facts by which two machines count as the same: processor, cores that may be used, memory."""
    host = record_origin.get("host") or {}
    return tuple(host.get(key) for key in ("cpu", "cores", "memory_bytes"))


SCHEMA = 2
_ADDED = ("shared", "peak_cgroup_bytes", "disk_read_bytes", "process_read_bytes", "bytes_moved")  # since the first


@dataclass(frozen=True, kw_only=True)
class Measurement(Outcome, Throughput):
    """One run of one system: the figures of its adapter, and the figures measured from outside.

    date                of its start, ISO 8601
    peak_rss_bytes      of the whole process, imports and loading included, by the kernel's count
    peak_cgroup_bytes   of its control group, page cache included; None where there was no cap
    process_read_bytes  from its start to its end; None where the kernel, or a record of before, does not say
    process_s           from the start of the process to its end
    load_average        of the machine before the run: earlier runs bring it to their threads, other programs above that
    token_ids           empty in a record that was read again and is of random weights
    origin              version, commit and host, as `origin` gives them
    """

    system: str
    repetition: int
    date: str
    load_average: float
    process_s: float
    peak_rss_bytes: int
    peak_cgroup_bytes: int | None
    process_read_bytes: int | None
    sequences: int
    prompt_tokens: int
    generated_tokens: int
    origin: dict[str, Any] = field(repr=False)

    @property
    def peak_bytes(self) -> int:
        """The peak of the control group where there was one, else of resident memory."""
        return self.peak_rss_bytes if self.peak_cgroup_bytes is None else self.peak_cgroup_bytes

    @property
    def ended(self) -> datetime.datetime:
        return datetime.datetime.fromisoformat(self.date) + datetime.timedelta(seconds=self.process_s)

    def to_json(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The record as it is written. Tokens only of checkpoints: tokens of random weights mean nothing."""
        data = dataclasses.asdict(self)
        detail, tokens, origin = (data.pop(name) for name in ("detail", "token_ids", "origin"))
        data.update((name, getattr(self, name)) for name in ("peak_bytes", *RATES))
        if settings["weights"] == "checkpoint":
            data["token_ids"] = tokens
        return {"bench_run": SCHEMA, **data, **origin, "settings": settings, "detail": detail}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measurement:
        """The measurement that `to_json` made a record of; ValueError where something is missing."""
        origin = {key: data[key] for key in KEYS if key in data}
        known = {**dict.fromkeys(_ADDED), **data, "token_ids": data.get("token_ids", []), "origin": origin}
        names = [item.name for item in dataclasses.fields(cls)]
        missing = [name for name in names if name not in known]
        if missing:
            raise ValueError(f"has no {', '.join(missing)}")
        return cls(**{name: known[name] for name in names})


AT_ONCE = datetime.timedelta(minutes=2)
"""The longest time from the end of one run of a repetition to the start of the next."""
FREE = ("systems", "reference", "text_reference", "repetitions", "timeout", "search_time", "only_best", "search_tokens")
"""Settings that may change from call to call: the work of a run and how fast it is does not depend on them."""
_FLAGS = {"batch_sizes": "--batch-size", "cap_enforced": "the cap being enforced"}
_STDERR_LINES = 200


Record = dict[str, Any]


@dataclass(frozen=True)
class RecordFile:
    """Records in one file of a folder, a line of JSON each, and what is made of them beside it."""

    folder: Path
    name: str = "records.jsonl"
    records: list[Record] = field(default_factory=list)

    @classmethod
    def open(cls, folder: Path, name: str = "records.jsonl") -> RecordFile:
        """The records in the folder, if there are any; a line that was torn by an interruption is left out."""
        found = cls(folder, name)
        for line in found._path.read_text(encoding="utf-8").splitlines() if found._path.is_file() else []:
            try:
                found.records.append(json.loads(line))
            except ValueError:
                sys.stderr.write(f"{found._path}: a line that is not JSON is left out\n")
        return found

    @property
    def _path(self) -> Path:
        return self.folder / self.name

    def add(self, record: Record) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+b") as file:
            torn = file.tell() > 0 and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
            file.write(b"\n" * torn + json.dumps(record).encode() + b"\n")
        self.records.append(record)

    def done(self, **wanted: object) -> bool:
        return any(all(record.get(key) == value for key, value in wanted.items()) for record in self.records)

    def write(self, lines: Iterable[str], name: str = "table.md") -> str:
        """Writes lines to a file beside the records, and gives them as one text."""
        text = "\n".join(lines)
        write(self.folder / name, text + "\n")
        return text


class Failure(NamedTuple):
    """A run that gave no measurement: why, whether for want of memory, when (ISO 8601)."""

    repetition: int
    reason: str
    out_of_memory: bool
    date: str


class NextRun(NamedTuple):
    """The next run: a repetition, the systems that it lacks, the first of which runs, and how many are whole."""

    repetition: int
    lacks: tuple[str, ...]
    whole: int


@dataclass
class Store:
    """Records in one folder: measurements by system, failures by system and batch. `settings` go into each file."""

    folder: Path
    settings: dict[str, Any]
    runs: dict[str, list[Measurement]] = field(default_factory=dict)
    failures: dict[tuple[str, int], Failure] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, settings: dict[str, Any]) -> Store:
        """The records of a folder, none where it does not exist. UsageError where its records have other settings."""
        store = cls(folder, settings)
        for path in sorted(folder.glob("run-*.json")):
            data = read(path, settings)
            try:
                run = Measurement.from_json(data)
            except ValueError as error:
                raise _no_record(path, str(error)) from None
            store.runs.setdefault(run.system, []).append(run)
        for path in sorted(folder.glob("failed-*.json")):
            data = read(path, settings)
            missing = [name for name in ("system", "batch", *Failure._fields) if name not in data]
            if missing:
                raise _no_record(path, f"has no {', '.join(missing)}")
            store.failures[data["system"], data["batch"]] = Failure(*(data[name] for name in Failure._fields))
        for runs in store.runs.values():
            runs.sort(key=lambda run: run.repetition)
        return store

    def add(self, run: Measurement) -> None:
        path = self.folder / f"run-{run.repetition:02d}-{run.system}.json"
        write(path, json.dumps(run.to_json(self.settings), indent=1) + "\n", fresh=True)
        self.runs.setdefault(run.system, []).append(run)

    def add_failure(self, system: str, batch: int, failure: Failure, errors: str) -> Path:
        """Keeps a failure with the end of its stderr; the path of its file, without which it would be tried again."""
        data = {"system": system, "batch": batch, **failure._asdict(), "settings": self.settings}
        data["stderr"] = errors.splitlines()[-_STDERR_LINES:]
        path = self.failed_path(system, batch)
        write(path, json.dumps(data, indent=1) + "\n", fresh=True)
        self.failures[system, batch] = failure
        return path

    def failed_path(self, system: str, batch: int) -> Path:
        return self.folder / f"failed-b{batch}-{system}.json"

    def next(
        self, systems: Sequence[str], repetitions: int, now: datetime.datetime, here: dict[str, Any]
    ) -> NextRun | None:
        """The next run on the way to so many whole repetitions of `systems`; None where nothing is missing.

        The run would start `now`, and its origin be `here`.
        """
        having = [{run.repetition for run in self.runs.get(name, [])} for name in systems]
        whole = len(set.intersection(*having)) if having else repetitions
        if whole >= repetitions:
            return None
        last = max((run.repetition for runs in self.runs.values() for run in runs), default=0)
        lacks = tuple(name for name, numbers in zip(systems, having, strict=True) if last not in numbers)
        if last and lacks and self._goes_on(last, now, here):
            return NextRun(last, lacks, whole)
        return NextRun(last + 1, tuple(systems), whole)

    def _goes_on(self, repetition: int, now: datetime.datetime, here: dict[str, Any]) -> bool:
        """Whether a run belongs to a repetition: it follows the last one there at once, and is made in its place."""
        there = [run for runs in self.runs.values() for run in runs if run.repetition == repetition]
        failed = [one.date for one in self.failures.values() if one.repetition == repetition]
        ended = max([*(run.ended for run in there), *map(datetime.datetime.fromisoformat, failed)])
        return now - ended <= AT_ONCE and all(place(run.origin) == place(here) for run in there)


def read(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """A file of a comparison. UsageError where it cannot be read, or is one with other settings than these."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        there = data["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} cannot be read: {error!r}", "needed records of bench", "name another folder"
        ) from None
    differ = [
        f"{_FLAGS.get(name, flag_of(name))}: {_said(there[name])} there, {_said(value)} now"
        for name, value in settings.items()
        if name in there and name not in FREE and there[name] != value
    ]
    if differ:
        raise UsageError(
            f"--output-dir holds a comparison with other settings ({path.name})",
            "; ".join(differ),
            "name another folder, or give the settings that are there",
        )
    return data


def write(path: Path, text: str, fresh: bool = False) -> None:
    """A file of the comparison, whole or not at all. StorageError where it cannot be written, or `fresh` and there."""
    if fresh and path.exists():
        raise StorageError(f"cannot write {path}: it is there already, and records are not overwritten")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial:
            partial.write_text(text, encoding="utf-8", errors="replace")  # names of files may be no text


def _no_record(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is not a record of bench: it {why}", "needed records", "name another folder")


def _said(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
