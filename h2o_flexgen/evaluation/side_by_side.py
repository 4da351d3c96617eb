"""The same prompts with the full cache and with an evicted one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.reports.quality import AnswerPair, SideBySide
from h2o_flexgen.config.reports.record import RunRecord
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.llm import LLM
from h2o_flexgen.evaluation.recall import answered

WARM_UP_TOKENS = 2


def side_by_side(
    prompts: Sequence[tuple[str, str | None]],
    eviction: EvictionConfig,
    gen_len: int,
    model: str = "demo",
    engine: Mapping[str, Any] | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> SideBySide:
    """Runs `prompts` (each with the right answer, or None) twice, greedily, `gen_len` new tokens at most.

    Each engine is warmed up on the same prompts first, so that neither pays for what happens once in a process.
    """
    texts = [text for text, _ in prompts]
    answers: list[list[str]] = []
    records: list[RunRecord] = []
    for config in (EvictionConfig(), eviction):
        share = f"{config.ratio:.0%}" if config.budget is None else f"{config.budget} tokens"
        on_stage("full cache" if config.name == "full" else f"{config.name} at {share}")
        config = replace(config, seed=(engine or {}).get("seed", 0))
        with LLM(model, **{**(engine or {}), "eviction": config}) as llm:
            llm.generate(texts, SamplingParams(max_new_tokens=WARM_UP_TOKENS))
            outputs = llm.generate(texts, SamplingParams(max_new_tokens=gen_len))
            answers.append([" ".join((output.text or "").split()) for output in outputs])
            if llm.last_record is None:
                raise RuntimeError("a run of at least one prompt left no record")
            records.append(llm.last_record)
    pairs = tuple(_pair(*prompt, *texts) for prompt, *texts in zip(prompts, *answers, strict=True))
    ratio = eviction.ratio if eviction.budget is None else None
    return SideBySide(full=records[0], evicted=records[1], ratio=ratio, budget=eviction.budget, pairs=pairs)


def _pair(prompt: str, expected: str | None, full: str, evicted: str) -> AnswerPair:
    if expected is None:
        return AnswerPair(prompt, full, evicted)
    return AnswerPair(prompt, full, evicted, expected, answered(full, expected), answered(evicted, expected))
