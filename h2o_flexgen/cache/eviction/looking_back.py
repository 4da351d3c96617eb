"""Policies that look back at the last queries when a burst is due: what they have in common."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from h2o_flexgen.cache.eviction.base import (
    AttendedPrompts,
    AttendedStep,
    PromptRows,
    PromptScores,
    RankedPolicy,
    Tokens,
    in_spans,
)
from h2o_flexgen.cache.vectors import reordered
from h2o_flexgen.config.eviction import Budget


@dataclass(frozen=True)
class Look:
    """What one row holds, N tokens in time order, with its last m queries.

    q: (heads, m, d) float32, scaled; asked_at: (m,) their positions; k, v: (kv_heads, N, d) float32; pos: (kv_heads,
    N), -1 where nothing is; chosen: (kv_heads, N) bool, whether a token may be let go and the next query sees it.
    tokens: N of them, of this row; their draws differ from step to step.
    """

    q: Tensor
    asked_at: Tensor
    k: Tensor
    v: Tensor
    pos: Tensor
    chosen: Tensor
    tokens: Tokens
    budget: Budget
    window: int | None

    def attention(self, *, candidates: bool, group: str = "after") -> Tensor:
        """The mean over the queries of their softmax, (kv_heads, N): over candidates alone, or over all that each sees.

        Over the heads that share a KV head the mean is taken after it, or the largest logit before it.
        """
        kv_heads, size = self.pos.shape
        logits = self.q.reshape(kv_heads, -1, self.q.shape[-1]) @ self.k.transpose(-1, -2)
        logits = logits.view(kv_heads, -1, self.q.shape[1], size)
        if group == "before":
            logits = logits.amax(1, keepdim=True)
        if candidates:
            hidden = ~self.chosen.unsqueeze(1)
        else:
            pos, at = self.pos.unsqueeze(1), self.asked_at.view(1, -1, 1)
            hidden = (
                (pos < 0) | (pos > at) if self.window is None else (pos < 0) | (pos > at) | (pos <= at - self.window)
            )
        hidden = hidden.unsqueeze(1).expand_as(logits) if hidden.dim() == 3 else hidden
        return logits.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num_(0.0).mean((1, 2))


class LookingBack(RankedPolicy):
    """Lets tokens go in bursts, row by row, by what `score` makes of a `Look`. The prompt is pruned in the same way."""

    reads_values: ClassVar[bool] = False  # else those of a `Look` are anything

    def queries(self, length: int, budget: Budget) -> int:
        return min(length, self.window_of(budget))

    def window_of(self, budget: Budget) -> int:
        """How many of the last queries count: no more than there are between two bursts."""
        return max(1, min(self.looks_back, budget.burst))

    @abstractmethod
    def score(self, look: Look) -> Tensor:
        """(kv_heads, N) float32, never negative; read where a token is a candidate."""

    def prompt_scores(self, prompts: AttendedPrompts, rows: PromptRows) -> PromptScores:
        if prompts.queries is None:
            raise ValueError(f"{self.name} needs the prompt's last queries")
        length, count = prompts.length, min(prompts.length, self.window_of(rows.budget))
        places = torch.arange(length, device=prompts.k.device).expand(prompts.k.shape[1], -1)
        asked_at = places[0, length - count :]
        queries = prompts.queries[:, :, -count:]
        pinned = in_spans(rows.budget, length, places.device).expand_as(places) if rows.budget.spans else None
        keys, values, scale = prompts.keys, prompts.values, prompts.scale
        looks = (
            self._look(rows, row, queries[row], asked_at, keys[row], values[row], places, scale, pinned)
            for row in range(len(prompts.k))
        )
        return PromptScores(torch.stack([self.score(look) for look in looks]))

    def ranks(self, step: AttendedStep) -> Tensor:
        if step.queries is None or step.asked_at is None:
            raise ValueError(f"{self.name} needs the last queries")
        k, v = step.held()
        ranks = []
        for row, budget in enumerate(step.budgets):
            of = PromptRows(
                step.tokens._replace(row_ids=step.tokens.row_ids[row : row + 1], positions=step.now[row]),
                budget,
                step.window,
            )
            last = step.asked_at[row].argsort()[-self.window_of(budget) :]
            # Where one token goes at a time, the next takes its slot: neighbours are so in time.
            pos, order = step.pos[row].to(torch.int64).sort(-1)
            pinned = None if step.pinned is None else step.pinned[row].gather(-1, order)
            keys = reordered(k[row], order)
            values = reordered(v[row], order) if self.reads_values else keys
            queries = step.queries[row, :, last]
            look = self._look(of, 0, queries, step.asked_at[row, last], keys, values, pos, step.scale, pinned)
            ranks.append(torch.empty_like(step.score[row]).scatter_(-1, order, self.score(look)))
        return torch.stack(ranks)

    def update(self, step: AttendedStep) -> None:
        """Nothing is kept from step to step but the queries."""

    def _look(
        self,
        rows: PromptRows,
        row: int,
        q: Tensor,
        at: Tensor,
        k: Tensor,
        v: Tensor,
        pos: Tensor,
        scale: float,
        pinned: Tensor | None,
    ) -> Look:
        budget, now = rows.budget, at.max()
        chosen = (pos >= budget.sinks) & (pos <= now - budget.recent)
        if rows.window is not None:
            chosen &= pos > now + 1 - rows.window
        if pinned is not None:
            chosen &= ~pinned
        # A token's number in a draw is its position beside the newest one: the next burst draws anew.
        drawn = pos.clamp(min=0).unsqueeze(0) + (now + 1) * 0x10001
        tokens = Tokens(drawn, rows.tokens.row_ids[row : row + 1], rows.tokens.heads, rows.tokens.layer)
        return Look(
            q.float() * scale,
            at,
            k.float(),
            v.float() if self.reads_values else v,
            pos,
            chosen,
            tokens,
            budget,
            rows.window,
        )


def neighbours(values: Tensor, chosen: Tensor, size: int, *, largest: bool) -> Tensor:
    """values (kv_heads, N): the largest or the mean of `size` neighbours, as far as these are candidates."""
    half = size // 2
    padded = torch.nn.functional.pad(
        values.masked_fill(~chosen, -torch.inf if largest else 0.0), (half, half), value=-torch.inf if largest else 0.0
    )
    near = padded.unfold(-1, size, 1)
    if largest:
        return near.amax(-1).clamp(min=0)
    counts = torch.nn.functional.pad(chosen.float(), (half, half)).unfold(-1, size, 1).sum(-1)
    return near.sum(-1) / counts.clamp(min=1)
