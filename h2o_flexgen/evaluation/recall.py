"""Recall: does the model give the fact that the prompt stated long before it asked?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from h2o_flexgen.config.reports.quality import RecallTally
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.llm import LLM
from h2o_flexgen.errors import UsageError
from h2o_flexgen.evaluation.sources import RecallCase

SPARE_TOKENS = 2
"""Generated beyond the answer, to see that it ends there: 4821 is not 48213."""

HALF = math.log(0.5)


def recall(llm: LLM, cases: Sequence[RecallCase]) -> tuple[RecallTally, ...]:
    """Asks every question in its prompt, and those that can be split off once more after it; a tally per kind.

    `llm.last_record` is that of the first pass. UsageError where the model has no tokenizer.
    """
    lengths = [_answer_tokens(llm, case) for case in cases]
    later = _asked_later(llm, cases, lengths)
    asked = _asked_in_prompt(llm, cases, lengths)
    tallies = []
    for kind in dict.fromkeys(case.kind for case in cases):
        mine = [index for index, case in enumerate(cases) if case.kind == kind]
        long = [index for index in mine if lengths[index] > 1]
        split = [index for index in mine if index in later]
        tallies.append(
            RecallTally(
                kind,
                sum(asked[index] for index in mine),
                len(mine),
                sum(asked[index] for index in long),
                len(long),
                sum(later[index] for index in split),
                len(split),
            )
        )
    return tuple(tallies)


def answered(text: str, answer: str) -> bool:
    """`text` starts with `answer`, as a whole word, whatever white space comes before it."""
    text, answer = text.lstrip(), answer.strip()
    return text.startswith(answer) and not text[len(answer) :][:1].isalnum()


def _asked_in_prompt(llm: LLM, cases: Sequence[RecallCase], lengths: Sequence[int]) -> list[bool]:
    """Generates greedily after every prompt and compares."""
    params = [SamplingParams(max_new_tokens=length + SPARE_TOKENS) for length in lengths]
    outputs = llm.generate([case.prompt for case in cases], params)
    return [answered(output.text or "", case.answer) for output, case in zip(outputs, cases, strict=True)]


def _asked_later(llm: LLM, cases: Sequence[RecallCase], lengths: Sequence[int]) -> dict[int, bool]:
    """By index of the case: the passage is prefilled and pruned, question and answer are decoded as given.

    An answer that could not be scored is not right.
    """
    split = [index for index, case in enumerate(cases) if case.question_at is not None]
    pairs = [(cases[index].prompt[: cases[index].question_at], _rest(cases[index])) for index in split]
    scores = llm.score(pairs)
    return {
        index: score.error is None and all(logprob > HALF for logprob in score.token_logprobs[-lengths[index] :])
        for index, score in zip(split, scores, strict=True)
    }


def _rest(case: RecallCase) -> str:
    return case.prompt[case.question_at :] + _space(case) + case.answer


def _space(case: RecallCase) -> str:
    return "" if case.prompt[-1].isspace() else " "


def _answer_tokens(llm: LLM, case: RecallCase) -> int:
    if llm.model.codec is None:
        raise UsageError(f"{llm.config.model} has no tokenizer", "needed one to ask questions in words")
    encode = llm.model.codec.encode
    return max(1, len(encode(case.prompt + _space(case) + case.answer)) - len(encode(case.prompt)))
