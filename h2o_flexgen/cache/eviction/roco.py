"""Mean attention, with volatile tokens immune (Ren and Zhu 2024, arXiv 2402.06262, "RoCo")."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from h2o_flexgen.cache.eviction import base
from h2o_flexgen.config.eviction import Budget
from h2o_flexgen.errors import required

VOLATILE = 3  # tenths of the budget
_TWO = "roco keeps two numbers"


class RoCoPolicy(base.RankedPolicy):
    """The score is the mean attention received, and of the 0.3 B tokens whose attention varies most none goes.

    Kept are sums of attention and of its squares. A token's attention varies most when it is young.
    """

    name = "roco"
    by = "steady"
    needs_rows = keeps_two = True
    asks = "all"

    def scope(self, budget: Budget) -> int:
        return _scope(budget, 1)

    def prompt_scores(self, prompts: base.AttendedPrompts, rows: base.PromptRows) -> base.PromptScores:
        budget, last = rows.budget, prompts.length - 1
        received = (part.mean(2) for _, part in base.attention_rows(prompts, prompts.length, rows.window))
        sums, squares = reduce(torch.add, (torch.stack([part.sum(2), part.square().sum(2)]) for part in received))
        seen = torch.full((1, 1, 1), last, device=sums.device)
        pos, scope = rows.tokens.positions, _scope(budget, max(1, prompts.length - budget.total))
        protected = (pos < budget.sinks) | (pos > last - budget.recent)
        if budget.spans:
            protected |= base.in_spans(budget, prompts.length, pos.device)
        ranks = _ranks(sums, squares, pos, seen, scope, protected)
        return base.PromptScores(ranks, sums, squares)

    def update(self, step: base.AttendedStep) -> None:
        step.score.add_(step.received)
        required(step.extra, _TWO).addcmul_(step.received, step.received)

    def ranks(self, step: base.AttendedStep) -> Tensor:
        numbers = [(budget.sinks, budget.recent, self.scope(budget)) for budget in step.budgets]
        limits = step.once("limits of roco", lambda: torch.tensor(numbers, device=step.pos.device))
        sinks, recent, scopes = limits.view(-1, 3, 1, 1).unbind(1)
        protected = (step.pos < sinks) | (step.pos > step.now - recent)
        if step.pinned is not None:
            protected |= step.pinned
        scope = numbers[0][2] if len(set(numbers)) == 1 else scopes
        return _ranks(step.score, required(step.extra, _TWO), step.pos, step.now, scope, protected)


def _scope(budget: Budget, leaving: int) -> int:
    """Of how many tokens, those with the steadiest attention, the ones that leave are chosen."""
    return max(budget.total - VOLATILE * budget.total // 10 - budget.sinks, leaving)


def _ranks(sums: Tensor, squares: Tensor, pos: Tensor, now: Tensor, scope: int | Tensor, protected: Tensor) -> Tensor:
    """Means; more than any mean where a token is not among its row's `scope` steadiest that are not `protected`.

    Of equal deviations the higher position is the steadier. scope: of all rows, or of each, (b, 1, 1).
    """
    count = (now + 1 - pos).clamp(min=1)
    mean = sums / count
    deviation = (squares / count - mean.square()).clamp_(min=0)
    # As one whole number, so that none are equal: positions are below 2^31, and deviations not negative.
    keys = deviation.view(torch.int32).to(torch.int64).bitwise_left_shift(32) - pos
    keys = keys.masked_fill(protected.expand_as(keys), torch.iinfo(torch.int64).max)
    if isinstance(scope, int):
        bound = keys.kthvalue(min(scope, keys.shape[-1]), -1, keepdim=True).values  # sorting takes thrice as long
    else:
        last = scope.clamp(max=keys.shape[-1]) - 1
        bound = keys.sort(-1).values.gather(-1, last.expand(*keys.shape[:2], 1))
    return mean.masked_fill(keys > bound, 2.0)
