"""The tasks of suites: cases in token ids, and a number for each case under an eviction policy."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

from h2o_flexgen.cache.eviction import EVICTION_POLICIES
from h2o_flexgen.cache.eviction.ceiling import CEILING, CeilingPolicy, Foresight
from h2o_flexgen.config.checks import Checked, Count, KeptAsJson
from h2o_flexgen.config.prompt import Prompt, Span, token_spans
from h2o_flexgen.config.reports.quality import FigureKind, SuiteRecord
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.config.splits import SPLITS, Split
from h2o_flexgen.engine.requests.chat import offsets_of
from h2o_flexgen.engine.requests.sequence import Score
from h2o_flexgen.errors import H2OFlexGenError, UsageError
from h2o_flexgen.evaluation.quality import ASKED, AskedCase, Window, asked_case, codec_of, cut_windows
from h2o_flexgen.evaluation.quality import whole as unbroken
from h2o_flexgen.evaluation.settings import (
    RECALL_FILE,
    SUMS_FILE,
    EvaluationSettings,
    Question,
    read_cases,
    read_text,
    spread,
)
from h2o_flexgen.planning.llm import LLM

TaskKind = Literal["perplexity", "recall", "keys", "instructions", "reasoning", "agreement"]
_COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown", "silver", "orange", "grey", "golden")
_WORDS: tuple[str, ...] = ("apple", "river", "window", "horse", "music", "garden", "paper", "winter", "bread", "stone")
_WORDS += ("island", "doctor", "summer", "letter", "tiger")
_PLACES = ("cabinet", "barn", "gate", "office", "bridge", "desk", "locker", "garage", "cellar", "tower", "vault")


@dataclass(frozen=True, kw_only=True)
class SuiteTask(Checked, KeptAsJson):
    """One measurement of a suite, and its size. Raises UsageError for values that make no sense.

    perplexity: `cases` windows of `text`, `context` tokens read and evicted from, `continuation` more scored. recall:
    `cases` questions of a file. keys: one of `keys` facts, at each of `depths` in passages of each of `lengths`
    tokens of `text`, `cases` passages of each; one key is a passkey. Both ask after the passage was evicted from, or
    with `asked` "before" as the end of the prompt; an answer counts if all its tokens have more than half of the
    probability. instructions: the `keys` facts open the passage, as spans that are kept where spans are; each is
    asked for in its turn, and what is kept of each is told, too. reasoning: `cases` questions of a file, the passage
    being what is given and all from there on to be generated greedily; right if the answer, its end, is generated to
    the token. agreement: `continuation` greedy tokens after `context` tokens, beside those of the full cache.
    """

    kind: TaskKind
    cases: Count
    text: str | None = None
    part: tuple[float, float] = (0.0, 1.0)
    """Of the text: from which share of it to which."""
    questions: str | None = None
    context: int | None = None
    continuation: int | None = None
    asked: Literal["after", "before"] = "after"
    only: str | None = None
    """Of the questions, those of this kind."""
    keys: Count = 1
    lengths: tuple[int, ...] = ()
    depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    told: Count = 1
    """How often each of `keys` facts is told, one time after the other."""
    answers: str = "number"
    """"number" or "words", of the facts of `keys`: four digits, or the last four of five common words, which are easier
    to copy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.part) != 2 or not 0 <= self.part[0] < self.part[1] <= 1:
            raise UsageError(f"part is {self.part}", "needed two shares of the text, from and to: [0, 0.5]")
        if self.kind in ("keys", "instructions"):
            if not self.lengths or not self.depths:
                raise UsageError("keys without lengths or depths", "needed at least one of each")
            if any(not 0 <= depth <= 1 for depth in self.depths):
                raise UsageError(f"depths are {self.depths}", "needed shares from 0 to 1")
            if self.answers not in ("number", "words"):
                raise UsageError(f"answers is {self.answers!r}", 'needed "number" or "words"')
            if self.keys > len(_COLOURS) * len(_PLACES):
                raise UsageError(f"keys is {self.keys}", f"needed at most {len(_COLOURS) * len(_PLACES)}")


class Figures(NamedTuple):
    """One metric of a task: a number for each case."""

    metric: str
    kind: FigureKind
    values: tuple[float, ...]
    answers: tuple[tuple[int, ...], ...] = ()


class Measured(NamedTuple):
    """A task whose cases are made, for one model."""

    task: SuiteTask
    cases: list[AskedCase]

    @property
    def pairs(self) -> list[Window]:
        return [(case.context, case.continuation) for case in self.cases]

    def run(self, llm: LLM, foresight: Foresight | None, full: Mapping[str, SuiteRecord]) -> list[Figures]:
        """The figures under the policy of `llm`; `full`: by metric, those of the full cache, empty for that itself."""
        if foresight is not None:
            with foresight.watching([len(rest) - 1 for _, rest in self.pairs]):
                llm.score([(context + rest[:-1], rest[-1:]) for context, rest in self.pairs])
        if self.task.kind == "agreement":
            return self._agreement(llm, full)
        if self.task.kind == "reasoning":
            return self._reasoning(llm)
        scores = unbroken(llm.score([(case.prompt, case.continuation) for case in self.cases]))
        if self.task.kind == "perplexity":
            nll = tuple(-score.logprob / len(score.token_logprobs) for score in scores)
            figures = [Figures("perplexity", "perplexity", nll)]
            if full:
                pairs = zip(nll, full["perplexity"].values, strict=True)
                figures.append(Figures("perplexity beside full", "increase", tuple(own - its for own, its in pairs)))
            return figures
        right = tuple(float(case.right(score)) for score, case in zip(scores, self.cases, strict=True))
        if self.task.kind != "instructions":
            return [Figures("recall", "share", right)]
        return self._instructions(scores, right)

    def _instructions(self, scores: Sequence[Score], followed: tuple[float, ...]) -> list[Figures]:
        """How many are followed, how likely what they ask for is, and how much is kept of the first, the second, ..."""
        nll = tuple(
            -sum(score.token_logprobs[-case.answer :]) / case.answer
            for score, case in zip(scores, self.cases, strict=True)
        )
        kept = [score.kept[ASKED] for score in scores if score.kept is not None]
        shares = tuple(each["prefill"] / each["tokens"] for each in kept)
        return [
            Figures("followed", "share", followed),
            Figures("nats per token asked for", "mean", nll),
            *(
                Figures(f"kept of instruction {i + 1}", "mean", shares[i :: self.task.keys])
                for i in range(self.task.keys)
            ),
        ]

    def _reasoning(self, llm: LLM) -> list[Figures]:
        """How many answers are right, and how much of the working before them and of themselves."""
        same = _same(self._generated(llm), [case.continuation for case in self.cases])
        parts = [(each[: -case.answer], each[-case.answer :]) for each, case in zip(same, self.cases, strict=True)]
        return [
            Figures("answers", "share", tuple(float(all(answer)) for _, answer in parts)),
            Figures("right tokens of the working", "mean", tuple(sum(working) / len(working) for working, _ in parts)),
            Figures("right tokens of the answer", "mean", tuple(sum(answer) / len(answer) for _, answer in parts)),
        ]

    def _agreement(self, llm: LLM, full: Mapping[str, SuiteRecord]) -> list[Figures]:
        answers = self._generated(llm)
        same = _same(answers, full["agreement"].answers if full else answers)
        first = tuple(float((*each, False).index(False)) for each in same)
        kept = () if full else tuple(answers)
        return [
            Figures("agreement", "mean", tuple(sum(each) / len(each) for each in same), kept),
            Figures("tokens until it differs", "mean", first),
        ]

    def _generated(self, llm: LLM) -> list[tuple[int, ...]]:
        """Greedy tokens after the contexts, as many as each continuation has."""
        params = [SamplingParams(max_new_tokens=len(case.continuation), ignore_eos=True) for case in self.cases]
        answers = []
        for output in llm.generate([case.context for case in self.cases], params):
            if output.finish_reason == "error":
                raise H2OFlexGenError(f"prompt {output.index} failed", "nothing can be compared")
            answers.append(tuple(output.token_ids))
        return answers


def _same(answers: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> list[list[bool]]:
    """Of each answer's tokens, which are the right one's at their place."""
    return [
        [own == its for own, its in zip(answer, other, strict=True)]
        for answer, other in zip(answers, right, strict=True)
    ]


def make(task: SuiteTask, llm: LLM) -> Measured:
    """The cases of `task` for the model of `llm`. UsageError where the text is too short."""
    if task.kind in ("perplexity", "agreement"):
        settings = EvaluationSettings(context=task.context, continuation=task.continuation, limit=task.cases)
        windows = cut_windows(llm, _text(task), settings)
        return Measured(task, [AskedCase(context, rest, 0) for context, rest in windows])
    if task.kind in ("recall", "reasoning"):
        cases = read_cases(task.questions, SUMS_FILE if task.kind == "reasoning" else RECALL_FILE)
        questions = [case for case in cases if task.only in (None, case.kind) and case.question_at is not None]
        questions = spread(questions, task.cases)
        if not questions:
            raise UsageError(f"there are no questions of kind {task.only!r} with a question_at", "needed one at least")
        return Measured(task, [_asked(task, llm, question) for question in questions])
    sentences = _sentences(_text(task))
    if task.kind == "instructions":
        passages = product(task.lengths, range(task.cases))
        return Measured(task, [asked for each in passages for asked in _instructed(task, llm, sentences, *each)])
    places = product(task.lengths, task.depths, range(task.cases))
    return Measured(task, [_asked(task, llm, _passage(task, llm, sentences, *place)) for place in places])


def _asked(task: SuiteTask, llm: LLM, case: Question) -> AskedCase:
    return asked_case(llm, case, None if task.asked == "before" else case.question_at)


def _text(task: SuiteTask) -> str:
    text = read_text(task.text)
    start, stop = (round(share * len(text)) for share in task.part)
    return text[start:stop]


def _sentences(text: str) -> list[str]:
    """Of running text; names and numbers of facts do not stand in it."""
    found = re.split(r"(?<=[.!?])\s+", " ".join(text.split()))
    return [each for each in found if "code of" not in each]


class _Fact(NamedTuple):
    text: str
    question: str
    answer: str


def _facts(task: SuiteTask, rng: random.Random) -> list[_Fact]:
    names = rng.sample([f"{colour} {place}" for colour in _COLOURS for place in _PLACES], task.keys)
    facts = []
    for name in names:
        if task.answers == "words":
            first, *words = rng.sample(_WORDS, 5)
            told, answer = f"The code words of the {name} are {first},", ", ".join(words)
            facts.append(_Fact(" ".join([f"{told} {answer}."] * task.told), f" {told}", answer))
            continue
        question = f" What is the code of the {name}? The code of the {name} is"
        code = str(rng.randrange(1000, 10000))
        facts.append(_Fact(" ".join([f"Remember: the code of the {name} is {code}."] * task.told), question, code))
    return facts


def _filling(llm: LLM, sentences: Sequence[str], length: int, facts: Sequence[_Fact], rng: random.Random) -> list[str]:
    """Sentences that have about `length` tokens together with the facts."""
    start, chosen, tokens = rng.randrange(len(sentences)), list[str](), 0
    left = length - len(codec_of(llm, "to ask in words").encode_bare(" ".join(fact.text for fact in facts)))
    for place in range(len(sentences)):
        sentence = sentences[(start + place) % len(sentences)]
        tokens += len(codec_of(llm, "to ask in words").encode_bare(" " + sentence))
        if tokens > left:
            break
        chosen.append(sentence)
    if len(chosen) == len(sentences) or not chosen:
        raise UsageError(f"the text has no passage of {length} tokens", change="give another text or length")
    return chosen


def _instructed(task: SuiteTask, llm: LLM, sentences: Sequence[str], length: int, case: int) -> list[AskedCase]:
    """A passage of about `length` tokens that the facts open, once for each of them."""
    rng = random.Random(f"instructions {task.keys} {length} {case}")
    facts, codec, ends = _facts(task, rng), codec_of(llm, "to ask in words"), list[int]()
    text = ""
    for fact in facts:
        text += fact.text + " "
        ends.append(len(text) - 1)
    passage = text + " ".join(_filling(llm, sentences, length, facts, rng))
    ids, asked = codec.encode(passage), list[AskedCase]()
    for fact in facts:
        marks = [
            Span(end - len(other.text), end, ASKED if other is fact else other.question, keep=True, unit="char")
            for other, end in zip(facts, ends, strict=True)
        ]
        prompt = Prompt(passage, marks)
        spans = token_spans(prompt, len(ids), offsets_of(prompt, codec, special=True))
        question = Question(passage + fact.question, fact.answer, "", len(passage))
        asked.append(_asked(task, llm, question)._replace(spans=spans))
    return asked


def _passage(task: SuiteTask, llm: LLM, sentences: Sequence[str], length: int, depth: float, case: int) -> Question:
    """Sentences of about `length` tokens, facts among them: the one asked for at `depth`, others evenly."""
    rng = random.Random(f"{task.keys} {length} {depth} {case}")
    facts = _facts(task, rng)
    chosen = _filling(llm, sentences, length, facts, rng)
    spots = [(depth, 0)] + [((number - 0.5) / (task.keys - 1), number) for number in range(1, task.keys)]
    for spot, number in sorted(spots, reverse=True):
        chosen.insert(math.floor(spot * len(chosen) + 0.5), facts[number].text)
    passage = " ".join(chosen)
    return Question(passage + facts[0].question, facts[0].answer, "", len(passage))


@contextmanager
def ceiling() -> Iterator[Foresight]:
    """Within it an eviction policy named CEILING exists, with the foresight that this gives."""
    foresight = Foresight()
    split = Split(lambda share: 0, takes_recent=False, queries="last")
    with SPLITS.lent(CEILING, split), EVICTION_POLICIES.lent(CEILING, lambda seed: CeilingPolicy(foresight)):
        yield foresight
