"""Tables as aligned Markdown: readable in a terminal of 100 columns, and where they are pasted."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from h2o_flexgen.config.reports import quality
from h2o_flexgen.config.reports.record import RunRecord
from h2o_flexgen.reporting.run_report import span_text
from h2o_flexgen.units import format_bytes, format_seconds, format_speed

COLUMNS = 98
"""Of prose: it fits a terminal of 100."""
_LABEL = 12


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose columns are padded to their widest cell; the first `left` columns are left-aligned."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if column < left else "-" * max(0, width - 1) + ":" for column, width in enumerate(widths)]
    return "\n".join([line(header), line(rule), *(line(row) for row in rows)])


def quality_table(report: quality.QualityReport) -> str:
    """A row per policy and ratio, and the lines that say what the columns are."""
    header = ["policy", "ratio", "tokens", "KV cache", "recall"]
    header += [name for name, _ in _right_answers(report.rows[0])]
    table = markdown_table([*header, "perplexity"], [_quality_cells(row) for row in report.rows])
    return f"{table}\n\n{_filled(_quality_notes(report))}"


def quality_line(row: quality.QualityRow) -> str:
    parts = ", ".join(f"{name} {_percent(share)}" for name, share in _right_answers(row))
    recall = f"recall {_percent(row.recall_accuracy)}, {parts}"
    return f"{row.policy} {row.ratio:g}: {recall}, perplexity {row.perplexity:.4g} ({row.seconds:.0f} s)"


def _right_answers(row: quality.QualityRow) -> list[tuple[str, float | None]]:
    """Shares by kind of question: "used", "used later", and "2+ tokens", "later" where a file knows no kinds."""
    shown = [(tally.kind or "2+ tokens", tally.shown) for tally in row.recall]
    return [*shown, *((f"{tally.kind} later".strip(), tally.later) for tally in row.recall if tally.later_cases)]


def _tokens(eviction: dict[str, Any], part: str = "budget") -> str:
    return span_text(eviction[part], joint="-")


def _quality_cells(row: quality.QualityRow) -> list[str]:
    cells = [row.policy, f"{row.ratio:g}", _tokens(row.eviction), format_bytes(row.kv_bytes)]
    shares = [row.recall_accuracy, *(share for _, share in _right_answers(row))]
    return [*cells, *map(_percent, shares), _number(row.perplexity)]


def _quality_notes(report: quality.QualityReport) -> list[str]:
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
        notes.insert(
            2,
            "Later: the question comes after the passage was read and evicted from; right is an answer each of whose "
            "tokens has more than half of the probability.",
        )
    return notes


def _filled(notes: Sequence[str]) -> str:
    return "\n".join(textwrap.fill(note, COLUMNS + 2, subsequent_indent="  ") for note in notes)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _number(perplexity: float | None) -> str:
    if perplexity is None:
        return "-"
    return f"{perplexity:,.2f}" if perplexity < 1e5 else f"{perplexity:.2g}"


def suite_table(records: Sequence[quality.SuiteRecord]) -> str:
    """A table per model, task and metric: policies by budgets, each figure with its 95 % confidence interval."""
    parts = []
    groups = dict.fromkeys((record.model, record.task, record.metric) for record in records)
    for model, task, metric in groups:
        own = [record for record in records if (record.model, record.task, record.metric) == (model, task, metric)]
        budgets = sorted({record.budget for record in own})
        cells = {(record.policy, record.budget): suite_cell(record) for record in own}
        rows = [
            [policy, *(cells.get((policy, budget), "") for budget in budgets)]
            for policy in dict.fromkeys(record.policy for record in own)
        ]
        counts = sorted({record.n for record in own})
        title = f"{model}, {task}: {metric}, n = {', '.join(map(str, counts))}"
        parts.append(f"{title}\n\n{markdown_table(['policy', *map(_budget_name, budgets)], rows)}")
    kinds = {record.kind for record in records}
    told = ["Student's t over cases"] if kinds - {"share"} else []
    told += ["Wilson's of shares"] if "share" in kinds else []
    note = f"In brackets: 95 % confidence intervals, {', '.join(told)}. Budgets: shares of prompt and generated tokens."
    return "\n\n".join([*parts, _filled([note])])


def suite_line(record: quality.SuiteRecord) -> str:
    budget = _budget_name(record.budget)
    return f"{record.model} {record.task}: {record.policy} at {budget}: {record.metric} {suite_cell(record)}"


def suite_cell(record: quality.SuiteRecord) -> str:
    """A figure and its interval: "16.5 (15.9 to 17.2)", shares and increases in percent."""
    figures = (record.value, record.low, record.high)
    if record.kind in ("share", "increase"):
        digits, sign = ".0f" if record.kind == "share" else ".1f", "+" if record.kind == "increase" else ""
        value, low, high = (f"{100 * figure:{sign}{digits}}" for figure in figures)
        return f"{value} % ({low} to {high})"
    value, low, high = (f"{figure:.3g}" if abs(figure) < 1000 else f"{figure:.2g}" for figure in figures)
    return f"{value} ({low} to {high})"


def _budget_name(budget: float) -> str:
    return f"{100 * budget:g} %"


def stream_table(report: quality.StreamReport) -> str:
    """A row per policy and kind of positions, and the lines that say what the columns are."""
    context, length = report.context, report.length
    ranges = ((report.prompt, context), (context, length), (max(context, length - context), length))
    header = ["policy", "positions", "tokens", "KV cache", f"within {context:,}", "beyond", f"last {context:,}"]
    rows = [
        [row.policy, row.positions, _tokens(row.eviction), _cache(row)]
        + [_number(report.between(row, first, last)) for first, last in ranges]
        for row in report.rows
    ]
    return f"{markdown_table(header, rows, left=2)}\n\n{_filled(_stream_notes(report))}"


def stream_line(row: quality.StreamRow) -> str:
    first, last = _number(row.perplexity[0]), _number(row.perplexity[-1])
    return f"{row.policy}, {row.positions} positions: perplexity {first} at first, {last} at last ({row.seconds:.0f} s)"


def _cache(row: quality.StreamRow) -> str:
    """Bytes of the cache; windows that are recomputed have caches of their own, which say nothing about a stream."""
    return "-" if row.positions == "recomputed" else format_bytes(row.kv_bytes)


def _stream_notes(report: quality.StreamReport) -> list[str]:
    scored = report.length - report.prompt
    return [
        f"{report.model}, {report.dtype} on {report.device}. Tokens: kept per head. KV cache: of all streams together.",
        f"Perplexity per token of {report.streams} streams of {report.length:,} tokens from {report.text_file}, "
        f"{report.length / report.context:g} times the model's context of {report.context:,}: {report.prompt} tokens "
        f"are read and evicted from, {scored:,} more scored one by one.",
        "Positions: recomputed for each window, whose preceding tokens are read anew, as many as the context has room "
        "for; rolling ones count within the cache; absolute ones in the stream, as if the context were longer.",
    ]


def answers_text(result: quality.SideBySide) -> str:
    """Every prompt's end, and below it what the two caches made of it."""
    name = evicted_name(result)
    return "\n\n".join(_pair_text(number, pair, name) for number, pair in enumerate(result.pairs, 1))


def figures_table(result: quality.SideBySide) -> str:
    full, evicted = _figures(result.full), _figures(result.evicted)
    rows = [(label, full[label], evicted[label]) for label in full]
    equal = sum(pair.equal for pair in result.pairs)
    rows.append(("same text as the full cache", "-", f"{equal} of {len(result.pairs)}"))
    asked = [pair for pair in result.pairs if pair.expected is not None]
    if asked:
        right = (sum(pair.full_right for pair in asked), sum(pair.evicted_right for pair in asked))
        rows.append(("questions answered right", f"{right[0]} of {len(asked)}", f"{right[1]} of {len(asked)}"))
    return markdown_table(("", "full cache", evicted_name(result)), rows)


def warnings_text(result: quality.SideBySide) -> str:
    """The warnings of both runs, a paragraph each; "" for none."""
    runs = {"full cache": result.full, evicted_name(result): result.evicted}
    said = [f"warning, {name}: {text}" for name, record in runs.items() for text in record.warnings]
    return "".join(textwrap.fill(text, COLUMNS, subsequent_indent="  ") + "\n" for text in said)


def evicted_name(result: quality.SideBySide) -> str:
    """The eviction policy and its budget, short: "h2o 20 %", "h2o 64"."""
    share = f"{result.budget}" if result.ratio is None else f"{100 * result.ratio:.3g} %"
    share = share if result.bytes is None else f"{100 * result.bytes:.3g} % of bytes"
    return f"{result.evicted.eviction['name']} {share}"


def _pair_text(number: int, pair: quality.AnswerPair, evicted: str) -> str:
    lines = [f"{number:>2}  {_tail(pair.prompt, COLUMNS - 4)}"]
    lines += _labelled("full cache", pair.full + _mark(pair, pair.full_right))
    lines += _labelled(evicted, "(the same)" if pair.equal else pair.evicted + _mark(pair, pair.evicted_right))
    return "\n".join(lines)


def _labelled(label: str, text: str) -> list[str]:
    first, rest = f"    {label:<{_LABEL}}", " " * (4 + _LABEL)
    return textwrap.wrap(text or "(nothing)", COLUMNS, initial_indent=first, subsequent_indent=rest)


def _mark(pair: quality.AnswerPair, right: bool) -> str:
    if pair.expected is None:
        return ""
    return "  [right]" if right else f"  [wrong: {pair.expected}]"


def _tail(prompt: str, columns: int) -> str:
    """The last words of `prompt` that fit into `columns`."""
    text = " ".join(prompt.split())
    if len(text) <= columns:
        return text
    return "... " + text[4 - columns :].partition(" ")[2]


def _figures(record: RunRecord) -> dict[str, str]:
    return {
        "KV cache": format_bytes(record.kv_bytes),
        "tokens kept per head, by prompt": _tokens(record.eviction),
        "of them heavy hitters": _tokens(record.eviction, "heavy"),
        "prefill": format_speed(record.prefill_throughput),
        "decode": format_speed(record.decode_throughput),
        "generated, prefill and decode": format_speed(record.gen_throughput),
        "time, prefill and decode": format_seconds(record.prefill_s + record.decode_s),
    }
