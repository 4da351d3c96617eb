"""Progress on stderr: a bar on a terminal, now and then a line where stderr is a file, nothing with --quiet."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from h2o_flexgen.cli.program import print_error, stop_if_told
from h2o_flexgen.folders import Closing
from h2o_flexgen.units import format_bytes, format_speed

PREFILL, GENERATING, PACKING, COMPILING = "prefill", "generating", "packing weights", "compiling kernels"
_LABELS = {PREFILL: "prefill", GENERATING: "decode"}
_LINE_EVERY, _SAY_EVERY, _DRAW_EVERY = 30.0, 2.0, 0.1  # seconds
_SHARE = 0.02  # of the time, at most, to find out what to say: of 100,000 requests that takes an eighth of a second
_TOKENS = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} tokens{postfix}"
_REQUESTS = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}, {elapsed}{postfix}"


def bar(total: float, **options: Any) -> tqdm[Any]:
    """A bar on stderr, which is a terminal. One that does not know its width says 0, and tqdm would draw nothing."""
    wide = os.get_terminal_size(sys.stderr.fileno()).columns
    width: dict[str, Any] = {"dynamic_ncols": True} if wide else {"ncols": 80}
    return tqdm(total=total, leave=False, file=sys.stderr, **width, **options)


@dataclass
class _Phase:
    """How many tokens of prefill or decode are done, and how many of them took how long."""

    expected: float | None = None
    """Seconds that a plan predicts."""
    done: int = 0
    total: int = 0
    timed: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float | None:
        """Tokens per second, as measured."""
        return self.timed / self.seconds if self.timed and self.seconds else None

    @property
    def left(self) -> float | None:
        """Seconds to the end, by the measured rate, else by the predicted one; None where there is neither."""
        rate = self.total / self.expected if self.rate is None and self.expected else self.rate
        return (self.total - self.done) / rate if rate else None


class ProgressBar(Closing):
    """The progress bar of a program, and the notice that kernels are compiled."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._terminal = quiet, sys.stderr.isatty()
        self._bar: tqdm[Any] | None = None
        self._kind = ""
        self._every = _SAY_EVERY if self._terminal else _LINE_EVERY
        self._next = time.monotonic() + self._every

    def close(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()

    def _of(self, kind: str, total: float, **options: Any) -> tqdm[Any]:
        """The bar of this `kind`, which takes the place of another's."""
        if self._bar is None or self._kind != kind:
            self.close()
            self._bar, self._kind = bar(total, **options), kind
        return self._bar

    def _bytes(self, what: str, done: int, total: int) -> None:
        if self._terminal:
            shown = self._of(what, total, desc=what, unit="B", unit_scale=True)
            shown.update(done - shown.n)
        else:
            self._now_and_then(lambda: print_error(f"{what}: {format_bytes(done)} of {format_bytes(total)}"))

    def _now_and_then(self, say: Callable[[], None]) -> None:
        now = time.monotonic()
        if now >= self._next:
            say()
            self._next = now + max(self._every, (time.monotonic() - now) / _SHARE)

    def _told(self, what: str) -> bool:
        """Whether `what` is compiling, which is told at once."""
        stop_if_told()
        if what == COMPILING and not self._quiet:
            print_error("compiling the C kernels (some seconds, first run on this machine only)")
        return what == COMPILING


class RunProgress(ProgressBar):
    """The handler for `LLM.on_progress`: (what, done, in all), of bytes while loading and of tokens in prefill and
    decode.

    Tokens of prompts and new ones take different times: the rates of the two are measured apart, over all blocks. A
    step into which prompts come counts as prefill, and the new tokens of its other sequences are not timed.
    """

    def __init__(self, quiet: bool, sequences: int) -> None:
        super().__init__(quiet)
        self._sequences, self._finished = sequences, 0
        self._phases = {PREFILL: _Phase(), GENERATING: _Phase()}
        self._what = ""
        self._then = time.monotonic()
        self._drawn = 0.0
        self.packed = 0
        """Bytes of weights that were packed for the disk."""

    def expect(self, predicted: Mapping[str, Any] | None) -> None:
        """The durations that a plan predicts, which serve until there are measurements."""
        for what, name in ((PREFILL, "prefill_s"), (GENERATING, "decode_s")):
            self._phases[what].expected = None if predicted is None else predicted[name]

    def __call__(self, what: str, done: int, total: int) -> None:
        compiling, now = self._told(what), time.monotonic()
        if what == PACKING:
            self.packed = done
        if what in self._phases:
            self._count(what, done, total, now - self._then)
        self._what, self._then = what, now
        if compiling or self._quiet or (what == GENERATING and not self._phases[PREFILL].total):
            return
        if what not in self._phases:
            self._bytes(what, done, total)
        elif self._terminal:
            self._draw(what, done, total, now)
        else:
            line = f"{_LABELS[what]}: {done} of {total} tokens"
            self._now_and_then(lambda: print_error(f"{line}, {self._state(what)}"))

    def finished(self) -> None:
        self._finished += 1

    def _count(self, what: str, done: int, total: int, seconds: float) -> None:
        """Books the time since the call before, if that was of tokens, too."""
        phase, more = self._phases[what], done - self._phases[what].done
        phase.done, phase.total = done, total
        if self._what not in self._phases:
            return
        # The first new token of a sequence comes with its prompt: only what follows a step without any is decode.
        decoded = what == self._what == GENERATING
        self._phases[GENERATING if decoded else PREFILL].seconds += seconds
        if decoded or what == PREFILL:
            phase.timed += max(0, more)

    def _draw(self, what: str, done: int, total: int, now: float) -> None:
        shown = self._of("tokens", total, desc=_LABELS[what], bar_format=_TOKENS)
        if now - self._drawn >= _DRAW_EVERY:
            self._drawn, shown.n, shown.total = now, done, total
            shown.set_description_str(_LABELS[what], refresh=False)
            shown.set_postfix_str(self._state(what))

    def _state(self, what: str) -> str:
        """Rate, finished sequences, and the time that is left of the whole call, as far as it is known."""
        rate, (prefill, decode) = self._phases[what].rate, (phase.left for phase in self._phases.values())
        parts = [format_speed(rate)] if rate else []
        parts.append(f"{self._finished} of {self._sequences} sequences")
        if prefill is not None and decode is not None:
            parts.append(f"{tqdm.format_interval(prefill + decode)} left")
        elif prefill is not None and what == PREFILL:
            parts.append(f"{tqdm.format_interval(prefill)} left, then decode")
        return ", ".join(parts)


class JobProgress(ProgressBar):
    """How many requests of a job are done, how fast, how long it will take. Also for `LLM.on_progress`."""

    def __init__(
        self,
        quiet: bool,
        requests: int,
        before: int = 0,
        meter: Callable[[str, int, int], None] = lambda *_: None,
        left: Callable[[float], str] = lambda _: "",
        what: str = "requests",
    ) -> None:
        """`before`: requests that earlier runs finished; `meter`: hears of tokens, too; `left`: how long it will take,
        so many seconds after its begin."""
        super().__init__(quiet)
        self._requests, self._before, self._meter, self._left, self._what = requests, before, meter, left, what
        self._now = self._failed = 0
        self._started = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        compiling = self._told(what)
        self._meter(what, done, total)
        if what in _LABELS:
            self._show()
        elif not (compiling or self._quiet):
            self._bytes(what, done, total)

    def finished(self, now: int, failed: int) -> None:
        """So many requests were done by this run; `failed`: of these."""
        self._now, self._failed = now, failed
        self._show()

    def _show(self) -> None:
        if self._quiet:
            return
        if not self._terminal:
            self._now_and_then(lambda: print_error(self._line()))
            return
        done = self._before + self._now
        shown = self._of(self._what, self._requests, desc=self._what, initial=done, bar_format=_REQUESTS)
        shown.update(done - shown.n)
        self._now_and_then(lambda: shown.set_postfix_str(self._time_left()))

    def _time_left(self) -> str:
        return self._left(time.monotonic() - self._started)

    def _line(self) -> str:
        trouble = f", {self._failed} failed" if self._failed else ""
        left = self._time_left()
        return f"{self._before + self._now:,} of {self._requests:,} {self._what}{trouble}{left and ', '}{left}"
