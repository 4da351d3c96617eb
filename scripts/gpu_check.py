"""Runs the sections of scripts/gpu_check.sh, each in a process of its own with a share of the time; writes the tables.

    python scripts/gpu_check.py --sections kernels,decode --budget-s 300
    python scripts/gpu_check.py --readme                 the README's GPU block, from the records in results/*-gpu-*
    python scripts/gpu_check.py --readme --check         exit code 1 if the block is not what the records give

A section that crashes or runs out of time is recorded as failed, and the others go on. A call adds to the records in
--output: what is measured there already is not measured again, unless --again says so; what was compiled for it is not
compiled again. Nothing is measured on a GPU that the Triton kernels cannot use: attention would be torch's.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

from gpu_check_compiled import cache_folder, pack, unpack
from gpu_check_records import ROOT, Failed, Section, end, hardware, run, say
from gpu_check_table import WHOLE, readme_block, tables, with_block

SHARES = {"kernels": 0.2, "decode": 0.15, "tests": 0.2, "cost": 0.2, "paper": 0.25}
"""In the order in which they run; the time that one leaves goes to those after it."""
ENDING_S = 5.0  # for a section to end by itself when its time is over
RESULTS = ROOT / "results"


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
        run([sys.executable, "-c", code], seconds)
    except Failed as failed:
        return str(failed)
    return None


def _run(name: str, seconds: float, output: Path, args: argparse.Namespace) -> bool:
    """One section; whether it ended by itself, without an error of its own."""
    command = [sys.executable, str(ROOT / "scripts" / f"gpu_check_{name}.py"), "--output", str(output.resolve())]
    command += ["--seconds", str(max(1.0, seconds - ENDING_S)), "--only", args.only, "--commit", args.commit]
    command += ["--peers", str(args.peers.resolve()), "--command", _said(args)]
    command += ["--dry-run"] * args.dry_run + ["--again"] * args.again
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    last: deque[str] = deque(maxlen=5)
    reader = threading.Thread(target=_pass_on, args=(process, last), daemon=True)
    reader.start()
    problem = None
    try:
        code = process.wait(seconds + ENDING_S)
        if code:
            problem = f"exit code {code}"
    except subprocess.TimeoutExpired:
        problem = f"not finished in {seconds:.0f} s"
    finally:
        end(process)
        reader.join(ENDING_S)
    if problem is None:
        return True
    said = last[-1].strip()[:300] if last else "no message"
    Section(name, output, 0.0, args.dry_run, commit=args.commit, command=_said(args)).keep(
        WHOLE, failed=f"{problem}: {said}"
    )
    return False


def _pass_on(process: subprocess.Popen[str], last: deque[str]) -> None:
    for line in process.stdout or ():
        last.append(line)
        sys.stderr.write(line)
        sys.stderr.flush()


def _said(args: argparse.Namespace) -> str:
    """The command, without the folders of this machine."""
    words = ["scripts/gpu_check.sh", "--sections", ",".join(args.sections), "--budget-s", f"{args.budget_s:g}"]
    words += (["--only", args.only] if args.only else []) + ["--dry-run"] * args.dry_run + ["--again"] * args.again
    return " ".join(words)


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
    parser.add_argument("--only", default="", help="parts of the names of what is measured, with commas")
    parser.add_argument("--again", action="store_true", help="measure what is recorded already, too")
    parser.add_argument("--commit", default=_commit(), help="for the records, where there is no git")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers", help="folder of the peers' environments")
    parser.add_argument("--readme", action="store_true", help="write the README's GPU block, run nothing")
    parser.add_argument("--check", action="store_true", help="with --readme: only say whether it is right")
    return parser.parse_args()


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    unknown = [name for name in names if name not in SHARES]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'nothing'}: needed sections of {', '.join(SHARES)}")
    return names


def _commit() -> str:
    """Of the checkout, with a + where files differ from it; "unknown" without git."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + "+" * bool(changed.strip())


if __name__ == "__main__":
    sys.exit(main())
