"""Where a record comes from: the version and commit of these sources, and the machine."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

from h2o_flexgen.config.reports.record import host_facts, package_version

_ROOT = Path(__file__).resolve().parents[2]
KEYS = ("version", "commit", "host")


def origin() -> dict[str, Any]:
    """What is true now of each of KEYS."""
    return {"version": package_version(), "commit": commit(_ROOT), "host": _host()}


@functools.cache
def _host() -> dict[str, Any]:
    """Of this process: the memory of a virtual machine may change while it runs, and it is the same machine yet."""
    return host_facts()


def commit(root: Path) -> str | None:
    """The commit of a checkout, with a `+` where tracked files of what is measured, or measures,
    differ from it; None where it is none."""
    if not (root / ".git").exists():  # installed, perhaps below a repository that has nothing to do with it
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        changes = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "h2o_flexgen", "benchmarks"], check=False)
    except OSError:  # no git
        return None
    return f"{head.stdout.strip()}{'+' if changes.returncode else ''}" if head.returncode == 0 else None


def place(record_origin: dict[str, Any]) -> tuple[Any, ...]:
    """What two runs have in common whose speeds may be compared: commit and machine."""
    return (record_origin.get("commit"), *machine(record_origin))


def machine(record_origin: dict[str, Any]) -> tuple[Any, ...]:
    """What makes two machines the same one for a comparison: processor, cores that may be used, memory."""
    host = record_origin.get("host") or {}
    return tuple(host.get(key) for key in ("cpu", "cores", "memory_bytes"))
