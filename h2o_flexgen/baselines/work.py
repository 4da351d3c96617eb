"""What an adapter is asked to do and what it answers: files and one line of JSON. Standard library only."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_WORK, _CONFIG = "work.json", "config.json"
WARMUP_PROMPT, WARMUP_NEW = 16, 2
"""Tokens of the warm-up that every adapter runs with the whole batch before the clock starts."""


@dataclass(frozen=True)
class Work:
    """Greedy generation of exactly `gen_len` tokens for each of `prompts`, which all have one length.

    model     the name as the user typed it
    folder    of the checkpoint, None where `weights` is "dummy"
    threads   compute threads; the environment is already set for OpenMP and MKL
    options   what only this system understands
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

    def write(self, folder: Path, model_config: dict[str, Any]) -> None:
        """Puts the work, and the model's config.json, into `folder`."""
        folder.mkdir()
        (folder / _CONFIG).write_text(json.dumps(model_config), encoding="utf-8")
        (folder / _WORK).write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Work:
        """The work that `write` put there."""
        return cls(**json.loads((folder / _WORK).read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Outcome:
    """What an adapter measured: seconds of its own clock, around generation only.

    prefill_s    from the call of generate until the first new token of every sequence is there
    decode_s     from there until generate returns
    total_s      around the call of generate; more than the two together only by what the system does besides
    load_s       making or reading the weights, not part of the others
    token_ids    the new tokens, a list per prompt
    versions     of the packages that did the work
    detail       whatever else the system reports; kept in the record
    """

    prefill_s: float
    decode_s: float
    total_s: float
    load_s: float
    token_ids: list[list[int]]
    versions: dict[str, str]
    detail: dict[str, Any] = field(default_factory=dict)

    def to_line(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False)

    @classmethod
    def from_line(cls, line: str) -> Outcome:
        """The outcome in `line`; ValueError where it is none."""
        try:
            return cls(**json.loads(line))
        except TypeError as error:
            raise ValueError(f"not the outcome of an adapter: {error}") from None


def give(outcome: Outcome) -> int:
    """Prints `outcome` as the last line of stdout; returns the exit code 0."""
    sys.stdout.write(outcome.to_line() + "\n")
    sys.stdout.flush()
    return 0
