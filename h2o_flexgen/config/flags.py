"""Command-line flags made from dataclass fields, so that an option is written down once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def flag(
    *names: str,
    help: str,
    metavar: str | None = None,
    parse: Callable[[str], Any] | None = None,
    show: Callable[[Any], str] | None = None,
    unset: str = "none",
) -> dict[str, Any]:
    """Metadata of a dataclass field that is also a flag: `field(default=1, metadata=flag("--gpu-batch-size", ...))`.

    `names` are the flag and its aliases. `parse` and `show` turn text into the value and back where the field's type
    (bool, int, float or str) does not say how; `unset` is how `--help` prints a default of None.
    """
    return {"flags": names, "help": help, "metavar": metavar, "parse": parse, "show": show, "unset": unset}
