"""The same prompts with two caches, for a terminal of 100 columns."""

from __future__ import annotations

import textwrap

from h2o_flexgen.config.reports.quality import AnswerPair, SideBySide
from h2o_flexgen.config.reports.record import RunRecord
from h2o_flexgen.reporting.quality_table import span
from h2o_flexgen.reporting.tables import markdown_table
from h2o_flexgen.units import format_bytes, format_seconds

COLUMNS = 98
_LABEL = 12


def answers_text(result: SideBySide) -> str:
    """Every prompt's end, and below it what the two caches made of it."""
    name = evicted_name(result)
    return "\n\n".join(_pair_text(number, pair, name) for number, pair in enumerate(result.pairs, 1))


def figures_table(result: SideBySide) -> str:
    """Budget, bytes and speed of the two runs."""
    full, evicted = _figures(result.full), _figures(result.evicted)
    rows = [(label, full[label], evicted[label]) for label in full]
    equal = sum(pair.equal for pair in result.pairs)
    rows.append(("same text as the full cache", "-", f"{equal} of {len(result.pairs)}"))
    asked = [pair for pair in result.pairs if pair.expected is not None]
    if asked:
        right = (sum(pair.full_right for pair in asked), sum(pair.evicted_right for pair in asked))
        rows.append(("questions answered right", f"{right[0]} of {len(asked)}", f"{right[1]} of {len(asked)}"))
    return markdown_table(("", "full cache", evicted_name(result)), rows)


def warnings_text(result: SideBySide) -> str:
    """The warnings of both runs, a paragraph each; "" for none."""
    runs = {"full cache": result.full, evicted_name(result): result.evicted}
    said = [f"warning, {name}: {text}" for name, record in runs.items() for text in record.warnings]
    return "".join(textwrap.fill(text, COLUMNS, subsequent_indent="  ") + "\n" for text in said)


def evicted_name(result: SideBySide) -> str:
    """The eviction policy and its budget, short: "h2o 20 %", "h2o 64"."""
    share = f"{result.budget}" if result.ratio is None else f"{100 * result.ratio:.3g} %"
    return f"{result.evicted.eviction['name']} {share}"


def _pair_text(number: int, pair: AnswerPair, evicted: str) -> str:
    lines = [f"{number:>2}  {_tail(pair.prompt, COLUMNS - 4)}"]
    lines += _labelled("full cache", pair.full + _mark(pair, pair.full_right))
    lines += _labelled(evicted, "(the same)" if pair.equal else pair.evicted + _mark(pair, pair.evicted_right))
    return "\n".join(lines)


def _labelled(label: str, text: str) -> list[str]:
    first, rest = f"    {label:<{_LABEL}}", " " * (4 + _LABEL)
    return textwrap.wrap(text or "(nothing)", COLUMNS, initial_indent=first, subsequent_indent=rest)


def _mark(pair: AnswerPair, right: bool) -> str:
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
        "tokens kept per head, by prompt": span(record.eviction["budget"]),
        "of them heavy hitters": span(record.eviction["heavy"]),
        "prefill": _rate(record.prefill_throughput),
        "decode": _rate(record.decode_throughput),
        "generated, prefill and decode": _rate(record.gen_throughput),
        "time, prefill and decode": format_seconds(record.prefill_s + record.decode_s),
    }


def _rate(tokens_per_second: float | None) -> str:
    return "-" if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s"
