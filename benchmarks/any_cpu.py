"""The tests as other processors would run them: six runs with inputs of their own, each setting in two of them or more.

    python -m benchmarks.any_cpu                      all that is not done for this commit
    python -m benchmarks.any_cpu tests/kernels        of these folders
    RUNNER="nice -n 9" python -m benchmarks.any_cpu   each piece by that command

A piece is the tests of one folder in one run. Each leaves a record in any-cpu.jsonl as it finishes, so that the same
command goes on where it was interrupted; pieces that failed run again. any-cpu.md sums up all records. By hand a run is
repeated by `SETTINGS H2O_TEST_SEED=N ./scripts/test.sh`, as the table gives them.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.records import ROOT, facts, shown
from h2o_flexgen.baselines.process import run_command
from h2o_flexgen.baselines.store import Record, RecordFile
from h2o_flexgen.openmp import without_short_spin

RUNS = (
    "OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=1",
    "OPENBLAS_CORETYPE=SkylakeX ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=2",
    "OPENBLAS_CORETYPE=Zen MKL_CBWR=COMPATIBLE H2O_FLEXGEN_NATIVE=0 OMP_NUM_THREADS=1",
    "OPENBLAS_CORETYPE=Zen ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=2",
    "OPENBLAS_CORETYPE=Haswell MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=1",
    "OPENBLAS_CORETYPE=SkylakeX H2O_FLEXGEN_NATIVE=0 OMP_NUM_THREADS=2",
)
"""OPENBLAS_CORETYPE is of numpy's products, MKL_CBWR of torch's, ATEN_CPU_CAPABILITY of torch's other kernels."""
PROBE = 'import numpy, torch; x = numpy.ones((99, 99), "f"); x @ x; torch.tensor(x) @ x'
NOTHING_COLLECTED = 5
MOST_NAMED = 6
"""Failures of a piece that the table names; of more the first."""


def folders() -> list[str]:
    """The folders of tests; `tests` stands for the files beside them."""
    below = {path.relative_to(ROOT).parts[1] for path in ROOT.glob("tests/*/**/test_*.py")}
    return ["tests", *(f"tests/{name}" for name in sorted(below))]


def revision() -> str:
    """The last commit that changed anything but results; with a `+` where files differ from it."""
    rest = ["--", ".", ":!results"]
    git = ["git", "-C", str(ROOT)]
    last = subprocess.run([*git, "log", "-1", "--format=%h", *rest], capture_output=True, text=True, check=True)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", *rest], check=False).returncode
    return last.stdout.strip() + "+" * bool(changed)


def usable(settings: str) -> str:
    """Of a run's settings those that numpy and torch bear: the others ask for instructions that are not there."""
    environment = without_short_spin(os.environ)

    def works(setting: str) -> bool:
        return run_command(["env", setting, sys.executable, "-c", PROBE], environment=environment).exit_code == 0

    return " ".join(filter(works, settings.split()))


def measure(settings: str, seed: int, folder: str, workers: int) -> Record:
    """Runs one piece: its outcomes by name, and the names of the tests that failed."""
    beside = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/test_*.py"))
    files = beside if folder == "tests" else [folder]
    command = [*shlex.split(os.environ.get("RUNNER", "")), "env", *settings.split(), f"H2O_TEST_SEED={seed}"]
    pytest = [sys.executable, "-m", "pytest", "-m", "not gpu", "-n", str(workers), "--dist", "worksteal", *files]
    environment = without_short_spin(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # as in test.sh
    done = run_command([*command, *pytest], cwd=ROOT, environment=environment)
    lines = done.output.splitlines()
    outcomes = {what: int(count) for count, what in re.findall(r"(\d+) ([a-z]+)", done.last_line)}
    failures = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if done.exit_code not in (0, NOTHING_COLLECTED) and not failures:
        failures = [f"{folder}: {done.reason}"]
    return {"outcomes": outcomes, "failures": failures, "seconds": round(done.seconds, 1), "used": settings}


def table(records: Sequence[Record]) -> Iterator[str]:
    """A row per run, of the last record of each of its pieces; then what failed at any time."""
    yield "# The tests under other settings"
    if not records:
        return
    host = records[-1]["host"]
    commits = ", ".join(dict.fromkeys(record["commit"] for record in records))
    machine, day = f"{host['cores']} cores of {host['cpu']}", records[-1]["date"][:10]
    yield f"By `scripts/any_cpu.sh` on {machine}, {day}, commit {commits}."
    yield ""
    yield "| settings | seed | folders | passed | skipped | failed | minutes |"
    yield "| --- | --: | --: | --: | --: | --: | --: |"
    for settings, seed in dict.fromkeys((record["settings"], record["seed"]) for record in records):
        last = {r["folder"]: r for r in records if (r["settings"], r["seed"]) == (settings, seed)}
        sums: Counter[str] = Counter()
        for record in last.values():
            sums.update(record["outcomes"])
        left_out = set(settings.split()).difference(*(record["used"].split() for record in last.values()))
        remark = "".join(f"; {setting} left out: not on this processor" for setting in sorted(left_out))
        failed = sum(len(record["failures"]) for record in last.values())
        minutes = sum(record["seconds"] for record in last.values()) / 60
        yield (
            f"| {settings}{remark} | {seed} | {len(last)} | {sums['passed']:,} | {sums['skipped']} | {failed} "
            f"| {minutes:.1f} |"
        )
    for record in records:
        failures = record["failures"]
        if len(failures) > MOST_NAMED:
            failures = [f"{failures[0]} and {len(failures) - 1} more of {record['folder']}"]
        for failure in failures:
            yield f"\n- seed {record['seed']}, commit {record['commit']}: {failure}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=folders(), help="of tests (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; each run has its own (default: 1)")
    parser.add_argument("--also", action="append", default=[], help="a commit whose records count, too (repeatable)")
    parser.add_argument("--workers", type=int, default=2, help="of pytest (default: 2)")
    parser.add_argument("--output", type=Path, default=ROOT / "results", help="where the records are")
    args = parser.parse_args(argv)
    store = RecordFile.open(args.output, "any-cpu.jsonl")
    commit, failed = revision(), 0
    good = {commit, *args.also}
    done = {
        (record["settings"], record["seed"], record["folder"])
        for record in store.records
        if record["commit"] in good and not record["commit"].endswith("+") and not record["failures"]
    }
    for seed, settings in enumerate(RUNS, args.seed):
        todo = [folder.rstrip("/") for folder in args.folders if (settings, seed, folder.rstrip("/")) not in done]
        used = usable(settings) if todo else ""
        for folder in todo:
            found = measure(used, seed, folder, args.workers)
            known = {**facts(["scripts/any_cpu.sh", *(argv or sys.argv[1:])]), "commit": commit}
            store.add({**known, "settings": settings, "seed": seed, "folder": folder, **found})
            store.write(table(store.records), "any-cpu.md")
            failed += bool(found["failures"])
            said = ", ".join(f"{count} {what}" for what, count in found["outcomes"].items())
            print(f"{settings} seed {seed} {folder}: {said}", *found["failures"], sep="\n  ", flush=True)
    print(f"records and any-cpu.md are in {shown(args.output)}", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
