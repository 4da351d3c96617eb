"""The processor's name: Linux has it in words on x86, and as numbers, which lscpu knows, on ARM."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """The name of the processor, or of its cores where there are several kinds; `platform` is asked where neither
    Linux nor lscpu says it."""
    try:
        words = _values("model name", cpuinfo.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        words = []
    return words[0] if words else _listed() or platform.processor() or platform.machine()


def _listed() -> str:
    try:
        run = subprocess.run(
            ["lscpu"], capture_output=True, text=True, timeout=30, env={**os.environ, "LC_ALL": "C"}, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    kinds = [kind for kind in _values("Model name", run.stdout) if kind != "-"]
    return " ".join([*_values("Vendor ID", run.stdout)[:1], " + ".join(kinds)]) if kinds else ""


def _values(name: str, text: str) -> list[str]:
    """All that lines `name: value` give it, each once."""
    lines = (line.partition(":") for line in text.splitlines())
    return list(dict.fromkeys(value.strip() for found, _, value in lines if found.strip() == name))
