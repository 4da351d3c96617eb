"""`serve` behind its flags: one engine in the main thread, which runs batch after batch, and a thread for HTTP.

A batch is a job as `batch` runs it: same results, same journal, by which one goes on after a kill.
"""

from __future__ import annotations

import logging
import shutil
import socket
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Any

import uvicorn

from h2o_flexgen.cli.batch.arguments import BatchArguments
from h2o_flexgen.cli.batch.job import job_identity, request_format
from h2o_flexgen.cli.planning import let_calibrate
from h2o_flexgen.cli.program import print_error, stop_if_told
from h2o_flexgen.cli.serve.arguments import ServeArguments
from h2o_flexgen.cli.serve.desk import ERRORS, LOOKED_AT, OUTPUT, ApiError, Desk, Entry, error_list
from h2o_flexgen.cli.serve.live import LiveRequests
from h2o_flexgen.cli.serve.web import make_app
from h2o_flexgen.errors import H2OFlexGenError, LockedError, ModelError, PlanError, StorageError, UsageError
from h2o_flexgen.jobs.forecast import Forecast, Meter, Percentiles
from h2o_flexgen.jobs.job import Job, Summary, bounded
from h2o_flexgen.jobs.journal import FAILED, OK, JobResults
from h2o_flexgen.jobs.openai import OpenAIFormat
from h2o_flexgen.jobs.outlook import expected, glimpse
from h2o_flexgen.jobs.requests import RequestFormat, line_of
from h2o_flexgen.jobs.source import BadLine, Record, Scan, Source, custom_id_of, load_json
from h2o_flexgen.planning.llm import LLM

_AGAIN_AFTER = 30.0
"""Seconds after which a batch that the disk failed is tried again."""
_LOOK_EVERY = 1.0
_TOLD_EVERY = 2.0
_LOOKING = 0.1
"""Seconds of each, at most, that go into looking at what waits."""


def run_service(arguments: ServeArguments) -> None:
    """Serves until a signal ends it. UsageError where it cannot listen, LockedError where another has its folder."""
    for note in arguments.jobs.notes:
        print_error(f"note: {note}")
    with ExitStack() as stack:
        listening = stack.enter_context(_listening(arguments))
        desk = Desk(arguments.data_dir, arguments.called)
        stack.callback(desk.close)
        worker = Worker(arguments, desk)
        stack.callback(worker.close)
        app = make_app(arguments, desk, worker.live)
        stack.enter_context(_answering(app, listening))
        stack.callback(worker.live.stop)
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print_error(f"serving {', '.join(arguments.models)} on http://{shown}:{port}, data in {arguments.data_dir}")
        worker.run()


@contextmanager
def _listening(arguments: ServeArguments) -> Iterator[socket.socket]:
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            arguments.host, arguments.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listening = socket.create_server(address, family=family, backlog=512)
    except OSError as error:
        found = f"cannot listen on {arguments.host}, port {arguments.port}: {error.strerror}"
        raise UsageError(found, "needed an address of this machine and a free port", "see --host and --port") from None
    with listening:
        yield listening


@contextmanager
def _answering(app: Any, listening: socket.socket) -> Iterator[None]:
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # requests that are no HTTP, clients that go
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # what is still sent to those
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # forms that are none, whose clients are told
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1, server_header=False
    )
    server = uvicorn.Server(config)
    thread = Thread(target=server.run, kwargs={"sockets": [listening]}, name="http", daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.005)
        if not server.started:
            raise H2OFlexGenError("HTTP cannot be answered", change="see what uvicorn says above")
        yield
    finally:
        server.should_exit = True
        thread.join(timeout=3)


class Interrupted(Exception):
    """A batch is to be stopped, and is to have this status."""


class Worker:
    """Runs batches, one after the other, and single requests, by the model that is loaded. Of the engine's thread."""

    def __init__(self, arguments: ServeArguments, desk: Desk) -> None:
        self._models, self._by_model, self._desk = arguments.models, arguments.queue == "model", desk
        self._looked, self._quiet = 0.0, arguments.jobs.quiet
        self._batch: Entry | None = None
        self._takes: dict[str, tuple[str, Percentiles]] = {}
        """Of batches that wait, by their ids: which one ran when it was looked at how long they will take, and that."""
        self._meter = Meter()
        self.live = LiveRequests(arguments.called)
        self.live.wake = self._wake
        self._llm: LLM | None = None
        self._loaded = ""
        self._use(next(iter(self._models)))

    def close(self) -> None:
        llm, self._llm, self._loaded = self._llm, None, ""
        self.live.unload()
        if llm is not None:
            llm.close()

    def run(self) -> None:
        """Until a signal ends it, or the only model turns out to be unusable. Single requests, and after them a model
        that others wait for, come before batches; but of those that wait none has to until no more requests come."""
        answered = changed = False
        while True:
            batch, model = self._next()
            if self.live.waiting and not (answered and (batch or model)):
                answered = self._run_live()
            elif model is not None and not (changed and batch):
                answered, changed = False, True
                try:
                    self._use(model)
                except H2OFlexGenError as error:
                    self._lose(model, error)
            elif batch is not None:
                answered = changed = False
                self._serve(batch)

    def _lose(self, model: str, error: H2OFlexGenError) -> str:
        """Closes a model that cannot be used, and refuses the single requests for it; returns what clients are told."""
        print_error(f"{model}: {error}")
        self.close()
        why = _reason(error)
        self.live.lost(model, f"model {model} cannot be used: {why}")
        return why

    def _use(self, model: str) -> LLM:
        """Loads a model, in the place of another one. H2OFlexGenError where it cannot be: then none is loaded."""
        if self._llm is not None and self._loaded == model:
            return self._llm
        self.close()
        jobs = self._models[model]
        llm = LLM(**vars(jobs.engine), hardware=jobs.hardware)
        self._llm, self._loaded = llm, model
        form = _form(jobs, llm, model)
        llm.on_progress, llm.late = self._look, self.live
        let_calibrate(llm, jobs.calibrate, jobs.quiet)
        self.live.use(model, llm, form)
        return llm

    def _next(self) -> tuple[Entry | None, str | None]:
        """Waits for something to do: a batch, or a model that single requests wait for. Neither where others do."""
        desk = self._desk
        with desk.changed:
            while True:
                stop_if_told()
                desk.news = False
                batch, model = desk.next_batch(self._loaded if self._by_model else None), self.live.wanted()
                if batch is not None or model is not None or self.live.waiting:
                    return batch, model
                desk.changed.wait(_LOOK_EVERY)
                with suppress(OSError):
                    desk.sweep()

    def _wake(self) -> None:
        with self._desk.changed:
            self._desk.news = True
            self._desk.changed.notify_all()

    def _look(self, what: str, done: int, total: int) -> None:
        """Called by the engine between its steps: reads new requests, and raises Interrupted to stop a batch."""
        stop_if_told()
        self._meter(what, done, total)
        now = time.monotonic()
        if not self._desk.news and now - self._looked < _LOOK_EVERY:
            return
        self._desk.news, self._looked = False, now
        self.live.read()
        why = None if self._batch is None else self._desk.ending(self._batch)
        if why is not None:
            raise Interrupted(why)

    # Batches

    def _serve(self, batch: Entry) -> None:
        """Goes on with a batch until it is over, or has to wait. ModelError where no request can be answered: the
        batch goes on once the model is mended."""
        try:
            end = batch.get("_end") or self._ended(batch)
            if end is None:
                return
            self._desk.publish(batch, end)
            if not self._quiet:
                counts = batch["request_counts"]
                print_error(f"{batch['id']} is {end}: {counts['completed']:,} of {counts['total']:,} requests")
        except (StorageError, LockedError) as error:
            print_error(f"{batch['id']} is tried again in {_AGAIN_AFTER:.0f} s: {error}")
            self._desk.hold(batch, str(error), _AGAIN_AFTER)

    def _ended(self, batch: Entry) -> str | None:
        """The status of a batch that was run, or stopped; None where it has to wait."""
        try:
            end = self._desk.ending(batch) or self._answered(batch)
            if end in _STOPPED:
                self._stop(batch, end)
            return end
        except ModelError as error:
            if len(self._models) == 1:
                raise
            self._wait(batch, f"this batch waits, as its model cannot be used: {self._lose(batch['model'], error)}")
            return None
        except (StorageError, LockedError):
            raise
        except H2OFlexGenError as error:
            return self._fail(batch, "cannot_be_run", str(error).partition("\n")[0])
        except (Exception, MemoryError) as error:  # a fault of ours, or no memory: others are to be served
            print_error(traceback.format_exc())
            return self._fail(batch, "internal_error", type(error).__name__)

    def _answered(self, batch: Entry) -> str | None:
        try:
            return self._answer(batch)
        except Interrupted as why:
            return str(why)
        finally:
            self._batch, self._meter = None, Meter()
            if self._llm is not None:
                self._llm.planner = self._llm.planning

    def _answer(self, batch: Entry) -> str | None:
        """Runs a batch; its status then, None where it has to wait."""
        desk = self._desk
        path, folder = desk.content(batch["input_file_id"]), desk.folder_of(batch)
        try:
            source = Source(path, "openai")
            scan = source.scan()
            faults = _faults(source)
        except UsageError as error:
            return self._fail(batch, "invalid_file", str(error).replace(str(path), batch["input_file_id"]))
        if faults:
            desk.update(batch, errors=error_list(faults))
            return "failed"
        usual = self._models.get(batch["model"])
        if usual is None:
            self._wait(batch, f"this batch waits for a service of {batch['model']}")
            return None
        try:
            llm = self._use(batch["model"])
        except H2OFlexGenError as error:
            print_error(f"{batch['model']}: {error}")
            self._wait(batch, f"this batch waits, as its model cannot be used: {_reason(error)}")
            return None
        folder.mkdir(mode=0o700, exist_ok=True)
        jobs = replace(usual, input=path, output=folder / OUTPUT, error_file=Path(ERRORS))
        with JobResults(folder / OUTPUT, folder / ERRORS) as results:
            begun = (results.header or {}).get("job")
            try:
                results.begin(job_identity(jobs, llm, source, scan, begun), scan.lines)
            except UsageError as error:
                self._wait(batch, f"this batch waits for a service as it was begun with: {error.found}")
                return None
            self._begin(batch, results, scan.requests)
            self._run(batch, jobs, llm, source, scan, results)
        return "completed"

    def _run(
        self, batch: Entry, jobs: BatchArguments, llm: LLM, source: Source, scan: Scan, results: JobResults
    ) -> None:
        form = _form(jobs, llm, batch["model"], scan.doubled, results.header)
        before = results.state.count(OK), results.state.count(FAILED)
        outlook = expected(llm, source, form, scan.requests, results.state, jobs.at_risk, jobs.sample)
        forecast, said = outlook.forecast, {"expected": outlook.to_json()} if jobs.sample else {}
        _, takes = self._takes.pop(batch["id"], ("", None))
        left = forecast.first or takes
        self._desk.foretell(batch, {**said, "left": left and left.to_json()})
        llm.planner = bounded(llm.planning, scan.requests, jobs.at_risk)
        self._meter, llm.on_plan = forecast.meter, lambda plan: forecast.block(plan.policy.block_size)
        started = told_at = time.monotonic()

        def told(summary: Summary) -> None:
            nonlocal told_at
            now = time.monotonic()
            forecast.note(now - started)
            if now - told_at > _TOLD_EVERY:
                told_at, left = now, forecast.told(now - started) or (takes and takes.after(now - started))
                self._desk.foretell(batch, {**said, "left": left and left.to_json()})
                self._tell_waiting(batch, left, forecast, form)
            self._desk.count(batch, scan.requests, before[0] + summary.ok, before[1] + summary.failed)

        summary = Job(llm, source, form, results, scan.requests, told=told, forecast=forecast).run()
        batch["forecast"] = {**said, "left": None, **forecast.to_json(summary.seconds)}

    def _tell_waiting(self, runs: Entry, ends: Percentiles | None, forecast: Forecast, form: RequestFormat) -> None:
        """Tells when the batches behind the one that `runs` begin and end: batches for the same model, up to the first
        without an estimate. Each file is looked at once while one batch runs, and few at a time."""
        begun, queue = time.monotonic(), self._desk.queue(self._loaded if self._by_model else None)
        for batch in queue:
            if batch is runs or ends is None:
                continue
            when, takes = self._takes.get(batch["id"], ("", None))
            if batch["model"] != self._loaded or self._llm is None:
                return
            if when != runs["id"] and time.monotonic() - begun < _LOOKING:
                with suppress(ApiError, UsageError, OSError):  # which will be told in its turn
                    done = batch["request_counts"]["completed"] + batch["request_counts"]["failed"]
                    source = Source(self._desk.content(batch["input_file_id"]), "openai")
                    takes = glimpse(self._llm, source, form, forecast, done) or takes
            if takes is None:
                return
            self._takes[batch["id"]] = runs["id"], takes
            starts, ends = ends, ends + takes
            self._desk.foretell(batch, {"starts": starts.to_json(), "left": ends.to_json()})

    def _wait(self, batch: Entry, why: str) -> None:
        print_error(f"{batch['id']}: {why}")
        self._desk.hold(batch, why)

    def _begin(self, batch: Entry, results: JobResults, total: int) -> None:
        self._batch = batch
        ok, failed = results.state.count(OK), results.state.count(FAILED)
        counts = {"total": total, "completed": ok, "failed": failed}
        self._desk.update(
            batch,
            status=batch["status"] if batch["status"] == "cancelling" else "in_progress",
            in_progress_at=batch["in_progress_at"] or int(time.time()),
            request_counts=counts,
            errors=None,
        )

    def _stop(self, batch: Entry, end: str) -> None:
        """Writes an error line for each unanswered request; answers stay."""
        desk, folder = self._desk, self._desk.folder_of(batch)
        path = desk.content(batch["input_file_id"])
        if not (folder / f"{OUTPUT}.journal").exists():
            shutil.rmtree(folder, ignore_errors=True)
            return
        with JobResults(folder / OUTPUT, folder / ERRORS) as results:
            if not results.resumed:
                return
            source = Source(path, "openai")
            results.begin((results.header or {})["job"], source.scan().lines)
            if not batch.get("_stopped"):
                ok, failed = results.state.count(OK), results.state.count(FAILED)
                counts = {**batch["request_counts"], "completed": ok, "failed": failed}
                desk.update(batch, request_counts=counts, _stopped=True)
            for record in source.records():
                if not results.state[record.line]:
                    results.add(record.line, line_of(_not_run(batch, record, end)), True)
            results.sync()

    def _fail(self, batch: Entry, code: str, message: str) -> str:
        self._desk.update(batch, errors=error_list([(code, self._desk.told(message), None)]))
        return "failed"

    # Single requests

    def _run_live(self) -> bool:
        """Answers those that wait, all of them together, and what comes meanwhile; False if some wait again."""
        rows = self.live.take(1 << 20)
        if not rows or self._llm is None:
            return True
        try:
            for _ in self._llm.run(rows):
                raise RuntimeError("a sequence belongs to nobody")
        except PlanError as error:
            longest = max(rows, key=lambda row: sum(row.longest_pass))
            self.live.fail([longest], str(error).partition("\n")[0], "out_of_memory")
            return False
        except ModelError as error:
            if len(self._models) == 1:
                raise
            self._lose(self._loaded, error)
        except (Exception, MemoryError) as error:
            print_error(traceback.format_exc())
            self.live.fail(rows, type(error).__name__, "server_error")
            return False
        return True


def _form(
    jobs: BatchArguments,
    llm: LLM,
    model: str,
    doubled: frozenset[int] = frozenset(),
    header: Mapping[str, Any] | None = None,
) -> OpenAIFormat:
    """The format of requests, in whose answers and errors a model has its id: they tell no path of this machine."""
    form = request_format(jobs, llm.model, "openai", doubled, header or {})
    assert isinstance(form, OpenAIFormat), "the format that was asked for"
    return replace(form, model=model, served=(form.model, *form.served))


def _reason(error: H2OFlexGenError) -> str:
    """Why a model cannot be used, as clients are told: the error, which names paths of this machine, is printed."""
    reasons = {
        ModelError: "its files are missing or cannot be used",
        PlanError: "it does not fit the memory",
        StorageError: "the disk is full or failing",
    }
    plain = (reason for kind, reason in reasons.items() if isinstance(error, kind))
    return f"{next(plain, 'the service lacks what it needs')} (its operator is told more)"


def _faults(source: Source) -> list[tuple[str, str, int | None]]:
    """Why a file is no batch file at all; faults of single requests are answered one by one."""
    found, records = list[tuple[str, str, int | None]](), list(islice(source.records(), LOOKED_AT))
    for record in records:
        try:
            if isinstance(load_json(record.data), dict):
                return []
            why = "is not a JSON object"
        except BadLine as error:
            why = str(error)
        found.append(("invalid_json_line", f"line {record.line} {why}", record.line))
    return found or [("empty_file", "the file has no requests", None)]


_STOPPED = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was run"),
    "expired": ("batch_expired", "this request could not be run before the completion window was over"),
}


def _not_run(batch: Entry, record: Record, end: str) -> dict[str, Any]:
    code, message = _STOPPED[end]
    name = f"batch_req_{batch['id'].removeprefix('batch_')[:16]}{record.line:08x}"
    return {
        "id": name,
        "custom_id": custom_id_of(record),
        "response": None,
        "error": {"code": code, "message": message},
    }
