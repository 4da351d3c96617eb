"""Suites: policies at several budgets on several models, measured by tasks, resumable, with confidence intervals."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from h2o_flexgen.cache.eviction.ceiling import CEILING, Foresight
from h2o_flexgen.config.checks import json_file, known_keys, share
from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.reports.quality import SuiteRecord, interval
from h2o_flexgen.config.reports.record import utc_now
from h2o_flexgen.errors import StorageError, UsageError, writing
from h2o_flexgen.evaluation.quality import evicting
from h2o_flexgen.evaluation.suites.tasks import Measured, SuiteTask, ceiling, make
from h2o_flexgen.planning.llm import LLM

RECORDS = "records.jsonl"
FULL = "full"
_ADDED = {"told": 1, "answers": "number"}
"""Of tasks what earlier ones lacked, and had: cells that were measured before keep their names."""


@dataclass(frozen=True)
class SuitePolicy:
    """A policy of a suite: an eviction policy's name and settings of EvictionConfig, without a budget. The setting
    "bytes", which is true, makes budgets shares of the bytes of a full cache in 16 bits."""

    name: str
    settings: tuple[tuple[str, Any], ...] = ()
    budgets: tuple[float, ...] = ()
    """The shares that it is measured at; if empty, the suite's."""

    @classmethod
    def from_json(cls, data: Any) -> SuitePolicy:
        """A name, or an object of EvictionConfig's keys and "budgets". UsageError for what makes no sense."""
        given = {"name": data} if isinstance(data, str) else dict(data)
        budgets = tuple(sorted({share(budget, "budgets") for budget in given.pop("budgets", ())}))
        given = known_keys(given, EvictionConfig)
        if {"ratio", "budget"} & given.keys():
            raise UsageError(f"the policy {data} has a budget", "needed budgets in the suite's own list")
        name = given.pop("name", FULL)
        if given.get("bytes", True) is not True:
            raise UsageError(f"bytes of the policy {data}", "needed true: budgets are then shares of bytes")
        if name != CEILING:
            EvictionConfig(name, ratio=1.0, **{key: value for key, value in given.items() if key != "bytes"})
        return cls(name, tuple((key, _hashable(given[key])) for key in sorted(given)), budgets)

    @property
    def label(self) -> str:
        """For tables: "h2o, global", "random, recent 8"."""
        words = (
            str(value) if key == "budget_split" else key.replace("_", " ") + ("" if value is True else f" {value}")
            for key, value in self.settings
        )
        return ", ".join((self.name, *words))

    def at(self, budget: float) -> EvictionConfig:
        """Its config at a share of prompt and generated tokens, or of bytes."""
        share_of = {"ratio": budget, **dict(self.settings)}
        if share_of.get("bytes"):
            share_of = {**share_of, "ratio": 1.0, "bytes": budget}
        return EvictionConfig(self.name, **share_of)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The measurements of a file of configs/eval: every policy at each of its budgets, on every model, by every task.

    The full cache is measured first, whether it is listed or not. Relative files are looked for beside the suite's.
    """

    name: str
    models: tuple[str, ...]
    policies: tuple[SuitePolicy, ...]
    budgets: tuple[float, ...]
    tasks: Mapping[str, SuiteTask]
    engine: Mapping[str, Any]

    @classmethod
    def read(cls, path: str | Path) -> Suite:
        """The suite in a file. UsageError naming what is wrong in it."""
        data = json_file(path, f"--suite {path}", "needed a suite, such as configs/eval/demo.json")
        try:
            return cls._of({"engine": {}, **data} if isinstance(data, Mapping) else data, Path(path))
        except (TypeError, AttributeError, ValueError) as error:
            if isinstance(error, UsageError):
                raise UsageError(f"{path}: {error.found}", error.needed, error.change) from None
            raise UsageError(f"{path} is not a suite: {error}", "needed one such as configs/eval/demo.json") from None

    @classmethod
    def _of(cls, data: Any, file: Path) -> Suite:
        values = known_keys(data, cls)
        if not (values["models"] and values["policies"] and values["budgets"] and values["tasks"]):
            raise UsageError("models, policies, budgets or tasks are empty", "needed at least one of each")
        for name in ("models", "policies", "budgets"):
            if not isinstance(values[name], list):
                raise ValueError(f"{name} is {values[name]!r}, not a list")
        engine = dict(values["engine"])
        for key, told in {"model": "models", "eviction": "policies and budgets"}.items():
            if key in engine:
                raise UsageError(f"engine has the key {key!r}", f"the suite's {told} say that", f"leave {key} out")
        EngineConfig(**known_keys(engine, EngineConfig))  # what cannot be set is said before anything is measured
        tasks = {name: SuiteTask.from_json(task) for name, task in values["tasks"].items()}
        for name, task in tasks.items():
            tasks[name] = replace(task, text=_beside(file, task.text), questions=_beside(file, task.questions))
        return cls(
            name=str(values["name"]),
            models=tuple(os.path.expanduser(model) for model in values["models"]),
            policies=tuple(dict.fromkeys(map(SuitePolicy.from_json, values["policies"]))),
            budgets=tuple(dict.fromkeys(share(budget, "budgets") for budget in values["budgets"])),
            tasks=tasks,
            engine=engine,
        )

    def cells(self) -> Iterator[tuple[SuitePolicy, float]]:
        """The full cache, then budget by budget, as listed, every policy; at 1 all are the full cache bit for bit."""
        yield SuitePolicy(FULL), 1.0
        for budget in dict.fromkeys([*self.budgets, *(each for policy in self.policies for each in policy.budgets)]):
            for policy in self.policies:
                if budget < 1 and policy.name != FULL and budget in (policy.budgets or self.budgets):
                    yield policy, budget


def _hashable(value: Any) -> Any:
    """With tuples in the place of lists."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _beside(file: Path, name: str | None) -> str | None:
    return None if name is None else str(file.parent / os.path.expanduser(name))


def run_suite(
    suite: Suite,
    folder: Path,
    engine: Mapping[str, Any] | None = None,
    on_record: Callable[[SuiteRecord], None] = lambda record: None,
    on_skip: Callable[[str], None] = lambda message: None,
) -> list[SuiteRecord]:
    """Measures the cells that have no record in `folder` yet; returns the records of all cells, in their order.

    `engine`: further settings of LLM, before the suite's own. Cells that a policy refuses have no records, and
    `on_skip` hears why. UsageError where the folder holds another suite's.
    """
    settings = {**suite.engine, **(engine or {})}
    file = SuiteRecords(folder, suite.name)
    wanted: list[str] = []
    for model in suite.models:
        cases: dict[str, Measured] = {}
        full: dict[str, dict[str, SuiteRecord]] = {}
        for policy, budget in suite.cells():
            names = [n for n, task in suite.tasks.items() if policy.name != CEILING or task.kind != "agreement"]
            cells = {name: _cell(model, policy, budget, suite.tasks[name], settings) for name in names}
            wanted += cells.values()
            missing = [name for name in names if cells[name] not in file.found]
            if missing:
                known = {"suite": suite.name, "model": Path(model).name, "policy": policy.label, "budget": budget}
                with (
                    ceiling() if policy.name == CEILING else nullcontext() as foresight,
                    evicting(model, settings, policy.at(budget)) as llm,
                ):
                    for name in missing:
                        if name not in cases:
                            cases[name] = make(suite.tasks[name], llm)
                        cell = {**known, "task": name, "cell": cells[name]}
                        try:
                            records = _measured(cell, cases[name], llm, foresight, full.get(name, {}))
                        except UsageError as error:
                            on_skip(f"{name}: {policy.label} at {budget:g}: {error}")
                            continue
                        file.add(records)
                        for record in records:
                            on_record(record)
            if policy.name == FULL:
                full = {name: {one.metric: one for one in file.found.get(cell, ())} for name, cell in cells.items()}
    return [record for cell in wanted for record in file.found.get(cell, ())]


def _measured(
    cell: Mapping[str, Any], task: Measured, llm: LLM, foresight: Foresight | None, full: Mapping[str, SuiteRecord]
) -> list[SuiteRecord]:
    """The records of one task; `cell`: their fields that are known beforehand."""
    started = time.perf_counter()
    figures = task.run(llm, foresight, full)
    seconds = round(time.perf_counter() - started, 2)
    return [
        SuiteRecord(
            **cell,
            metric=found.metric,
            kind=found.kind,
            **interval(found.kind, found.values)._asdict(),
            n=len(found.values),
            values=tuple(round(value, 6) for value in found.values),
            seconds=seconds,
            answers=found.answers,
            date=utc_now(),
            dtype=llm.model.dtype,
        )
        for found in figures
    ]


def _cell(model: str, policy: SuitePolicy, budget: float, task: SuiteTask, settings: Mapping[str, Any]) -> str:
    """A name for what is measured: the same settings give the same name."""
    own = {name: value for name, value in asdict(task).items() if name not in _ADDED or value != _ADDED[name]}
    told = json.dumps([model, policy.name, policy.settings, budget, own, dict(settings)], default=str)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _line(record: SuiteRecord) -> str:
    return json.dumps(record.to_json(), allow_nan=False) + "\n"


class SuiteRecords:
    """The records of a suite in a folder, a line each, added cell by cell."""

    def __init__(self, folder: Path, suite: str) -> None:
        self._path = folder / RECORDS
        self.found: dict[str, list[SuiteRecord]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        except OSError as error:
            why = f"cannot use {folder}: {error.strerror}"
            raise StorageError(why, change="name another with --output-dir") from None
        *lines, torn = text.split("\n")
        for number, line in enumerate(lines, 1):
            try:
                record = SuiteRecord.from_json(json.loads(line))
            except ValueError as error:
                raise UsageError(f"{self._path} line {number}: {error}", change="name another --output-dir") from None
            if record.suite != suite:
                raise UsageError(
                    f"{folder} holds records of the suite {record.suite!r}, this is {suite!r}",
                    change="name another --output-dir",
                )
            self.found.setdefault(record.cell, []).append(record)
        if torn:  # a run ended while it was writing a cell, whose first records may be whole
            self.found.popitem() if self.found else None
            self._write("".join(map(_line, (record for cell in self.found.values() for record in cell))), "w")

    def add(self, records: Sequence[SuiteRecord]) -> None:
        """All records of one cell, in one piece."""
        self._write("".join(map(_line, records)), "a")
        self.found[records[0].cell] = list(records)

    def _write(self, text: str, mode: str) -> None:
        with writing(self._path, "another folder with --output-dir"), self._path.open(mode, encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
