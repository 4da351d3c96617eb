"""How prompts go through attention: whole, several at a time, or in parts."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple


class Segment(NamedTuple):
    """Prompts, or parts of long ones, that go through attention together: `rows` times `length` tokens after `past`."""

    rows: int
    length: int
    past: int


def chunks(tokens: int, chunk: int) -> Counter[int]:
    """`tokens` in chunks, and a rest: how many there are of each size."""
    return +Counter({chunk: tokens // chunk, tokens % chunk: 1 if tokens % chunk else 0})


def prompt_segments(rows: int, prompt_len: int, chunk: int) -> Counter[Segment]:
    """How the engine cuts `rows` prompts that share nothing, and how many segments of each kind there are.

    Whole prompts, as many as a chunk holds; longer ones alone, in parts. Each segment is a chunk of its own.
    """
    if prompt_len > chunk:
        starts = range(0, prompt_len, chunk)
        return Counter({Segment(1, min(chunk, prompt_len - start), start): rows for start in starts})
    fitting = chunk // prompt_len
    segments = Counter({Segment(fitting, prompt_len, 0): rows // fitting, Segment(rows % fitting, prompt_len, 0): 1})
    return Counter({segment: count for segment, count in segments.items() if segment.rows and count})
