"""`python -m h2o_flexgen.serve`: OpenAI's files and batches on the own machine, which a kill does not end.

    python -m h2o_flexgen.serve --model opt-30b --hh-ratio 0.2 --port 8000

Messages go to stderr, nothing to stdout.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from h2o_flexgen.cli.program import exit_on_errors, leaving_at_once, look_up_model
from h2o_flexgen.cli.serve.arguments import parse_serve, require_libraries


def main(argv: Sequence[str] | None = None) -> int:
    with exit_on_errors() as outcome:
        arguments = parse_serve(argv)
        require_libraries()
        for jobs in arguments.models.values():
            look_up_model(jobs.engine)
        with leaving_at_once():  # torch takes seconds to import
            from h2o_flexgen.cli.serve.service import run_service
        outcome.stopped = 0  # who serves until told to stop, and stops, has done what was asked
        run_service(arguments)
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())
