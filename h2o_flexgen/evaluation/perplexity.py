"""Perplexity of text with eviction active: contexts are prefilled and pruned, continuations decoded as given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from h2o_flexgen.engine.llm import LLM
from h2o_flexgen.engine.requests.sequence import Score
from h2o_flexgen.errors import H2OFlexGenError, UsageError
from h2o_flexgen.evaluation.settings import EvaluationSettings
from h2o_flexgen.evaluation.sources import spread

LARGEST_CONTEXT, MOST_WINDOWS = 768, 32

Window = tuple[list[int], list[int]]
"""Token ids: a context, and the continuation that is scored after it."""


class Windows(NamedTuple):
    """Pieces of one text, all of the same lengths."""

    pairs: list[Window]
    context: int
    continuation: int


class Likelihood(NamedTuple):
    """Mean negative log-likelihood in nats, over `tokens`."""

    nll: float
    tokens: int


def cut_windows(llm: LLM, text: str, settings: EvaluationSettings) -> Windows:
    """Windows spread evenly over `text`, none of whose continuations overlap; UsageError where none fits.

    Each starts as the tokenizer starts a text (with BOS, if it adds one), which counts as one token of the context.
    """
    if llm.model.codec is None:
        raise UsageError(f"{llm.config.model} has no tokenizer", "needed one to score text")
    ids, limit = llm.model.codec.encode(text), llm.model.spec.max_positions
    head = ids[:1] if ids[:1] == [llm.model.spec.bos_token_id] else []
    body = ids[len(head) :]
    context, continuation = _lengths(settings, limit)
    inside = context - len(head)
    last = len(body) - inside - continuation
    if inside < 1 or last < 0:
        raise UsageError(
            f"the text has {len(body)} tokens",
            f"needed {context} of context and {continuation} to score",
            "give a longer text, or lower --context and --continuation",
        )
    starts = range(0, last + 1, continuation)
    chosen = spread(starts, settings.limit or MOST_WINDOWS)
    pairs = [(head + body[at : at + inside], body[at + inside : at + inside + continuation]) for at in chosen]
    return Windows(pairs, context, continuation)


def likelihood(llm: LLM, windows: Sequence[Window]) -> Likelihood:
    """Scores every window's continuation through `llm`, at its eviction policy and budget."""
    scores = whole(llm.score(windows))
    tokens = sum(len(score.token_logprobs) for score in scores)
    return Likelihood(-sum(score.logprob for score in scores) / tokens, tokens)


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
