"""The documentation names files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMED = re.compile(r"`([\w./-]+(?:\.(?:py|c|h|sh|md|png|json|txt)|/))`")
LINKED = re.compile(r"\]\((?!https?:)([^)#]+)\)")
ELSEWHERE = {"h2o_flexgen/benchmark/h2o/h2o_suite.py"}
"""Files of the original H2O code."""


def there(name: str) -> bool:
    """Whether a file or folder is named by its path from the root, the package or a place that the text speaks of."""
    below = (ROOT, ROOT / "h2o_flexgen", ROOT / "h2o_flexgen/kernels", ROOT / "h2o_flexgen/engine")
    return any((folder / name).exists() for folder in below)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_files_that_are_named_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = {name for name in NAMED.findall(text) if "/" in name and "NAME" not in name} - ELSEWHERE
    assert not (gone := sorted(name for name in named if not there(name))), gone
    assert not (gone := sorted(name for name in LINKED.findall(text) if not (path.parent / name).exists())), gone


def test_the_readme_is_read_in_one_sitting() -> None:
    assert len(DOCS[0].read_text(encoding="utf-8").splitlines()) <= 120


def test_the_documents_stay_short() -> None:
    words = {path.name: len(path.read_text(encoding="utf-8").split()) for path in DOCS}
    assert sum(words.values()) < 20_000, words


def test_the_engine_is_read_in_25_files() -> None:
    text = (ROOT / "docs/how-it-works.md").read_text(encoding="utf-8")
    section = text.partition("## The engine in 25 files")[2].partition("\n## ")[0]
    files = re.findall(r"^\| ?`([\w/]+\.py)` ?\|", section, re.MULTILINE)
    assert len(files) == len(set(files)) == 25
    lines = [len((ROOT / "h2o_flexgen" / name).read_text(encoding="utf-8").splitlines()) for name in files]
    assert sum(lines) < 6000, dict(zip(files, lines, strict=True))
