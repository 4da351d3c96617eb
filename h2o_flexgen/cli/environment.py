"""Every flag can also be given as an environment variable: --gpu-batch-size 8 is H2O_FLEXGEN_GPU_BATCH_SIZE=8."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

from h2o_flexgen.config.flags import parse_bool
from h2o_flexgen.errors import UsageError
from h2o_flexgen.registry import suggestion

PREFIX = "H2O_FLEXGEN_"
_NO_FLAGS = {f"{PREFIX}{name}" for name in ("DEBUG", "NATIVE", "TRITON", "GRAPHS", "MEMLOCK")}
_ALTERNATIVES = (
    {"--hh-ratio", "--kv-budget", "--compression-ratio", "--heavy-ratio"},
    {"--recent", "--recent-ratio"},
    {"--prompt", "--prompts", "--prompt-len"},
    {"--percent", "--weights-placement"},
    {"--percent", "--cache-placement"},
    {"--percent", "--hidden-placement"},
)


def environment_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str], environ: Mapping[str, str]
) -> dict[str, list[str]]:
    """What the environment adds to `argv`, by variable; an empty variable says nothing.

    A flag that was typed wins, and one that says the same thing otherwise: --kv-budget over H2O_FLEXGEN_HH_RATIO.
    UsageError where a switch is neither true nor false.
    """
    words = {argument.partition("=")[0] for argument in argv}
    spellings = [{*action.option_strings} for action in parser._actions]
    typed = set().union(*(options for options in spellings if options & words))
    found = {}
    for name, action in _variables(parser):
        value, options = environ.get(name, ""), {*action.option_strings}
        rivals = set().union(*(flags for flags in _ALTERNATIVES if flags & options))
        if value and not typed & (options | rivals):
            found[name] = _as_typed(action, name, value)
    return found


def misspelt(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that looks like one of ours and is none."""
    known = {name for name, _ in _variables(parser)} | _NO_FLAGS
    words = [name.removeprefix(PREFIX) for name in known]
    unknown = [name for name in environ if name.startswith(PREFIX) and name not in known]
    hints = {name: suggestion(name.removeprefix(PREFIX), words) for name in unknown}
    return [f"{name} is set, and no flag is called so: {hint}" for name, hint in hints.items() if hint]


def _variables(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """A variable for every spelling of every flag, but for the --no-x of a switch, which is X=false."""
    for action in parser._actions:
        options = [option for option in action.option_strings if option.startswith("--")]
        if "--help" in options or action.help is argparse.SUPPRESS:
            continue
        for option in options:
            if option == options[0] or not option.startswith("--no-"):
                yield PREFIX + option[2:].replace("-", "_").upper(), action


def _as_typed(action: argparse.Action, name: str, value: str) -> list[str]:
    """The arguments that one would type for a variable's value."""
    flag = next(option for option in action.option_strings if option.startswith("--"))
    if isinstance(action.nargs, int) and action.nargs > 0:
        return [flag, *value.split()]
    if action.nargs == 0:
        try:
            return [flag] if parse_bool(value) else []
        except UsageError as error:
            raise UsageError(f"{name} is {error.found}", error.needed) from None
    return [f"{flag}={value}"]
