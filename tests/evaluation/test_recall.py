"""Recall counts whole words, and knows which answers the evicted cache has a say in."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.reports.quality import RecallTally
from h2o_flexgen.engine.requests.sequence import Score
from h2o_flexgen.errors import UsageError
from h2o_flexgen.evaluation.quality import answered, recall
from h2o_flexgen.evaluation.settings import Question, read_cases, read_text, spread
from h2o_flexgen.planning.llm import LLM
from tests.tiny import make_opt, save


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (" 4821. And", True),
        ("4821", True),
        ("\n 4821 is it", True),
        ("48213", False),
        ("482", False),
        ("the 4821", False),
        ("", False),
    ],
)
def test_an_answer_is_a_whole_word_at_the_start(text: str, right: bool) -> None:
    assert answered(text, "4821") is right


def test_the_full_cache_gives_its_own_answers(tiny: str, files: tuple[str, str]) -> None:
    with LLM(tiny, dtype="float32") as llm:
        assert recall(llm, read_cases(files[0])) == (RecallTally("", 4, 4, 3, 3),)


@pytest.mark.parametrize("name", ["h2o", "local", "streaming", "heavy", "random"])
def test_an_answer_of_one_token_is_right_under_every_policy(name: str, tiny: str, files: tuple[str, str]) -> None:
    """It comes from the prompt's own attention: that is why the others are counted apart."""
    cases = read_cases(files[0])
    with LLM(tiny, dtype="float32", eviction=EvictionConfig(name=name, budget=6)) as llm:
        assert recall(llm, cases[3:]) == (RecallTally("", 1, 1, 0, 0),)
        (tally,) = recall(llm, cases)
    assert (tally.cases, tally.long_cases, tally.later_cases) == (4, 3, 0)
    assert tally.right == tally.long_right + 1


def test_eviction_is_active(tiny: str, files: tuple[str, str]) -> None:
    """A budget of a few tokens cannot give all that the full cache gives."""
    with LLM(tiny, dtype="float32", eviction=EvictionConfig(name="local", budget=2)) as llm:
        (tally,) = recall(llm, read_cases(files[0]))
    assert tally.long_right < 3


def test_kinds_are_counted_apart_and_asked_later(tiny: str, files: tuple[str, str]) -> None:
    """Later, every token of the answer depends on what was kept: the passage is read before the question is known."""
    first, second, *_ = read_cases(files[0])
    at = second.prompt.rindex(" ")
    cases = [first._replace(kind="once"), second._replace(kind="used", question_at=at)]
    with LLM(tiny, dtype="float32") as llm:
        once, used = recall(llm, cases)
        assert llm.last_record is not None
        assert llm.last_record.sequences == 2
        (score,) = llm.score([(second.prompt, " " + second.answer)])
    assert once == RecallTally("once", 1, 1, 1, 1)
    sure = all(logprob > math.log(0.5) for logprob in score.token_logprobs)
    assert used == RecallTally("used", 1, 1, 1, 1, int(sure), 1)


def test_a_certain_answer_is_right_later(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the answer's tokens count, not those of the question before it."""
    seen: list[tuple[list[int], list[int]]] = []

    def score(pairs: list[tuple[list[int], list[int]]]) -> list[Score]:
        seen.extend(pairs)
        return [Score(0.0, False, [-9.0, -9.0, -0.6, -0.1]), Score(0.0, False, [-0.1, -0.1, -0.1, -0.8])]

    case = Question("w4 w5 w6 w7 w8", "w9 w10", "k", 8)
    with LLM(tiny) as llm:
        monkeypatch.setattr(llm, "score", score)
        (tally,) = recall(llm, [case, case])
    assert seen == [([2, 4, 5, 6], [7, 8, 9, 10])] * 2, "BOS and w4 w5 w6, then w7 w8 w9 w10"
    assert (tally.later_right, tally.later_cases) == (1, 2)


def test_an_answer_that_could_not_be_scored_is_not_right(broken: str, files: tuple[str, str]) -> None:
    """Not one of its tokens is unlikely, as it has none."""
    first, *_ = read_cases(files[0])
    with LLM(broken) as llm:
        (tally,) = recall(llm, [first._replace(kind="used", question_at=first.prompt.rindex(" "))])
    assert tally == RecallTally("used", 0, 1, 0, 1, 0, 1)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    save(make_opt(), tmp_path)
    with LLM(str(tmp_path)) as llm, pytest.raises(UsageError, match="has no tokenizer"):
        recall(llm, [Question("a", "b")])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no questions"),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}', "line 2 lacks a prompt or an answer"),
        ('{"prompt": "a", "answer": 4821}', "line 1 lacks"),
        ('{"prompt": "a", "answer": " "}', "line 1 lacks"),
        ('["a", "b"]', "line 1 lacks"),
        ("{", "line 1 is not JSON"),
        ('{"prompt": "abc", "answer": "b", "question_at": 3}', "line 1 has kind '' and question_at 3"),
        ('{"prompt": "abc", "answer": "b", "kind": 7}', "line 1 has kind 7"),
    ],
)
def test_bad_questions_are_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "cases.jsonl"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        read_cases(str(file))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--recall .*missing"):
        read_cases(str(tmp_path / "missing.jsonl"))
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(UsageError, match="not UTF-8 text: byte 3"):
        read_text(str(tmp_path / "latin"))


def test_a_limit_takes_from_all_over() -> None:
    assert spread(range(80), 4) == [10, 30, 50, 70]
    assert spread(range(3), 5) == spread(range(3), None) == [0, 1, 2]
    assert spread([], 5) == []


def test_the_demo_files_are_there() -> None:
    cases = read_cases(None)
    assert len(cases) >= 32
    assert all(case.answer in case.prompt for case in cases)
    assert len(read_text(None)) > 10_000


def test_a_separator_inside_a_question_does_not_end_its_line(tmp_path: Path) -> None:
    """U+2028 and a form feed may stand in JSON text; only a newline ends a line, whatever came before it."""
    lines = ['{"prompt": "a\u2028b?", "answer": "c"}', '{"prompt": "d?", "answer": "e"}']
    file = tmp_path / "questions.jsonl"
    file.write_bytes("\r\n".join(lines).encode())
    assert [case.prompt for case in read_cases(str(file))] == ["a\u2028b?", "d?"]
