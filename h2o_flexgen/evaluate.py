"""`python -m h2o_flexgen.evaluate`: the cost of eviction to a model, in recall and in perplexity.

    python -m h2o_flexgen.evaluate --policies full,h2o,local --ratios 0.1,0.2,0.5 --plot quality.png
    python -m h2o_flexgen.evaluate --model opt-125m --recall questions.jsonl --text book.txt --limit 16
    python -m h2o_flexgen.evaluate --model pythia-160m --text book.txt --stream 32768 --kv-budget 512
    python -m h2o_flexgen.evaluate --suite configs/eval/demo.json --output-dir quality
    python -m h2o_flexgen.evaluate --measure-layers --model opt-125m

A table goes to stdout, everything else to stderr. The last line of stdout is one JSON object, unless stdout is a
terminal.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from argparse import Namespace
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from h2o_flexgen.cli.parser import Parser
from h2o_flexgen.cli.program import (
    add_json,
    look_up_model,
    output_file,
    print_error,
    program,
    require_several,
    write_json,
    write_result,
)
from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.config.flags import add_arguments, called, flags_of, from_namespace, given
from h2o_flexgen.errors import UsageError, writing
from h2o_flexgen.evaluation.settings import EvaluationSettings, StreamSettings, read_cases, read_text
from h2o_flexgen.reporting.plots import check_plot, plot_quality, plot_stream, plot_suite
from h2o_flexgen.reporting.tables import quality_line, quality_table, stream_line, stream_table, suite_line, suite_table

STREAM_READS = {"policies", "text", "context"}
"""The fields of EvaluationSettings that a measurement of streams reads."""


@program
def main(argv: Sequence[str] | None) -> int:
    with _parser().parsed(argv) as args:
        settings, streams = from_namespace(EvaluationSettings, args), from_namespace(StreamSettings, args)
        _one_kind(args, streams.stream is not None)
        config = from_namespace(EngineConfig, args)
    plot = output_file("--plot", args.plot, keep=not args.overwrite)
    if plot is not None:
        check_plot(plot)
    if args.suite is not None:
        return _suite(args, plot)
    if args.output_dir is not None:
        raise UsageError("--output-dir without --suite", "needed a suite, whose records go there", "--output FILE")
    engine = given(EngineConfig, args)
    model = engine.pop("model", "demo")
    files = {"--text": settings.text, "--recall": settings.recall, "--output": args.output, "--plot": args.plot}
    require_several(files)
    output = output_file("--output", args.output, keep=not args.overwrite)
    if plot is not None and args.measure_layers:
        raise UsageError("--plot with --measure-layers", "there is no picture of layers", "leave --plot out")
    # torch takes seconds to import: --help and refusals do without it.
    look_up_model(config)
    read_text(settings.text)
    read_cases(settings.recall)
    if args.measure_layers:
        from h2o_flexgen.evaluation.far_layers import READS, measure_layers

        if flags := _named(EvaluationSettings, given(EvaluationSettings, args).keys() - READS):
            needed = "needed --text, --context and --limit at most"
            raise UsageError(f"{flags} with --measure-layers", needed, f"leave {flags} out")
        found = measure_layers(settings, model, engine, print_error)
        data, table, draw = found.to_json(), found.table(), None
    elif streams.stream is None:
        from h2o_flexgen.evaluation.quality import evaluate

        quality = evaluate(settings, model, engine, lambda row: print_error(quality_line(row)))
        data, table, draw = quality.to_json(), quality_table(quality), partial(plot_quality, quality)
    else:
        from h2o_flexgen.evaluation.stream import evaluate_streams

        curves = evaluate_streams(streams, settings, model, engine, lambda row: print_error(stream_line(row)))
        data, table, draw = curves.to_json(), stream_table(curves), partial(plot_stream, curves)
    if output is not None:
        with writing(output):
            output.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if plot is not None and draw is not None:
        draw(plot)
    write_result(table + "\n")
    write_json(json.dumps(data, allow_nan=False), args.json)
    return 0


def _suite(args: Namespace, plot: Path | None) -> int:
    """Measures what a suite's file says, as far as its records are not there yet."""
    engine = given(EngineConfig, args)
    typed = [given(kind, args).keys() for kind in (EvaluationSettings, StreamSettings)]
    if "model" in engine or any(typed) or args.output is not None:
        raise UsageError(
            "--suite with --model, --output or what is to be measured",
            "the suite says what is measured, and records go to --output-dir",
            "leave these out, or leave --suite out",
        )
    if args.output_dir is None:
        raise UsageError("--suite without --output-dir", "needed a folder for its records")
    from h2o_flexgen.evaluation.suites.runner import Suite, run_suite

    suite = Suite.read(args.suite)
    folder = Path(args.output_dir)
    records = run_suite(suite, folder, engine, lambda record: print_error(suite_line(record)), print_error)
    if plot is not None:
        plot_suite(records, plot)
    write_result(suite_table(records) + "\n")
    rows = [{key: value for key, value in record.to_json().items() if key != "answers"} for record in records]
    write_json(json.dumps({"suite": suite.name, "records": rows}, allow_nan=False), args.json)
    return 0


def _named(settings: type[Any], fields: Collection[str]) -> str:
    """The flags of these fields, one after another."""
    return ", ".join(flags_of(item)[0] for item in dataclasses.fields(settings) if item.name in fields)


def _one_kind(args: Namespace, streaming: bool) -> None:
    """UsageError for flags of the other kind of measurement, which would be without effect."""
    other: type[Any] = EvaluationSettings if streaming else StreamSettings
    typed = given(other, args).keys() - STREAM_READS
    if typed:
        flags = _named(other, typed)
        raise UsageError(
            f"{flags} {'with' if streaming else 'without'} --stream",
            "needed recall and perplexity at --ratios, or streams at one --kv-budget",
            f"leave {flags} out, or {'leave --stream out' if streaming else 'add --stream'}",
        )


def _parser() -> Parser:
    parser = Parser(
        prog=called("evaluate"),
        description="Measures recall and perplexity under eviction policies at several KV budgets, or along a stream. "
        "Plans go by rule, without a search: quality does not depend on them.",
    )
    add_arguments(parser, EvaluationSettings, title="measurements")
    add_arguments(parser, StreamSettings, title="streams beyond the context")
    parser.add_argument(
        "--suite", metavar="FILE", help="policies, budgets, models and tasks from a file: configs/eval/demo.json"
    )
    parser.add_argument(
        "--measure-layers", action="store_true", help="the layers and heads that look far, for --far-layers"
    )
    # Random weights have no quality to measure.
    add_arguments(parser, EngineConfig, title="model and machine", exclude=("weights",))
    out = parser.add_argument_group("output")
    out.add_argument("--output", "-o", metavar="FILE", help="the JSON object in a file too")
    out.add_argument(
        "--output-dir",
        metavar="DIR",
        help="folder for the records of a suite; cells with records are not measured again",
    )
    out.add_argument("--plot", metavar="FILE", help="a picture (.png, .svg, .pdf); needs matplotlib")
    out.add_argument("--overwrite", action="store_true", help="replace existing --output and --plot files")
    add_json(out)
    return parser


if __name__ == "__main__":
    sys.exit(main())
