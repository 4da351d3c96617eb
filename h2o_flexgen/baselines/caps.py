"""One memory limit for every system: a control group that holds a process to it, by scripts/memcap.sh."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

MEMCAP = Path(__file__).resolve().parents[2] / "scripts" / "memcap.sh"
_UNITS = (("G", 30), ("M", 20))


@cache
def cap_problem() -> str | None:
    """Why no process can be held to a limit here, in one line; None where one can."""
    if not MEMCAP.is_file():
        return "scripts/memcap.sh is not there: it comes with the repository, not with the package"
    tried = subprocess.run([str(MEMCAP), "64M", "--", "true"], capture_output=True, text=True, check=False)
    if tried.returncode == 0:
        return None
    said = tried.stderr.strip() or f"{MEMCAP.name} ended with {tried.returncode}, and said nothing"
    return said.splitlines()[-1].removeprefix("memcap: ")


def cap_command(limit: int, cold: Sequence[Path], report: Path) -> list[str]:
    """What goes before a command: at most `limit` bytes, none of the files in `cold` in the page cache before it."""
    unit, shift = next(((unit, shift) for unit, shift in _UNITS if limit % (1 << shift) == 0), ("K", 10))
    command = [str(MEMCAP), f"{limit >> shift}{unit}", "--report", str(report)]
    for path in cold:
        command += ["--cold", str(path)]
    return [*command, "--"]


def read_report(report: Path) -> dict[str, Any]:
    """What scripts/memcap.sh saw; {} where it could not say."""
    try:
        seen: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return seen
