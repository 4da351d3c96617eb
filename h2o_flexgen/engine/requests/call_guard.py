"""One call of an engine at a time: calls share the weights that stream, and a plan may place all of them anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from h2o_flexgen.errors import UsageError


class CallGuard:
    """Whose turn it is to run on an engine. Not thread safe, as the engine is not."""

    def __init__(self) -> None:
        self._holder: object | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Within, the engine belongs to this call: another one gets a UsageError, and changes nothing."""
        if self._holder is not None:
            raise UsageError(
                "a stream of this engine is still under way",
                change="finish it or close() it first, or use another LLM",
            )
        mine = self._holder = object()
        try:
            yield
        finally:
            # Of a stream that outlived `end`, another call may have the turn by now.
            if self._holder is mine:
                self._holder = None

    def end(self) -> None:
        """The engine is closed: it belongs to no call any more, whatever is under way."""
        self._holder = None
