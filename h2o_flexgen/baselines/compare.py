"""Runs systems in turn, repetition by repetition, and keeps a record of every run."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from h2o_flexgen.baselines.measurement import Measurement
from h2o_flexgen.baselines.origin import origin
from h2o_flexgen.baselines.process import RunFailed
from h2o_flexgen.baselines.runner import Runner
from h2o_flexgen.baselines.settings import BenchSettings
from h2o_flexgen.baselines.store import Failure, Step, Store

Say = Callable[[str], None]


@dataclass
class Comparison:
    """What came of it: measurements by system, in the order of repetitions, and why a system has none or too few.

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


def _next(result: Comparison, store: Store) -> Step | None:
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


def _go_on(result: Comparison, runner: Runner, store: Store, step: Step, say: Say) -> str:
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
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        failure, batch = Failure(step.repetition, str(error), error.out_of_memory, now), result.batches[name]
        path = store.add_failure(name, batch, failure, error.errors)
        say(f"{_label(result, step, name)}: batch {batch} failed, {error} ({path.name})")
        return name
    store.add(run)
    say(
        f"{_label(result, step, name)}: batch {run.sequences}, prefill {run.prefill_s:.2f} s, decode "
        f"{run.decode_s:.2f} s (load average before: {run.load_average:.1f})"
    )
    return name


def _label(result: Comparison, step: Step, name: str) -> str:
    return f"{name} {step.whole + 1}/{result.settings.repetitions}"
