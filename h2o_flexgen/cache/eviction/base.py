"""The interface of eviction policies. Caches do the bookkeeping: slots, positions, protection, ties."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.config.eviction import ROW_LOGITS, Budget
from h2o_flexgen.errors import required
from h2o_flexgen.kernels.torch_attention import capped, softmax
from h2o_flexgen.kernels.types import KeysValues, Logits, RankedBy

Turn = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Positions (c,) -> cosines and sines (c, dim) of the angles that queries there are turned by, float32. The second half
of `dim`, which are the leading ones of a head, repeats the first; i and i + dim / 2 turn together."""


Once = Callable[[str, Callable[[], Tensor]], Tensor]


class Tokens(NamedTuple):
    """Tokens whose scores are asked for; the three tensors are int64 and broadcast to (n, kv_heads, T)."""

    positions: Tensor  # absolute
    row_ids: Tensor  # the sequence's index in the call, not its place in a GPU batch
    heads: Tensor  # KV heads
    layer: int


@dataclass(frozen=True)
class AttendedPrompts:
    """Prompts of one length S in one layer after attention: the inputs of a policy.

    k, v, stored_k  the last L tokens, (n, kv_heads, L, d); stored_k as a cache stores it, unrotated if positions roll
    past            K, V and stored K (kv_heads, S - L, d) of the tokens before, which the n rows share
    queries         the last m, (n, heads, m, d), as many as `RankedPolicy.queries` asks for
    column_sums     (n, kv_heads, S) float32
    turn            the rotation of queries; None: they are not rotated
    """

    k: Tensor
    v: Tensor
    stored_k: Tensor
    logits: Logits
    past: tuple[Tensor, ...] | None = None
    queries: Tensor | None = None
    column_sums: Tensor | None = None
    turn: Turn | None = None

    def of(self, rows: slice | Tensor) -> AttendedPrompts:
        own = {name: getattr(self, name) for name in ("k", "v", "stored_k", "queries", "column_sums")}
        taken: dict[str, Any] = {name: None if x is None else x[rows] for name, x in own.items()}
        return replace(self, **taken)

    def with_heads(self, heads: Tensor, asked: Tensor | None) -> AttendedPrompts:
        """Only these KV heads, and `asked`, their query heads, where there is something of those."""
        own = {name: getattr(self, name) for name in ("k", "v", "stored_k", "column_sums")}
        taken: dict[str, Any] = {name: None if x is None else x[:, heads] for name, x in own.items()}
        past = None if self.past is None else tuple(part[heads] for part in self.past)
        queries = None if self.queries is None else self.queries[:, asked]
        return replace(self, past=past, queries=queries, logits=self.logits.of(asked), **taken)

    def first(self, length: int) -> AttendedPrompts:
        """Only K and V of the first `length` tokens; `length` may end after those of `past` or among them."""
        return self if length >= self.length else self._cut(0, length)

    def last(self, count: int) -> AttendedPrompts:
        """The last `count` tokens as if they were the prompts: only they attend to each other."""
        first, queries, sums = self.length - count, self.queries, self.column_sums
        queries = None if queries is None else queries[:, :, max(0, queries.shape[2] - count) :]
        sums = None if sums is None else sums[..., first : self.length]
        return replace(self._cut(first, self.length), queries=queries, column_sums=sums)

    def _cut(self, start: int, stop: int) -> AttendedPrompts:
        """Only K and V of the tokens [start, stop)."""
        before = self.length - self.k.shape[2]
        past = None if self.past is None or start >= before else tuple(part[:, start:stop] for part in self.past)
        own = slice(max(0, start - before), max(0, stop - before))
        taken = {name: getattr(self, name)[:, :, own] for name in ("k", "v", "stored_k")}
        return replace(self, past=past, **taken)

    def part(self, start: int, stop: int) -> AttendedPrompts:
        """The tokens [start, stop) as if they were the prompts, at their positions; `queries` must be of all tokens."""
        turn, before = self.turn, self.length - (stop - start)
        later: Turn | None = None if turn is None else lambda positions: turn(positions + before)
        cut = self._cut(start, stop)
        return replace(
            cut,
            k=cut.keys,
            v=cut.values,
            stored_k=cut.stored_keys,
            past=None,
            queries=None if self.queries is None else self.queries[:, :, start:stop],
            column_sums=None,
            turn=later,
        )

    @property
    def length(self) -> int:
        return self.k.shape[2] + (0 if self.past is None else self.past[0].shape[1])

    @cached_property
    def keys(self) -> Tensor:
        """As queries saw them, (n, kv_heads, S, d)."""
        return self._whole(self.k, 0)

    @cached_property
    def values(self) -> Tensor:
        """(n, kv_heads, S, d)."""
        return self._whole(self.v, 1)

    @cached_property
    def stored_keys(self) -> Tensor:
        """As a cache keeps them, (n, kv_heads, S, d)."""
        return self._whole(self.stored_k, 2)

    def _whole(self, own: Tensor, part: int) -> Tensor:
        if self.past is None:
            return own
        return torch.cat([self.past[part].expand(len(own), -1, -1, -1), own], dim=2)


class PromptRows(NamedTuple):
    """Facts about prompts beside their attention: their tokens, budget and window."""

    tokens: Tokens
    budget: Budget
    """The budget of each prompt."""
    window: int | None
    """The layer's window."""


class PromptScores(NamedTuple):
    """Scores of prompt tokens: for the choice, and for decode steps to start from; each (n, kv_heads, S) float32."""

    rank: Tensor
    """Higher stays; never negative."""
    state: Tensor | None = None
    """The score that steps start from; None: `rank`."""
    extra: Tensor | None = None
    """The second number per slot, for a policy that `keeps_two`."""


@dataclass(frozen=True)
class AttendedStep:
    """A decode step of b rows over the first N slots, once attention is computed; (b, kv_heads, N) unless it says else.

    score, extra: the policy's numbers per slot, changed in place. row: probabilities, 0 in slots that are not seen;
    None unless the policy `needs_rows`. pos: positions, int32, -1 in slots never used. now: positions of the newest
    tokens, (b, 1, 1). tokens: the newest tokens, at positions `now`. held: gives keys and values as stored, (b,
    kv_heads, N, d). queries: the last m, (b, heads, m, d), in any order, if the policy `looks_back`; asked_at: their
    positions (b, m). pinned: bool, True for tokens that spans protect. once: makes a value once per name for steps of
    the same rows, and returns it again.
    """

    score: Tensor
    extra: Tensor | None
    row: Tensor | None
    pos: Tensor
    now: Tensor
    tokens: Tokens
    budgets: tuple[Budget, ...]
    held: Callable[[], KeysValues]
    once: Once
    logits: Logits
    window: int | None = None
    queries: Tensor | None = None
    asked_at: Tensor | None = None
    pinned: Tensor | None = None

    def of(self, rows: slice | Tensor, numbers: Sequence[int]) -> AttendedStep:
        """Some of the rows, by an index and by their numbers."""
        names = ("score", "extra", "row", "pos", "now", "queries", "asked_at", "pinned")
        taken: dict[str, Any] = {name: None if (x := getattr(self, name)) is None else x[rows] for name in names}
        tokens = self.tokens._replace(positions=taken["now"], row_ids=self.tokens.row_ids[rows])
        budgets = tuple(self.budgets[i] for i in numbers)
        taken |= {"held": lambda: KeysValues(*(x[rows] for x in self.held())), "once": lambda name, make: make()}
        return replace(self, tokens=tokens, budgets=budgets, **taken)

    @property
    def received(self) -> Tensor:
        """The row, which the policy asks for."""
        return required(self.row, "this step has no probabilities")


class EvictionPolicy:
    """Decides which tokens stay. This base keeps sinks and the most recent tokens, by order of arrival, without scores.

    For every policy, the first `sinks` and the last `recent` positions of a row's budget are protected; among equal
    scores the lower position stays. Policies hold no state of a sequence: one object serves all layers and batches.
    """

    name: ClassVar[str]
    column_sums: ClassVar[bool] = False  # whether the policy needs the column sums of the prompt's attention
    needs_rows: ClassVar[bool] = False  # whether the policy needs the probability row of a decode step

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed


class RankedPolicy(EvictionPolicy, ABC):
    """A policy that gives every token a score, float32 and never negative; higher stays.

    The cache stores a score per slot. `prompt_scores` and `new_scores` set it, `update` changes it in a decode step,
    and `ranks` gives the numbers by which tokens are compared. A policy that overrides neither of the last two is
    served by one kernel per step.
    """

    asks: ClassVar[int | Literal["recent", "all"]] = 0  # how many of a prompt's last queries it looks at
    raw_queries: ClassVar[bool] = False  # whether `queries` are needed as they were before rotation
    scores_keys: ClassVar[bool] = False  # whether a new token's score is computed from its key
    compares_keys: ClassVar[bool] = False  # whether keys count beside the attention that queries pay to them
    keeps_two: ClassVar[bool] = False  # whether a second number is stored per slot
    looks_back: ClassVar[int] = 0  # how many of the last queries `ranks` looks at
    by: ClassVar[RankedBy | None] = None  # the C kernel's rule that equals `update` and `ranks`

    def queries(self, length: int, budget: Budget) -> int:
        """How many of the last queries of a prompt of `length` tokens `prompt_scores` looks at."""
        if isinstance(self.asks, int):
            return self.asks
        return length if self.asks == "all" else budget.recent

    def scope(self, budget: Budget) -> int:
        """The number of candidates of a row from which a step evicts one; used by policies that rank by "steady"."""
        return budget.total

    @abstractmethod
    def prompt_scores(self, prompts: AttendedPrompts, rows: PromptRows) -> PromptScores:
        """The scores of prompts in one layer that share one length and one budget."""

    def new_scores(self, tokens: Tokens, keys: Tensor | None) -> Tensor | None:
        """Scores of the b tokens just written, (b, kv_heads, 1), before their own row is accumulated; None: zero.

        keys: (b, kv_heads, d), as they are kept; given where the policy `scores_keys`.
        """
        return None

    def update(self, step: AttendedStep) -> None:
        """Adds a step's probabilities to the scores, in place. Called if the policy `needs_rows`."""
        step.score.add_(step.received)

    def ranks(self, step: AttendedStep) -> Tensor:
        """The numbers that tokens are compared by, (b, kv_heads, N) float32, never negative; the lowest is evicted."""
        return step.score


class ArrivalPolicy(RankedPolicy):
    """The order of arrival as a score, where it is not alone: the newest tokens stay, beside sinks and spans."""

    name = "arrival"

    def prompt_scores(self, prompts: AttendedPrompts, rows: PromptRows) -> PromptScores:
        positions = rows.tokens.positions.float() + 1
        return PromptScores(positions.expand(len(prompts.k), prompts.k.shape[1], -1))

    def new_scores(self, tokens: Tokens, keys: Tensor | None) -> Tensor:
        positions, _ = torch.broadcast_tensors(tokens.positions, tokens.heads)
        return positions.float().add(1)


def in_spans(budget: Budget, length: int, device: torch.device) -> Tensor:
    """Which of a prompt's `length` tokens lie in spans of the budget: (length,) bool."""
    found = torch.zeros(length, dtype=torch.bool, device=device)
    for start, stop in budget.spans:
        found[start:stop] = True
    return found


def attention_rows(
    prompts: AttendedPrompts,
    count: int,
    window: int | None,
    beside: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The attention of the last `count` queries: their positions (c,), and probabilities (n, kv_heads, group, c, S).

    Computed anew in float32, as many queries at a time as keep the logits small; causal, and within the window.
    `beside`: (positions of queries (c,), of keys (S,)) to (c, S) bool, which keys they are not asked about.
    """
    if prompts.queries is None or prompts.queries.shape[2] < min(count, prompts.length):
        raise ValueError(f"the last {count} queries are needed")
    keys, length = prompts.keys.float().transpose(-1, -2), prompts.length
    n, heads, _, d = prompts.queries.shape
    kv_heads, count = keys.shape[1], min(count, length)
    some = max(1, ROW_LOGITS // (n * heads * length))
    places = torch.arange(length, device=keys.device)
    for start in range(length - count, length, some):
        stop = min(start + some, length)
        end = prompts.queries.shape[2] - (length - stop)
        asked = prompts.queries[:, :, end - (stop - start) : end].float().mul(prompts.logits.scale)
        logits = asked.reshape(n, kv_heads, -1, d) @ keys
        logits = logits.view(n, kv_heads, heads // kv_heads, stop - start, length)
        logits = capped(logits, prompts.logits.soft_cap)
        at = places[start:stop]
        hidden = places > at.unsqueeze(1)
        if window is not None:
            hidden |= places <= at.unsqueeze(1) - window
        if beside is not None:
            hidden |= beside(at, places)
        logits = logits.masked_fill_(hidden, -torch.inf)
        sinks = prompts.logits.sinks
        yield at, softmax(logits, None if sinks is None else sinks.view(kv_heads, -1, 1).expand(logits.shape[:-1]))


def summed_rows(prompts: AttendedPrompts, count: int, window: int | None) -> Tensor:
    """The sum of the last `count` attention rows, averaged over a KV head's query heads: (n, kv_heads, S) float32."""
    return reduce(torch.add, (rows.mean(2).sum(2) for _, rows in attention_rows(prompts, count, window)))
