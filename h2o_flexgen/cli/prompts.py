"""Where `run` gets its prompts: flags, files, the demo's own, or random tokens for measuring."""

from __future__ import annotations

import json
import random
from importlib import resources
from pathlib import Path

from h2o_flexgen.errors import UsageError


def read_prompts(path: Path) -> list[str]:
    """Prompts in a text file (one per line) or a .jsonl file ({"prompt": "..."} per line); blank lines are skipped.

    A byte order mark is tolerated. UsageError naming the file and line where one cannot be used.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: byte {error.start}", "needed a text file or .jsonl") from None
    except OSError as error:
        raise UsageError(f"--prompts {path}: {error.strerror}", "needed a readable file") from None
    if path.suffix == ".jsonl":
        return [_prompt_of(line, f"{path} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    return [line for line in lines if line.strip()]


def _prompt_of(line: str, where: str) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}", 'needed {"prompt": "..."}') from None
    prompt = entry.get("prompt") if isinstance(entry, dict) else entry
    if not isinstance(prompt, str):
        raise UsageError(f"{where} has no prompt text", 'needed {"prompt": "..."}')
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{where} holds half a surrogate pair, which is no text", "needed valid Unicode") from None
    return prompt


def demo_prompts() -> list[str]:
    """The prompts that are shipped with the demo model."""
    text = resources.files("h2o_flexgen").joinpath("data/demo/prompts.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.strip()]


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """`count` prompts of `length` random token ids: work of a known size, for measuring."""
    source = random.Random(seed)
    first = min(4, vocab_size - 1)  # the first ids are special tokens in most vocabularies
    return [[source.randrange(first, vocab_size) for _ in range(length)] for _ in range(count)]
