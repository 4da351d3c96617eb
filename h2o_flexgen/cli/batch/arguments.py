"""The flags of `batch`: files and formats of its own, and the engine's as `run` has them. No torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h2o_flexgen.cli.arguments import add_engine, engine_of, refuse_known
from h2o_flexgen.cli.parser import Parser, misspelt
from h2o_flexgen.cli.program import add_json
from h2o_flexgen.cli.prompts import stop_texts
from h2o_flexgen.config.checks import whole
from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.config.flags import as_typed, called, from_namespace, given
from h2o_flexgen.config.hardware.profile import HardwareProfile, PlanningConfig, find_profile
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.errors import UsageError

FORMATS = ("auto", "openai", "jsonl", "text", "parquet")


@dataclass(frozen=True)
class BatchArguments:
    """All of a command line, checked. `typed`: the sampling settings that were given, by their names in
    SamplingParams; `sampling`: all of them. `notes` are sentences for the user."""

    engine: EngineConfig
    sampling: SamplingParams
    typed: Mapping[str, Any]
    hardware: HardwareProfile | None
    calibrate: bool | None
    input: Path
    output: Path
    error_file: Path | None
    format: str
    prompt_column: str
    id_column: str | None
    chat: bool
    served_model_name: tuple[str, ...]
    shard: tuple[int, int]
    ray: int | None
    at_risk: float | None
    overwrite: bool
    resume: bool
    retry_failed: bool
    ordered: bool
    strict: bool
    quiet: bool
    json: bool | None
    notes: tuple[str, ...]
    plan: bool = False
    sample: int = 0


def parse_batch(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> BatchArguments:
    """Parses `argv` and what `environ` adds. Exits (2) where argparse objects, UsageError where the configs do."""
    parser = _batch_parser()
    with parser.parsed(argv, environ) as args:
        return _checked(args, misspelt(parser, environ))


def job_arguments(args: argparse.Namespace, notes: list[str]) -> BatchArguments:
    """Those of jobs whose files are named later: `args` has the engine's flags, and whichever else it likes."""
    usual = _batch_parser().parse_args(["--input-file", "", "--output", "", "--error-file", "", "--format", "openai"])
    return _checked(argparse.Namespace(**{**vars(usual), **vars(args)}), notes)


def _checked(args: argparse.Namespace, notes: list[str]) -> BatchArguments:
    refuse_known(args)
    _require_files(args)
    engine = engine_of(args, notes)
    typed = given(SamplingParams, args)
    if args.stop:
        typed["stop_strings"] = stop_texts(args.stop)
    if args.overwrite and (args.resume or args.retry_failed):
        other = "--resume" if args.resume else "--retry-failed"
        raise UsageError(f"--overwrite and {other} are given together", "needed one: --overwrite starts anew")
    if args.at_risk is not None and not 0 < args.at_risk <= 1:
        raise UsageError(f"--at-risk is {args.at_risk}", "needed a share above 0, up to 1")
    planning = from_namespace(PlanningConfig, args)
    made: dict[str, Any] = {
        "engine": engine,
        "sampling": from_namespace(SamplingParams, args, defaults={"stop_strings": typed.get("stop_strings", ())}),
        "typed": typed,
        "hardware": None if planning.hardware is None else find_profile(planning.hardware),
        "calibrate": planning.calibrate,
        "input": Path(args.input_file if args.plan is None else args.plan),
        "output": Path(args.output or ""),
        "error_file": None if args.error_file is None else Path(args.error_file),
        "served_model_name": tuple(args.served_model_name),
        "ray": None if args.ray is None else whole(args.ray, "--ray", 1),
        "notes": tuple(notes),
        "plan": args.plan is not None,
        "sample": whole(args.sample, "--sample", 0),
    }
    return BatchArguments(**{**as_typed(BatchArguments, args), **made})


def _require_files(args: argparse.Namespace) -> None:
    """UsageError unless there are files to run, or one to plan."""
    lacking = [flag for flag, path in (("-i", args.input_file), ("-o", args.output)) if path is None]
    if args.plan is None and lacking:
        raise UsageError(f"{' and '.join(lacking)} are missing" if lacking[1:] else f"{lacking[0]} is missing", _FILES)
    if args.plan is not None and (len(lacking) < 2 or args.ray is not None):
        other = "--ray" if len(lacking) == 2 else "-i or -o"
        raise UsageError(f"--plan is given beside {other}", "needed --plan FILE alone, which runs nothing")


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
    _add_files(parser)
    add_engine(parser)
    return parser


def _add_files(parser: argparse.ArgumentParser) -> None:
    """Requests in, results out."""
    work = parser.add_argument_group("work")
    work.add_argument("--input-file", "-i", metavar="FILE", help="the requests")
    work.add_argument("--output", "--output-file", "-o", metavar="FILE", help="the results, as JSONL")
    work.add_argument(
        "--plan", metavar="FILE", help="run nothing: print the expected time, bytes and memory of these requests"
    )
    work.add_argument(
        "--sample",
        type=int,
        default=0,
        metavar="N",
        help="first answer N of the requests, for the lengths of answers and the pace (default: 0)",
    )
    work.add_argument("--error-file", metavar="FILE", help="failed requests go here instead")
    work.add_argument(
        "--format",
        choices=FORMATS,
        default="auto",
        help="openai (batch files), jsonl, text (a prompt a line), parquet (default: by name and first line)",
    )
    work.add_argument(
        "--prompt-column", default="prompt", metavar="NAME", help="prompts in jsonl and parquet (default: prompt)"
    )
    work.add_argument(
        "--id-column", metavar="NAME", help="column of jsonl and parquet that is written beside the answer"
    )
    work.add_argument("--chat", action="store_true", help="each prompt is a user message; not for openai")
    work.add_argument(
        "--served-model-name",
        nargs="+",
        default=(),
        metavar="NAME",
        help="for openai: other names for the model in bodies",
    )
    work.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends a sequence; may be repeated")
    work.add_argument("--shard", type=_shard, default=(1, 1), metavar="I/N", help="only the I-th of every N requests")
    work.add_argument(
        "--ray",
        type=int,
        metavar="N",
        help="run by N actors of Ray Data, an engine each, on the cluster of RAY_ADDRESS or one started here",
    )
    work.add_argument("--resume", action="store_true", help="fail unless there is a job to resume")
    work.add_argument("--overwrite", action="store_true", help="start anew, whatever was there")
    work.add_argument("--retry-failed", action="store_true", help="run requests again that failed before")
    work.add_argument("--ordered", action="store_true", help="sort the results in the order of the requests at the end")
    work.add_argument("--strict", action="store_true", help="run no request if any cannot be run")
    work.add_argument(
        "--at-risk",
        type=float,
        metavar="SHARE",
        help="share of the requests that may be under way at once, the cost of a kill (default: 0.02, or 32 requests; "
        "where weights or caches move, as many as the plan takes)",
    )
    add_json(work)
    work.add_argument("--quiet", "-q", action="store_true", help="no progress, no report")


def _shard(text: str) -> tuple[int, int]:
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r}: needed I/N with I from 1 to N, as in 2/8")
    return int(part), int(parts)
