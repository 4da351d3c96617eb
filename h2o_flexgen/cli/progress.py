"""Progress on stderr: a bar on a terminal, now and then a line where stderr is a file, nothing with --quiet."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from tqdm import tqdm

from h2o_flexgen.cli.program import print_error, stop_if_told
from h2o_flexgen.units import format_bytes

GENERATING, PACKING = "generating", "packing weights"
_LINE_EVERY = 30.0  # seconds


class Progress:
    """What `LLM.on_progress` calls: (what, done, in all), of bytes while loading and of tokens while generating."""

    def __init__(self, quiet: bool, sequences: int) -> None:
        self._quiet, self._terminal = quiet, sys.stderr.isatty()
        self._sequences, self._finished = sequences, 0
        self._bar: tqdm[Any] | None = None
        self._what = ""
        self._said = time.monotonic()
        self.packed = 0
        """Bytes of weights that were packed for the disk."""

    def __call__(self, what: str, done: int, total: int) -> None:
        stop_if_told()
        if what == PACKING:
            self.packed = done
        if self._quiet:
            return
        if self._terminal:
            self._draw(what, done, total)
        elif time.monotonic() - self._said >= _LINE_EVERY:
            self._said = time.monotonic()
            print_error(self._line(what, done, total))

    def finished(self) -> None:
        """One more sequence is done."""
        self._finished += 1
        if self._bar is not None and self._what == GENERATING:
            self._bar.set_postfix_str(self._count(), refresh=False)

    def close(self) -> None:
        """Takes the bar off the terminal."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()

    def _draw(self, what: str, done: int, total: int) -> None:
        bar, in_bytes = self._bar, what != GENERATING
        if bar is None or self._what != what:
            self.close()
            options: dict[str, Any] = {"unit": "B" if in_bytes else " tokens", "unit_scale": in_bytes}
            # A terminal that does not know its width says 0, and tqdm would draw nothing on it.
            options |= {"dynamic_ncols": True} if os.get_terminal_size(sys.stderr.fileno()).columns else {"ncols": 80}
            bar = tqdm(total=total, desc=what, leave=False, file=sys.stderr, **options)
            self._bar, self._what = bar, what
            if not in_bytes:
                bar.set_postfix_str(self._count(), refresh=False)
        bar.update(done - bar.n)

    def _line(self, what: str, done: int, total: int) -> str:
        if what == GENERATING:
            return f"{what}: {done} of {total} tokens, {self._count()}"
        return f"{what}: {format_bytes(done)} of {format_bytes(total)}"

    def _count(self) -> str:
        return f"{self._finished} of {self._sequences} sequences"
