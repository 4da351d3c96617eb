"""`batch` behind its flags: one `LLM`, one job, its results, and a summary; or the job over actors of Ray Data.

Ray starts the actors, gives them requests as they ask for more, and starts a lost one anew, whose requests it runs
again. It schedules nothing by the job's rules, and the job nothing by Ray's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import logging
import pickle
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any, NamedTuple

import h2o_flexgen
from h2o_flexgen.cache.prefix_store import StoreCounts
from h2o_flexgen.cli.batch.arguments import BatchArguments
from h2o_flexgen.cli.generate import EXIT_SOME_FAILED
from h2o_flexgen.cli.planning import let_calibrate, plan_text
from h2o_flexgen.cli.program import ProgramExit, print_error, write_json, write_result
from h2o_flexgen.cli.progress import JobProgress
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.workload import asks_for_far_layers, counted_in_bytes
from h2o_flexgen.engine.limits.devices import cpu_limit
from h2o_flexgen.engine.limits.plan import Plan
from h2o_flexgen.engine.model import Model
from h2o_flexgen.errors import H2OFlexGenError, UsageError
from h2o_flexgen.folders import last_part
from h2o_flexgen.jobs.forecast import Forecast, seconds_text
from h2o_flexgen.jobs.job import GivenRequests, Job, Summary, bounded, under_way
from h2o_flexgen.jobs.journal import FAILED, JobResults
from h2o_flexgen.jobs.openai import OpenAIFormat
from h2o_flexgen.jobs.outlook import expected, outlook, outlook_text
from h2o_flexgen.jobs.plain import PlainFormat
from h2o_flexgen.jobs.requests import RequestFormat
from h2o_flexgen.jobs.source import Record, Scan, Source
from h2o_flexgen.planning.llm import LLM
from h2o_flexgen.units import counted, format_speed

EXIT_RESUMABLE = 75
_MOST_TOLD = 5  # requests that cannot be run, of those that --strict refuses
_OF_RECORD = ("model", "dtype", "device", "weights", "quantization", "eviction", "policy", "peak_bytes", "warnings")
"""The keys of the last window's record that the summary repeats."""
_FAR = "heads that look far"
"""The key of a job's identity that has the layers and heads that were measured to, where results depend on them."""


def run_batch(arguments: BatchArguments, outcome: ProgramExit) -> int:
    """Runs; returns 0, or 3 where requests failed. Stopped by a signal once it has begun, it leaves 75 in `outcome`."""
    for note in arguments.notes:
        print_error(f"note: {note}")
    if arguments.ray is not None:
        for package in ("ray", "pyarrow"):
            if importlib.util.find_spec(package) is None:
                change = "pip install 'h2o_flexgen[ray]'"
                raise UsageError("--ray needs Ray Data, which is not installed", change=change)
    if arguments.plan:
        return _plan_only(arguments)
    with ExitStack() as stack:
        source = Source(arguments.input, arguments.format, columns=_columns(arguments), shard=arguments.shard)
        for flag, path in (("--output", arguments.output), ("--error-file", arguments.error_file)):
            if path is not None and path.exists() and path.samefile(arguments.input):
                raise UsageError(f"{flag} {path} is the file of requests", "needed another one")
        results = stack.enter_context(JobResults(arguments.output, arguments.error_file, overwrite=arguments.overwrite))
        if arguments.resume and not results.resumed:
            raise UsageError(f"--resume: no job was begun with --output {arguments.output}", "leave --resume out")
        scan = source.scan()
        llm = stack.enter_context(LLM(**vars(arguments.engine), hardware=arguments.hardware))
        begun = (results.header or {}).get("job")
        identity = job_identity(arguments, llm, source, scan, begun)
        if arguments.strict:
            form = request_format(arguments, llm.model, source.format, scan.doubled, results.header or {})
            if faults := "; ".join(islice(Job(llm, source, form, results, scan.requests).faults(), _MOST_TOLD)):
                raise UsageError(f"--strict: {faults}", "needed requests that can all be run", "leave --strict out")
        _begin(arguments, results, identity, scan)
        look_far_as_begun(llm, identity)
        form = request_format(arguments, llm.model, source.format, scan.doubled, results.header or {})
        sample, done = arguments.sample if arguments.ray is None else 0, len(results.state) - results.state.count(0)
        with _sampling(arguments, llm, scan.requests) as told:
            found = expected(llm, source, form, scan.requests, results.state, arguments.at_risk, sample, told)
        forecast = found.forecast
        if forecast.first is not None and not arguments.quiet:
            print_error(f"expected: {seconds_text(forecast.first)}")
        progress = JobProgress(arguments.quiet, scan.requests, done, forecast.meter, forecast.left_text)
        stack.enter_context(progress)
        job = _job(arguments, llm, source, scan, results, progress, form, forecast)
        outcome.stopped = EXIT_RESUMABLE
        try:
            summary = job.run()
            if arguments.ordered:
                results.rewrite(ordered=True)
        except BaseException:
            results.close()
            progress.close()
            print_error(f"{job.summary.done:,} of {scan.requests:,} requests are done; the same command goes on")
            raise
        progress.close()
        failed = results.state.count(FAILED)
        ran = job.record if isinstance(job, ClusterJob) else _record(llm)
        stored = llm.prefixes.counts if llm.prefixes else StoreCounts()
        with suppress(BrokenPipeError):  # who read stdout has gone
            _report(arguments, summary, failed, ran, stored, forecast)
    return EXIT_SOME_FAILED if failed else 0


def _plan_only(arguments: BatchArguments) -> int:
    """Prints what the job would take, and its JSON. No results are written."""
    source = Source(arguments.input, arguments.format, columns=_columns(arguments), shard=arguments.shard)
    scan = source.scan()
    with LLM(**vars(arguments.engine), hardware=arguments.hardware) as llm:
        let_calibrate(llm, arguments.calibrate, arguments.quiet)
        form = request_format(arguments, llm.model, source.format, scan.doubled, {})
        with _sampling(arguments, llm, scan.requests) as told:
            found = outlook(llm, source, form, scan.requests, arguments.at_risk, arguments.sample, told).to_json()
    if not arguments.quiet:
        write_result(outlook_text(found))
    write_json(json.dumps({"plan": {**found, "sample": arguments.sample}}), arguments.json)
    return 0


@contextmanager
def _sampling(arguments: BatchArguments, llm: LLM, requests: int) -> Iterator[Callable[[Summary], None]]:
    """Shows how far a sample of the requests is."""
    some = min(arguments.sample, requests)
    with JobProgress(arguments.quiet, some, what="requests of the sample") as progress:
        llm.on_progress = progress
        yield lambda summary: progress.finished(summary.ok + summary.failed, summary.failed)


def _begin(arguments: BatchArguments, results: JobResults, identity: dict[str, Any], scan: Scan) -> None:
    begun = results.resumed
    results.begin(identity, scan.lines)
    if arguments.retry_failed:
        results.rewrite(ordered=False, keep_failed=False)
    done = len(results.state) - results.state.count(0)
    if begun and not arguments.quiet:
        print_error(f"going on: {done:,} of {scan.requests:,} requests are done")


def _job(
    arguments: BatchArguments,
    llm: LLM,
    source: Source,
    scan: Scan,
    results: JobResults,
    progress: JobProgress,
    form: RequestFormat,
    forecast: Forecast,
) -> Job | ClusterJob:
    """The job, whose plans and progress are shown; over a cluster, whose actors plan for themselves."""

    begun = time.monotonic()

    def told(summary: Summary) -> None:
        forecast.note(time.monotonic() - begun)
        progress.finished(summary.ok + summary.failed, summary.failed)

    if arguments.ray is not None:
        return ClusterJob(arguments, source, scan, results, told)
    shown: list[str] = []

    def on_plan(plan: Plan) -> None:
        forecast.block(plan.policy.block_size)
        text = plan_text(plan)
        if not arguments.quiet and text not in shown:
            shown[:] = [text]
            print_error(text)

    llm.on_progress, llm.on_plan = progress, on_plan
    let_calibrate(llm, arguments.calibrate, arguments.quiet)
    llm.planner = bounded(llm.planner, scan.requests, arguments.at_risk)
    return Job(llm, source, form, results, scan.requests, told=told, forecast=forecast)


def _columns(arguments: BatchArguments) -> tuple[str, ...]:
    return (arguments.prompt_column, *([] if arguments.id_column is None else [arguments.id_column]))


def _model_identity(llm: LLM, begun: Mapping[str, Any]) -> dict[str, Any]:
    """The model by its content, with any name and in any folder. A job that was `begun` by an older version, which
    went by names and times, goes on by these."""
    if begun and "config.json" not in begun:
        return {"model": llm.config.model, "checkpoint": llm.model.source.fingerprint}
    return {"model": begun.get("model", llm.config.model), **llm.model.content()}


def job_identity(
    arguments: BatchArguments, llm: LLM, source: Source, scan: Scan, begun: Mapping[str, Any] | None
) -> dict[str, Any]:
    """All that results depend on: a job goes on only with the same. `begun`: that of the job to go on with."""
    engine = arguments.engine
    eviction = dataclasses.asdict(engine.eviction)
    for name in ("token_bytes", "window_bytes", "cacheless"):  # which follow from the model and its bits
        del eviction[name]
    if eviction["bytes"] is None:
        del eviction["bytes"]
    return {
        "input file": scan.sha256,
        "format": source.format,
        "columns": [arguments.prompt_column, arguments.id_column],
        "chat": arguments.chat,
        "shard": list(arguments.shard),
        "error file": None if arguments.error_file is None else str(arguments.error_file),
        **_model_identity(llm, begun or {}),
        "weights": engine.weights,
        "dtype": llm.model.dtype,
        "weight bits": [engine.weight_bits, engine.weight_group, engine.weight_importance, engine.allow_compress],
        "cache bits": llm.model.spec.cache_bits,
        **({} if llm.model.spec.cache_bits == 16 else {"cache rotation": llm.model.spec.cache_rotation}),
        **({"newest in the cache": llm.model.spec.cache_newest} if llm.model.spec.cache_newest else {}),
        "dequantize": engine.dequantize,
        "seed": engine.seed,
        **{f"eviction {name}": value for name, value in eviction.items()},
        **_looking_far(engine.eviction, llm, begun),
        "sampling": dataclasses.asdict(arguments.sampling),
        "typed sampling": sorted(arguments.typed),
        "version": h2o_flexgen.__version__,
    }


def _looking_far(eviction: EvictionConfig, llm: LLM, begun: Mapping[str, Any] | None) -> dict[str, Any]:
    """Of a job that was `begun` those of its beginning, whatever is kept on this machine by now."""
    if begun is not None:
        return {_FAR: begun[_FAR]} if _FAR in begun else {}  # an older version's has none
    return {_FAR: llm.config.eviction.far_layers or ()} if asks_for_far_layers(eviction, llm.model.spec) else {}


def look_far_as_begun(llm: LLM, job: Mapping[str, Any]) -> None:
    """From now on the layers and heads that the identity of a job names have more of the budget, and no others."""
    if _FAR in job:
        eviction = replace(llm.config.eviction, far_layers=job[_FAR])
        llm.config = replace(llm.config, eviction=counted_in_bytes(eviction, llm.model.spec))


def _record(llm: LLM) -> dict[str, Any]:
    return {} if llm.last_record is None else dict(json.loads(llm.last_record.to_line()))


def _report(
    arguments: BatchArguments,
    summary: Summary,
    failed: int,
    ran: Mapping[str, Any],
    stored: StoreCounts,
    forecast: Forecast,
) -> None:
    """Prints a summary and its JSON. `failed`: in all runs of the job; `ran`: the record of its last window; `stored`:
    of this process's store of prefixes."""
    if summary.first_failure is not None:
        print_error(f"the first that failed: {summary.first_failure}")
    if failed:
        print_error(f"{failed:,} of {counted(summary.requests, 'request')} failed; --retry-failed runs them again")
    if not arguments.quiet:
        done = summary.ok + summary.failed
        rate = summary.generated_tokens / summary.seconds if summary.seconds else None
        speed = "" if rate is None else f", {format_speed(rate, 'new tokens')}"
        before = f", {summary.before:,} before" if summary.before else ""
        told = "" if forecast.first is None else f", expected at first {seconds_text(forecast.first)}"
        write_result(f"{counted(done, 'request')} in {summary.seconds:,.1f} s{told}{speed}{before}\n")
        if stored.prompts:
            write_result(f"prefixes: {stored.found:,} of {stored.tokens:,} prompt tokens were found in the store\n")
    kept = {name: ran[name] for name in _OF_RECORD if name in ran}
    found = {"prefixes": dataclasses.asdict(stored)} if stored.prompts else {}
    found |= {"forecast": forecast.to_json(summary.seconds)} if forecast.first is not None else {}
    write_json(json.dumps({**kept, **summary.to_json(), **found, "failed_in_all": failed}), arguments.json)


def request_format(
    arguments: BatchArguments, model: Model, kind: str, doubled: frozenset[int], header: Mapping[str, Any]
) -> RequestFormat:
    """The format of a source of this `kind`. `doubled`: lines whose custom_id stood before; `header`: the journal's."""
    seed, typed = arguments.engine.seed, arguments.engine.model
    if kind != "openai":
        return PlainFormat(
            kind,
            typed,
            model.codec,
            seed,
            arguments.sampling,
            arguments.prompt_column,
            arguments.id_column,
            arguments.chat,
            model.dummy,
            "max_new_tokens" not in arguments.typed,
        )
    return OpenAIFormat(
        header.get("job", {}).get("model", typed),
        model.codec,
        model.spec.eos_token_ids,
        seed,
        arguments.typed,
        header.get("created", 0),
        hashlib.sha256(json.dumps(header.get("job")).encode()).hexdigest(),
        model.dummy,
        doubled,
        (typed, last_part(typed), *arguments.served_model_name),
    )


# Over a cluster


class ActorShare(NamedTuple):
    """The resources of one actor: processors, GPUs, and the share of its machine's free memory."""

    cpus: int
    gpus: int
    memory: float


def share_of(nodes: Iterable[Mapping[str, float]], actors: int, gpus: int) -> ActorShare:
    """The largest share with which so many `actors` of `gpus` GPUs each fit on `nodes`, as Ray counts what is there.

    UsageError where they do not fit.
    """
    nodes = list(nodes)
    for cpus in range(int(max((node.get("CPU", 0) for node in nodes), default=0)), 0, -1):
        places = [min(node.get("CPU", 0) // cpus, node.get("GPU", 0) // gpus if gpus else actors) for node in nodes]
        if sum(places) >= actors:
            return ActorShare(cpus, gpus, 1 / min(actors, max(places)))
    there = sum(node.get("CPU", 0) for node in nodes)
    found = f"--ray {actors}: the cluster has {there:.0f} processors"
    raise UsageError(found, "needed one for each actor, and a GPU where GPUs are used")


class JobActor:
    """Answers batches of requests as `batch` does in one process. An actor's class; `memory`: its ActorShare's."""

    def __init__(
        self, arguments: BatchArguments, kind: str, doubled: frozenset[int], header: Mapping[str, Any], memory: float
    ) -> None:
        engine = arguments.engine
        if engine.cpu_mem is None and memory < 1:
            engine = replace(engine, cpu_mem=int(memory * cpu_limit().nbytes))
        self._llm = LLM(**vars(engine), hardware=arguments.hardware)
        look_far_as_begun(self._llm, header.get("job", {}))
        self._format = request_format(arguments, self._llm.model, kind, doubled, header)

    def __call__(self, batch: Any) -> Any:
        """An Arrow table with a column of pickled records to one of lines, results, whether they failed, and tokens.

        The first row has the record of the engine's last call.
        """
        import pyarrow

        records = [Record(*pickle.loads(data.as_py())) for data in batch["record"]]
        given = GivenRequests(records)
        counts = [(0, 0)]

        def told(summary: Summary) -> None:
            counts.append((summary.prompt_tokens, summary.generated_tokens))

        Job(self._llm, given, self._format, given, len(records), told=told).run()
        prompts, new = ([after - before for before, after in pairwise(each)] for each in zip(*counts, strict=True))
        ran = "" if self._llm.last_record is None else self._llm.last_record.to_line()
        return pyarrow.table(
            {
                **dict(zip(("line", "result", "failed"), map(list, zip(*given.results, strict=True)), strict=True)),
                "prompt_tokens": prompts,
                "generated_tokens": new,
                "record": [ran, *[""] * (len(records) - 1)],
            }
        )


class ClusterJob:
    """Runs what `results` has not yet of `source` by actors of a cluster; as `Job` otherwise.

    `record`: the RunRecord of some engine's last call, as JSON.
    """

    def __init__(
        self,
        arguments: BatchArguments,
        source: Source,
        scan: Scan,
        results: JobResults,
        told: Callable[[Summary], None],
    ) -> None:
        self._arguments, self._source, self._scan, self._results, self._told = arguments, source, scan, results, told
        self.summary = Summary(scan.requests, before=len(results.state) - results.state.count(0))
        self.record: dict[str, Any] = {}

    def run(self) -> Summary:
        """Runs all unfinished requests. Raises the errors of the actors' engines."""
        started = time.monotonic()
        if self.summary.before < self.summary.requests:
            with _cluster() as ray:
                for table in self._answers(ray):
                    self._take(table)
                    self.summary.seconds = time.monotonic() - started
        self._results.sync()
        self.summary.seconds = time.monotonic() - started
        return self.summary

    def _answers(self, ray: Any) -> Iterator[Any]:
        """Tables of results, as soon as an actor has finished one."""
        arguments, actors = self._arguments, self._arguments.ray or 1
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        engine = arguments.engine
        on_gpu = engine.device != "cpu" and engine.emulate_gpu is None and any(node.get("GPU") for node in nodes)
        share = share_of(nodes, actors, engine.num_gpus if on_gpu else 0)
        rows = max(1, under_way(self._scan.requests, arguments.at_risk) // actors)
        if "gpu_batch_size" not in engine.free_fields:
            rows = max(rows, engine.fixed_policy.block_size)
        requests = ray.data.from_arrow_refs([ray.put(table) for table in self._batches(rows)])
        settings = {
            "arguments": arguments,
            "kind": self._source.format,
            "doubled": self._scan.doubled,
            "header": self._results.header or {},
            "memory": share.memory,
        }
        answered = requests.map_batches(
            JobActor,
            fn_constructor_kwargs=settings,
            batch_size=None,  # as they are cut
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=actors),
            num_cpus=share.cpus,
            num_gpus=share.gpus or None,
        )
        # No table is fetched ahead: each is in the journal before the next is waited for.
        yield from answered.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)

    def _batches(self, rows: int) -> Iterator[Any]:
        """Arrow tables of the requests that are not finished, `rows` each."""
        import pyarrow

        left = (record for record in self._source.records() if not self._results.state[record.line])
        while batch := [pickle.dumps(tuple(record)) for record in islice(left, rows)]:
            yield pyarrow.table({"record": batch})

    def _take(self, table: Any) -> None:
        for row in table.to_pylist():
            if row["record"]:
                self.record = json.loads(row["record"])
            if self._results.state[row["line"]]:
                continue  # computed twice, of an actor that was lost after it had finished them
            self._results.add(row["line"], row["result"], row["failed"])
            self.summary.count(row["line"], json.loads(row["result"]), row["failed"])
            self.summary.prompt_tokens += row["prompt_tokens"]
            self.summary.generated_tokens += row["generated_tokens"]
            self._told(self.summary)


@contextmanager
def _cluster() -> Iterator[Any]:
    """Ray, connected to the cluster that it finds, or to one of this machine, which then ends with this.

    H2OFlexGenErrors that actors raised come out as they were, Ray's own errors as one message.
    """
    told = signal.getsignal(signal.SIGTERM)
    import ray
    import ray.data

    begun = not ray.is_initialized()
    try:
        if begun:
            ray.init(include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
        if signal.getsignal(signal.SIGTERM) is not told:  # Ray puts a handler of its own in its place
            signal.signal(signal.SIGTERM, told)
        ray.data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        yield ray
    except ray.exceptions.RayError as error:
        raise _cause(error) from error
    finally:
        if begun:
            ray.shutdown()


def _cause(error: BaseException) -> H2OFlexGenError:
    """The first error of ours behind one of Ray's, else one with its message."""
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__module__ == H2OFlexGenError.__module__ and isinstance(seen, H2OFlexGenError):
            return seen
        seen = getattr(seen, "cause", None) or seen.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()]
    return H2OFlexGenError(f"Ray: {lines[-1] if lines else type(error).__name__}", change="see Ray's logs")
