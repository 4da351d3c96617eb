"""Generated texts for the demo models, from seeds: stories, and recall passages. All of it is ours (Apache-2.0).

Recall passages are what makes the model useful for an eviction demo: a few facts, much filler, then questions that only
the facts can answer.
"""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import NamedTuple


def _words() -> dict[str, list[str]]:
    text = Path(__file__).with_name("words.txt").read_text(encoding="utf-8")
    found = {}
    for block in text.split("\n\n")[1:]:
        name, _, entries = block.partition(":")
        found[name] = [entry.strip() for entry in " ".join(entries.split()).split("|")]
    return found


WORDS = _words()
FEMALE = set(WORDS["female"])
STORY = {name.removeprefix("story."): entries for name, entries in WORDS.items() if name.startswith("story.")}
STORY |= {"job": WORDS["jobs"], "job2": WORDS["jobs"], "animal": WORDS["pets"], "colour": WORDS["colours"]}
PLAN = ("open", "sky", "want", "go", "meet", "trouble", "help", "end", "close")
REPEATS = {"go": 2, "meet": 3, "trouble": 2, "help": 2, "end": 2}


def upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def story(rng: Random) -> list[str]:
    """One short story as a list of sentences; its people keep their names and pronouns throughout."""
    hero, friend = rng.sample(WORDS["names"], 2)
    pronouns = ("she", "her", "her") if hero in FEMALE else ("he", "him", "his")
    fixed = {"n": hero, "m": friend} | dict(zip(("he", "him", "his"), pronouns, strict=True))
    for slot in ("thing", "spot", "animal", "job", "job2"):
        fixed[slot] = expand(rng, rng.choice(STORY[slot]), fixed)
    sentences = []
    for part in PLAN:
        if part == "sky" and rng.random() < 0.4:
            continue
        for pattern in rng.sample(STORY[part], rng.randint(1, REPEATS.get(part, 1))):
            sentences.append(upper(expand(rng, pattern, fixed)))
    return sentences


def expand(rng: Random, pattern: str, fixed: dict[str, str]) -> str:
    """Fill the {slots} of `pattern`, innermost last; `fixed` wins over a random choice."""
    while match := re.search(r"\{(\w+)\}", pattern):
        value = fixed.get(match[1]) or rng.choice(STORY[match[1]])
        pattern = pattern[: match.start()] + value + pattern[match.end() :]
    return re.sub(r"\b([Aa]) (?=[aeioAEIO])", r"\1n ", pattern)


class Piece(NamedTuple):
    """A piece of a document; `weight` is how much its tokens count in the loss."""

    text: str
    weight: float = 1.0


MARKS = ["Remember: ", "Note this: ", "Important: ", "Remember this: ", "Keep in mind: "]


class Fact(NamedTuple):
    """One fact: how it may be told, how it may be asked, and `lead`, which the answer follows."""

    tells: tuple[str, ...]
    asks: tuple[str, ...]
    lead: str
    answer: str


PEOPLE = ("cities", "pets", "foods", "jobs")
"""Words that facts about people end in."""


def fact_of(kind: str, about: str, answer: str) -> Fact:
    """A fact by the patterns of its kind: some that tell it, as many that ask for it, and the lead."""
    *said, lead = (pattern.format(n=about, v=answer) for pattern in WORDS[f"fact.{kind}"])
    half = len(said) // 2
    return Fact(tuple(said[:half]), tuple(said[half:]), lead, answer)


def draw_facts(rng: Random, count: int, used: set[str]) -> list[Fact]:
    """Distinct facts; `used` holds the subjects that other passages in the same row already took."""
    facts: list[Fact] = []
    while len(facts) < count:
        number = rng.random() < 0.6
        words = ("colours", "objects") if number else ("names",)
        key = " ".join(rng.choice(WORDS[name]) for name in words)
        if key in used and (number or len(used) < 20):
            continue
        used.add(key)
        kind = "codes" if number else rng.choice(PEOPLE)
        answer = "".join(rng.choice("0123456789") for _ in range(4)) if number else rng.choice(WORDS[kind])
        facts.append(fact_of(kind, key, answer))
    return facts


def recall_passage(
    rng: Random,
    filler: list[str],
    facts: list[Fact],
    plain: float,
    weight: float,
    questions: int,
    late: bool = False,
    review: float = 0.0,
) -> list[Piece]:
    """Facts between `filler` sentences, then questions and weighted answers.

    `plain` is the chance that a fact is told in the words of its answer (the easy case). `late` tells facts in the
    first third only, so that the answer lies almost the whole passage back. `review` is the chance, at each sentence,
    of a question in the midst of the filler: facts then matter all along, not only at the end.
    """
    share = 3 if late else 1
    slots = sorted(rng.randrange(len(filler) // share + 1) for _ in facts)
    told = rng.sample(facts, len(facts))
    spans: list[Piece] = []
    for index in range(len(filler) + 1):
        while slots and slots[0] == index:
            slots.pop(0)
            fact = told.pop()
            tell = fact.tells[0] if rng.random() < plain else rng.choice(fact.tells)
            mark = rng.choice(MARKS) if rng.random() < 0.8 else ""
            spans.append(Piece((mark + tell if mark else upper(tell)) + " "))
        if index < len(filler):
            spans.append(Piece(filler[index] + " "))
            known = [fact for fact in facts if fact not in told]
            if review and known and rng.random() < review:
                spans += question(rng, rng.choice(known), plain, weight)
    for fact in rng.sample(facts, min(questions, len(facts))):
        spans += question(rng, fact, plain, weight)
    spans[-1] = Piece(".")
    return spans


def question(rng: Random, fact: Fact, plain: float, weight: float) -> list[Piece]:
    ask = fact.asks[0] if rng.random() < plain else rng.choice(fact.asks)
    return [Piece(f"{ask} {fact.lead}"), Piece(f" {fact.answer}", weight), Piece(". ")]
