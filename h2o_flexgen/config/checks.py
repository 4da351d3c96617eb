"""Checks that the configuration classes share. All of them raise UsageError."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from h2o_flexgen.config.flags import flags_of, without_none
from h2o_flexgen.errors import UsageError
from h2o_flexgen.registry import suggestion

T = TypeVar("T")


def whole(value: object, label: str, minimum: int) -> int:
    """`value` as an int that is at least `minimum`; True and 2.0 are not ints here. `label` names the flag or field."""
    number = _as(int, value, "__index__")  # numpy's integers count too
    if number is None:
        raise UsageError(f"{label} is {shown(value)}", f"needed a whole number, at least {minimum}")
    if number < minimum:
        raise UsageError(f"{label} is {number}", f"needed at least {minimum}")
    return number


def truth(value: object, label: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{label} is {shown(value)}", "needed true or false")
    return value


def share(value: object, label: str) -> float:
    """`value` as a float in (0, 1]; nan, zero and everything outside raise."""
    return number(value, label, 0, 1, above=True, needed="needed a number above 0 and at most 1")


def _as(kind: Callable[[Any], T], value: object, method: str) -> T | None:
    """`value` as a `kind`, None where it is none: True is no number, nor is an array of several."""
    if isinstance(value, bool) or not hasattr(type(value), method):
        return None
    try:
        return kind(getattr(value, method)())
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def number(
    value: object, label: str, low: float, high: float = math.inf, *, above: bool = False, needed: str = ""
) -> float:
    """`value` as a finite float from `low`, or `above` it, to `high`; True is none. `needed`: the same in words."""
    real = _as(float, value, "__float__")
    if real is None or not low <= real <= high or real == math.inf or (above and real == low):
        first, last = f"{'above' if above else 'from'} {low:g}", f" to {high:g}" if high < math.inf else ""
        raise UsageError(f"{label} is {shown(value)}", needed or f"needed a number {first}{last}")
    return real


def one_of(value: T, label: str, allowed: Collection[object]) -> T:
    """`value`; UsageError with a suggestion where it is not among those `allowed`."""
    if not among(value, allowed):
        words = [str(each) for each in allowed]
        raise UsageError(
            f"{label} is {shown(value)}", f"needed one of {', '.join(words)}", suggestion(str(value), words)
        )
    return value


def among(value: object, allowed: Collection[object]) -> bool:
    """Whether `value` is one of those `allowed`; arrays and lists, which `in` may raise an error for, are not."""
    try:
        return value in allowed
    except (TypeError, ValueError, RuntimeError):
        return False


def iterable(value: object, label: str, needed: str) -> Iterable[Any]:
    """`value`, if it can be gone through: UsageError for anything else, and for a text."""
    with suppress(TypeError):  # a tensor without dimensions has the method, too
        if not isinstance(value, str) and iter(value):  # type: ignore[call-overload]
            return value  # type: ignore[return-value]
    raise UsageError(f"{label} is {shown(value)}", needed)


def token_ids(value: object, label: str) -> tuple[int, ...]:
    """`value` as a tuple of numbers from 0 on."""
    given = iterable(value, label, "needed a list of token ids")
    return tuple(whole(token, f"a token of {label}", 0) for token in given)


def is_text(text: str) -> bool:
    """Whether `text` can be encoded: halves of surrogate pairs cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def whole_text(text: str, where: str) -> str:
    """`text`; UsageError if it cannot be encoded."""
    if not is_text(text):
        raise UsageError(f"{where} holds half a surrogate pair, which is not text", "needed Unicode text")
    return text


def shown(value: object) -> str:
    """`value` in a message: its first characters where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def no_number(word: str) -> float:
    """A `parse_constant`: Python's reader takes NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{word} is not a JSON number")


def json_fault(error: Exception) -> str:
    """The error in a line of JSON, with its column; Python would count lines within it."""
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    return f"{error.msg}: column {min(error.pos, len(error.doc.rstrip())) + 1}"


def json_file(path: str | Path, called: str, needed: str) -> Any:
    """The value of a file of JSON. UsageError, naming the file as it is `called`, where it cannot be read as such."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{called} cannot be read: {error.strerror}", "needed a readable file") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{called} is not JSON: {error}", needed) from None


def known_keys(data: object, cls: type[Any], *, derived: tuple[str, ...] = ()) -> dict[str, Any]:
    """`data` as keyword arguments of the dataclass `cls`; a missing or an unknown key raises.

    `derived` keys may be there but are left out of the result.
    """
    if not isinstance(data, Mapping):
        raise UsageError(f"a {cls.__name__} cannot be made from {shown(data)}", "needed a JSON object")
    fields = {item.name: item for item in dataclasses.fields(cls) if item.init}
    for key in data:
        if key not in fields and key not in derived:
            raise UsageError(
                f"{cls.__name__} has no key {key!r}",
                f"needed keys among {', '.join(fields)}",
                suggestion(str(key), fields),
            )
    missing = [
        name
        for name, item in fields.items()
        if name not in data and item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UsageError(f"{cls.__name__} lacks the keys {', '.join(missing)}")
    return {key: value for key, value in data.items() if key in fields}


def given_as(cls: type[T], asked: Any, name: str, needed: str) -> T | None:
    """`asked`, if that is a `cls` or None, or what the JSON object of one describes; UsageError for anything else."""
    if asked is None or isinstance(asked, cls):
        return asked
    if not isinstance(asked, Mapping):
        raise UsageError(f"{name} is {shown(asked)}", f"needed {needed}")
    return cls(**known_keys(asked, cls))


Check = Callable[[Any, str], Any]
"""From a value, and what messages call it, to the value that is kept; UsageError where there is none."""
Count = Annotated[int, functools.partial(whole, minimum=1)]
Natural = Annotated[int, functools.partial(whole, minimum=0)]
Ratio = Annotated[float, share]
Positive = Annotated[float, functools.partial(number, low=0, above=True)]
Seconds = Annotated[float, functools.partial(number, low=0, needed="needed seconds, at least 0")]
TokenIds = Annotated[tuple[int, ...], token_ids]


class Checked:
    """Mixin of frozen dataclasses whose types say what fields may hold: Annotated types a Check, Literal types their
    values, bool True or False; all others are not looked at. UsageError also for an unknown field, instead of
    Python's TypeError."""

    CALLED: ClassVar[str] = ""
    """How messages call a field, "{}" being its name; by its flag where they say nothing else, and it has one."""
    FIELD: ClassVar[str] = ""
    """How messages call any field."""

    def __new__(cls, *values: Any, **options: Any) -> Self:
        names: Mapping[str, Any] = cls.__dataclass_fields__  # type: ignore[attr-defined]
        for name in options:
            if name not in names:
                found = f"{name!r} is not {cls.FIELD or f'an option of {cls.__name__}'}"
                raise UsageError(found, f"needed one of {', '.join(names)}", suggestion(name, names))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, label, check, optional in _checks(type(self)):  # type: ignore[arg-type]
            value = getattr(self, name)
            if not (optional and value is None):
                object.__setattr__(self, name, check(value, label))


@functools.cache
def _checks(cls: type[Any]) -> list[tuple[str, str, Check, bool]]:
    """The fields of `cls` that are checked, how messages call each, and whether it may be None."""
    hints, found = typing.get_type_hints(cls, include_extras=True), list[tuple[str, str, Check, bool]]()
    for item in dataclasses.fields(cls):
        kind, check = without_none(hints[item.name]), None
        if typing.get_origin(kind) is Annotated:
            check = kind.__metadata__[0]
        elif typing.get_origin(kind) is Literal:
            check = functools.partial(one_of, allowed=typing.get_args(kind))
        elif kind is bool:
            check = truth
        if check is not None:
            label = cls.CALLED.format(item.name) or (flags_of(item)[0] if "names" in item.metadata else item.name)
            found.append((item.name, label, check, kind is not hints[item.name]))
    return found


class KeptAsJson:
    """Mixin of dataclasses that are kept as JSON objects: of their fields, and of the properties in DERIVED."""

    DERIVED: ClassVar[tuple[str, ...]] = ()

    def to_json(self) -> dict[str, Any]:
        """Every field, and what follows from them, as plain JSON values."""
        data: dict[str, Any] = plain(self)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The object whose `to_json` is `data`; unknown keys raise UsageError with a suggestion."""
        return made_of(cls, data)


def plain(value: Any, where: str = "", owner: str = "") -> Any:
    """A copy of `value` made of dict, list, str, bool, int, float and None; of a dataclass with one field the value of
    that. Anything else, and a number that is not finite, raises UsageError: `where` it is, of which `owner`."""
    if value is None or isinstance(value, str | bool):
        return value
    if dataclasses.is_dataclass(value):
        names = [item.name for item in dataclasses.fields(value)]
        if len(names) == 1:
            return plain(getattr(value, names[0]), where, owner)
        owner = owner or type(value).__name__
        value = {name: getattr(value, name) for name in (*names, *getattr(value, "DERIVED", ()))}
    if isinstance(value, Mapping):
        within = f"{where}." if where else ""
        return {str(key): plain(item, f"{within}{key}", owner) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{position}]", owner) for position, item in enumerate(value)]
    if hasattr(type(value), "__index__"):
        return int(value)
    if not hasattr(type(value), "__float__"):
        raise UsageError(f"{where} of a {owner} is a {type(value).__name__}", "needed a plain JSON value")
    if not math.isfinite(value):
        raise UsageError(f"{where} of a {owner} is {float(value)}", "needed a finite number")
    return float(value)


def made_of(cls: type[T], data: Any, *, derived: tuple[str, ...] = ()) -> T:
    """The `cls` of which `plain` made `data`, by types of its fields; `derived` as in `known_keys`, besides DERIVED."""
    kinds = _kinds(cls)  # type: ignore[arg-type]
    if len(kinds) == 1:
        return cls(data)  # type: ignore[call-arg]
    given = known_keys(data, cls, derived=(*derived, *getattr(cls, "DERIVED", ())))
    return cls(**{name: _made(kinds[name], value) for name, value in given.items()})


@functools.cache
def _kinds(cls: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {item.name: hints[item.name] for item in dataclasses.fields(cls)}


def _made(kind: Any, value: Any) -> Any:
    if isinstance(kind, UnionType) and isinstance(value, list | Mapping):
        choices = typing.get_args(kind)
        kind = next((each for each in choices if typing.get_args(each) or dataclasses.is_dataclass(each)), Any)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return made_of(kind, value)
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return tuple(_made(parts[0], item) for item in value)
    if typing.get_origin(kind) is Mapping and parts[1] not in (int, float, str, Any):
        return {key: _made(parts[1], item) for key, item in value.items()}
    return value
