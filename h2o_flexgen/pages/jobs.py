"""The page of a service: its batches, how far they are, how long that will take, and their results. It loads nothing,
runs no script, and asks for itself again every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from h2o_flexgen.pages.page import asset, filled, hashed

RELOADED_EVERY = 5
_SHOWN = 200


class JobsPage(NamedTuple):
    """A page, and the policy that goes with it."""

    html: str
    policy: str


def jobs_page(
    models: Sequence[str],
    batches: Sequence[Mapping[str, Any]],
    left: Callable[[Mapping[str, Any]], str],
    files: Mapping[str, Mapping[str, Any]],
) -> JobsPage:
    """The newest batches of a service for `models`. `left`: how long a batch still takes, in words."""
    newest = sorted(batches, key=lambda batch: int(batch["_number"]), reverse=True)[:_SHOWN]
    style = asset("page.css") + asset("jobs.css")
    html = filled(
        "jobs.html",
        {"style": style},
        models=models,
        rows=[_row(batch, left(batch), files) for batch in newest],
        left_out=len(batches) - len(newest),
        every=RELOADED_EVERY,
    )
    return JobsPage(html, f"default-src 'none'; style-src {hashed(style)}; base-uri 'none'; frame-ancestors 'none'")


def _row(batch: Mapping[str, Any], left: str, files: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    counts = batch["request_counts"]
    names = [(word, batch[f"{word}_file_id"]) for word in ("output", "error")]
    errors = (batch["errors"] or {"data": []})["data"]
    return {
        "id": batch["id"],
        "model": batch["model"],
        "file": files[batch["input_file_id"]]["filename"] if batch["input_file_id"] in files else "deleted",
        "status": batch["status"].replace("_", " "),
        "done": counts["completed"] + counts["failed"],
        "total": counts["total"],
        "failed": counts["failed"],
        "created": time.strftime("%Y-%m-%d %H:%M", time.localtime(batch["created_at"])),
        "left": left,
        "results": [(word, name) for word, name in names if name in files],
        "errors": [error["message"] for error in errors[:3]],
    }
