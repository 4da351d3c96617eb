"""Section tests: `pytest -m gpu`, how many passed, and what did not. In a dry run on the emulated gpu tier."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from importlib import util

from gpu_check_records import ROOT, Section, end, section_arguments

OUTCOME = re.compile(r"(?:^|\s)(PASSED|FAILED|SKIPPED|ERROR)(?:\s|$)")
FILES = ("tests/gpu", "tests/cache", "tests/memory", "tests/models", "tests/engine")
FILES_TINY = ("tests/gpu/test_tokens.py",)
WORKERS = 8
MOST_NAMED = 20


def command(section: Section) -> list[str]:
    """pytest over the marked tests: one line per test, so that what ran in time is known."""
    chosen = FILES_TINY if section.dry_run else FILES
    flags = ["-m", "gpu", "-vv", "-rfE", "--tb=line", "-p", "no:cacheprovider"]
    flags += ["--continue-on-collection-errors"]
    if section.dry_run:
        flags += ["-k", "h2o and opt or full and llama"]
    elif util.find_spec("xdist") is not None:
        flags += ["-n", str(min(WORKERS, os.cpu_count() or 1))]  # compiling kernels is what takes time
    return [sys.executable, "-m", "pytest", *chosen, *flags]


def summary(lines: list[str]) -> tuple[Counter[str], list[str]]:
    """Outcomes by name, and one line per test that failed, as pytest's own summary has it."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for line in lines:
        if line.startswith(("FAILED ", "ERROR ")) and " - " in line:
            failures.append(line[:300])
        elif "::" in line and (found := OUTCOME.search(line)):
            counts[found[1].lower()] += 1
    return counts, failures


def main() -> int:
    """Runs the section; 0 whatever failed, since the record says so."""
    section = section_arguments("tests")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if section.dry_run:
        environment["H2O_FLEXGEN_GPU_TESTS"] = "emulated"
    started = time.monotonic()
    process = subprocess.Popen(
        command(section),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )

    def stop(*_: object) -> None:
        os.killpg(process.pid, signal.SIGKILL)

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(max(1, int(section.left())))
    lines = []
    try:
        for line in process.stdout or ():
            lines.append(line.rstrip())
            print(lines[-1], file=sys.stderr)
        code = process.wait()
    finally:
        signal.alarm(0)
        end(process)
    counts, failures = summary(lines)
    facts = {"outcomes": dict(counts), "failures": failures[:MOST_NAMED], "seconds": time.monotonic() - started}
    said = ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing ran"
    if code == -signal.SIGKILL:
        section.keep("pytest -m gpu", failed=f"not finished in {facts['seconds']:.0f} s: {said}", **facts)
    elif code not in (0, 1):
        section.keep("pytest -m gpu", failed=f"pytest ended with {code}: {lines[-1] if lines else ''}", **facts)
    else:
        section.keep("pytest -m gpu", said=said, **facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
