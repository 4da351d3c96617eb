"""Runs systems in turn, repetition by repetition, and writes a record of every run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from h2o_flexgen.baselines.runner import Measurement, RunFailed, Runner
from h2o_flexgen.baselines.settings import BenchSettings
from h2o_flexgen.errors import StorageError

Say = Callable[[str], None]


@dataclass
class Comparison:
    """What came of it: measurements by system, in the order of repetitions, and why a system has none or too few.

    batches   the batch size that each system ran with; one that could not run has none
    """

    settings: BenchSettings
    batches: dict[str, int]
    runs: dict[str, list[Measurement]]
    failed: dict[str, str]
    uncapped: str | None = None
    tried: dict[str, list[dict[str, object]]] = field(default_factory=dict)


def compare(
    runner: Runner,
    batches: Mapping[str, int],
    folder: Path,
    say: Say,
    failed: Mapping[str, str] | None = None,
    smaller: Mapping[str, Sequence[int]] | None = None,
) -> Comparison:
    """Runs each system of `batches` once per repetition, A B C A B C, so that a machine's drift meets all of them.

    Records go to `folder` as they are made. A system that fails is not run again and is listed with its reason; one
    that runs out of memory at its first run goes on with the next of its `smaller` batches. `failed` is known before.
    """
    settings = runner.settings
    names = settings.systems
    result = Comparison(settings, dict(batches), {name: [] for name in names}, dict(failed or {}), runner.uncapped)
    for name in names:
        problem = runner.missing(name)
        if problem is not None:
            result.failed.setdefault(name, problem)
    rest = {name: list(sizes) for name, sizes in (smaller or {}).items()}
    for repetition in range(1, settings.repetitions + 1):
        for name in names:
            while name in result.batches and name not in result.failed:
                if _run(result, runner, name, repetition, folder, say, rest.get(name, [])):
                    break
    for name in [name for name in result.batches if not result.runs[name]]:
        del result.batches[name]
    return result


def _run(
    result: Comparison, runner: Runner, name: str, repetition: int, folder: Path, say: Say, rest: list[int]
) -> bool:
    """Runs a system once. False where it shall be tried again, at the first of `rest`, which loses it."""
    settings, label = result.settings, f"{name} {repetition}/{result.settings.repetitions}"
    batch = result.batches[name]
    try:
        run = runner.run(name, batch, settings.gen_len, repetition)
    except RunFailed as error:
        write(folder / f"run-{repetition:02d}-{name}.stderr.txt", error.errors)
        say(f"{label}: failed, {error}")
        if error.out_of_memory and rest and not result.runs[name]:
            result.batches[name] = rest.pop(0)
            return False
        result.failed[name] = f"in repetition {repetition}: {error}" if repetition > 1 else str(error)
        return True
    result.runs[name].append(run)
    write(folder / f"run-{repetition:02d}-{name}.json", json.dumps(run.to_json(settings), indent=1) + "\n")
    say(
        f"{label}: batch {batch}, prefill {run.prefill_s:.2f} s, decode {run.decode_s:.2f} s "
        f"(load average before: {run.load_average:.1f})"
    )
    return True


def write(path: Path, text: str) -> None:
    """A file of the comparison; StorageError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
