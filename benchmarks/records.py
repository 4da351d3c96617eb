"""What benchmarks share: processes, records as JSON lines, medians with their spread, facts of the machine.

A script measures *points*: settings with a name. Each run is a process of its own and leaves one record; records are
appended, and tables and pictures are made of all that lie in the folder, so that a measurement that was interrupted
goes on where it was and one that is too coarse can be added to.
"""

from __future__ import annotations

import datetime
import io
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from h2o_flexgen.config.record import host_facts, utc_now

ROOT = Path(__file__).resolve().parents[1]
Record = dict[str, Any]
_TIDYING = 30.0  # seconds that a run which was interrupted has to end by itself


def default_output(name: str) -> Path:
    """`results/<date>-NAME`, where records go unless a folder is named."""
    return ROOT / "results" / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-{name}"


def shown(path: Path) -> str:
    """`path` from the root of the sources where it is below it: commands run there, and records name no home folder."""
    absolute = path.resolve()
    return str(absolute.relative_to(ROOT) if absolute.is_relative_to(ROOT) else absolute)


def commit() -> str | None:
    """The commit of the sources, with a `+` where tracked files differ from it; None outside a checkout."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changes = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "h2o_flexgen", "benchmarks"], check=False)
    return f"{head.stdout.strip()}{'+' if changes.returncode else ''}" if head.returncode == 0 else None


def facts(command: Sequence[str]) -> Record:
    """What a figure is worth nothing without: machine, versions, commit, time, load and the command."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "unknown"
    threads = os.environ.get("OMP_NUM_THREADS")
    return {
        "date": utc_now(),
        "commit": commit(),
        "host": host_facts(),
        "torch": torch,
        "threads": int(threads) if threads and threads.isdigit() else host_facts()["cores"],
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


def run_json(command: Sequence[str], loud: bool = False) -> Record:
    """Runs a command in the root of the sources and gives the JSON object on the last line of its stdout, with `facts`.

    Its own keys go before those of `facts`. `loud`: its stderr is seen. RuntimeError, with the end of a stderr that was
    not seen, where it fails.
    """
    known, error = facts(command), None if loud else subprocess.PIPE
    with subprocess.Popen(list(command), cwd=ROOT, stdout=subprocess.PIPE, stderr=error, text=True) as process:
        try:
            out, said = process.communicate()
        except KeyboardInterrupt:  # which the run hears of, too: it removes its files
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TIDYING)
            process.kill()
            raise
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode} of {known['command']}\n{(said or '')[-2000:]}")
    result: Record = json.loads(out.splitlines()[-1])
    return {**known, **result, "host": {**known["host"], **result.get("host", {})}}


def engine(flags: Iterable[object]) -> list[str]:
    """The command of one run of the engine: random weights in bfloat16, everything in memory, nothing calibrated.

    Flags that come later win, so `flags` may place things elsewhere.
    """
    always = ["--weights", "dummy", "--dtype", "bfloat16", "--no-calibrate", "--quiet"]
    for kind in ("weights", "cache", "hidden"):
        always += [f"--{kind}-placement", "cpu=1"]
    return [sys.executable, "-m", "h2o_flexgen.run", *always, *(str(flag) for flag in flags)]


@dataclass(frozen=True)
class Store:
    """The folder of one measurement: `records.jsonl`, and what is made of it."""

    folder: Path
    records: list[Record] = field(default_factory=list)

    @classmethod
    def open(cls, folder: Path) -> Store:
        """The folder, made where it is not there, and its records; a last line that is torn is left out."""
        folder.mkdir(parents=True, exist_ok=True)
        path, records = folder / "records.jsonl", []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                records.append(json.loads(line))
            except ValueError:
                print(f"{path}: a line that is not JSON is left out", file=sys.stderr)
        return cls(folder, records)

    def add(self, record: Record) -> None:
        """Appends a record, here and to the file."""
        with (self.folder / "records.jsonl").open("a+b") as file:
            torn = file.tell() > 0 and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
            file.write(b"\n" * torn + json.dumps(record).encode() + b"\n")
        self.records.append(record)

    def done(self, **wanted: object) -> bool:
        """Whether there is a record in which all of `wanted` holds."""
        return any(all(record.get(key) == value for key, value in wanted.items()) for record in self.records)

    def write(self, lines: Iterable[str], name: str = "table.md") -> str:
        """Writes lines to a file in the folder, and gives them as one text."""
        text = "\n".join(lines)
        (self.folder / name).write_text(text + "\n", encoding="utf-8")
        return text


def repeat(
    store: Store, points: Sequence[Record], repetitions: int, measure: Callable[[Record], Record], label: str
) -> int:
    """Measures every point once per repetition, in turn; every other repetition the other way round.

    A record is the point, the number of its repetition, and what `measure` gives; points that have one are left out.
    `label` is the key of a point's name, for progress on stderr. A run that fails is said and left out; returned is how
    many did.
    """
    orders = [list(points) if number % 2 == 0 else list(reversed(points)) for number in range(repetitions)]
    todo = [
        (number, point)
        for number, order in enumerate(orders)
        for point in order
        if not store.done(**point, repetition=number)
    ]
    begun, failed = time.monotonic(), 0
    for index, (number, point) in enumerate(todo):
        left = (time.monotonic() - begun) / index * (len(todo) - index) if index else None
        about = "" if left is None else f", about {left / 60:.0f} min left"
        print(f"[{index + 1}/{len(todo)}{about}] {point[label]}", file=sys.stderr, flush=True)
        try:
            store.add({**measure(point), **point, "repetition": number})
        except RuntimeError as error:
            failed += 1
            print(f"failed: {error}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            print(f"interrupted: the same command goes on from here, in {shown(store.folder)}", file=sys.stderr)
            raise SystemExit(130) from None
    return failed


def save_picture(figure: Any, path: Path) -> None:
    """A matplotlib figure as a PNG of 64 colours: a third of the size, and nothing that lines and text would miss."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=90)
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)


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
