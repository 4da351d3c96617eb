"""Command-line flags made from dataclass fields, so that an option is written down once."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import types
import typing
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from h2o_flexgen.errors import UsageError

T = TypeVar("T")

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def option(
    default: Any,
    *names: str,
    help: str,
    metavar: str | None = None,
    parse: Callable[[str], Any] | None = None,
    show: Callable[[Any], str] | None = None,
    unset: str = "none",
    **how: Any,
) -> Any:
    """A field of a dataclass that is also a flag; where `default` is a function, a call of it, and MISSING for none.

    `names` are the flag and its aliases: without any it is called as the field. `parse` and `show` turn text into the
    value and back where the field's type does not say how (bool, int, float, str, a Literal, or several texts with
    commas between); `unset` is how `--help` prints a default of None. `how` is for argparse, of what it knows more.
    """
    given = {"default_factory": default} if callable(default) else {"default": default}
    kept = {"names": names, "help": help, "metavar": metavar, "parse": parse, "show": show, "unset": unset, "how": how}
    return dataclasses.field(**given, metadata=kept)


def flag_of(name: str) -> str:
    """The flag of a field of this name, where it has no other."""
    return f"--{name.replace('_', '-')}"


def flags_of(item: dataclasses.Field[Any]) -> Sequence[str]:
    return item.metadata["names"] or (flag_of(item.name),)


def between_commas(text: str) -> tuple[str, ...]:
    """The words of "a,b": how a field is parsed that holds several."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def layer_numbers(text: str) -> tuple[int | tuple[int, ...], ...]:
    """The numbers of layers, and of layers and heads, in "0,7.2": 0 and (7, 2). UsageError where it has others."""
    try:
        found = [tuple(map(int, word.split("."))) for word in between_commas(text)]
    except ValueError:
        raise UsageError(f"{text!r} are no layers", "needed numbers of layers, or layer.head: 0,7.2") from None
    return tuple(each[0] if len(each) == 1 else each for each in found)


def with_commas(values: Iterable[object]) -> str:
    return ",".join(map(str, values))


def called(program: str = "") -> str:
    """How one starts `program`, in the way in which this process was started."""
    path = Path(sys.argv[0])
    if path.name == "h2o-flexgen":
        return f"h2o-flexgen {program}".rstrip()
    if path.parts[-2:] == ("h2o_flexgen", "__main__.py"):
        return f"python -m h2o_flexgen {program}".rstrip()
    return f"python -m h2o_flexgen.{program}".rstrip(".")


def add_arguments(
    parser: argparse.ArgumentParser,
    cls: type[Any],
    *,
    exclude: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
    title: str | None = None,
    bare: bool = False,
) -> argparse._ArgumentGroup:
    """Give `parser` a group, called `title`, with a flag for every field of the dataclass `cls` that has one.

    Fields in `exclude` get none. `defaults` replace those of the fields, in `--help` too: pass the same to
    `from_namespace`. A flag that is not typed leaves no trace in the namespace, so that `given` can tell. `bare`:
    switches take no value and have no --no-x, and `--help` names the defaults that the fields' own texts name.
    """
    group = parser.add_argument_group(title or cls.__name__)
    for item in _flagged(cls):
        if item.name in exclude:
            continue
        default = (defaults or {}).get(item.name, item.default)
        required = default is dataclasses.MISSING
        note = "required" if required else f"default: {item.show(default)}"
        said, metavar, how = (item.given[name] for name in ("help", "metavar", "how"))
        text = (said if bare else f"{said} ({note})").replace("%", "%%")
        common: dict[str, Any] = {"dest": item.dest, "default": argparse.SUPPRESS, "required": required, "help": text}
        if item.type is not bool:
            metavar = metavar or ("N" if item.type is int else None)
            group.add_argument(*item.names, type=_converter(item), metavar=metavar, **how, **common)
        elif bare:
            group.add_argument(*item.names, action="store_true", **common)
        else:
            group.add_argument(*item.names, f"--no-{item.names[0][2:]}", action=Switch, metavar="BOOL", **common)
    return group


def from_namespace(cls: type[T], namespace: argparse.Namespace, *, defaults: Mapping[str, Any] | None = None) -> T:
    """The `cls` that the parsed flags describe; other fields come from `defaults`, else from the fields' own defaults.

    Raises UsageError as `cls` does for values that make no sense, and warns as it does: of flags, not of fields.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            made = cls(**{**(defaults or {}), **given(cls, namespace)})
        except UsageError as error:
            raise error.reworded(lambda message: _in_flags(cls, message)) from None
    for warning in caught:
        warnings.warn(_in_flags(cls, str(warning.message)), warning.category, stacklevel=2)
    return made


def given(cls: type[Any], namespace: argparse.Namespace) -> dict[str, Any]:
    """The fields of `cls` whose flags were typed, and their values."""
    return {item.name: getattr(namespace, item.dest) for item in _flagged(cls) if hasattr(namespace, item.dest)}


def _in_flags(cls: type[Any], message: str) -> str:
    """`message` with flags for the fields of `cls`: "top_k=-1", "dtype is 'x'", "needed do_sample=True".

    A field whose name is an everyday word is meant where it has a value, and where it is what the message is about.
    """
    for item in _flagged(cls):
        name, flag_name = item.name, item.names[0]
        message = re.sub(rf"\b{name}=True\b", flag_name, message)
        message = re.sub(rf"\b{name}=", f"{flag_name} ", message)
        message = re.sub(rf"\b{name}\b" if "_" in name else rf"^{name}(?= is | has |, )", flag_name, message)
    return message


def parse_bool(text: str) -> bool:
    """True for true, 1, yes, on, False for false, 0, no, off, in any case; UsageError for anything else."""
    word = text.strip().lower()
    if word not in _TRUE + _FALSE:
        raise UsageError(f"{text!r} is neither true nor false", f"needed one of {', '.join(_TRUE + _FALSE)}")
    return word in _TRUE


class _Flagged(NamedTuple):
    """One field with its flag: `type` is the field's own, without None; `given` to `option` was all the rest."""

    name: str
    names: Sequence[str]
    type: Any
    default: Any
    given: Mapping[str, Any]

    @property
    def dest(self) -> str:
        return self.names[0].lstrip("-").replace("-", "_")

    @property
    def parse(self) -> Any:
        """From the text of a flag to its value."""
        usual: dict[Any, Any] = {bool: parse_bool, tuple: between_commas, Literal: str}
        return self.given["parse"] or usual.get(typing.get_origin(self.type) or self.type, self.type)

    def show(self, value: Any) -> str:
        if value is None:
            return str(self.given["unset"])
        if self.given["show"]:
            return str(self.given["show"](value))
        if isinstance(value, tuple):
            return with_commas(value)
        return str(value).lower() if isinstance(value, bool) else str(value)


_known: dict[type[Any], tuple[_Flagged, ...]] = {}


def _flagged(cls: type[Any]) -> tuple[_Flagged, ...]:
    """The fields of `cls` that have flags: read once, as type hints are slow to evaluate."""
    if cls not in _known:
        _known[cls] = tuple(_read(cls))
    return _known[cls]


def _read(cls: type[Any]) -> Iterator[_Flagged]:
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        if "names" in item.metadata:
            default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
            yield _Flagged(item.name, flags_of(item), without_none(hints[item.name]), default, item.metadata)


def without_none(hint: Any) -> Any:
    """`int` for `int | None`."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        kinds = [part for part in typing.get_args(hint) if part is not types.NoneType]
        hint = kinds[0] if len(kinds) == 1 else hint  # of several, `parse` says which
    return hint


def _converter(item: _Flagged) -> Callable[[str], Any]:
    """`item.parse` in a form whose complaints argparse shows."""

    def convert(text: str) -> Any:
        try:
            return item.parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    convert.__name__ = getattr(item.parse, "__name__", item.name)
    return convert


class Switch(argparse.Action):
    """`--x`, `--no-x`, and FlexGen's `--x true`."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs="?", **options)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        negated = option_string is not None and option_string.startswith("--no-")
        if negated and values is not None:
            raise argparse.ArgumentError(self, f"{option_string} takes no value, found {values!r}")
        try:
            setattr(namespace, self.dest, not negated if values is None else parse_bool(str(values)))
        except UsageError as error:
            raise argparse.ArgumentError(self, str(error)) from None
