"""Text for the stream model: generated stories, and the prose of the Python installation that runs this.

The prose is what `pydoc` shows: the topics of the language reference, and the docstrings of the standard library. Both
are under the PSF licence, and nothing has to be fetched.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

from demo_rows import BOS, Corpus
from demo_sources import split_heldout
from demo_story import story

HELD_SEED = 77
SKIPPED = {"site-packages", "test", "tests", "idlelib", "idle_test", "pydoc_data", "lib2to3", "__pycache__"}
LEAST = 60  # characters of a paragraph


def python_prose() -> list[str]:
    """Paragraphs of the topics and of all docstrings of the standard library, in a fixed order, each once."""
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    root = Path(os.__file__).parent
    for file in sorted(root.rglob("*.py")):
        if not SKIPPED & set(file.relative_to(root).parts):
            texts += docstrings(file)
    blocks = (" ".join(block.split()) for text in texts for block in re.split(r"\n\s*\n", text))
    return list(dict.fromkeys(block for block in blocks if len(block) >= LEAST and block.isascii()))


def docstrings(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8", errors="ignore"))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
            yield text


class Mix:
    """Lines of text: half of them stories, half as long runs of paragraphs of Python's prose."""

    def __init__(self, corpus: Corpus) -> None:
        self.encode = corpus.encode
        self.kept, self.held = split_heldout(python_prose(), every=25)

    def prose(self, pool: list[str], at: int) -> tuple[str, int]:
        """Paragraphs from `at` on that make about as many tokens as a story, and where they end."""
        taken: list[str] = []
        while sum(map(len, taken)) < 500:
            taken.append(pool[at % len(pool)])
            at += 1
        return " ".join(taken), at

    def row(self, rng: Random, length: int, held: bool = False) -> list[int]:
        """BOS and `length` - 1 tokens, half the time from the beginning of a line."""
        pool = self.held if held else self.kept
        skipped = rng.randrange(200) if rng.random() < 0.5 else 0
        ids: list[int] = []
        while len(ids) < length + skipped:
            prose = rng.random() < 0.5
            line = self.prose(pool, rng.randrange(len(pool)))[0] if prose else " ".join(story(rng))
            ids += self.encode(line + "\n")
        return [BOS, *ids[skipped : skipped + length - 1]]

    def heldout(self) -> str:
        """All prose that was held out, each paragraph once and in order, a story of another seed after each run."""
        rng, lines, at = Random(HELD_SEED), list[str](), 0
        while at < len(self.held):
            line, at = self.prose(self.held, at)
            lines += [line, " ".join(story(rng))]
        return "\n".join(lines) + "\n"
