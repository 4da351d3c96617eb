"""A quality report as a person reads it."""

from __future__ import annotations

from typing import Any

from h2o_flexgen.config.quality import QualityReport, QualityRow
from h2o_flexgen.reporting.tables import markdown_table
from h2o_flexgen.units import format_bytes

HEADER = ("policy", "ratio", "tokens per head", "KV cache", "recall", "2+ tokens", "perplexity")


def quality_table(report: QualityReport) -> str:
    """A row per policy and ratio, and the lines that say what the columns are."""
    some, context, scored = report.rows[0], report.context, report.continuation
    notes = [
        f"{report.model}, {report.dtype} on {report.device}.",
        f"recall      right answers to the {some.recall_cases} questions of {report.recall_file}, greedily",
        f"2+ tokens   of these the {some.long_cases} whose answer has two tokens or more: an answer's first token",
        "            still comes from the whole prompt, from which tokens are evicted once it is read",
        f"perplexity  of {some.scored_tokens} tokens of {report.text_file}: in {report.windows} windows",
        f"            {context} tokens are read and most of them evicted, then {scored} are scored one by one",
        "ratio       KV budget as a share of prompt and generated tokens",
        "tokens per head, KV cache   in the recall run: over its questions, and of its largest block",
    ]
    return markdown_table(HEADER, [_cells(row) for row in report.rows]) + "\n\n" + "\n".join(notes)


def quality_line(row: QualityRow) -> str:
    """One row as a line of a log."""
    return (
        f"{row.policy} {row.ratio:g}: recall {row.recall_right}/{row.recall_cases}, "
        f"2+ tokens {row.long_right}/{row.long_cases}, perplexity {row.perplexity:.4g} ({row.seconds:.0f} s)"
    )


def _cells(row: QualityRow) -> tuple[str, ...]:
    return (
        row.policy,
        f"{row.ratio:g}",
        span(row.eviction["budget"]),
        format_bytes(row.kv_bytes),
        _share(row.recall_right, row.recall_cases),
        _share(row.long_right, row.long_cases),
        f"{row.perplexity:.2f}" if row.perplexity < 1e5 else f"{row.perplexity:.2g}",
    )


def span(value: Any) -> str:
    """A number of a record, or the [smallest, largest] it has where sequences differ."""
    return f"{value[0]}-{value[1]}" if isinstance(value, list) else str(value)


def _share(right: int, cases: int) -> str:
    return f"{right / cases:.1%}" if cases else "-"
