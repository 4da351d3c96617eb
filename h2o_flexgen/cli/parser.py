"""The argument parser of every program, which helps with typing mistakes. `run`, `batch`, `serve`, `search` and
`calibrate` read the environment too.

Every flag can be given as an environment variable there: --gpu-batch-size 8 is H2O_FLEXGEN_GPU_BATCH_SIZE=8.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

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


class Parser(argparse.ArgumentParser):
    """An argument parser that takes no abbreviations and suggests the flag that an unknown one resembles.

    A mistake is told in two lines: dozens of flags in a usage text would scroll it off the screen. Messages name a flag
    of several spellings as it was typed, and the variable where it was set in the environment.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._words: set[str] = set()
        self._origins: dict[str, str] = {}
        """The variables of the environment that were read, as one would set them, and the flag of each."""

    @contextlib.contextmanager
    def parsed(
        self, argv: Sequence[str] | None, environ: Mapping[str, str] = MappingProxyType({})
    ) -> Iterator[argparse.Namespace]:
        """The values of `argv` (None: of the command line) and of `environ`, and as `notes` sentences on variables that
        look misspelt. Exits (2) where argparse objects.

        Within it a UsageError names flags as they were typed, and where they were set if that was elsewhere.
        """
        argv = sys.argv[1:] if argv is None else list(argv)
        added = _environment_arguments(self, argv, environ)
        flags = {name: words[0].partition("=")[0] for name, words in added.items() if words}
        self._origins = {f"{name}={environ[name]}": flag for name, flag in flags.items()}
        args = self.parse_args([*(word for words in added.values() for word in words), *argv])
        args.notes = _misspelt(self, environ)
        try:
            yield args
        except UsageError as error:
            told = error.reworded(self._as_typed)
            change = ". ".join(part for part in (told.change, self._origin(str(told))) if part)
            raise UsageError(told.found, told.needed, change) from None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's own, which `parse_args` calls."""
        self._words = {word.partition("=")[0] for word in (sys.argv[1:] if args is None else args)}
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print `message` to stderr and exit with code 2."""
        prefix, named = "unrecognized arguments: ", re.match(r"argument (\S+): ", message)
        if named:
            # argparse names all spellings: "argument --gen-len/--max-new-tokens/-n: invalid int value: 'x'".
            spellings = named[1].split("/")
            typed = next((name for name in spellings if name in self._words), spellings[0])
            told = self._as_typed(message.removeprefix(named[0]))
            said = told if told.startswith(f"{typed} ") else f"{typed}: {told}"
        else:
            said = message
        if message.startswith(prefix):
            unknown = message.removeprefix(prefix).split()[0].partition("=")[0]
            hints = [suggestion(unknown, self._option_string_actions)]
            if not unknown.startswith("-") and "--prompt" in self._option_string_actions:
                hints.insert(0, "a prompt is given with --prompt TEXT")
            said = "\n  ".join([said, *filter(None, hints)])
        origin = self._origin(message)
        said = f"{said}\n  {origin}" if origin else said
        self.exit(2, f"error: {said}\n  {self.prog} --help lists the flags\n")

    def _as_typed(self, message: str) -> str:
        for action in filter(lambda each: each.option_strings, self._actions):
            first, *aliases = action.option_strings
            typed = [alias for alias in aliases if alias in self._words and not alias.startswith("--no-")]
            if typed and first not in self._words:
                message = re.sub(rf"(?<![\w-]){first}\b(?!-)", typed[-1], message)
        return message

    def _origin(self, message: str) -> str:
        """Where the flags that `message` is about were set, if that was in the environment."""
        set_there = [setting for setting, flag in self._origins.items() if self._is_about(message, flag)]
        return f"from the environment: {', '.join(set_there)}" if set_there else ""

    def _is_about(self, message: str, flag: str) -> bool:
        names = "|".join(map(re.escape, self._option_string_actions[flag].option_strings))
        return re.search(rf"(?<![\w-])(?:{names})\b(?!-)", message) is not None


def _environment_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str], environ: Mapping[str, str]
) -> dict[str, list[str]]:
    """The additions of the environment to `argv`, by variable; an empty variable says nothing.

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


def _misspelt(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that looks like one of ours but is unknown."""
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
    flag = next(option for option in action.option_strings if option.startswith("--"))
    if action.nargs == "+" or (isinstance(action.nargs, int) and action.nargs > 0):
        return [flag, *value.split()]
    if action.nargs == 0:
        try:
            return [flag] if parse_bool(value) else []
        except UsageError as error:
            raise UsageError(f"{name}: {error.found}", error.needed) from None
    return [f"{flag}={value}"]


def at_least_one(text: str) -> int:
    """A whole number that counts something, as argparse wants its types."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: needed a whole number of at least 1")
    return int(text)
