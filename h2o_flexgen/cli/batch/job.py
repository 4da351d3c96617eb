"""`batch` behind its flags: one `LLM`, one job, its results, and a summary."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import h2o_flexgen
from h2o_flexgen.cli.batch.arguments import BatchArguments
from h2o_flexgen.cli.batch.cluster import ClusterJob, require_ray
from h2o_flexgen.cli.batch.formats import request_format
from h2o_flexgen.cli.generate import EXIT_SOME_FAILED, engine_settings
from h2o_flexgen.cli.planning import let_calibrate, plan_text
from h2o_flexgen.cli.program import ProgramExit, print_error, write_json, write_result
from h2o_flexgen.cli.progress import JobProgress
from h2o_flexgen.engine.limits.plan import Plan
from h2o_flexgen.errors import UsageError
from h2o_flexgen.jobs.job import Job, Summary, bounded
from h2o_flexgen.jobs.journal import FAILED, JobResults
from h2o_flexgen.jobs.source import Scan, Source
from h2o_flexgen.planning.llm import LLM

EXIT_RESUMABLE = 75
_OF_RECORD = ("model", "dtype", "device", "weights", "quantization", "eviction", "policy", "peak_bytes", "warnings")
"""What the summary has of the record of the last window."""


def run_batch(arguments: BatchArguments, outcome: ProgramExit) -> int:
    """Runs; returns 0, or 3 where requests failed. Stopped by a signal once it has begun, it leaves 75 in `outcome`."""
    for note in arguments.notes:
        print_error(f"note: {note}")
    if arguments.ray is not None:
        require_ray()
    with ExitStack() as stack:
        source = Source(arguments.input, arguments.format, columns=_columns(arguments), shard=arguments.shard)
        results = stack.enter_context(JobResults(arguments.output, arguments.error_file, overwrite=arguments.overwrite))
        if arguments.resume and not results.resumed:
            raise UsageError(f"--resume: no job was begun with --output {arguments.output}", "leave --resume out")
        scan = source.scan()
        llm = stack.enter_context(LLM(**engine_settings(arguments.engine), hardware=arguments.hardware))
        identity = _identity(arguments, llm, source, scan)
        if arguments.strict:
            form = request_format(arguments, llm.model, source.format, scan.doubled, {})
            _require_faultless(Job(llm, source, form, results, scan.requests))
        _begin(arguments, results, identity, scan)
        progress = JobProgress(arguments.quiet, scan.requests)
        stack.callback(progress.close)
        job = _job(arguments, llm, source, scan, results, progress)
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
        _report(arguments, summary, failed, ran)
    return EXIT_SOME_FAILED if failed else 0


def _begin(arguments: BatchArguments, results: JobResults, identity: dict[str, Any], scan: Scan) -> None:
    begun = results.resumed
    results.begin(identity, scan.lines)
    if arguments.retry_failed:
        results.rewrite(ordered=False, keep_failed=False)
    done = len(results.state) - results.state.count(0)
    if begun and not arguments.quiet:
        print_error(f"going on: {done:,} of {scan.requests:,} requests are done")


def _job(
    arguments: BatchArguments, llm: LLM, source: Source, scan: Scan, results: JobResults, progress: JobProgress
) -> Job | ClusterJob:
    """The job, whose plans and progress are shown; over a cluster, whose actors plan for themselves."""

    def told(summary: Summary) -> None:
        progress.finished(summary.before, summary.ok + summary.failed, summary.failed)

    header = results.header or {}
    if arguments.ray is not None:
        return ClusterJob(arguments, source, scan, results, header, told)
    shown: list[str] = []

    def on_plan(plan: Plan) -> None:
        text = plan_text(plan)
        if not arguments.quiet and text not in shown:
            shown[:] = [text]
            print_error(text)

    form = request_format(arguments, llm.model, source.format, scan.doubled, header)
    llm.on_progress, llm.on_plan = progress, on_plan
    let_calibrate(llm, arguments.calibrate, arguments.quiet)
    llm.planner = bounded(llm.planner, scan.requests, arguments.at_risk)
    return Job(llm, source, form, results, scan.requests, told=told)


def _columns(arguments: BatchArguments) -> tuple[str, ...]:
    return (arguments.prompt_column, *([] if arguments.id_column is None else [arguments.id_column]))


def _identity(arguments: BatchArguments, llm: LLM, source: Source, scan: Scan) -> dict[str, Any]:
    """All that results depend on: a job goes on only with the same."""
    engine = arguments.engine
    eviction = dataclasses.asdict(engine.eviction)
    return {
        "input file": scan.sha256,
        "format": source.format,
        "columns": [arguments.prompt_column, arguments.id_column],
        "chat": arguments.chat,
        "shard": list(arguments.shard),
        "error file": None if arguments.error_file is None else str(arguments.error_file),
        "model": engine.model,
        "checkpoint": llm.model.source.fingerprint,
        "weights": engine.weights,
        "dtype": llm.model.dtype,
        "weight bits": [engine.weight_bits, engine.weight_group, engine.weight_importance, engine.allow_compress],
        "cache bits": engine.cache_bits,
        "dequantize": engine.dequantize,
        "seed": engine.seed,
        **{f"eviction {name}": value for name, value in eviction.items()},
        "sampling": dataclasses.asdict(arguments.sampling),
        "typed sampling": sorted(arguments.typed),
        "version": h2o_flexgen.__version__,
    }


def _require_faultless(job: Job) -> None:
    faults = job.faults()
    if faults:
        raise UsageError(f"--strict: {'; '.join(faults)}", "needed requests that can all be run", "leave --strict out")


def _record(llm: LLM) -> dict[str, Any]:
    """That of the last window, if there was one."""
    return {} if llm.last_record is None else dict(json.loads(llm.last_record.to_line()))


def _report(arguments: BatchArguments, summary: Summary, failed: int, ran: Mapping[str, Any]) -> None:
    """What was done, and the JSON object. `failed`: in all runs of the job; `ran`: the record of its last window."""
    if not arguments.quiet:
        done = summary.ok + summary.failed
        rate = f", {summary.generated_tokens / summary.seconds:,.0f} new tokens/s" if summary.seconds else ""
        before = f", {summary.before:,} before" if summary.before else ""
        write_result(f"{done:,} requests in {summary.seconds:,.1f} s{rate}{before}\n")
    if failed:
        print_error(f"{failed:,} of {summary.requests:,} requests failed; --retry-failed runs them again")
    kept = {name: ran[name] for name in _OF_RECORD if name in ran}
    write_json(json.dumps({**kept, **summary.to_json(), "failed_in_all": failed}), arguments.json)
