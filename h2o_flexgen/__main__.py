"""`h2o-flexgen PROGRAM ...`, and `python -m h2o_flexgen PROGRAM ...`: every program of the package under one name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import h2o_flexgen
from h2o_flexgen.cli.program import exit_on_errors, leaving_at_once, write_result
from h2o_flexgen.config.flags import called
from h2o_flexgen.errors import UsageError
from h2o_flexgen.registry import suggestion

PROGRAMS = {
    "run": "complete prompts with a model that need not fit in memory",
    "batch": "answer a file of requests, such as OpenAI's batch files; a job that is killed goes on where it was",
    "serve": "answer OpenAI's files, batches, chat and completions on this machine; a kill loses nothing",
    "demo": "the demo model with the full KV cache and with an evicted one, side by side",
    "search": "find the fastest plan for a model on a machine, without running it",
    "calibrate": "measure how fast this machine is, for the shapes of a model",
    "evaluate": "measure what eviction costs a model, in recall and in perplexity",
    "report": "make one page of what runs did: charts of records and traces, in a file that loads nothing",
    "bench": "compare this engine with others on the same work",
    "doctor": "say what this machine offers, what is off and why, as a bug report needs it",
}
"""The modules of the package that are programs, and what each does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program that the first word names, with the words after it; returns its exit code."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in PROGRAMS:
        with leaving_at_once():
            program = import_module(f"h2o_flexgen.{name}")
        code: int = program.main(rest)
        return code
    with exit_on_errors() as outcome:
        command = called()
        if name in ("-h", "--help", "help"):
            rows = "\n".join(f"  {name:{max(map(len, PROGRAMS))}}  {text}" for name, text in PROGRAMS.items())
            write_result(f"usage: {command} PROGRAM [flags]\n\n{rows}\n\n{command} PROGRAM --help lists its flags.\n")
        elif name in ("-V", "--version"):
            write_result(f"h2o-flexgen {h2o_flexgen.__version__}\n")
        elif name.startswith("-"):
            raise UsageError(f"the program's name comes before {name}", f"needed one of {', '.join(PROGRAMS)}")
        else:
            near = suggestion(name, PROGRAMS)
            raise UsageError(f"{name!r} is not a program", f"needed one of {', '.join(PROGRAMS)}", near)
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())
