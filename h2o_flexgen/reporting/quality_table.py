"""A quality report as a person reads it."""

from __future__ import annotations

import textwrap
from typing import Any

from h2o_flexgen.config.reports.quality import QualityReport, QualityRow
from h2o_flexgen.reporting.tables import markdown_table
from h2o_flexgen.units import format_bytes

COLUMNS = 100


def quality_table(report: QualityReport) -> str:
    """A row per policy and ratio, and the lines that say what the columns are."""
    header = ["policy", "ratio", "tokens", "KV cache", "recall"]
    header += [column_name(tally.kind) for tally in report.rows[0].recall]
    header += [column_name(tally.kind, later=True) for tally in report.rows[0].recall if tally.later_cases]
    table = markdown_table([*header, "perplexity"], [_cells(row) for row in report.rows])
    return f"{table}\n\n{_notes(report)}"


def quality_line(row: QualityRow) -> str:
    """One row as a line of a log."""
    parts = [f"{column_name(tally.kind)} {_percent(tally.shown)}" for tally in row.recall]
    parts += [
        f"{column_name(tally.kind, later=True)} {_percent(tally.later)}" for tally in row.recall if tally.later_cases
    ]
    recall = f"recall {_percent(row.recall_accuracy)}, {', '.join(parts)}"
    return f"{row.policy} {row.ratio:g}: {recall}, perplexity {row.perplexity:.4g} ({row.seconds:.0f} s)"


def column_name(kind: str, later: bool = False) -> str:
    """The name of a kind of question: "used", "used later", and "2+ tokens", "later" where a file knows no kinds."""
    return f"{kind} later".strip() if later else kind or "2+ tokens"


def span(value: Any) -> str:
    """A number of a record, or the [smallest, largest] it has where sequences differ."""
    return f"{value[0]}-{value[1]}" if isinstance(value, list) else str(value)


def _cells(row: QualityRow) -> list[str]:
    perplexity = f"{row.perplexity:.2f}" if row.perplexity < 1e5 else f"{row.perplexity:.2g}"
    cells = [row.policy, f"{row.ratio:g}", span(row.eviction["budget"]), format_bytes(row.kv_bytes)]
    cells += [_percent(row.recall_accuracy), *(_percent(tally.shown) for tally in row.recall)]
    return [*cells, *(_percent(tally.later) for tally in row.recall if tally.later_cases), perplexity]


def _notes(report: QualityReport) -> str:
    first = report.rows[0]
    cases, later = (sum(getattr(tally, name) for tally in first.recall) for name in ("cases", "later_cases"))
    long = ", ".join(f"{tally.long_cases} of {tally.cases} {tally.kind}".strip() for tally in first.recall)
    notes = [
        f"{report.model}, {report.dtype} on {report.device}. Ratio: the budget's share of prompt and generated tokens. "
        "Tokens: kept per head, over the questions. KV cache: of the largest block of questions.",
        f"Recall: right answers to the {cases} questions of {report.recall_file}, generated greedily. An answer's "
        "first token comes from the prompt's own attention, before anything is evicted, so the columns beside it "
        f"count the answers of two tokens or more ({long}).",
        f"Perplexity: of {first.scored_tokens} tokens of {report.text_file}, in {report.windows} windows of which "
        f"{report.context} tokens are read and evicted from, and {report.continuation} more scored one by one.",
    ]
    if later:
        said = (
            "Later: the question comes after the passage was read and evicted from; right is an answer each of whose "
        )
        notes.insert(2, said + "tokens has more than half of the probability.")
    return "\n".join(textwrap.fill(note, COLUMNS, subsequent_indent="  ") for note in notes)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
