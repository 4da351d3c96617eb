"""The ceiling of eviction: a policy with foresight, as Belady's algorithm, for measurements only.

It reads every text twice: first as one prompt with the full cache, recording the attention of the continuation's
queries, then evicting the token that gets least of it. No policy keeps more of the full run's attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from h2o_flexgen.cache.eviction import base
from h2o_flexgen.config.eviction import Budget

CEILING = "ceiling"
"""Its name; it is offered to measurements alone."""


class Foresight:
    """The attention to come of the texts that were watched, by layer and by the text's place in the call."""

    def __init__(self) -> None:
        self.steps: list[int] | None = None
        """While texts are watched: queries of each text's continuation."""
        self.to_come: dict[tuple[int, int], Tensor] = {}
        """Where a choice had to be made (kv_heads, queries + 1, tokens) float32: entry q is what the queries from
        number q on pay each token."""

    @contextmanager
    def watching(self, steps: Sequence[int]) -> Iterator[None]:
        """Within it prompts are whole texts, the last `steps` of whose queries are kept. Forgets earlier ones."""
        self.to_come.clear()
        self.steps = list(steps)
        try:
            yield
        finally:
            self.steps = None

    def record(self, layer: int, row: int, received: Tensor) -> None:
        """received: (kv_heads, queries, tokens), what each query pays. Kept is what it and all later ones pay."""
        sums = received.flip(1).cumsum(1).flip(1)
        self.to_come[layer, row] = torch.cat([sums, torch.zeros_like(sums[:, :1])], dim=1)


class CeilingPolicy(base.RankedPolicy):
    """The score is the attention that a token receives in all later steps of the full run."""

    name = CEILING

    def __init__(self, foresight: Foresight) -> None:
        super().__init__()
        self._foresight = foresight

    def queries(self, length: int, budget: Budget) -> int:
        return 0 if self._foresight.steps is None else max(self._foresight.steps)

    def prompt_scores(self, prompts: base.AttendedPrompts, rows: base.PromptRows) -> base.PromptScores:
        foresight, layer = self._foresight, rows.tokens.layer
        names = [int(row) for row in rows.tokens.row_ids.flatten()]
        if foresight.steps is None:
            scores = [foresight.to_come[layer, row][:, 0, : prompts.length] for row in names]
            return base.PromptScores(torch.stack(scores).to(prompts.k.device))
        steps = [foresight.steps[row] for row in names]
        parts = (
            [part.mean(2) for _, part in base.attention_rows(prompts, max(steps), rows.window)] if max(steps) else []
        )
        for place, (row, count) in enumerate(zip(names, steps, strict=True)):
            none = prompts.keys.new_zeros(prompts.keys.shape[1], 0, prompts.length, dtype=torch.float32)
            received = torch.cat([part[place] for part in parts], dim=1)[:, -count:] if count else none
            foresight.record(layer, row, received)
        return base.PromptScores(torch.ones(len(names), prompts.keys.shape[1], prompts.length, device=prompts.k.device))

    def ranks(self, step: base.AttendedStep) -> Tensor:
        found = []
        for place, row in enumerate(step.tokens.row_ids.flatten().tolist()):
            to_come = self._foresight.to_come.get((step.tokens.layer, row))
            if to_come is None:  # it loses no token: its budget is its length
                found.append(torch.zeros_like(step.score[place]))
                continue
            # The first query of the continuation stands behind the context; positions end with the last query's.
            number = int(step.now[place]) + 1 - (to_come.shape[2] - to_come.shape[1] + 1)
            pos = step.pos[place].clamp(0, to_come.shape[2] - 1).to(torch.int64)
            # A row that is done may wait for its neighbours: its last entry, after all queries, is 0 for every token.
            found.append(to_come[:, min(number, to_come.shape[1] - 1)].to(pos.device).gather(-1, pos))
        return torch.stack(found)
