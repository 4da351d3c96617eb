"""Recall and perplexity of one model under several eviction policies and ratios."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.reports.quality import QualityReport, QualityRow
from h2o_flexgen.config.reports.record import RunRecord
from h2o_flexgen.engine.llm import LLM
from h2o_flexgen.evaluation.perplexity import Windows, cut_windows, likelihood
from h2o_flexgen.evaluation.recall import recall
from h2o_flexgen.evaluation.settings import EvaluationSettings
from h2o_flexgen.evaluation.sources import RECALL_FILE, TEXT_FILE, RecallCase, read_cases, read_text, spread


def evaluate(
    settings: EvaluationSettings,
    model: str = "demo",
    engine: Mapping[str, Any] | None = None,
    on_row: Callable[[QualityRow], None] = lambda row: None,
) -> QualityReport:
    """Measures every cell of `settings` on `model`; `engine` are further settings of LLM, `on_row` hears of each row.

    Every cell sees the same questions and the same windows of text, and makes an engine of its own.
    """
    cases = spread(read_cases(settings.recall), settings.limit)
    text = read_text(settings.text)
    rows: list[QualityRow] = []
    for cell in settings.cells:
        eviction = replace(cell, seed=(engine or {}).get("seed", 0))
        with LLM(model, **{**(engine or {}), "eviction": eviction}) as llm:
            windows = cut_windows(llm, text, settings)
            row, record = _measure(llm, eviction, cases, windows)
        rows.append(row)
        on_row(row)
    return QualityReport(
        model=record.model,
        dtype=record.dtype,
        device=record.device,
        recall_file=settings.recall or RECALL_FILE,
        text_file=settings.text or TEXT_FILE,
        context=windows.context,
        continuation=windows.continuation,
        windows=len(windows.pairs),
        rows=tuple(rows),
    )


def _measure(
    llm: LLM, eviction: EvictionConfig, cases: list[RecallCase], windows: Windows
) -> tuple[QualityRow, RunRecord]:
    started = time.perf_counter()
    tallies = recall(llm, cases)
    record = llm.last_record
    if record is None:
        raise RuntimeError("a run of at least one question left no record")
    nll, tokens = likelihood(llm, windows.pairs)
    row = QualityRow(
        policy=eviction.name,
        ratio=eviction.ratio,
        eviction=record.eviction,
        recall=tallies,
        nll=nll,
        scored_tokens=tokens,
        kv_bytes=record.kv_bytes,
        seconds=time.perf_counter() - started,
    )
    return row, record
