"""Recall: does greedy decoding give the fact that the prompt stated long before it asked?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.llm import LLM
from h2o_flexgen.errors import UsageError
from h2o_flexgen.evaluation.sources import RecallCase

SPARE_TOKENS = 2
"""Generated beyond the answer, to see that it ends there: 4821 is not 48213."""


class RecallCount(NamedTuple):
    """Right answers and questions; `long_*` of the answers of two tokens or more."""

    right: int
    cases: int
    long_right: int
    long_cases: int


def recall(llm: LLM, cases: Sequence[RecallCase]) -> RecallCount:
    """Generates greedily after every prompt and compares. UsageError where the model has no tokenizer."""
    lengths = [_answer_tokens(llm, case) for case in cases]
    params = [SamplingParams(max_new_tokens=length + SPARE_TOKENS) for length in lengths]
    outputs = llm.generate([case.prompt for case in cases], params)
    right = [answered(output.text or "", case.answer) for output, case in zip(outputs, cases, strict=True)]
    long = [hit for hit, length in zip(right, lengths, strict=True) if length > 1]
    return RecallCount(sum(right), len(right), sum(long), len(long))


def answered(text: str, answer: str) -> bool:
    """`text` starts with `answer`, as a whole word, whatever white space comes before it."""
    text, answer = text.lstrip(), answer.strip()
    return text.startswith(answer) and not text[len(answer) :][:1].isalnum()


def _answer_tokens(llm: LLM, case: RecallCase) -> int:
    if llm.model.codec is None:
        raise UsageError(f"{llm.config.model} has no tokenizer", "needed one to ask questions in words")
    encode = llm.model.codec.encode
    space = "" if case.prompt[-1].isspace() else " "
    return max(1, len(encode(case.prompt + space + case.answer)) - len(encode(case.prompt)))
