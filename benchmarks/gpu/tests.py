"""Section tests: `pytest -m gpu`, how many passed, and what did not. In a dry run on the emulated gpu tier."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from importlib import util
from typing import Any

from benchmarks.gpu.section import Section, run, serve

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


def measure(section: Section) -> None:
    """Runs the tests in the time there is; their output is shown as it comes."""
    emulated = {"H2O_FLEXGEN_GPU_TESTS": "emulated"} if section.dry_run else {}
    shown = ["sh", "-c", 'exec "$@" >&2', "sh", *command(section)]
    done = run(shown, max(1.0, section.left()), loud=True, **emulated)
    lines = done.errors.splitlines()
    counts, failures = summary(lines)
    facts: dict[str, Any] = {"outcomes": dict(counts), "failures": failures[:MOST_NAMED], "seconds": done.seconds}
    said = ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing ran"
    if done.timed_out:
        facts["failed"] = f"not finished in {done.seconds:.0f} s: {said}"
    elif done.exit_code not in (0, 1):
        facts["failed"] = f"pytest ended with {done.exit_code}: {lines[-1] if lines else ''}"
    section.keep("pytest -m gpu", said=said, **facts)


if __name__ == "__main__":
    sys.exit(serve(measure))
