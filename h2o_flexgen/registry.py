"""Names that users type, looked up with help for the ones mistyped."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from h2o_flexgen.errors import H2OFlexGenError, UsageError

T = TypeVar("T")


def suggestion(word: str, known: Iterable[str]) -> str:
    """`did you mean 'h2o'?` for a `word` that begins one of `known` or is close to one, else an empty string."""
    lowered = {name.lower(): name for name in known}
    begun = sorted((name for name in lowered if len(word) > 3 and name.startswith(word.lower())), key=len)
    close = begun or difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    return f"did you mean {lowered[close[0]]!r}?" if close else ""


class Registry(Generic[T]):
    """A mapping from names to things of one `kind` ("eviction policy"), in the order of registration.

    `error` is the exception that an unknown name raises.
    """

    def __init__(self, kind: str, error: type[H2OFlexGenError] = UsageError) -> None:
        self.kind, self._error = kind, error
        self._items: dict[str, T] = {}

    def register(self, name: str, item: T) -> T:
        """Add `item` and return it; a name that is taken raises ValueError."""
        if name in self._items:
            raise ValueError(f"the {self.kind} {name!r} is registered twice")
        self._items[name] = item
        return item

    @contextmanager
    def lent(self, name: str, item: T) -> Iterator[None]:
        """`item` is registered until the end of the block."""
        self.register(name, item)
        try:
            yield
        finally:
            del self._items[name]

    def get(self, name: str) -> T:
        """The item called `name`; an unknown one raises `error` with the list of names and the closest of them."""
        if not isinstance(name, str) or name not in self._items:
            raise self._error(
                f"unknown {self.kind} {str(name)[:60]!r}",
                f"needed one of {', '.join(self.names())}",
                suggestion(str(name), self.names()),
            )
        return self._items[name]

    def names(self) -> tuple[str, ...]:
        return tuple(self._items)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._items
