"""The prompt's spans in a cache: pinned spans, which stay whole, and fair spans, which share the budget."""

from __future__ import annotations

from dataclasses import replace

import torch

from h2o_flexgen.cache.eviction import base
from h2o_flexgen.cache.eviction.choice import choose
from h2o_flexgen.config.budget import Budget, shares_of


def queries(policy: base.RankedPolicy, length: int, budget: Budget) -> int:
    """As `RankedPolicy.queries`; within fair spans attention is computed anew."""
    wanted = policy.queries(length, budget.inside or budget)
    return length if budget.fair and (wanted or policy.column_sums) else wanted


def prompt_scores(policy: base.RankedPolicy, prompts: base.AttendedPrompts, rows: base.PromptRows) -> base.PromptScores:
    """As `RankedPolicy.prompt_scores`, with +inf for tokens that spans keep, which are then never evicted."""
    budget = rows.budget
    if budget.fair:
        return _shared(policy, prompts, rows)
    rank, state, extra = policy.prompt_scores(prompts, rows)
    if not budget.spans:
        return base.PromptScores(rank, state, extra)
    pinned = base.in_spans(budget, rank.shape[-1], rank.device)
    state = None if state is None else state.masked_fill(pinned, torch.inf)
    return base.PromptScores(rank.masked_fill(pinned, torch.inf), state, extra)


def _shared(policy: base.RankedPolicy, prompts: base.AttendedPrompts, rows: base.PromptRows) -> base.PromptScores:
    """Scores by fair shares: each part keeps its share, chosen as if the part were the prompt."""
    n, kv_heads = prompts.k.shape[:2]
    rank = torch.zeros(n, kv_heads, prompts.length, device=prompts.k.device)
    for (start, stop), share in shares_of(rows.budget, prompts.length, rows.window):
        if share is None:
            rank[..., start:stop] = torch.inf
            continue
        part, places = prompts.part(start, stop), torch.arange(stop - start, device=rank.device)
        asked = base.PromptRows(rows.tokens._replace(positions=places), share, rows.window)
        if policy.column_sums:
            part = replace(part, column_sums=base.summed_rows(part, part.length, rows.window))
        kept = choose(policy.prompt_scores(part, asked).rank, places, share, None)
        rank[..., start:stop].scatter_(-1, kept, torch.inf)
    return base.PromptScores(
        rank, torch.full_like(rank, torch.inf), torch.zeros_like(rank) if policy.keeps_two else None
    )
