"""`python -m h2o_flexgen.evaluate`: what eviction costs a model, in recall and in perplexity.

    python -m h2o_flexgen.evaluate --policies full,h2o,local --ratios 0.1,0.2,0.5 --plot quality.png
    python -m h2o_flexgen.evaluate --model opt-125m --recall questions.jsonl --text book.txt --limit 16

A table goes to stdout, its last line is one JSON object, everything else goes to stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from h2o_flexgen.cli.files import output_file
from h2o_flexgen.cli.program import exit_on_errors, print_error, write_result
from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.config.flags import Parser, add_arguments, from_namespace, given
from h2o_flexgen.config.quality import QualityReport, QualityRow
from h2o_flexgen.errors import StorageError
from h2o_flexgen.evaluation.settings import EvaluationSettings
from h2o_flexgen.reporting.quality_plot import check_plot, plot_quality
from h2o_flexgen.reporting.quality_table import quality_line, quality_table


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    return exit_on_errors(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    args = _parser().parse_args(argv)
    settings = from_namespace(EvaluationSettings, args)
    engine: dict[str, Any] = {name: getattr(args, name) for name in given(EngineConfig, args)}
    EngineConfig(**engine)  # a setting that makes no sense is said before torch is imported
    output = output_file("--output", args.output, keep=not args.overwrite)
    plot = output_file("--plot", args.plot, keep=not args.overwrite)
    if plot is not None:
        check_plot(plot)
    # torch takes seconds to import: --help and usage errors do without it.
    from h2o_flexgen.evaluation.quality import evaluate

    def heard(row: QualityRow) -> None:
        print_error(quality_line(row))

    report = evaluate(settings, engine.pop("model", "demo"), engine, heard)
    _give(report, output, plot)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="python -m h2o_flexgen.evaluate",
        description="Measures recall and perplexity under eviction policies at several KV budgets.",
    )
    add_arguments(parser, EvaluationSettings, title="what is measured")
    # Random weights have no quality to measure.
    add_arguments(parser, EngineConfig, title="model and machine", exclude=("weights",))
    out = parser.add_argument_group("output")
    out.add_argument("--output", "-o", metavar="FILE", help="the JSON object in a file too")
    out.add_argument("--plot", metavar="FILE", help="a picture (.png, .svg, .pdf); needs matplotlib")
    out.add_argument("--overwrite", action="store_true", help="replace existing --output and --plot files")
    return parser


def _give(report: QualityReport, output: Path | None, plot: Path | None) -> None:
    data = report.to_json()
    if output is not None:
        try:
            output.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise StorageError(f"cannot write {output}: {error.strerror}") from None
    if plot is not None:
        plot_quality(report, plot)
    write_result(f"{quality_table(report)}\n{json.dumps(data, allow_nan=False)}\n")


if __name__ == "__main__":
    sys.exit(main())
