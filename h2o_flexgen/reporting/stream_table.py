"""A stream report as a person reads it."""

from __future__ import annotations

import textwrap

from h2o_flexgen.config.reports.stream import StreamReport, StreamRow
from h2o_flexgen.reporting.quality_table import span
from h2o_flexgen.reporting.tables import markdown_table
from h2o_flexgen.units import format_bytes

COLUMNS = 100


def stream_table(report: StreamReport) -> str:
    """A row per policy and kind of positions, and the lines that say what the columns are."""
    context, length = report.context, report.length
    ranges = ((report.prompt, context), (context, length), (max(context, length - context), length))
    header = ["policy", "positions", "tokens", "KV cache", f"within {context:,}", "beyond", f"last {context:,}"]
    rows = [
        [row.policy, row.positions, span(row.eviction["budget"]), _cache(row)]
        + [_number(report.between(row, first, last)) for first, last in ranges]
        for row in report.rows
    ]
    return f"{markdown_table(header, rows, left=2)}\n\n{_notes(report)}"


def stream_line(row: StreamRow) -> str:
    """One row as a line of a log."""
    first, last = _number(row.perplexity[0]), _number(row.perplexity[-1])
    return f"{row.policy}, {row.positions} positions: perplexity {first} at first, {last} at last ({row.seconds:.0f} s)"


def _cache(row: StreamRow) -> str:
    """Bytes of the cache; windows that are recomputed have caches of their own, which say nothing about a stream."""
    return "-" if row.positions == "recomputed" else format_bytes(row.kv_bytes)


def _number(perplexity: float | None) -> str:
    if perplexity is None:
        return "-"
    return f"{perplexity:,.2f}" if perplexity < 1e5 else f"{perplexity:.2g}"


def _notes(report: StreamReport) -> str:
    scored = report.length - report.prompt
    notes = (
        f"{report.model}, {report.dtype} on {report.device}. Tokens: kept per head. KV cache: of all streams together.",
        f"Perplexity per token of {report.streams} streams of {report.length:,} tokens from {report.text_file}, "
        f"{report.length / report.context:g} times the model's context of {report.context:,}: {report.prompt} tokens "
        f"are read and evicted from, {scored:,} more scored one by one.",
        "Positions: recomputed for each window, whose preceding tokens are read anew, as many as the context has room "
        "for; rolling ones count within the cache; absolute ones in the stream, as if the context were longer.",
    )
    return "\n".join(textwrap.fill(note, COLUMNS, subsequent_indent="  ") for note in notes)
