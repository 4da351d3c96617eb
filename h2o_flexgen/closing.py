"""What is closed at the end of a `with`."""

from __future__ import annotations

from typing import Self


class Closing:
    """Mixin of context managers that end with `close`."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
