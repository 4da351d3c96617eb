"""The common parts of benchmarks: processes, records as JSON lines, medians with their spread, facts of the machine.

A script measures *points*: settings with a name. Each run is a process of its own and leaves one record; records are
appended, and tables are made of all that lie in the folder, so that a measurement that was interrupted goes on where it
was and one that is too coarse can be added to. Curves of them: h2o_flexgen.report.
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import sys
import time
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median

from h2o_flexgen.baselines.process import RunFailed, run_command
from h2o_flexgen.baselines.settings import usable_threads
from h2o_flexgen.baselines.store import Record, RecordFile, origin
from h2o_flexgen.config.reports.record import utc_now, version_of

ROOT = Path(__file__).resolve().parents[1]


def shown(path: Path) -> str:
    """`path` from the root of the sources where it is below it: commands run there, and records name no home folder."""
    absolute = path.resolve()
    return str(absolute.relative_to(ROOT) if absolute.is_relative_to(ROOT) else absolute)


def facts(command: Sequence[str]) -> Record:
    """The facts that every figure needs: machine, versions, commit, time, load and the command."""
    return {
        "date": utc_now(),
        **origin(),
        "torch": version_of("torch") or "unknown",
        "threads": usable_threads(),
        "load_average": os.getloadavg()[0],
        "command": shlex.join(map(_word, command)),
    }


def _word(word: str) -> str:
    """A word of a command as a record shows it: of folders that are one machine's own, only where they lead."""
    if word == sys.executable:
        return "python"
    home, path = str(Path.home()), Path(word)
    if word.startswith(home) or not path.is_absolute():
        return word.replace(home, "~")
    return shown(path) if path.is_relative_to(ROOT) else f".../{path.name}"


def run_json(command: Sequence[str]) -> Record:
    """Runs a command in the root of the sources and gives the JSON object on the last line of its stdout, with `facts`.

    Its own keys go before those of `facts`. Where it fails, RunFailed has the end of its stderr.
    """
    known, done = facts(command), run_command(command, cwd=ROOT)
    try:
        result: Record = done.json()
    except RunFailed as failure:
        raise RunFailed(f"{failure} ({known['command']})", failure.out_of_memory, failure.errors[-2000:]) from None
    return {**known, **result, "host": {**known["host"], **result.get("host", {})}}


def arguments(text: str | None, name: str, repetitions: int, what: str = "runs of every point") -> ArgumentParser:
    """The flags that all benchmarks have; `text` is the module's docstring.

    With --run it is one point that is measured, in this process: see `in_process`.
    """
    parser = ArgumentParser(description=text, formatter_class=RawDescriptionHelpFormatter)
    folder = ROOT / "results" / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-{name}"
    said = f"{what}, in all (default: {repetitions})"
    parser.add_argument("--repetitions", type=int, default=repetitions, help=said)
    parser.add_argument("--output", type=Path, default=folder, help="folder of the records")
    parser.add_argument("--run", type=json.loads, help=SUPPRESS)
    return parser


def in_process(module: str, point: Record) -> Record:
    """The record that `python -m benchmarks.MODULE --run POINT` prints last, with `facts`."""
    return run_json([sys.executable, "-m", f"benchmarks.{module}", "--run", json.dumps(point)])


def shaped(folder: Path, config: Record) -> str:
    """The folder of a model of this config.json alone: random weights are as good."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return str(folder)


def repeat(
    store: RecordFile, points: Sequence[Record], repetitions: int, measure: Callable[[Record], Record], label: str
) -> int:
    """Measures every point once per repetition, in turn; every other repetition the other way round.

    A record is the point, the number of its repetition, and what `measure` gives; points that have one are left out.
    `label` is the key of a point's name, for progress on stderr. A run that fails is said and left out; returned is how
    many did.
    """
    todo = [
        (number, point)
        for number in range(repetitions)
        for point in (points if number % 2 == 0 else reversed(points))
        if not store.done(**point, repetition=number)
    ]
    begun, failed = time.monotonic(), 0
    for index, (number, point) in enumerate(todo):
        left = (time.monotonic() - begun) / index * (len(todo) - index) if index else None
        about = "" if left is None else f", about {left / 60:.0f} min left"
        print(f"[{index + 1}/{len(todo)}{about}] {point[label]}", file=sys.stderr, flush=True)
        try:
            store.add({**measure(point), **point, "repetition": number})
        except RunFailed as error:
            failed += 1
            print(f"failed: {error}\n{error.errors}".rstrip(), file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            print(f"interrupted: the same command goes on from here, in {shown(store.folder)}", file=sys.stderr)
            raise SystemExit(130) from None
    return failed


def run_all(
    args: Namespace,
    points: Sequence[Record],
    measure: Callable[[Record], Record],
    label: str,
    table: Callable[[list[Record]], Iterable[str]],
    one: Callable[[Record], Record] | None = None,
) -> int:
    """Measures what is missing in the folder --output (`repeat`), then prints the table of all that is there.

    The table goes to table.md, too. With --run `one` measures that point, and its record is printed. Returns the exit
    code of the program: 1 where a run failed.
    """
    if one is not None and args.run is not None:
        print(json.dumps(one(args.run)))
        return 0
    store = RecordFile.open(args.output.resolve())
    failed = repeat(store, points, args.repetitions, measure, label)
    print(store.write(table(store.records)))
    print(f"records and table.md are in {shown(store.folder)}", file=sys.stderr)
    return 1 if failed else 0


def spread(values: Sequence[float], form: str = ".3g") -> str:
    """The median, and least and most where there are several."""
    if len(values) < 2:
        return format(values[0], form) if values else ""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def provenance(records: Sequence[Record]) -> str:
    """One sentence: on what, when and from which commits the records come."""
    if not records:
        return "Nothing was measured."

    def all_of(values: Iterable[object]) -> str:
        return ", ".join(dict.fromkeys(str(value) for value in values))

    host = records[-1]["host"]
    return (
        f"{len(records)} runs on {host['cores']} cores of {all_of(r['host']['cpu'] for r in records)}, "
        f"{host['memory_bytes'] / 2**30:.1f} GiB, {all_of(r['threads'] for r in records)} threads, torch "
        f"{all_of(r['torch'] for r in records)}, random weights in "
        f"{all_of(r.get('dtype', 'bfloat16') for r in records)}, {all_of(r['date'][:10] for r in records)}, "
        f"commit {all_of(r['commit'] for r in records)}."
    )
