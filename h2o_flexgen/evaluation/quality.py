"""Recall and perplexity of one model under several eviction policies and ratios, and texts side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.prompt import Prompt, Span, TokenSpan
from h2o_flexgen.config.reports.quality import AnswerPair, QualityReport, QualityRow, RecallTally, SideBySide
from h2o_flexgen.config.reports.record import RunRecord
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.requests.sequence import Score
from h2o_flexgen.engine.requests.tokenizer import TextCodec
from h2o_flexgen.errors import ContextLengthError, H2OFlexGenError, UsageError, required
from h2o_flexgen.evaluation.settings import (
    RECALL_FILE,
    TEXT_FILE,
    EvaluationSettings,
    Question,
    read_cases,
    read_text,
    spread,
)
from h2o_flexgen.planning.llm import LLM

LARGEST_CONTEXT, MOST_WINDOWS = 768, 32
SPARE_TOKENS = 2
"""Generated beyond the answer, to see that it ends there: 4821 is not 48213."""
HALF = math.log(0.5)

Window = tuple[list[int], list[int]]
"""Token ids: a context, and the continuation that is scored after it."""


class AskedCase(NamedTuple):
    """A context, what follows it, and how many of its last tokens are the answer."""

    context: list[int]
    continuation: list[int]
    answer: int
    spans: tuple[TokenSpan, ...] = ()
    """Of the context; the one that is asked for has the name ASKED."""

    @property
    def prompt(self) -> list[int] | Prompt:
        spans = [Span(span.start, span.stop, span.name, span.keep) for span in self.spans]
        return Prompt(self.context, spans) if spans else self.context

    def right(self, score: Score) -> bool:
        """Whether all tokens of the answer have more than half of the probability; not where they were not scored."""
        return score.error is None and all(logprob > HALF for logprob in score.token_logprobs[-self.answer :])


ASKED = "asked"


def evicting(model: str, engine: Mapping[str, Any] | None, eviction: EvictionConfig) -> LLM:
    """An engine with the settings `engine` and this eviction, which takes its seed from them."""
    settings = dict(engine or {})
    return LLM(model, **{**settings, "eviction": replace(eviction, seed=settings.get("seed", 0))})


def record_of(llm: LLM) -> RunRecord:
    return required(llm.last_record, "a run of at least one sequence left no record")


def codec_of(llm: LLM, purpose: str) -> TextCodec:
    """The model's. UsageError where it has none, with the `purpose` that needs one."""
    if llm.model.codec is None:
        raise UsageError(f"{llm.config.model} has no tokenizer", f"needed one {purpose}")
    return llm.model.codec


def encoded(llm: LLM, text: str) -> tuple[list[int], list[int]]:
    """The tokens that every piece of `text` starts with (BOS, if the tokenizer adds one), and the tokens after it."""
    ids = codec_of(llm, "to score text").encode(text)
    count = int(ids[:1] == [llm.model.spec.bos_token_id])
    return ids[:count], ids[count:]


def cut_windows(llm: LLM, text: str, settings: EvaluationSettings) -> list[Window]:
    """Windows of the same lengths, spread evenly over `text`, none of whose continuations overlap; UsageError where
    none fits.

    Each starts as the tokenizer starts a text (with BOS, if it adds one), which counts as one token of the context.
    """
    head, body = encoded(llm, text)
    context, continuation = _lengths(settings, llm.model.spec.max_positions)
    inside = context - len(head)
    if inside < 1:
        found = f"--context {context} holds nothing but the token that a text begins with"
        raise UsageError(found, f"needed at least {len(head) + 1}")
    last = len(body) - inside - continuation
    if last < 0:
        raise UsageError(
            f"the text has {len(body)} tokens",
            f"needed {context} of context and {continuation} to score",
            "give a longer text, or lower --context and --continuation",
        )
    starts = range(0, last + 1, continuation)
    chosen = spread(starts, settings.limit or MOST_WINDOWS)
    return [(head + body[at : at + inside], body[at + inside : at + inside + continuation]) for at in chosen]


def likelihood(llm: LLM, windows: Sequence[Window]) -> tuple[float, int]:
    """Scores every window's continuation through `llm`, at its eviction policy and budget: mean negative log-likelihood
    in nats, and over how many tokens."""
    scores = whole(llm.score(windows))
    tokens = sum(len(score.token_logprobs) for score in scores)
    return -sum(score.logprob for score in scores) / tokens, tokens


def whole(scores: list[Score]) -> list[Score]:
    """`scores`; H2OFlexGenError where one failed, so that there is no perplexity."""
    for score in scores:
        if score.error is not None:
            raise H2OFlexGenError(score.error, "no perplexity can be given")
    return scores


def _lengths(settings: EvaluationSettings, limit: int) -> tuple[int, int]:
    context = settings.context or min(LARGEST_CONTEXT, 3 * limit // 4)
    continuation = settings.continuation or max(1, min(context // 3, limit - context))
    if context + continuation > limit:
        raise UsageError(
            f"--context {context} and --continuation {continuation} are {context + continuation} tokens",
            f"the model's context is {limit}",
            "lower one of them",
        )
    return context, continuation


def recall(llm: LLM, cases: Sequence[Question]) -> tuple[RecallTally, ...]:
    """Asks every question in its prompt, and those that can be split off once more after it; a tally per kind.

    `llm.last_record` is that of the first pass. UsageError where the model has no tokenizer.
    """
    asked = [asked_case(llm, case, case.question_at) for case in cases]
    # The passage is prefilled and pruned, question and answer are decoded as given.
    apart = [index for index, case in enumerate(cases) if case.question_at is not None]
    scores = llm.score([(asked[index].context, asked[index].continuation) for index in apart])
    later = {index: asked[index].right(score) for index, score in zip(apart, scores, strict=True)}
    params = [SamplingParams(max_new_tokens=each.answer + SPARE_TOKENS) for each in asked]
    outputs = llm.generate([case.prompt for case in cases], params)
    shown = [answered(output.text or "", case.answer) for output, case in zip(outputs, cases, strict=True)]
    tallies = []
    for kind in dict.fromkeys(case.kind for case in cases):
        mine = [index for index, case in enumerate(cases) if case.kind == kind]
        right = [shown[index] for index in mine]
        long = [shown[index] for index in mine if asked[index].answer > 1]
        split = [later[index] for index in mine if index in later]
        tallies.append(RecallTally(kind, sum(right), len(right), sum(long), len(long), sum(split), len(split)))
    return tuple(tallies)


def answered(text: str, answer: str) -> bool:
    """`text` starts with `answer`, as a whole word, whatever white space comes before it."""
    text, answer = text.lstrip(), answer.strip()
    return text.startswith(answer) and not text[len(answer) :][:1].isalnum()


def asked_case(llm: LLM, case: Question, at: int | None) -> AskedCase:
    """A question and its answer in tokens, after the first `at` characters of its prompt (None: all) as the context."""
    codec = codec_of(llm, "to ask questions in words")
    at = len(case.prompt) if at is None else at
    text = case.prompt + ("" if case.prompt[-1].isspace() else " ") + case.answer
    before, asked, ids = codec.encode(case.prompt[:at]), codec.encode(case.prompt), codec.encode(text)
    rest = ids[len(before) :] if ids[: len(before)] == before else codec.encode_bare(text[at:])
    return AskedCase(before, rest, max(1, len(ids) - len(asked)))


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
        with evicting(model, engine, cell) as llm:
            windows = cut_windows(llm, text, settings)
            row, record = _measure(llm, cell, cases, windows)
        rows.append(row)
        on_row(row)
    context, continuation = map(len, windows[0])
    return QualityReport(
        model=record.model,
        dtype=record.dtype,
        device=record.device,
        recall_file=settings.recall or RECALL_FILE,
        text_file=settings.text or TEXT_FILE,
        context=context,
        continuation=continuation,
        windows=len(windows),
        rows=tuple(rows),
    )


def _measure(
    llm: LLM, eviction: EvictionConfig, cases: list[Question], windows: list[Window]
) -> tuple[QualityRow, RunRecord]:
    started = time.perf_counter()
    try:
        tallies, record = recall(llm, cases), record_of(llm)
    except ContextLengthError as error:
        raise UsageError(error.found, error.needed, "name a file of shorter questions: --recall FILE") from None
    nll, tokens = likelihood(llm, windows)
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


def side_by_side(
    prompts: Sequence[tuple[str, str | None]],
    eviction: EvictionConfig,
    gen_len: int,
    model: str = "demo",
    engine: Mapping[str, Any] | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> SideBySide:
    """Runs `prompts` (each with the right answer, or None) twice, greedily, `gen_len` new tokens at most.

    Each engine does the same work once before it is timed, and one of the full cache does so before both: the process
    and the machine reach their speed only after some runs, and the first of two would look slower than it is.
    """
    texts, params = [text for text, _ in prompts], SamplingParams(max_new_tokens=gen_len)
    answers: list[list[str]] = []
    records: list[RunRecord] = []
    with evicting(model, engine, EvictionConfig()) as llm:
        llm.generate(texts, params)
    for config in (EvictionConfig(), eviction):
        share = f"{config.ratio:.0%}" if config.bytes is None else f"{config.bytes:.0%} of the bytes"
        share = share if config.budget is None else f"{config.budget} tokens"
        on_stage("full cache" if config.name == "full" else f"{config.name} at {share}")
        with evicting(model, engine, config) as llm:
            llm.generate(texts, params)
            outputs = llm.generate(texts, params)
            answers.append([" ".join((output.text or "").split()) for output in outputs])
            records.append(record_of(llm))
    pairs = tuple(_pair(*prompt, *texts) for prompt, *texts in zip(prompts, *answers, strict=True))
    budget, by_bytes = eviction.budget, eviction.bytes
    ratio = eviction.ratio if budget is None and by_bytes is None else None
    return SideBySide(full=records[0], evicted=records[1], ratio=ratio, budget=budget, bytes=by_bytes, pairs=pairs)


def _pair(prompt: str, expected: str | None, full: str, evicted: str) -> AnswerPair:
    if expected is None:
        return AnswerPair(prompt, full, evicted)
    return AnswerPair(prompt, full, evicted, expected, answered(full, expected), answered(evicted, expected))
