"""Files of requests for tests, and their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def request(name: str | None, fields: dict[str, Any], **changes: Any) -> str:
    """A line of a batch file for the tiny model, whose folder is called model."""
    line = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"model": "model", **fields}}
    return json.dumps({**line, **changes})


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def results(path: Path, name: str = "custom_id") -> dict[Any, dict[str, Any]]:
    """The lines of a file of results by their names, each of which stands once and is whole."""
    text = path.read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    lines = [json.loads(line) for line in text.split("\n")[:-1]]
    found = {line[name]: line for line in lines}
    assert len(found) == len(lines), "a result stands twice"
    return found


def timeless(found: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Results without the time when their job began."""
    for line in found.values():
        line["response"]["body"].pop("created", None)
    return found
