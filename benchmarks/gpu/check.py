"""Runs the sections of scripts/gpu_check.sh, each in a process of its own with a share of the time; writes the tables.

    python -m benchmarks.gpu.check --sections kernels,decode --budget-s 300
    python -m benchmarks.gpu.check --readme              the README's GPU block, from the records in results/*-gpu-*
    python -m benchmarks.gpu.check --readme --check      exit code 1 if the block is not what the records give

A section that crashes or runs out of time is recorded as failed, and the others go on. A call adds to the records in
--output: figures that are there already are not measured again, unless --again says so. A GPU that the Triton kernels
cannot use is not measured: attention would be torch's.

Triton compiles into a folder of its own, or that of TRITON_CACHE_DIR. After every section it is packed into
OUTPUT/kernels.tar.gz; a call that finds that file, here or on another machine, begins with what is in it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tarfile
import time
from pathlib import Path

from benchmarks.gpu.section import KEPT, Section, hardware, module_command, run, say
from benchmarks.gpu.tables import WHOLE, readme_block, tables, with_block
from benchmarks.records import ROOT
from h2o_flexgen.baselines.process import RunFailed
from h2o_flexgen.baselines.store import commit
from h2o_flexgen.config.flags import between_commas
from h2o_flexgen.folders import cached

SHARES = {"kernels": 0.2, "decode": 0.15, "tests": 0.2, "cost": 0.2, "paper": 0.25}
"""In the order in which they run; the time that one leaves goes to those after it."""
ENDING_S = 5.0  # for a section to end by itself when its time is over
RESULTS = ROOT / "results"
ARCHIVE = "kernels.tar.gz"


def main() -> int:
    """Runs the program; returns its exit code: 1 where a section failed as a whole."""
    args = _arguments()
    if args.readme:
        return _readme(args.check)
    chosen = [name for name in SHARES if name in args.sections]
    output = args.output or _default_output(args.dry_run)
    output.mkdir(parents=True, exist_ok=True)
    until, good = time.monotonic() + args.budget_s, True
    compiled = cache_folder()
    unpack(output, compiled)
    if not args.dry_run and (problem := _without_triton(args.budget_s)) is not None:
        say(f"nothing is measured: {problem}")
        return 1
    for position, name in enumerate(chosen):
        left = until - time.monotonic()
        seconds = left * SHARES[name] / sum(SHARES[other] for other in chosen[position:])
        say(f"{name}: at most {seconds:.0f} s")
        good = _run(name, seconds, output, args) and good
        pack(compiled, output)
    table = tables(output)
    (output / "table.md").write_text(table + "\n", encoding="utf-8")
    print(table)
    say(f"records and table.md are in {output}")
    return 0 if good else 1


def _without_triton(seconds: float) -> str | None:
    """Why the Triton kernels cannot be used on this machine's GPU: which of them fails, say; None: they can."""
    code = (
        "import sys; from h2o_flexgen.kernels.triton_available import interpreting, why_not; "
        "sys.exit('TRITON_INTERPRET is set' if interpreting() else why_not('cuda'))"
    )
    try:
        run([sys.executable, "-c", code], seconds).checked()
    except RunFailed as failed:
        return str(failed)
    return None


def _run(name: str, seconds: float, output: Path, args: argparse.Namespace) -> bool:
    """One section; whether it ended by itself, without an error of its own."""
    told = {"commit": args.commit, "command": _said(args), "dry_run": args.dry_run}
    where = {"output": str(output.resolve()), "seconds": max(1.0, seconds - ENDING_S), "only": args.only}
    asked = {**told, **where, "again": args.again, "peers": str(args.peers.resolve())}
    done = run(module_command(name, name, asked), seconds + ENDING_S, loud=True)
    if done.exit_code == 0 and not done.timed_out:
        return True
    problem = f"not finished in {seconds:.0f} s: {done.last_error}" if done.timed_out else done.reason
    Section(name, output, 0.0, **told).keep(WHOLE, failed=problem[:300])
    return False


def cache_folder() -> Path:
    """Where programs that are started from now on have Triton compile to. Only machine code is kept: a tenth of all."""
    folder = os.environ.setdefault("TRITON_CACHE_DIR", str(cached(KEPT, "triton")))
    os.environ.setdefault("TRITON_STORE_BINARY_ONLY", "1")
    return Path(folder)


def unpack(output: Path, folder: Path) -> None:
    """Puts the files that `pack` left in `output` into `folder`; kernels that cannot be read are compiled again."""
    path = output / ARCHIVE
    if not path.is_file():
        return
    try:
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")
        for made in folder.glob("*/__grp__*.json"):  # Triton's absolute paths of files that lie beside: now here
            children = json.loads(made.read_text(encoding="utf-8"))["child_paths"]
            here = {name: str((made.parent / name).absolute()) for name in children}
            made.write_text(json.dumps({"child_paths": here}), encoding="utf-8")
    except (OSError, EOFError, tarfile.TarError, ValueError) as error:
        say(f"{path} is of no use: {error}")


def pack(folder: Path, output: Path) -> None:
    """Leaves what `folder` holds in `output`, in place of what `unpack` found there."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and "tmp.pid_" not in path.parent.name]
    if not files:
        return
    made = output / f"{ARCHIVE}.new"
    with tarfile.open(made, "w:gz", compresslevel=1) as archive:
        for path in files:
            archive.add(path, path.relative_to(folder))
    made.replace(output / ARCHIVE)


def _said(args: argparse.Namespace) -> str:
    """The command, without the folders of this machine."""
    words = ["scripts/gpu_check.sh", "--sections", ",".join(args.sections), "--budget-s", f"{args.budget_s:g}"]
    words += (["--only", ",".join(args.only)] if args.only else []) + ["--dry-run"] * args.dry_run
    return " ".join(words + ["--again"] * args.again)


def _default_output(dry_run: bool) -> Path:
    """A dry run goes where nothing is committed from."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    if dry_run:
        return RESULTS / "local" / f"{date}-gpu-dry-run"
    gpu = hardware()["gpu"]
    name = gpu["name"] if gpu else "none"
    return RESULTS / f"{date}-gpu-{'-'.join(name.lower().split())}"


def _readme(check: bool) -> int:
    path = ROOT / "README.md"
    text = path.read_text(encoding="utf-8")
    wanted = with_block(text, readme_block(RESULTS))
    if text == wanted:
        return 0
    if check:
        say("the README's GPU block is not what the records give: scripts/gpu_check.sh --readme")
        return 1
    path.write_text(wanted, encoding="utf-8")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", type=_names, default=tuple(SHARES), help=f"of {','.join(SHARES)} (all)")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU; marked, never in the README")
    parser.add_argument("--output", type=Path, help="folder of records (results/DATE-gpu-NAME)")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds for all sections (540)")
    parser.add_argument(
        "--only", type=between_commas, default=(), help="parts of the names of what is measured, with commas"
    )
    parser.add_argument("--again", action="store_true", help="measure what is recorded already, too")
    parser.add_argument("--commit", default=commit(ROOT) or "unknown", help="for the records, where there is no git")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers", help="folder of the peers' environments")
    parser.add_argument("--readme", action="store_true", help="write the README's GPU block, run nothing")
    parser.add_argument("--check", action="store_true", help="with --readme: only say whether it is right")
    return parser.parse_args()


def _names(text: str) -> tuple[str, ...]:
    names = between_commas(text)
    unknown = [name for name in names if name not in SHARES]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'nothing'}: needed sections of {', '.join(SHARES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
