"""The common part of policies that look back at the last queries when a burst is due."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.cache.eviction import base
from h2o_flexgen.cache.vectors import index_of, reordered
from h2o_flexgen.config.eviction import ROW_LOGITS, Budget
from h2o_flexgen.errors import required
from h2o_flexgen.kernels.torch_attention import capped
from h2o_flexgen.kernels.types import KeysValues

_NEEDED = "the last queries are needed"


@dataclass(frozen=True)
class Look:
    """The tokens of n rows of one budget, N of each in time order, with their last m queries.

    q: (n, heads, m, d) float32, scaled; asked_at: (n, m) their positions; k, v: (n, kv_heads, N, d) float32; pos: (n,
    kv_heads, N), -1 where a slot is empty; chosen: the same, bool, whether the token may be evicted and the next query
    sees it. tokens: N of each row, numbered anew for the random choices of each step.
    """

    q: Tensor
    asked_at: Tensor
    k: Tensor
    v: Tensor
    pos: Tensor
    chosen: Tensor
    tokens: base.Tokens
    budget: Budget
    window: int | None
    soft_cap: float | None

    def attention(self, *, candidates: bool, group: str = "after") -> Tensor:
        """The mean over the queries of their softmax, (n, kv_heads, N): over candidates alone, or all that each sees.

        Over the heads that share a KV head the mean is taken after it, or the largest logit before it.
        """
        n, kv_heads, size = self.pos.shape
        logits = self.q.reshape(n, kv_heads, -1, self.q.shape[-1]) @ self.k.transpose(-1, -2)
        logits = capped(logits, self.soft_cap).view(n, kv_heads, -1, self.q.shape[2], size)
        if group == "before":
            logits = logits.amax(2, keepdim=True)
        if candidates:
            hidden = ~self.chosen.unsqueeze(2)
        else:
            # Empty slots get the last position, which no query sees. In int32, as there is a comparison for each logit.
            held = self.pos.masked_fill(self.pos < 0, torch.iinfo(torch.int32).max).to(torch.int32).unsqueeze(2)
            at = self.asked_at[:, None, :, None].to(torch.int32)
            hidden = held > at
            if self.window is not None:
                hidden |= held <= at - self.window
        return torch.where(hidden.unsqueeze(2), -torch.inf, logits).softmax(-1).nan_to_num_(0.0).mean((2, 3))


class LookingBack(base.RankedPolicy):
    """Lets tokens go in bursts by what `score` makes of a `Look`. The prompt is pruned in the same way."""

    reads_values: ClassVar[bool] = False  # else those of a `Look` are anything

    def queries(self, length: int, budget: Budget) -> int:
        return min(length, self.window_of(budget))

    def window_of(self, budget: Budget) -> int:
        """How many of the last queries count: no more than there are between two bursts."""
        return max(1, min(self.looks_back, budget.burst))

    @abstractmethod
    def score(self, look: Look) -> Tensor:
        """(n, kv_heads, N) float32, never negative; read where a token is a candidate."""

    def prompt_scores(self, prompts: base.AttendedPrompts, rows: base.PromptRows) -> base.PromptScores:
        length, count = prompts.length, min(prompts.length, self.window_of(rows.budget))
        places = torch.arange(length, device=prompts.k.device).expand(1, prompts.k.shape[1], -1)
        pinned = base.in_spans(rows.budget, length, places.device).expand_as(places) if rows.budget.spans else None
        queries = required(prompts.queries, _NEEDED)
        some = max(1, ROW_LOGITS // (queries.shape[1] * count * length))
        scores = []
        for first in range(0, len(prompts.k), some):
            part = prompts.of(slice(first, first + some))
            pos = places.expand(len(part.k), -1, -1)
            tokens = rows.tokens._replace(row_ids=rows.tokens.row_ids[first : first + some])
            asked = queries[first : first + some, :, -count:]
            asked_at, held = pos[:, 0, length - count :], KeysValues(part.keys, part.values)
            scores.append(
                self.score(self._look(rows._replace(tokens=tokens), asked, asked_at, held, pos, part, pinned))
            )
        return base.PromptScores(torch.cat(scores))

    def ranks(self, step: base.AttendedStep) -> Tensor:
        asked, asked_at = required(step.queries, _NEEDED), required(step.asked_at, _NEEDED)
        # Where one token goes at a time, the next takes its slot: neighbours are so in time. Bursts keep the order.
        pos, order = step.pos.to(torch.int64), None
        if any(budget.burst == 1 for budget in step.budgets):
            pos, order = pos.sort(-1)
        held, last = step.held(), asked_at.argsort(-1)
        found = torch.empty_like(step.score)
        for budget, rows in self._parts(step, asked.shape[1]):
            recent, own = last[rows, -self.window_of(budget) :], None if order is None else order[rows]
            queries = reordered(asked[rows], recent.unsqueeze(1).expand(-1, asked.shape[1], -1))
            of = base.PromptRows(step.tokens._replace(row_ids=step.tokens.row_ids[rows]), budget, step.window)
            pinned, kept = None if step.pinned is None else step.pinned[rows], KeysValues(held.k[rows], held.v[rows])
            if own is not None:
                pinned = None if pinned is None else pinned.gather(-1, own)
                keys = reordered(kept.k, own)
                kept = KeysValues(keys, reordered(kept.v, own) if self.reads_values else keys)
            look = self._look(of, queries, asked_at[rows].gather(-1, recent), kept, pos[rows], step, pinned)
            scores = self.score(look)
            found[rows] = scores if own is None else torch.empty_like(scores).scatter_(-1, own, scores)
        return found

    def _parts(self, step: base.AttendedStep, heads: int) -> Iterator[tuple[Budget, slice | Tensor]]:
        """Rows of one budget, some at a time: of many at once, logits would leave the processor's caches between one
        operation and the next."""
        for budget in dict.fromkeys(step.budgets):
            members = [row for row, each in enumerate(step.budgets) if each == budget]
            some = max(1, ROW_LOGITS // (heads * self.window_of(budget) * step.pos.shape[-1]))
            for first in range(0, len(members), some):
                part = members[first : first + some]
                together = part[-1] - part[0] < len(part)  # whose keys and values are not copied
                yield budget, slice(part[0], part[-1] + 1) if together else index_of(part, step.pos.device)

    def update(self, step: base.AttendedStep) -> None:
        """No state is kept from step to step but the queries."""

    def _look(
        self,
        rows: base.PromptRows,
        q: Tensor,
        at: Tensor,
        held: KeysValues,
        pos: Tensor,
        attended: base.AttendedPrompts | base.AttendedStep,
        pinned: Tensor | None,
    ) -> Look:
        budget, now = rows.budget, at.amax(-1).view(-1, 1, 1)
        chosen = (pos >= budget.sinks) & (pos <= now - budget.recent)
        if rows.window is not None:
            chosen &= pos > now + 1 - rows.window
        if pinned is not None:
            chosen &= ~pinned
        # A token's number in a draw is its position beside the newest one: the next burst draws anew.
        tokens = rows.tokens._replace(positions=pos.clamp(min=0) + (now + 1) * 0x10001)
        keys, values = held.k.float(), held.v.float() if self.reads_values else held.v
        q = q.float() * attended.logits.scale
        return Look(q, at, keys, values, pos, chosen, tokens, budget, rows.window, attended.logits.soft_cap)


def neighbours(values: Tensor, chosen: Tensor, size: int, *, largest: bool) -> Tensor:
    """values (n, kv_heads, N): the largest or the mean of `size` neighbours, as far as these are candidates."""
    half = size // 2
    if largest:  # none is negative
        return F.max_pool1d(values.masked_fill(~chosen, 0.0), size, stride=1, padding=half)
    near = F.avg_pool1d(values.masked_fill(~chosen, 0.0), size, stride=1, padding=half)
    return near / F.avg_pool1d(chosen.float(), size, stride=1, padding=half).clamp(min=1 / size)
