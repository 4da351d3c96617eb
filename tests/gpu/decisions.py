"""Why two runs of the same work gave other tokens: sums in another order that tipped a close choice, or a fault.

What a run computes depends on two kinds of choices: which token a cache lets go, by its score, and which token comes
next, by its log-probability. Up to the first choice that two runs made differently all numbers are close; that choice
must have been close, too; after it nothing can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
from torch import Tensor

from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.engine.requests.sequence import RequestOutput

CLOSE = 2e-3
"""Of log-probabilities: sums in another order."""
TIE = 1e-4
"""Of scores, which are sums of probabilities in float32."""

Kept = dict[int, float]
"""Scores by position, of the tokens that one head of a row holds; 0 where tokens have none."""


class Run(NamedTuple):
    """What was answered, with a few likeliest tokens beside each, and what caches held.

    `kept`: heads by (row, layer), by the position of the decode step's token, before that step.
    """

    outputs: list[RequestOutput]
    prompts: list[int]
    kept: dict[int, dict[int, dict[int, list[Kept]]]]


@contextmanager
def watched(kept: dict[int, dict[int, dict[int, list[Kept]]]]) -> Iterator[None]:
    """Fills `kept` (row, position, layer) from every decode step within. Steps must not be recorded."""
    attend = KVCache.attend

    def noted(cache: KVCache, q: Tensor, *args: object, **options: object) -> Tensor:
        positions, score = cache.pos.tolist(), cache._slots.score
        scores = None if score is None else score.tolist()
        for row, (name, step) in enumerate(zip(cache.row_ids, cache.next_pos, strict=True)):
            heads = []
            for head, held in enumerate(positions[row]):
                values = [0.0] * len(held) if scores is None else scores[row][head]
                heads.append({p: s for p, s in zip(held, values, strict=True) if p >= 0})
            kept.setdefault(name, {}).setdefault(step, {})[cache._layer] = heads
        return attend(cache, q, *args, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "attend", noted)
        patch.setenv("H2O_FLEXGEN_GRAPHS", "0")
        yield


def fault(ours: Run, theirs: Run) -> str | None:
    """What no rounding explains, in one sentence; None where the runs differ by close choices at most."""
    for row in range(len(theirs.outputs)):
        found = _row_fault(row, ours, theirs)
        if found is not None:
            return f"row {row}: {found}"
    return None


def _row_fault(row: int, ours: Run, theirs: Run) -> str | None:
    mine, other, prompt = ours.outputs[row], theirs.outputs[row], theirs.prompts[row]
    if len(mine.token_ids) != len(other.token_ids):
        return f"{len(mine.token_ids)} tokens, not {len(other.token_ids)}"
    for index, (token, expected) in enumerate(zip(mine.token_ids, other.token_ids, strict=True)):
        # The first token comes from the prompt alone, the others from a step over the caches.
        step = prompt + index - 1
        flips = list(_flips(ours.kept.get(row, {}).get(step, {}), theirs.kept.get(row, {}).get(step, {})))
        if flips:
            far = [flip for flip in flips if not _tie(*flip)]
            return f"before token {index} the caches held {far[0]}, which was not close" if far else None
        if token != expected:
            beside = (other.top_logprobs or [])[index].get(token)
            close = beside is not None and abs(beside - (other.logprobs or [])[index]) <= CLOSE
            return None if close else f"token {index} is {token}, not {expected}, which was not close"
        difference = abs((mine.logprobs or [])[index] - (other.logprobs or [])[index])
        if difference > CLOSE:
            return f"token {index} is the same, and its log-probability is {difference:.2g} off"
    return None


def _flips(ours: dict[int, list[Kept]], theirs: dict[int, list[Kept]]) -> Iterator[tuple[Kept, Kept]]:
    """What one of the runs held and the other did not, head by head."""
    for layer, heads in theirs.items():
        for mine, other in zip(ours.get(layer, [{}] * len(heads)), heads, strict=True):
            if mine.keys() != other.keys():
                yield (
                    {p: mine[p] for p in mine.keys() - other.keys()},
                    {p: other[p] for p in other.keys() - mine.keys()},
                )


def _tie(mine: Kept, other: Kept) -> bool:
    """Whether as many tokens took each other's places, with scores that are all but the same."""
    pairs = list(zip(sorted(mine.values()), sorted(other.values()), strict=False))
    return len(mine) == len(other) and all(abs(a - b) <= TIE * max(1.0, abs(a)) for a, b in pairs)
