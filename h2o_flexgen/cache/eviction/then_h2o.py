"""A policy that prunes the prompt, and H2O from there on: `snapkv+h2o` and its kin."""

from __future__ import annotations

from dataclasses import replace

import torch

from h2o_flexgen.cache.eviction import base
from h2o_flexgen.config.eviction import Budget

_WINDOW = 32


class ThenH2O(base.RankedPolicy):
    """Keeps the tokens of the prompt that `first` ranks highest, beside the sinks and H2O's recent half.

    H2O's sums then start with the plain attention that `first` made its ranks of; with 0 where it used none.
    """

    name = "+h2o"
    needs_rows = True

    def __init__(self, first: base.RankedPolicy) -> None:
        super().__init__(first.seed)
        self._first = first

    @property
    def raw_queries(self) -> bool:  # type: ignore[override]
        return self._first.raw_queries

    def queries(self, length: int, budget: Budget) -> int:
        return self._first.queries(length, _narrow(budget))

    def prompt_scores(self, prompts: base.AttendedPrompts, rows: base.PromptRows) -> base.PromptScores:
        rank, state, _ = self._first.prompt_scores(prompts, rows._replace(budget=_narrow(rows.budget)))
        return base.PromptScores(rank, torch.zeros_like(rank) if state is None else state)


def _narrow(budget: Budget) -> Budget:
    """With no more recent tokens than a window has queries."""
    return replace(budget, recent=max(1, min(_WINDOW, budget.recent)))
