"""The texts of the demo models are made from seeds: what ships is what the generator still gives."""

from __future__ import annotations

import asyncio
import json
from importlib import resources
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from training import stream
from training.evaluate import heldout_texts
from training.generated import draw_facts, recall_passage, story
from training.rows import ANSWER_WEIGHT, BOS, PAD, Corpus, clean_plain, clean_rst, split_heldout
from training.stream import Mix
from training.sums import GIVEN, LENGTH, build_tokenizer, problem, write_problems

DEMO = resources.files("h2o_flexgen") / "data" / "demo"


def corpus() -> Corpus:
    return Corpus(PreTrainedTokenizerFast.from_pretrained(str(DEMO)), [])


@pytest.mark.slow
def test_held_out_stories_are_those_that_ship() -> None:
    shipped = (DEMO / "heldout.txt").read_text(encoding="utf-8")
    assert shipped.startswith(heldout_texts(corpus(), 20_000)["stories"] + "\n\n")


def test_a_question_about_a_fact_can_be_answered_from_its_passage() -> None:
    made = corpus()
    for number in range(20):
        case = made.recall_case(Random(number), 100)
        assert case.answer in case.prompt[: case.question_at]
        assert case.asked == 0
    shipped = json.loads((DEMO / "recall_prompts.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert shipped.keys() == {"kind", "tokens", *case._fields}


@pytest.mark.parametrize("step", [0, 300, 900])
def test_rows_of_every_stage(step: int) -> None:
    ids, weights = corpus().batch(Random(3), rows=12, length=128, step=step)
    assert ids.shape == weights.shape == (12, 129)
    assert (weights[ids == PAD] == 0).all()
    assert (ids[:, 0] == BOS).sum() >= 8  # the others are noise that is said twice
    assert weights.max() == ANSWER_WEIGHT


def test_a_stream_begins_with_bos_and_has_it_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prose whose docstrings are those of one package: all of the library has nothing else."""
    monkeypatch.setattr(stream, "os", SimpleNamespace(__file__=asyncio.__file__))
    mix = Mix(corpus())
    for held in (False, True):
        row = mix.row(Random(1), 257, held)
        assert (len(row), row[0], row.count(BOS)) == (257, BOS, 1)
    assert not set(mix.kept) & set(mix.held)
    assert len(mix.kept) > 20 * len(mix.held) > 0


def test_a_sum_is_worked_out_line_by_line() -> None:
    case = problem(Random(1))
    digits = [int(word) for word in case.given.split()[1::2]]
    lines = [sum(digits[start:]) % 10 for start in range(len(digits))]
    said = [int(after) for word, after in pairwise(case.working.split()) if word.endswith("=")]
    assert said == lines == [int(word) for word in case.answer.split()[2::3]]
    assert int(case.answer.split()[-2]) == sum(place * digit for place, digit in enumerate(digits, 1)) % 10
    assert (len(case.ids), case.ids[:GIVEN]) == (LENGTH, build_tokenizer()(case.given)["input_ids"])
    assert build_tokenizer()(" ".join(case))["input_ids"] == case.ids


def test_problems_are_those_that_ship(tmp_path: Path) -> None:
    write_problems(tmp_path)
    shipped = resources.files("h2o_flexgen") / "data/demo-sums/problems.jsonl"
    assert (tmp_path / "problems.jsonl").read_bytes() == shipped.read_bytes()


@pytest.mark.parametrize(
    ("clean", "text", "paragraphs"),
    [
        (clean_plain, "\n".join(f"Ge1:{n} Verse {n}." for n in range(1, 130)), 17),
        (clean_plain, f"{'A sentence of prose. ' * 4}\nYes.\n\nShort.", 1),
        (clean_rst, f"Title\n=====\n\n{'A sentence with :func:`open <io.open>` in it. ' * 4}\n\n  indented", 1),
    ],
)
def test_prose_is_cleaned(clean: Any, text: str, paragraphs: int) -> None:
    found = clean(text)
    assert len(found) == paragraphs
    assert not any(mark in line for line in found for mark in ("`", "Ge1", "\n"))


def test_what_is_held_out_is_whole_runs() -> None:
    kept, held = split_heldout([str(n) for n in range(2000)])
    assert held == [str(n) for n in (*range(780, 800), *range(1580, 1600))]
    assert len(kept) + len(held) == 2000
    assert story(Random(1)) == story(Random(1)) != story(Random(2))
    assert recall_passage(Random(1), ["A."], draw_facts(Random(1), 2, set()), 1.0, 1.0, 2)[-1].text == "."
