r"""`python -m h2o_flexgen.lm_eval`: EleutherAI's lm-evaluation-harness, which knows this engine as a model.

    python -m h2o_flexgen.lm_eval run --model h2o_flexgen --model_args pretrained=demo,eviction=h2o,hh_ratio=0.2 \
        --tasks h2o_recall --include_path configs/lm-eval

All words behind it are the harness's own: `run --help` lists them. Needs the extra `lm-eval`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from h2o_flexgen.cli.program import exit_on_errors, write_result
from h2o_flexgen.errors import H2OFlexGenError, UsageError


def main(argv: Sequence[str] | None = None) -> int:
    asked = list(sys.argv[1:] if argv is None else argv)
    if asked in (["--help"], ["-h"]):
        with exit_on_errors() as outcome:
            write_result(str(__doc__))  # None with python -OO
        return outcome.code
    with exit_on_errors() as outcome:
        try:
            import_module("lm_eval.models")  # before ours: the harness fills an empty registry only
            harness = import_module("lm_eval.__main__")
            import_module("h2o_flexgen.evaluation.lm_eval")
        except ImportError as error:
            raise UsageError(
                f"the lm-evaluation-harness cannot be imported: {error}",
                "needed the extra lm-eval",
                "pip install 'h2o_flexgen[lm-eval]'",
            ) from None
    if outcome.code:
        return outcome.code
    sys.argv = [sys.argv[0], *asked]
    try:  # beside the frame of our programs: the harness forks, and its children keep what signals do
        harness.cli_evaluate()
    except H2OFlexGenError as error:
        with exit_on_errors() as outcome:
            raise error
    except ValueError as error:
        if not str(error).startswith("Tasks not found"):  # as the harness says it
            raise
        with exit_on_errors() as outcome:
            raise UsageError(str(error), "needed names that `ls tasks` lists, or --include_path") from None
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())
