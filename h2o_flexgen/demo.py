"""`python -m h2o_flexgen.demo`: the demo model on the same prompts, with the full cache and with an evicted one.

Texts and figures go to stdout side by side, everything else to stderr. The last line of stdout is one JSON object,
unless stdout is a terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from h2o_flexgen.cli.parser import Parser, at_least_one
from h2o_flexgen.cli.program import add_json, look_up_model, print_error, program, write_json, write_result
from h2o_flexgen.cli.prompts import demo_prompts
from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.flags import add_arguments, called, from_namespace, given
from h2o_flexgen.config.reports.quality import SideBySide
from h2o_flexgen.errors import ContextLengthError, UsageError
from h2o_flexgen.evaluation.settings import Question, read_cases
from h2o_flexgen.reporting.tables import answers_text, evicted_name, figures_table, warnings_text

DEFAULTS: dict[str, Any] = {"name": "h2o", "ratio": 0.2}
QUESTIONS = {"used": 2, "once": 1}
"""Long recall prompts by kind: facts asked for before and told once, far above the question."""

FOOT = """The budget is a share of each sequence: it leaves short prompts a few tokens, long ones hundreds.
What each share and policy costs:"""


@program
def main(argv: Sequence[str] | None) -> int:
    with _parser().parsed(argv) as args:
        asked = given(EvictionConfig, args)
        defaults = {"name": "h2o"} if asked.keys() & {"budget", "bytes"} or asked.get("name") == "full" else DEFAULTS
        eviction = from_namespace(EvictionConfig, args, defaults=defaults)
        look_up_model(from_namespace(EngineConfig, args))
    engine = given(EngineConfig, args)
    prompts: list[tuple[str, str | None]] = [(prompt, None) for prompt in demo_prompts()]
    prompts += [(case.prompt, case.answer) for case in _questions()]
    # torch takes seconds to import: --help and refusals do without it.
    from h2o_flexgen.evaluation.quality import side_by_side

    def stage(name: str) -> None:
        print_error(f"running {len(prompts)} prompts: {name} ...")

    try:
        result = side_by_side(prompts, eviction, args.gen_len, engine.pop("model", "demo"), engine, stage)
    except ContextLengthError as error:
        raise UsageError(error.found, error.needed, "lower --gen-len, or name a --model with a longer one") from None
    write_result(_text(result))
    write_json(json.dumps(result.to_json(), allow_nan=False), args.json)
    return 0


def _questions() -> list[Question]:
    """A few of the long prompts, of every kind that is wanted."""
    # Codes only: an answer of one token comes from the prompt's own attention, whatever is evicted after it.
    codes = [case for case in read_cases(None) if case.answer.isdigit()]
    return [case for kind, count in QUESTIONS.items() for case in [c for c in codes if c.kind == kind][:count]]


def _text(result: SideBySide) -> str:
    full, name = result.full, evicted_name(result)
    before, once = QUESTIONS["used"], QUESTIONS["once"]
    head = (
        f"{full.model}, {full.dtype} on {full.device}: {full.sequences} prompts of up to {full.prompt_len} tokens, "
        f"{full.gen_len} new ones at most,\nwith the full cache and with {name}. Only each prompt's end is shown.\n"
        f"The last {before + once} ask for a fact that stands hundreds of tokens above:\n"
        f"{before} of them were asked for it before, {once} was not."
    )
    table = f"{figures_table(result)}\n{warnings_text(result)}"
    return f"{head}\n\n{answers_text(result)}\n\n{FOOT} {called('evaluate')}\n\n{table}"


def _parser() -> Parser:
    parser = Parser(
        prog=called("demo"),
        description="Runs the demo prompts twice, with the full cache and with an evicted one, side by side.",
    )
    parser.add_argument("--gen-len", type=at_least_one, default=32, metavar="N", help="most new tokens (default: 32)")
    add_arguments(parser, EvictionConfig, title="KV cache and eviction", defaults=DEFAULTS)
    add_json(parser)
    # The demo's prompts are text, and random weights give none.
    add_arguments(parser, EngineConfig, title="model and machine", exclude=("weights",))
    return parser


if __name__ == "__main__":
    sys.exit(main())
