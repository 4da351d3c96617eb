"""Recall counts whole words, and knows which answers the evicted cache has a say in."""

from __future__ import annotations

from pathlib import Path

import pytest

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.engine.llm import LLM
from h2o_flexgen.errors import UsageError
from h2o_flexgen.evaluation.recall import RecallCount, answered, recall
from h2o_flexgen.evaluation.sources import RecallCase, read_cases, read_text
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
        assert recall(llm, read_cases(files[0])) == RecallCount(4, 4, 3, 3)


@pytest.mark.parametrize("name", ["h2o", "local", "streaming", "heavy", "random"])
def test_an_answer_of_one_token_is_right_under_every_policy(name: str, tiny: str, files: tuple[str, str]) -> None:
    """It comes from the prompt's own attention: that is why the others are counted apart."""
    cases = read_cases(files[0])
    with LLM(tiny, dtype="float32", eviction=EvictionConfig(name=name, budget=6)) as llm:
        assert recall(llm, cases[3:]) == RecallCount(1, 1, 0, 0)
        count = recall(llm, cases)
    assert (count.cases, count.long_cases) == (4, 3)
    assert count.right == count.long_right + 1


def test_eviction_is_active(tiny: str, files: tuple[str, str]) -> None:
    """A budget of a few tokens cannot give all that the full cache gives."""
    with LLM(tiny, dtype="float32", eviction=EvictionConfig(name="local", budget=2)) as llm:
        assert recall(llm, read_cases(files[0])).long_right < 3


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    save(make_opt(), tmp_path)
    with LLM(str(tmp_path)) as llm, pytest.raises(UsageError, match="has no tokenizer"):
        recall(llm, [RecallCase("a", "b")])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no questions"),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}', "line 2 lacks a prompt or an answer"),
        ('{"prompt": "a", "answer": 4821}', "line 1 lacks"),
        ('{"prompt": "a", "answer": " "}', "line 1 lacks"),
        ('["a", "b"]', "line 1 lacks"),
        ("{", "line 1 is not JSON"),
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


def test_the_demo_files_are_there() -> None:
    cases = read_cases(None)
    assert len(cases) == 64
    assert all(case.answer in case.prompt for case in cases)
    assert len(read_text(None)) > 10_000
