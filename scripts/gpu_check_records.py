"""What the sections of scripts/gpu_check.sh share: arguments, records, facts of the machine, programs that are run.

A record is one line of JSON in OUTPUT/SECTION.jsonl: what was measured under what name, or why it was not ("failed"),
with hardware, versions, date, command and commit. Nothing is overwritten; of several records of a name the last counts.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from h2o_flexgen.config.reports.record import host_facts, utc_now  # noqa: E402

SCHEMA = 1
PACKAGES = ("torch", "triton", "transformers", "accelerate", "deepspeed", "flexgen", "numpy")
TINY_OPT: dict[str, Any] = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
"""What a dry run computes with."""


class Failed(Exception):
    """A program or a measurement that gave nothing; the message says why, in one line."""


@dataclass(frozen=True)
class Section:
    """What a section is told, and where its records go. `until` is a time of time.monotonic."""

    name: str
    output: Path
    until: float
    dry_run: bool = False
    only: tuple[str, ...] = ()
    again: bool = False
    commit: str = "unknown"
    peers: str = ""
    command: str = ""

    @property
    def path(self) -> Path:
        """The file of records."""
        return self.output / f"{self.name}.jsonl"

    def left(self) -> float:
        """Seconds that are left."""
        return self.until - time.monotonic()

    def wanted(self, name: str) -> bool:
        """Whether to measure `name`: no good record of it is there, and --only, where given, has a part of it."""
        if self.only and not any(part in name for part in self.only):
            return False
        if self.again:
            return True
        return not any(r["name"] == name and not r.get("failed") for r in read(self.path) if not r["dry_run"])

    def known(self, name: str) -> bool:
        """Whether there is a record of `name`, good or not."""
        return any(r["name"] == name for r in read(self.path))

    def keep(self, name: str, **facts: Any) -> None:
        """Appends a record; `failed` among the facts says why there is nothing to report."""
        record = {
            "gpu_check": SCHEMA,
            "section": self.name,
            "name": name,
            "dry_run": self.dry_run,
            "date": utc_now(),
            "commit": self.commit,
            "command": self.command,
            "hardware": hardware(),
            "versions": versions(),
            **facts,
        }
        self.output.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
        said = f"failed: {facts['failed']}" if facts.get("failed") else facts.get("said", "done")
        say(f"{self.name}: {name}: {said}")


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file, without lines that were torn by an interruption; none where there is no file."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def say(text: str) -> None:
    """A line of progress, to stderr."""
    print(text, file=sys.stderr, flush=True)


def section_arguments(name: str) -> Section:
    """The section `name` as scripts/gpu_check.py starts it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--peers", default="")
    parser.add_argument("--command", default="")
    args = parser.parse_args()
    return Section(
        name,
        args.output,
        time.monotonic() + args.seconds,
        args.dry_run,
        tuple(part for part in args.only.split(",") if part),
        args.again,
        args.commit,
        args.peers,
        args.command,
    )


@cache
def hardware() -> dict[str, Any]:
    """CPU, memory, system and Python; `gpu` with name, bytes and capability, None without one. No host name."""
    import torch

    facts: dict[str, Any] = {**host_facts(), "gpu": None}
    if torch.cuda.is_available():
        of = torch.cuda.get_device_properties(0)
        facts["gpu"] = {
            "name": of.name,
            "count": torch.cuda.device_count(),
            "memory_bytes": of.total_memory,
            "processors": of.multi_processor_count,
            "capability": f"{of.major}.{of.minor}",
            "cuda": torch.version.cuda,
        }
    return facts


@cache
def versions() -> dict[str, str]:
    """Of what does the work, as far as it is installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def run(command: Sequence[str], seconds: float, environment: dict[str, str] | None = None) -> str:
    """Stdout of a program. Failed where it ends with an error, or not within `seconds`: it never outlives this call."""
    if seconds <= 0:
        raise Failed("no time is left in the budget")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **(environment or {})}
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise Failed(f"given up after {seconds:.0f} s: {shlex.join(command[1:4])}") from None
    finally:
        end(process)
    if process.returncode:
        said = [line.strip() for line in (err or out).splitlines() if line.strip()]
        raise Failed(f"exit code {process.returncode}: {said[-1][:400] if said else 'no message'}")
    return out


def run_json(command: Sequence[str], seconds: float, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """The JSON object on the last line of what a program prints; otherwise as `run`."""
    out = run(command, seconds, environment)
    try:
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        raise Failed(f"no JSON from {shlex.join(command[1:4])}") from None
    return found


def end(process: subprocess.Popen[str]) -> None:
    """Ends a program that was started in a session of its own, and what it started, where any of it is still there."""
    for sign, wait in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 10.0)):
        if process.poll() is not None and sign is signal.SIGTERM:
            return
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def scratch_folder() -> Path:
    """What is kept for the next call on this machine: checkpoints of random weights, compiled kernels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "h2o_flexgen" / "gpu-check"


def tiny_model(folder: Path) -> str:
    """A folder with the config.json of a tiny OPT."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_OPT), encoding="utf-8")
    return str(folder)
