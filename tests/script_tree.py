"""A copy of the tree in which scripts run, whose Python only notes what it is asked to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]

PYTHON = """#!/bin/sh
# Notes what it is asked to do, and makes the environments that it is asked for: of programs that do the same.
printf '%s\\0' "${0##*/}" "$@" >"$ASKED.$$" && mv "$ASKED.$$" "$ASKED/$$"  # whole or not at all: scripts kill some
case "$*" in
  *"-m venv"*)
    for folder; do :; done
    mkdir -p "$folder/bin"
    for name in python ruff mypy; do cp "$0" "$folder/bin/$name"; done ;;
  "-m benchmarks.paper_table") cat >/dev/null ;;
esac
"""


@dataclass
class Tree:
    """Where scripts run: what they read is the project's own, what they write is not."""

    root: Path
    asked: list[list[str]] = field(default_factory=list)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command by bash; `asked` has what programs were called since the last time."""
        notes = self.root / "asked"
        for folder in (notes, self.root / ".venv-peers", self.root / ".venv-gpu"):
            shutil.rmtree(folder, ignore_errors=True)
        notes.mkdir()
        here = {"PYTHON": str(self.root / "stub/python"), "ASKED": str(notes), "HOME": str(self.root / "home")}
        plain = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TMPDIR")}
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.root, env={**plain, **here}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        self.asked = [path.read_text().split("\0")[:-1] for path in sorted(notes.iterdir())]
        return done

    def programs(self) -> Iterator[tuple[str, list[str]]]:
        """The programs of this project that were called, and their arguments."""
        for name, *words in self.asked:
            if name in ("ruff", "mypy") or words[:1] in (["-c"], ["-"]):
                continue
            if words[0] == "-P":
                yield str(Path(words[1]).resolve().relative_to(ROOT).with_suffix("")).replace("/", "."), words[2:]
            elif words[1] not in ("pip", "venv", "tarfile", "cmake"):
                yield words[1], words[2:]
