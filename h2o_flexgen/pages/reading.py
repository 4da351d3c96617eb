"""Files that a page is made of: which kind of record each JSON object in them is.

A record that lacks what the page would show is taken as it is, and the page says what is missing. A file that is not
JSON, an object of no known kind, or a value of the wrong type is a UsageError that names file, line and key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from h2o_flexgen.config.checks import no_number, number
from h2o_flexgen.config.reports.quality import QualityReport, StreamReport
from h2o_flexgen.errors import UsageError
from h2o_flexgen.pages.traces import TraceFile, trace_of

Json = dict[str, Any]
NUMBERS = ("prefill_s", "decode_s", "prompt_tokens", "generated_tokens", "sequences")
"""Keys of numbers that every run has, ours and others'."""
OBJECTS = ("eviction", "policy", "predicted", "roofline", "bytes_moved", "quantization", "host", "settings")
"""Keys of objects that a run may have, besides the peaks of memory, which some have as one number."""
KINDS = (
    "needed a record of run, bench, search, evaluate (of a suite, too) or demo, a trace, a summary of bench, or "
    "recorded scores, as JSON or JSON lines"
)


@dataclass(frozen=True)
class Run:
    """One run: a RunRecord, or what bench kept of another system, which has less. `record`: the RunRecord, if any."""

    source: str
    system: str
    data: Json
    record: Json | None


@dataclass(frozen=True)
class Sourced:
    """An object and the file that it came from."""

    source: str
    data: Any


@dataclass
class Material:
    """Everything that a page is made of, by kind."""

    runs: list[Run] = field(default_factory=list)
    summaries: list[Sourced] = field(default_factory=list)
    plans: list[Sourced] = field(default_factory=list)
    qualities: list[Sourced] = field(default_factory=list)
    streams: list[Sourced] = field(default_factory=list)
    suites: list[Sourced] = field(default_factory=list)
    """A figure each: of a policy at a budget in a task."""
    traces: list[TraceFile] = field(default_factory=list)
    scores: list[Sourced] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    """The kinds of records in each file, or why it was left out."""

    def add(self, source: str, data: Any) -> str:
        """Takes one object; returns what it is. UsageError for one of no known kind."""
        if (kind := _kind_of(data)) is not None:
            what, _, into, read = kind
            getattr(self, into).extend(read(source, dict(data)))
            return what
        found = (
            f"has the keys {', '.join(list(data)[:8])}" if isinstance(data, Mapping) else f"is a {type(data).__name__}"
        )
        found = "is an object without keys" if data == {} else found
        raise UsageError(f"{source}: not a record that this page can show: it {found}", KINDS)


def read(paths: list[Path]) -> Material:
    """All records in files and, of folders, in their .json and .jsonl files. UsageError where one cannot be read.

    In a folder what is of no known kind is left out and named in `files`; so is a summary whose runs lie beside it.
    """
    material = Material()
    for path in paths:
        if path.is_dir():
            _read_folder(material, path)
        else:
            _read_file(material, path)
    return material


def _read_folder(material: Material, folder: Path) -> None:
    inside = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".jsonl") and path.is_file())
    if not inside:
        raise UsageError(f"{folder}: no .json or .jsonl file in this folder", KINDS)
    runs = any(path.name.startswith("run-") for path in inside)
    for path in inside:
        if path.name == "summary.json" and runs:
            continue
        try:
            _read_file(material, path)
        except UsageError as error:
            if any(_kind_of(data) for _, data in _objects(path)):
                raise
            material.files[str(path)] = f"left out: {error.found.partition(': ')[2]}"


def _read_file(material: Material, path: Path) -> None:
    found: dict[str, int] = {}
    for where, data in _objects(path):
        what = material.add(where, data)
        found[what] = found.get(what, 0) + 1
    material.files[str(path)] = ", ".join(f"{count} x {what}" if count > 1 else what for what, count in found.items())


def _objects(path: Path) -> Iterator[tuple[str, Any]]:
    """The JSON objects of a file, each with where it stands: one object, or one per line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise UsageError(f"{path}: cannot be read: {why}", KINDS) from None
    try:
        yield str(path), json.loads(text, parse_constant=no_number)
        return
    except ValueError as error:
        whole = str(error)
    lines = [(place, line) for place, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if len(lines) < 2:
        raise UsageError(f"{path}: not JSON: {whole}", KINDS) from None
    for place, line in lines:
        try:
            data = json.loads(line, parse_constant=no_number)
        except ValueError as error:
            # A file that is one object over many lines fails on its own terms.
            why = whole if place == lines[0][0] else str(error)
            raise UsageError(f"{path}, line {place}: not JSON: {why}", KINDS) from None
        yield f"{path}, line {place}", data


def number_in(data: Mapping[str, Any], name: str, source: str) -> float | None:
    """`data[name]` where it is a number that is at least 0; None where it is missing. UsageError for anything else."""
    value = data.get(name)
    if value is None:
        return None
    number(value, f"{source}: {name}", 0, needed="needed a number, at least 0")
    return float(value)


def model_name(value: Any) -> str:
    """A model as it is called; of one that was named by its folder the last part: the rest says who made the record."""
    text = str(value)
    return Path(text).name or text if Path(text).is_absolute() else text


def object_in(data: Mapping[str, Any], name: str, source: str) -> Json:
    """`data[name]`, an object; an empty one where it is missing. UsageError for anything else."""
    value = data.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UsageError(f"{source}: {name} is {value!r}", "needed an object")
    return value


def _checked(source: str, data: Json) -> None:
    for name in NUMBERS:
        if number_in(data, name, source) is None:
            raise UsageError(f"{source}: the record has no {name}", f"needed {', '.join(NUMBERS)}")
    for name in OBJECTS:
        object_in(data, name, source)
    if not isinstance(data.get("peak_bytes"), int):
        object_in(data, "peak_bytes", source)


def _run(source: str, data: Json) -> list[Run]:
    _checked(source, data)
    return [Run(source, str(object_in(data, "eviction", source).get("name", "run")), data, data)]


def _bench_run(source: str, data: Json) -> list[Run]:
    _checked(source, data)
    detail = object_in(data, "detail", source)
    record = detail if "eviction" in detail else None
    if record is not None:
        _checked(source, record)
    return [Run(source, str(data["system"]), data, record)]


def _demo(source: str, data: Json) -> list[Run]:
    return [run for which in ("full", "evicted") for run in _run(f"{source}, {which}", object_in(data, which, source))]


def _report(kind: Any, source: str, data: Json) -> list[Sourced]:
    """A report that its own class reads."""
    try:
        return [Sourced(source, kind.from_json(data))]
    except (UsageError, TypeError, KeyError) as error:
        raise UsageError(f"{source}: not a whole {kind.__name__}: {error}", KINDS) from None


def _summary(source: str, data: Json) -> list[Sourced]:
    for name, system in object_in(data, "systems", source).items():
        if not isinstance(system, dict):
            raise UsageError(f"{source}: systems.{name} is {system!r}", "needed an object")
    return [Sourced(source, data)]


def _plan(source: str, data: Json) -> list[Sourced]:
    for name in ("policy", "predicted"):
        object_in(data, name, source)
    return [Sourced(source, data)]


def _policy_file(source: str, data: Json) -> list[Sourced]:
    policy = {name: value for name, value in data.items() if name != "made_for"}
    return _plan(source, {**object_in(data, "made_for", source), "policy": policy})


def _of_a_suite(source: str, data: Json) -> list[Sourced]:
    for name in ("suite", "model", "policy", "task", "metric", "kind"):
        if not isinstance(data.get(name), str):
            raise UsageError(f"{source}: {name} is {data.get(name)!r}", "needed a text")
    for name in ("budget", "value", "low", "high"):
        number(data.get(name), f"{source}: {name}", -math.inf, needed="needed a number")
    return [Sourced(source, data)]


_Kind = tuple[str, set[str], str, Callable[[str, Json], list[Any]]]
_KINDS: tuple[_Kind, ...] = (
    ("trace", {"traceEvents"}, "traces", lambda source, data: [trace_of(data, source)]),
    ("scores", {"heavy_hitters"}, "scores", lambda source, data: [Sourced(source, data)]),
    ("run of bench", {"bench_run", "system"}, "runs", _bench_run),
    ("summary of bench", {"bench", "systems"}, "summaries", _summary),
    ("full cache beside an evicted one", {"full", "evicted"}, "runs", _demo),
    ("evaluation along a stream", {"rows", "streams"}, "streams", partial(_report, StreamReport)),
    ("evaluation of quality", {"rows", "recall_file"}, "qualities", partial(_report, QualityReport)),
    ("figure of a suite", {"suite", "metric"}, "suites", _of_a_suite),
    ("run", {"eviction", "decode_s"}, "runs", _run),
    ("policy file", {"made_for"}, "plans", _policy_file),
    ("plan of search", {"predicted", "policy"}, "plans", _plan),
)
"""Of each kind its name, the keys that tell it, where it goes in a Material, and its reader."""


def _kind_of(data: Any) -> _Kind | None:
    """The first that fits."""
    return next((kind for kind in _KINDS if isinstance(data, Mapping) and kind[1] <= data.keys()), None)
