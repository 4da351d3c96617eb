"""Files that a program writes at its end."""

from __future__ import annotations

import os
from pathlib import Path

from h2o_flexgen.errors import UsageError


def output_file(flag: str, text: str | None, *, keep: bool) -> Path | None:
    """The path typed for `flag`, found out now, not after hours, where it cannot be written.

    UsageError for a folder, a missing folder and a lack of permission, and with `keep` for a file that is there
    already: nothing is overwritten unasked. What is no regular file (a pipe, /dev/stdout) may be there.
    """
    if text is None:
        return None
    path, needed = Path(text), "needed a file that can be written"
    if path.is_dir():
        raise UsageError(f"{flag} {path}: this is a folder", needed)
    if not path.parent.is_dir():
        raise UsageError(
            f"{flag} {path}: the folder {path.parent} is not there", needed, "where there is no folder, none is made"
        )
    if keep and path.is_file():
        raise UsageError(
            f"{flag} {path} exists", "nothing is overwritten unasked", "name another file, or add --overwrite"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{flag} {path}: permission denied", needed)
    return path
