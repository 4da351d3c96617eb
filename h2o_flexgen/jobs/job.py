"""A file of requests through an engine: read in windows, run by whom finishes first, written as they finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from h2o_flexgen.config.workload import Workload
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.limits.plan import Plan, Planner
from h2o_flexgen.engine.requests.reader import Request
from h2o_flexgen.engine.requests.sequence import RequestOutput
from h2o_flexgen.engine.requests.sequence import Sequence as Row
from h2o_flexgen.errors import ContextLengthError, PlanError, UsageError
from h2o_flexgen.jobs.forecast import Forecast
from h2o_flexgen.jobs.journal import JobResults
from h2o_flexgen.jobs.requests import BatchRequest, Refused, RequestFormat, line_of
from h2o_flexgen.jobs.source import Record, Source
from h2o_flexgen.schedule.request import PlanRequest

WINDOW_ROWS, WINDOW_TOKENS = 8192, 1 << 21
"""Limits of a window, the part of a file that is in memory: sequences, and tokens of prompts."""
AT_RISK, LEAST_AT_RISK = 0.02, 32
"""The share of a job that is under way at once, which a kill costs, and at least so many sequences: fewer are slow."""
PROMPT_BITS = 15
"""Bits of a prompt's number in a job that count the prompts of its request."""


class GivenRequests:
    """Some requests in the place of a file of them and of its results, which no file keeps."""

    def __init__(self, requests: list[Record]) -> None:
        self.requests = requests
        self.results = list[tuple[int, str, bool]]()
        self.state = bytearray(max(record.line for record in requests) + 1)

    def records(self) -> list[Record]:
        return self.requests

    def add(self, line: int, text: str, failed: bool) -> None:
        self.results.append((line, text, failed))

    def sync(self) -> None:
        pass


@dataclass
class OpenRequest:
    """A request with its sequences, and what is finished of these, by their numbers."""

    record: Record
    asked: BatchRequest
    rows: list[list[Row]]
    outputs: dict[int, RequestOutput] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sequences = sum(map(len, self.rows))

    @property
    def waiting(self) -> list[Row]:
        return [row for each in self.rows for row in each if row.row_id not in self.outputs]

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Of each sequence the tokens of its prompt, and those that it may generate."""
        return [(row.prompt_tokens, row.max_new_tokens) for each in self.rows for row in each]

    @property
    def tokens(self) -> int:
        """Of its longest sequence."""
        return max((row.prompt_tokens + row.max_new_tokens for each in self.rows for row in each), default=0)


@dataclass
class Summary:
    """The requests, tokens and seconds of this run of a job; `before`: requests that earlier runs finished."""

    requests: int
    before: int = 0
    ok: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    first_failure: str | None = None
    """Its line, and why."""

    def count(self, line: int, result: Mapping[str, Any], failed: bool) -> None:
        self.failed += failed
        self.ok += not failed
        if failed and self.first_failure is None:
            self.first_failure = f"line {line}: {result['error']['message'].removeprefix(f'line {line}: ')}"

    @property
    def done(self) -> int:
        return self.before + self.ok + self.failed

    def to_json(self) -> dict[str, Any]:
        rate = self.generated_tokens / self.seconds if self.seconds else None
        return {**vars(self), "seconds": round(self.seconds, 3), "gen_throughput": rate}


@dataclass
class Job:
    """Runs what `results` has not yet of `source`. `requests`: how many there are in all.

    Anything that an engine or a disk raises ends it, and leaves what is finished; the same job then goes on.
    """

    engine: Engine
    source: Source | GivenRequests
    format: RequestFormat
    results: JobResults | GivenRequests
    requests: int
    window_rows: int = WINDOW_ROWS
    told: Callable[[Summary], None] = lambda summary: None
    """Called after each request."""
    forecast: Forecast | None = None
    """Hears of all that is read and finished."""

    def __post_init__(self) -> None:
        state = self.results.state
        self.summary = Summary(self.requests, before=len(state) - state.count(0))

    def run(self) -> Summary:
        """All that is left to do. PlanError where not even the shortest request of the first that are read fits."""
        started = begun = time.monotonic()
        for window in self._windows():
            if begun == started:
                sizes = ((row.prompt_tokens, max(1, row.max_new_tokens)) for task in window for row in task.waiting)
                self.engine.plan(Workload(*min(sizes, key=sum)))
            if self.forecast is not None:
                read = self.summary.ok + self.summary.failed + len(window)
                self.forecast.read(read, time.monotonic() - begun)
            self._run(window)
            begun = time.monotonic()
            self.summary.seconds = begun - started
        self.results.sync()
        self.summary.seconds = time.monotonic() - started
        return self.summary

    def faults(self) -> Iterator[str]:
        for record in self.source.records():
            try:
                opened(self.engine, self.format, record)
            except Refused as why:
                yield f"line {record.line}: {why.message}"

    def _windows(self) -> Iterator[list[OpenRequest]]:
        """The unfinished requests, so many at a time; requests that cannot be run are answered at once."""
        window, rows, tokens = list[OpenRequest](), 0, 0
        for record in self.source.records():
            if self.results.state[record.line]:
                continue
            try:
                task = opened(self.engine, self.format, record)
            except Refused as why:
                self._refuse(record, why)
                continue
            waiting = task.waiting
            if self.forecast is not None:
                self.forecast.expect(record.line, task.waiting)
            if not waiting:
                self._finish(task)
                continue
            window.append(task)
            rows += len(waiting)
            tokens += sum(row.prompt_tokens for row in waiting)
            if rows >= self.window_rows or tokens >= WINDOW_TOKENS:
                yield window
                window, rows, tokens = [], 0, 0
        if window:
            yield window

    def _run(self, window: Sequence[OpenRequest]) -> None:
        """Answers all of `window`. Requests that do not fit into memory together are tried in halves."""
        owners = {row.row_id: task for task in window for row in task.waiting}
        try:
            for row, output in self.engine.run([row for task in window for row in task.waiting]):
                task = owners.pop(row.row_id)
                task.outputs[row.row_id] = output
                if self.forecast is not None:
                    self.forecast.end(row, row.remaining)
                if len(task.outputs) == task.sequences:
                    self._finish(task)
        except PlanError as error:
            left = sorted({id(task): task for task in owners.values()}.values(), key=lambda task: task.tokens)
            if len(left) == 1:
                self._refuse(left[0].record, Refused(str(error).partition("\n")[0], "out_of_memory", status=500))
                return
            for task in left:
                for row in task.waiting:
                    row.restart()
            half = len(left) // 2
            self._run(left[:half])
            self._run(left[half:])

    def _finish(self, task: OpenRequest) -> None:
        outputs = [[task.outputs[row.row_id] for row in each] for each in task.rows]
        answer = self.format.answer(task.record, task.asked, outputs)
        bad = any(output.error is not None for output in task.outputs.values())
        self.summary.prompt_tokens += sum(len(each[0].prompt_ids) for each in outputs if each)
        self.summary.generated_tokens += sum(len(output.token_ids) for each in outputs for output in each)
        self._write(task.record, answer, bad)
        task.rows, task.outputs = [], {}  # log-probabilities of a whole window are gigabytes

    def _refuse(self, record: Record, why: Refused) -> None:
        self._write(record, self.format.refusal(record, why), True)

    def _write(self, record: Record, result: dict[str, Any], bad: bool) -> None:
        if self.forecast is not None:
            self.forecast.finish(record.line)
        self.results.add(record.line, line_of(result), bad)
        self.summary.count(record.line, result, bad)
        self.told(self.summary)


def opened(engine: Engine, form: RequestFormat, record: Record, asked: BatchRequest | None = None) -> OpenRequest:
    """A request with its sequences, none of them begun; `asked`: its prompts and settings, if they are known.
    Refused where it cannot be run."""
    asked = asked or form.asked(record)
    rows = []
    for index, prompt in enumerate(asked.prompts):
        number = record.line << PROMPT_BITS | index
        try:
            rows.append(engine.read(Request(prompt, asked.params, number, index, asked.scores, asked.fits)))
        except ContextLengthError as error:
            param = "messages" if "speech" in asked.body else "prompt"
            raise Refused.of(error, param) from None
        except UsageError as error:
            raise Refused.of(error, param="response_format" if "the schema" in error.found else None) from None
    return OpenRequest(record, asked, rows)


def bounded(planner: Planner, requests: int, share: float | None = None) -> Planner:
    """`planner`, but with blocks of at most `share` of a job's requests, so that a kill costs no more. See `under_way`.

    Where something has to move, blocks stay as large as they come: there they are what speed comes from.
    """
    most = under_way(requests, share)

    def plan(request: PlanRequest) -> Plan:
        work = request.workload
        if work.num_sequences <= most:
            return planner(request)
        small = planner(replace(request, workload=replace(work, num_sequences=most)))
        return planner(request) if small.moves else small

    return plan


def under_way(requests: int, share: float | None) -> int:
    """Requests of a job that may be under way at once: `share` of them; None: AT_RISK, or LEAST_AT_RISK if that is
    more."""
    return max(LEAST_AT_RISK, int(AT_RISK * requests)) if share is None else max(1, int(share * requests))
