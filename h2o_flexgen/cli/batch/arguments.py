"""The flags of `batch`: files and formats of its own, and the engine's as `run` has them. No torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h2o_flexgen.cli.arguments import WorkArguments, add_engine, engine_of
from h2o_flexgen.cli.parser import Parser
from h2o_flexgen.cli.program import add_json
from h2o_flexgen.cli.prompts import stop_texts
from h2o_flexgen.config.checks import Count, Natural, Ratio
from h2o_flexgen.config.flags import add_arguments, called, from_namespace, given, option
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.errors import UsageError

FORMATS = ("auto", "openai", "jsonl", "text", "parquet")


def _shard(text: str) -> tuple[int, int]:
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r}: needed I/N with I from 1 to N, as in 2/8")
    return int(part), int(parts)


@dataclass(frozen=True)
class BatchArguments(WorkArguments):
    """`typed`: the sampling settings that were given, by their names in SamplingParams; `sampling`: all of them.
    `input`: that of `plan`, too."""

    typed: Mapping[str, Any]
    input: Path = option(Path(), "--input-file", "-i", metavar="FILE", help="the requests")
    output: Path = option(Path(), "--output", "--output-file", "-o", metavar="FILE", help="the results, as JSONL")
    plan: Path | None = option(
        None, metavar="FILE", help="run nothing: print the expected time, bytes and memory of these requests"
    )
    sample: Natural = option(
        0, help="first answer N of the requests, for the lengths of answers and the pace (default: 0)"
    )
    error_file: Path | None = option(None, metavar="FILE", help="failed requests go here instead")
    format: str = option(
        "auto",
        choices=FORMATS,
        help="openai (batch files), jsonl, text (a prompt a line), parquet (default: by name and first readable line)",
    )
    prompt_column: str = option("prompt", metavar="NAME", help="prompts in jsonl and parquet (default: prompt)")
    id_column: str | None = option(
        None, metavar="NAME", help="column of jsonl and parquet that is written beside the answer"
    )
    chat: bool = option(False, help="each prompt is a user message; not for openai")
    served_model_name: Sequence[str] = option(
        (), parse=str, nargs="+", action="extend", metavar="NAME", help="other names for the model in requests"
    )
    stop: Sequence[str] = option(
        (), parse=str, action="append", metavar="TEXT", help="ends a sequence; may be repeated"
    )
    shard: tuple[int, int] = option((1, 1), parse=_shard, metavar="I/N", help="only the I-th of every N requests")
    ray: Count | None = option(
        None, help="run by N actors of Ray Data, an engine each, on the cluster of RAY_ADDRESS or one started here"
    )
    resume: bool = option(False, help="fail unless there is a job to resume")
    overwrite: bool = option(False, help="start anew, whatever was there")
    retry_failed: bool = option(False, help="run requests again that failed before")
    ordered: bool = option(False, help="sort the results in the order of the requests at the end")
    strict: bool = option(False, help="run no request if any cannot be run")
    at_risk: Ratio | None = option(
        None,
        metavar="SHARE",
        help="share of the requests that may be under way at once, the cost of a kill (default: 0.02, or 32 requests; "
        "where weights or caches move, as many as the plan takes)",
    )
    quiet: bool = option(False, "--quiet", "-q", help="no progress, no report")


def parse_batch(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> BatchArguments:
    """Parses `argv` and what `environ` adds. Exits (2) where argparse objects, UsageError where the configs do."""
    with _batch_parser().parsed(argv, environ) as args:
        typed = given(BatchArguments, args)
        lacking = [flag for flag, name in (("-i", "input"), ("-o", "output")) if name not in typed]
        if "plan" not in typed and lacking:
            raise UsageError(f"{' and '.join(lacking)} {'are' if lacking[1:] else 'is'} missing", _FILES)
        if "plan" in typed and (len(lacking) < 2 or "ray" in typed):
            other = "--ray" if len(lacking) == 2 else "-i or -o"
            raise UsageError(f"--plan is given beside {other}", "needed --plan FILE alone, which runs nothing")
        return job_arguments(args)


def job_arguments(args: argparse.Namespace) -> BatchArguments:
    """The arguments of jobs, with their files if these are named. `args` has the engine's flags and may have others."""
    engine, typed, said = engine_of(args), given(BatchArguments, args), given(SamplingParams, args)
    if "stop" in typed:
        said["stop_strings"] = stop_texts(typed["stop"])
    resumed = typed.keys() & {"resume", "retry_failed"}
    if "overwrite" in typed and resumed:
        other = "--resume" if "resume" in resumed else "--retry-failed"
        raise UsageError(f"--overwrite and {other} are given together", "needed one: --overwrite starts anew")
    sampling = from_namespace(SamplingParams, args, defaults={"stop_strings": said.get("stop_strings", ())})
    return BatchArguments.of(args, engine, sampling, typed=said, **{"input": typed.get("plan", Path()), **typed})


_FILES = "needed -i requests.jsonl -o results.jsonl, or --plan requests.jsonl"


def _batch_parser() -> Parser:
    parser = Parser(
        prog=called("batch"),
        usage="%(prog)s -i requests.jsonl -o results.jsonl [--model MODEL] [--hh-ratio R] [flags]",
        description="Answers a file of requests. The same command goes on where a job was stopped or killed.",
        epilog="Every flag can be set in the environment, as for run. Exit codes: 0 all well, 2 flags or files, 3 some "
        "requests failed, 4 model or checkpoint, 5 does not fit, 6 disk, 7 another process writes the results, 75 "
        "stopped: the same command goes on, 130 or 143 interrupted before it began.",
    )
    add_json(add_arguments(parser, BatchArguments, title="work", bare=True))
    add_engine(parser)
    return parser
