"""The requests to adapters and their answers: files and one line of JSON. Standard library only."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_WORK, _CONFIG = "work.json", "config.json"
WARMUP_PROMPT, WARMUP_NEW = 16, 2
"""Tokens of the warm-up that every adapter runs with the whole batch before the clock starts."""

REFUSED = 69
"""Exit code of an adapter that cannot do this work at all, with the reason as the last line of stderr."""


class CannotRun(Exception):
    """This system cannot do this work; the message says why, in one line."""


@dataclass(frozen=True)
class AdapterWork:
    """Greedy generation of exactly `gen_len` tokens for each of `prompts`, which all have one length.

    model     the name as the user typed it
    folder    of the checkpoint, None where `weights` is "dummy"
    threads   compute threads; the environment is already set for OpenMP and MKL
    options   what only this system understands
    cpu_mem   bytes of host memory the whole process may use, None for what there is
    gpu_mem   bytes of GPU memory, likewise
    scratch   a folder on the disk, the same for every run of this system, for offloaded tensors and weights made once
    plan      what a planner of ours chooses: "rule", "placement" of one GPU batch of all prompts, or "all"
    weight_bits  that our own systems pack weights to while they load them, 16 for not at all
    model_impl   of `config.engine.MODEL_IMPLS`, for our own systems
    room_len  new tokens of the full run, where this is a short one to try a batch: there must be memory for all of them
    """

    model: str
    folder: str | None
    weights: str
    dtype: str
    device: str
    threads: int
    seed: int
    gen_len: int
    prompts: list[list[int]]
    options: dict[str, Any] = field(default_factory=dict)
    cpu_mem: int | None = None
    gpu_mem: int | None = None
    scratch: str = "."
    plan: str = "rule"
    room_len: int = 0
    weight_bits: int = 16
    model_impl: str = "auto"

    def write(self, folder: Path, model_config: dict[str, Any]) -> None:
        folder.mkdir(parents=True)
        (folder / _CONFIG).write_text(json.dumps(model_config), encoding="utf-8")
        (folder / _WORK).write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> AdapterWork:
        return cls(**json.loads((folder / _WORK).read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Outcome:
    """The measurements of an adapter: seconds of its own clock, around generation only.

    prefill_s    from the call of generate until the first new token of every sequence is there
    decode_s     from there until generate returns
    total_s      around the call of generate; more than the two together only by what the system does besides
    load_s       making or reading the weights, not part of the others
    token_ids    the new tokens, a list per prompt
    versions     of the packages that did the work
    detail       whatever else the system reports; kept in the record
    disk_read_bytes  read from disks between the start and the end of generate, by the kernel's count
    bytes_moved      between tiers while generating, where the system counts them
    shared           who had the cores while it generated, as `cores.CoreCount` says it
    """

    prefill_s: float
    decode_s: float
    total_s: float
    load_s: float
    token_ids: list[list[int]]
    versions: dict[str, str]
    detail: dict[str, Any] = field(default_factory=dict)
    disk_read_bytes: int | None = None
    bytes_moved: dict[str, int] | None = None
    shared: dict[str, float] | None = None

    def to_line(self) -> str:
        return json.dumps(dataclasses.asdict(self), allow_nan=False)

    @classmethod
    def from_line(cls, line: str) -> Outcome:
        """The outcome in `line`; ValueError where it holds no outcome."""
        try:
            return cls(**json.loads(line))
        except TypeError as error:
            raise ValueError(f"not the outcome of an adapter: {error}") from None


def disk_bytes() -> int:
    """Bytes that this process has had read from disks so far, page faults included; 0 where the kernel does not say."""
    return read_bytes_of(os.getpid()) or 0


def read_bytes_of(pid: int) -> int | None:
    """Bytes that a process, and those of its children that it has waited for, had read from disks. None if not told."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


PASSIVE = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
"""Without these llama.cpp's threads wait for each other by spinning, which is erratic on few cores."""


def batched_bench(
    environment: Path, sequences: int, prompt: int, steps: int, cells: int, threads: int, **more: object
) -> list[str]:
    """`llama-batched-bench` of an environment: so many tokens of a prompt and steps of each sequence, in so many cells
    of a cache; `more`: other flags."""
    values = {"c": cells, "npp": prompt, "ntg": steps, "npl": sequences, "t": threads, "tb": threads, **more}
    words = (str(word) for name, value in values.items() for word in (f"-{name}", value))
    return [str(environment / "bin" / "llama-batched-bench"), *words, "--output-format", "jsonl"]


def bench_row(said: str) -> dict[str, Any]:
    """The row that it printed last, as it was told to."""
    rows = [line for line in said.splitlines() if line.startswith("{") and '"t_pp"' in line]
    if not rows:
        raise RuntimeError(f"llama-batched-bench printed no row: {said[-500:]!r}")
    row: dict[str, Any] = json.loads(rows[-1])
    return row


def run(measure: Callable[[str], Outcome], prepare: Callable[[str], None] | None = None) -> int:
    """Has `measure` do the work in the folder named on the command line, and prints its outcome as the last line.

    Where the word "prepare" follows, `prepare` is called with it instead. Returns the exit code: REFUSED where either
    says that it cannot run.
    """
    try:
        if prepare is not None and sys.argv[2:] == ["prepare"]:
            prepare(sys.argv[1])
        else:
            sys.stdout.write(measure(sys.argv[1]).to_line() + "\n")
            sys.stdout.flush()
    except CannotRun as reason:
        sys.stderr.write(f"{reason}\n")
        return REFUSED
    return 0
