"""`python -m h2o_flexgen.run`: prompts in, text and a report out.

    python -m h2o_flexgen.run --prompt "Once upon a time"
    python -m h2o_flexgen.run --model opt-30b --hh-ratio 0.2 --prompts prompts.txt --output answers.jsonl

Answers go to stdout (or --output), everything else to stderr. The last line of stdout is one JSON object, unless stdout
is a terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack

from h2o_flexgen.cli.arguments import given_prompts, parse_arguments
from h2o_flexgen.cli.program import exit_on_errors, leaving_at_once, look_up_model


def main(argv: Sequence[str] | None = None) -> int:
    with exit_on_errors() as outcome:
        arguments = parse_arguments(argv)
        from h2o_flexgen.cli.answers import AnswerFile, AnswerPrinter

        every = given_prompts(arguments)
        with ExitStack() as stack:
            answers: AnswerFile | AnswerPrinter = AnswerPrinter(as_json=str(arguments.output) == "-")
            if arguments.output is not None and str(arguments.output) != "-":
                answers = stack.enter_context(AnswerFile(arguments.output, arguments.overwrite))
            look_up_model(arguments.engine)
            # torch takes seconds to import: --help and refusals do without it.
            with leaving_at_once(stack):
                from h2o_flexgen.cli.generate import generate
            outcome.code = generate(arguments, every, answers)
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())
