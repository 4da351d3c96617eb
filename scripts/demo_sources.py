"""Prose of public sources for the demo model, cleaned, and what of it is held out."""

from __future__ import annotations

import re
from pathlib import Path

VERSE = re.compile(r"^[A-Z0-9][A-Za-z0-9]{1,5}?(\d+:\d+)\s+(.*)$")
ROLE = re.compile(r":[\w:+-]+:`!?~?([^`<]+?)(?:\s*<[^`>]*>)?`")


def clean_rst(text: str) -> list[str]:
    """Prose paragraphs of a reStructuredText file: no directives, code, tables or headings."""
    kept = []
    for block in re.split(r"\n\s*\n", text):
        if block.startswith((" ", "\t", "..", "*", "-", "+", "|", "=", "#", ">", ":")) or len(block) < 120:
            continue
        line = re.sub(r"\s+", " ", ROLE.sub(r"\1", block)).strip()
        line = re.sub(r"`([^`<]+?)(\s*<[^`>]*>)?`_*", r"\1", line.replace("``", "").replace("::", ":"))
        line = re.sub(r"\*\*?([^*]+)\*\*?", r"\1", line).replace("\\", "")
        if line.endswith((".", ":", "?", "!")) and "====" not in line and "----" not in line and line.isascii():
            kept.append(line)
    return kept


def clean_plain(text: str) -> list[str]:
    """Paragraphs of a plain text file; numbered verses ('Ge1:1 In the ...') are joined, eight to a paragraph."""
    verses = [match[2] for match in map(VERSE.match, text.splitlines()) if match]
    if len(verses) > 100:
        return [" ".join(verses[at : at + 8]) for at in range(0, len(verses), 8)]
    return [re.sub(r"\s+", " ", block).strip() for block in re.split(r"\n\s*\n", text) if len(block) >= 80]


def load_source(path: Path) -> list[str]:
    """Paragraphs of one source: a text file, or a folder of reStructuredText files."""
    if path.is_dir():
        files = sorted([*path.rglob("*.rst"), *path.rglob("*.rst.txt")])
        return [line for file in files for line in clean_rst(file.read_text(encoding="utf-8", errors="ignore"))]
    return clean_plain(path.read_text(encoding="utf-8", errors="ignore"))


def split_heldout(paragraphs: list[str], run: int = 20, every: int = 40) -> tuple[list[str], list[str]]:
    """(training, held-out): every 40th run of 20 consecutive paragraphs is held out."""
    groups = [paragraphs[at : at + run] for at in range(0, len(paragraphs), run)]
    held = [line for index, group in enumerate(groups) if index % every == every - 1 for line in group]
    kept = [line for index, group in enumerate(groups) if index % every != every - 1 for line in group]
    return kept, held


def sentences_of(paragraph: str) -> list[str]:
    return [part for part in re.split(r"(?<=[.!?]) +(?=[A-Z\"])", paragraph) if part]
