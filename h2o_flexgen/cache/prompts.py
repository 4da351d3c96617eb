"""Prompts that come into a cache: what stays of them goes into the first slots of their rows, in the order of time."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from h2o_flexgen.cache.slots import SlotBook
from h2o_flexgen.cache.vectors import index_of, select
from h2o_flexgen.config.eviction import Budget
from h2o_flexgen.kernels.types import KeysValues, PackedPrompts, PackedRow


def fill_alike(
    book: SlotBook,
    buffers: KeysValues,
    rows: Sequence[tuple[int, Budget]],
    own: tuple[Tensor, Tensor],
    past: tuple[Tensor, Tensor] | None,
    column_sums: Tensor | None,
    zero: bool,
) -> None:
    """Prompts of one length, of rows with these budgets; see `KVCache.fill`. `zero`: their other slots, too."""
    same_budget: dict[Budget, list[int]] = {}
    for index, (_, budget) in enumerate(rows):
        same_budget.setdefault(budget, []).append(index)
    before = 0 if past is None else past[0].shape[1]
    length = before + own[0].shape[2]
    for budget, members in same_budget.items():
        source, target = (index_of(part, own[0].device) for part in (members, [rows[index][0] for index in members]))
        kept = book.fill(target, length, budget, None if column_sums is None else column_sums[source])
        held = length if kept is None else kept.shape[-1]
        for i, buffer in enumerate(buffers):
            shared = None if past is None else past[i]
            if kept is not None:
                buffer[target, :, :held] = select(own[i][source], shared, kept)
            else:
                buffer[target, :, before:held] = own[i][source]
                if shared is not None:
                    buffer[target, :, :before] = shared
            if zero:
                buffer[target, :, held:] = 0


def packed(spans: Sequence[tuple[int, int, int]], budgets: Sequence[Budget]) -> PackedPrompts:
    """Prompts as (row, first token, length), of a cache whose rows have these budgets, as kernels take them."""
    rows = []
    for row, first, length in spans:
        budget = budgets[row]
        rows.append(PackedRow(first, length, row, budget.total, budget.heavy, budget.recent, budget.sinks))
    return PackedPrompts.of(rows)
