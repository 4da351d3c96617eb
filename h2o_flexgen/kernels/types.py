"""Arguments and results of kernels, and the interface of a kernel for a whole decode step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor


class KeysValues(NamedTuple):
    """Keys and values of the same tokens, (..., kv_heads, tokens, d)."""

    k: Tensor
    v: Tensor


def fit(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`x` as kernels of a decode step take it: in `dtype` (None: its own), with the numbers of a head side by side."""
    if dtype is not None and x.dtype is not dtype:
        x = x.to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


class PrefillAttention(NamedTuple):
    """`out` (n, heads, S, d) in q's dtype; `column_sums` (n, kv_heads, P + S) float32, or None if not asked for."""

    out: Tensor
    column_sums: Tensor | None


class PackedRow(NamedTuple):
    """A prompt among others that are packed one after the other: seven whole numbers, which kernels read as int64."""

    first: int
    """Its first token among those that are packed."""
    length: int
    """Tokens."""
    place: int
    """The row of the cache that it goes to."""
    total: int
    """Tokens that may stay there: `heavy` ones, the last `recent` and the first `sinks`."""
    heavy: int
    recent: int
    sinks: int


class PackedPrompts(NamedTuple):
    """Prompts that kernels take at once, whatever their lengths."""

    rows: tuple[PackedRow, ...]
    table: Tensor
    """The same as (n, 7) int64 in host memory."""
    tokens: int
    """Packed tokens up to the end of the last of them."""
    longest: int
    """Tokens of one of them."""
    places: int
    """Rows of the cache up to the last that one of them goes to."""
    slots: int
    """The most tokens that stay of one of them."""

    @classmethod
    def of(cls, rows: Sequence[PackedRow]) -> PackedPrompts:
        """`rows`, at least one."""
        return cls(
            tuple(rows),
            torch.tensor(rows, dtype=torch.int64),
            tokens=max(row.first + row.length for row in rows),
            longest=max(row.length for row in rows),
            places=max(row.place for row in rows) + 1,
            slots=max(min(row.length, row.total) for row in rows),
        )


class Quantised(NamedTuple):
    """Numbers (..., d) of some bits each in groups of neighbours, as `quant.groupwise` lays them out."""

    codes: Tensor
    """(..., bytes) uint8."""
    scale: Tensor
    """(..., groups) bfloat16, never negative; 0 where all numbers of the group are `low`."""
    low: Tensor
    """(..., groups) bfloat16."""

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + self.low.nbytes


class DecodeAttention(NamedTuple):
    """`out` (b, heads, d) in the dtype of q; `row` (b, kv_heads, N) float32, or None if not asked for."""

    out: Tensor
    row: Tensor | None


class SlotRule(NamedTuple):
    """The numbers that the slots of a row follow from, beside the step: eight whole numbers, which kernels read as
    int64."""

    held: int
    """Tokens that came into the row's first slots before step 0, the prompt's mostly; later ones lie in the next."""
    limit: int
    """Slots that the row ever occupies."""
    prompt: int
    """The position of step 0's token: the length of the prompt, where nothing was decoded elsewhere before."""
    ring: int
    """The slot that follows the last one, where no score decides."""
    sinks: int
    """First positions, which never go."""
    hides: int
    """How many of these are not seen once they have left the window."""
    recent: int
    """Last positions, which do not go."""
    evicts: int
    """The first step at whose end a token goes by its score."""


class Logits(NamedTuple):
    """How products of queries and keys become logits: `scale` times the product, then soft_cap tanh(x / soft_cap) of
    that x; and `sinks`, float32 (heads,), of each head a logit that is no token's."""

    scale: float
    soft_cap: float | None = None
    sinks: Tensor | None = None

    @property
    def in_base_2(self) -> tuple[float, float | None]:
        """Scale and soft cap, for powers of two in place of exponentials."""
        times = math.log2(math.e)
        return self.scale * times, None if self.soft_cap is None else self.soft_cap * times

    def of(self, heads: slice | Tensor | None) -> Logits:
        """The same for some query heads, None: all, with their sinks."""
        return self if self.sinks is None or heads is None else self._replace(sinks=self.sinks[heads])

    def to(self, device: torch.device) -> Logits:
        return self if self.sinks is None else self._replace(sinks=self.sinks.to(device))


class Ranking(NamedTuple):
    """State of slots that are ranked by score; steps change all of it in place."""

    score: Tensor
    """(rows, kv_heads, capacity) float32, never negative; +inf for sinks and slots that were never occupied."""
    pos: Tensor
    """(rows, kv_heads, capacity) int32: positions."""
    free: Tensor
    """(rows * kv_heads,) int64: the slot of the next token, counted from the first slot of all rows."""


RankedBy = Literal["score", "fading", "rare", "difference", "steady", "mean"]
RULES: tuple[RankedBy, ...] = get_args(RankedBy)
"""As the kernel in C numbers them."""


class RankRule(NamedTuple):
    """The rule that compares ranked slots in C: by their scores, which are running means of the probabilities
    (inertiakv's) or count low ones (scissorhands', whose tokens go in bursts, unknown to the kernel); by the
    differences of unpacked keys (keydiff's); or by the means of scores that add up probabilities, among the tokens with
    the lowest deviation (roco's) or all (h2o_mean's).
    """

    by: RankedBy
    squares: Tensor | None = None
    """As `Ranking.score`, of "steady": sums of squared probabilities, which steps add to."""
    scopes: Tensor | None = None
    """(rows,) int64, of "steady": of how many tokens, the steadiest that may go, the one that does is chosen."""


class RoundingErrors:
    """The rounding errors of each row's newest tokens and its first: their keys and values, scaled as for packing,
    less the packed ones, packed as these are. Steps see these tokens with no more than the errors of these errors."""

    def __init__(
        self, newest: int, first: int, rows: int, heads: int, nbytes: Sequence[int], device: torch.device
    ) -> None:
        """Of the last `newest` tokens, and behind them the `first` ones, none yet; nbytes: of a key and a value."""
        self.newest, self.at, self.count = newest, newest - 1, newest + first
        """How many are the newest, which of them came last (-1: there are none), and how many there are in all."""
        shape = rows, heads, self.count
        self.lost = KeysValues(*(torch.zeros(*shape, each, dtype=torch.uint8, device=device) for each in nbytes))
        """(rows, heads, count, bytes) uint8."""
        self.slots = torch.full(shape, -1, dtype=torch.int32, device=device)
        """Where they lie, from the first slot of their row and head; -1: nowhere any more."""


Seen = Callable[[slice, int, int], Tensor]
"""Of some rows of prompts of one length, the queries from one to another: which of the keys up to there they attend to,
bool (rows, queries, keys)."""


class Choice(Protocol):
    """Which of the tokens before them those of a part attend to, in layers that choose (DeepSeek's sparse attention).

    `most`: of as many or fewer all are. `layer`: which has what it needs of a token, `keys` (T, D), at the end of its
    key. `by_position`: whether layers without that choose the same tokens.
    """

    most: int
    layer: int
    keys: Tensor
    by_position: bool

    def seen(self, tokens: Tensor, keys: Tensor, seen: Tensor, positions: Tensor | None, own: bool) -> Tensor:
        """Of the keys (n, N, d) of a layer, those that queries attend to, bool (n, q, N), of those that they may,
        `seen`. tokens (n, q): their places in the part; positions (n, N), -1 of none: of the keys; None: in order from
        the first. `own`: the keys are of `layer`."""

    def of_prompts(self, first: int, own: Tensor, past: Tensor | None, indexed: bool) -> Seen:
        """For prompts of one length from token `first` of the part on, whose keys are `own` (n, S, d), and before them
        all `past` (P, d). `indexed`: these are of `layer`."""


class DecodeStep(Protocol):
    """The decode steps of one cache: each writes the new token, attends, adds to the scores and frees a slot, in one.

    Made of a `SlotRule` per row, the size (rows, kv_heads, capacity, dim), the window (tokens that a query sees, itself
    included), whether scores grow by the probabilities, in the mean over the query heads that share a KV head, and a
    `Ranking`; without one slots are taken in order of arrival.
    """

    used: Tensor
    """(rows, kv_heads) int64: the slot of the last step's token; the next step changes it in place."""

    def attach(self, k: Tensor, v: Tensor) -> None:
        """K and V, contiguous (rows, kv_heads, capacity, dim), from now on; they must outlive the steps.

        Raises ValueError for an unsupported dtype or layout.
        """

    def detach(self) -> None:
        """Let go of K and V."""

    def step(
        self,
        number: int | Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        logits: Logits,
        *,
        fresh: Tensor | None = None,
        slots: Tensor | None = None,
        probs: Tensor | None = None,
    ) -> Tensor:
        """Step `number`, 0 for the first after the prompts: the output (rows, heads, dim) in K's dtype, q's if packed.

        number: a whole number, or where the kernel can do that the same number in an int64 tensor (rows, kv_heads) on
        its device, which the step then increases by one, so that no launch depends on it any more. qkv: q (rows, heads,
        dim), k and v (rows, kv_heads, dim) of the new tokens. fresh: the scores they start with, float32 (rows,
        kv_heads); None: 0. slots: where they go, as `Ranking.free`, if the caller decides that; with a ranking, in C
        alone, tokens come into it and none is freed. probs: takes the probabilities, float32 (rows, kv_heads, width),
        0 where no token is seen; width is at least what is occupied. Logits have sinks in C alone. Tensors contiguous.
        """
        ...
