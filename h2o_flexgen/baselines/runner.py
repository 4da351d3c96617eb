"""Runs of systems, each in a process of its own: one at a time, or in turn for a comparison."""

from __future__ import annotations

import datetime
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from h2o_flexgen.baselines.memcap import cap_command, cap_problem, read_report
from h2o_flexgen.baselines.process import Finished, RunFailed, run_process
from h2o_flexgen.baselines.settings import SYSTEMS, BenchModel, BenchSettings, System
from h2o_flexgen.baselines.store import Failure, Measurement, NextRun, Store, origin
from h2o_flexgen.baselines.work import AdapterWork, Outcome
from h2o_flexgen.config.reports.record import utc_now

Prompts = Callable[[int], Sequence[Sequence[int]]]
"""From a batch size to that many prompts, the first ones the same for every size."""


class Runner:
    """Runs systems on one model.

    `scratch` is a folder for the systems' files, `work` one for what they are asked. The attribute `uncapped` says why
    --cpu-mem does not hold, None where it does or there is none.
    """

    def __init__(self, settings: BenchSettings, model: BenchModel, prompts: Prompts, scratch: Path, work: Path) -> None:
        self.settings, self._model, self._prompts = settings, model, prompts
        self._files = scratch / settings.model_name
        self._work = work / "work"
        self._prepared: set[tuple[str, int]] = set()
        self.uncapped = cap_problem() if settings.cpu_mem is not None else None

    @property
    def kept_settings(self) -> dict[str, Any]:
        """The settings as every record has them, and whether --cpu-mem holds, None where there is none."""
        enforced = None if self.settings.cpu_mem is None else self.uncapped is None
        return {**self.settings.to_json(), "cap_enforced": enforced}

    def missing(self, name: str) -> str | None:
        """Why a system cannot be run at all; None where it can."""
        system = SYSTEMS.get(name)
        if system.python(Path(self.settings.peers)) is None:
            return f"not installed: scripts/peer_env.sh {system.environment}"
        return None

    def prepare(self, name: str, batch: int, gen_len: int) -> bool:
        """Has a system make what its runs use, which may take minutes. False where there was nothing to do.

        RunFailed where it fails.
        """
        system = SYSTEMS.get(name)
        # Files of others serve every batch; ours may have to calibrate for a large one and not for a small one.
        wanted = (name, batch if system.own else 0)
        if not system.prepares or wanted in self._prepared:
            return False
        folder, _ = self._ask(name, batch, gen_len)
        self._finish(system, [str(folder), "prepare"], capped=None)
        self._prepared.add(wanted)
        return True

    def run(self, name: str, batch: int, gen_len: int, repetition: int = 1) -> Measurement:
        """Runs a system on `batch` prompts for `gen_len` new tokens. RunFailed where that gives no measurement."""
        self.prepare(name, batch, gen_len)
        system = SYSTEMS.get(name)
        folder, scratch = self._ask(name, batch, gen_len)
        came_from = origin()
        date, load = utc_now(), os.getloadavg()[0]
        report = None if self.settings.cpu_mem is None or self.uncapped else folder / "memcap.json"
        finished = self._finish(system, [str(folder)], report, scratch)
        outcome = _outcome(finished, batch, gen_len)
        return Measurement(
            system=name,
            repetition=repetition,
            date=date,
            load_average=load,
            **vars(outcome),
            process_s=finished.seconds,
            peak_rss_bytes=finished.peak_rss_bytes,
            peak_cgroup_bytes=None if report is None else read_report(report).get("peak_bytes"),
            process_read_bytes=finished.read_bytes,
            sequences=batch,
            prompt_tokens=batch * self.settings.prompt_len,
            generated_tokens=batch * gen_len,
            origin=came_from,
        )

    def _ask(self, name: str, batch: int, gen_len: int) -> tuple[Path, Path]:
        """Writes down what a system is to do: (the folder of that, the one for its files)."""
        settings, checkpoint, system = self.settings, self._model.folder, SYSTEMS.get(name)
        folder, scratch = self._work / name, self._files / system.scratch
        scratch.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        asked = {
            **{name: value for name, value in vars(settings).items() if name in AdapterWork.__dataclass_fields__},
            "folder": None if checkpoint is None else str(checkpoint.resolve()),
            "gen_len": gen_len,
            "prompts": [list(prompt) for prompt in self._prompts(batch)],
            "options": system.options(settings.hh_ratio),
            "scratch": str(scratch.resolve()),
            "room_len": settings.gen_len,
        }
        own = {"plan": settings.plan} if system.own else {"weight_bits": 16}
        work = AdapterWork(**{**asked, **own})
        work.write(folder, self._model.config)
        return folder, scratch

    def _finish(self, system: System, arguments: list[str], capped: Path | None, *cold: Path) -> Finished:
        """Runs the adapter to its end, under the cap where there is a file to report to. RunFailed where it failed."""
        prefix: list[str] = []
        if capped is not None and self.settings.cpu_mem is not None:
            files = [path for path in (*cold, self._model.folder) if path is not None]
            prefix = cap_command(self.settings.cpu_mem, files, capped)
        settings, python = self.settings, system.python(Path(self.settings.peers)) or ""
        done = run_process(system.adapter, arguments, settings.threads, settings.timeout, python, prefix, system.own)
        return done.checked()


def _outcome(finished: Finished, batch: int, gen_len: int) -> Outcome:
    """The adapter's outcome; RunFailed where it did not do the work."""
    try:
        outcome = Outcome.from_line(finished.last_line)
    except ValueError as error:
        raise RunFailed(str(error), errors=finished.errors) from None
    lengths = [len(tokens) for tokens in outcome.token_ids]
    if lengths != [gen_len] * batch:
        reason = f"generated {sorted(set(lengths))} tokens for {len(lengths)} prompts, not what was asked"
        raise RunFailed(reason, errors=finished.errors)
    return outcome


Say = Callable[[str], None]


@dataclass
class Comparison:
    """The outcome: measurements by system, in the order of repetitions, and why a system has none or too few.

    batches   the batch size that each system ran with; one that could not run has none
    runs      of earlier calls too, and of systems that only those had
    """

    settings: BenchSettings
    batches: dict[str, int]
    runs: dict[str, list[Measurement]]
    failed: dict[str, str]
    uncapped: str | None = None
    tried: dict[str, list[dict[str, object]]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The systems asked for, then others that there are records of."""
        return list(dict.fromkeys([*self.settings.systems, *self.runs]))


def compare(
    runner: Runner,
    batches: Mapping[str, int],
    store: Store,
    say: Say,
    failed: Mapping[str, str] | None = None,
    smaller: Mapping[str, Sequence[int]] | None = None,
) -> Comparison:
    """Runs each system of `batches` once per repetition, A B C A B C, so that a machine's drift meets all of them.

    Runs what `store` does not hold yet, and puts it there as it is made. A system that fails is not run again, nor by
    another call while the store has its failure, and is listed with its reason; one that runs out of memory before
    it has run at all goes on with the next of its `smaller` batches. `failed` is known before.
    """
    settings, rest = runner.settings, dict(smaller or {})
    names = settings.systems
    runs = {**{name: [] for name in names}, **store.runs}
    result = Comparison(settings, dict(batches), runs, dict(failed or {}), runner.uncapped)
    store.runs = runs
    for name in names:
        problem = runner.missing(name)
        if problem is not None:
            result.failed.setdefault(name, problem)
    for name in result.batches:
        _settle(result, store, name, rest.get(name, []))
        if (name, result.batches[name]) in store.failures:
            path = store.failed_path(name, result.batches[name])
            say(f"{name}: failed before, {result.failed[name]} (without {path} it would be tried again)")
    while (step := _next(result, store)) is not None:
        name = _go_on(result, runner, store, step, say)
        _settle(result, store, name, rest.get(name, []))
    result.batches = {name: runs[name][0].sequences for name in result.names if runs[name]}
    return result


def _next(result: Comparison, store: Store) -> NextRun | None:
    names = [name for name in result.settings.systems if name in result.batches and name not in result.failed]
    return store.next(names, result.settings.repetitions, datetime.datetime.now(datetime.UTC), origin())


def _settle(result: Comparison, store: Store, name: str, smaller: Sequence[int]) -> None:
    """Gives a system the batch that it goes on with, or the reason why it does not, by what has failed so far."""
    runs = store.runs[name]
    sizes = [runs[0].sequences] if runs else [result.batches[name], *smaller]
    for size in sizes:
        result.batches[name] = size
        failure = store.failures.get((name, size))
        if failure is None:
            return
        if not failure.out_of_memory or size == sizes[-1]:
            said = f"in repetition {failure.repetition}: {failure.reason}" if runs else failure.reason
            result.failed.setdefault(name, said)
            return


def _go_on(result: Comparison, runner: Runner, store: Store, step: NextRun, say: Say) -> str:
    """Runs a system once and keeps what came of it, or prepares one; the system.

    All are prepared before a repetition, and not within it: minutes between its runs would end it. Whether that has
    taken too long for one that was begun is asked anew.
    """
    settings, name = result.settings, step.lacks[0]
    try:
        for name in step.lacks:
            if runner.prepare(name, result.batches[name], settings.gen_len):
                return name
        name = step.lacks[0]
        run = runner.run(name, result.batches[name], settings.gen_len, step.repetition)
    except RunFailed as error:
        failure, batch = Failure(step.repetition, str(error), error.out_of_memory, utc_now()), result.batches[name]
        path = store.add_failure(name, batch, failure, error.errors)
        say(f"{_label(result, step, name)}: batch {batch} failed, {error} ({path.name})")
        return name
    store.add(run)
    say(
        f"{_label(result, step, name)}: batch {run.sequences}, prefill {run.prefill_s:.2f} s, decode "
        f"{run.decode_s:.2f} s (load average before: {run.load_average:.1f})"
    )
    return name


def _label(result: Comparison, step: NextRun, name: str) -> str:
    return f"{name} {step.whole + 1}/{result.settings.repetitions}"
