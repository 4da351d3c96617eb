"""`python -m h2o_flexgen.batch`: a file of requests in, a file of results out, which a killed job goes on with.

    python -m h2o_flexgen.batch -i requests.jsonl -o results.jsonl --model opt-30b --hh-ratio 0.2

What was done goes to stdout, whose last line is one JSON object unless it is a terminal; messages go to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from h2o_flexgen.cli.batch.arguments import parse_batch
from h2o_flexgen.cli.program import exit_on_errors, leaving_at_once, look_up_model


def main(argv: Sequence[str] | None = None) -> int:
    with exit_on_errors() as outcome:
        arguments = parse_batch(argv)
        from h2o_flexgen.jobs.source import Source

        Source(arguments.input, arguments.format)  # UsageError where there is none
        look_up_model(arguments.engine)
        with leaving_at_once():  # torch takes seconds to import
            from h2o_flexgen.cli.batch.job import run_batch
        outcome.code = run_batch(arguments, outcome)
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())
