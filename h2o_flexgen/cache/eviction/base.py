"""What an eviction policy decides. The cache does the bookkeeping: slots, positions, protection, ties."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

Statistic = Literal["none", "last_row", "window_rows", "column_sums"]


class Tokens(NamedTuple):
    """Tokens whose scores are asked for; the three tensors are int64 and broadcast to (n, kv_heads, T)."""

    positions: Tensor  # absolute
    row_ids: Tensor  # the sequence's index in the call, not its place in a GPU batch
    heads: Tensor  # KV heads
    layer: int


class EvictionPolicy:
    """Which tokens stay. This base keeps the sinks and the most recent: only the order of arrival counts, no score.

    For every policy, the first `sinks` and the last `recent` positions of a row's budget are protected; among equal
    scores the lower position stays. Policies hold no state of a sequence: one object serves all layers and batches.
    """

    name: ClassVar[str]
    statistic: ClassVar[Statistic] = "none"  # what the attention of the prompt must deliver
    needs_rows: ClassVar[bool] = False  # whether a decode step must deliver its probability row

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed


class RankedPolicy(EvictionPolicy, ABC):
    """A policy that gives every token a score, float32 and never negative; higher stays."""

    @abstractmethod
    def prompt_scores(self, tokens: Tokens, column_sums: Tensor | None) -> Tensor:
        """Scores after the prompt, (n, kv_heads, S) float32; `column_sums` has that shape too."""

    def new_scores(self, tokens: Tokens) -> Tensor | None:
        """Scores of the b tokens just written, (b, kv_heads, 1), before their own row is accumulated; None: zero."""
        return None

    def accumulate(self, score: Tensor, row: Tensor) -> None:
        """Take a step's softmax probabilities `row` (b, kv_heads, N) into `score` of the same shape, in place.

        Called only where `needs_rows`; empty slots have probability 0. This sum a kernel may do by itself instead: a
        policy that wants something else overrides it.
        """
        score.add_(row)
