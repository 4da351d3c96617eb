"""Where numbers stop being finite: the search behind `--check-finite`."""

from __future__ import annotations

import torch

from h2o_flexgen.config.model import UnitSpec
from h2o_flexgen.engine.batch import GpuBatch
from h2o_flexgen.engine.sequence import Sequence


class FiniteCheck:
    """Remembers, for every sequence, the first unit after which its hidden states held nan or infinity.

    Costs a pass over the hidden states per unit and a wait for the device: for finding a fault, not for every run.
    """

    def __init__(self) -> None:
        self._first: dict[int, str] = {}

    def look(self, unit: UnitSpec, batch: GpuBatch) -> None:
        """Called after each unit but the output head."""
        hidden = batch.take_hidden()
        finite = torch.isfinite(hidden).all(-1)
        if bool(finite.all()):
            return
        packed = len(hidden) != len(batch.rows)
        lengths = [len(row.prompt_ids) if packed else 1 for row in batch.rows]
        for row, part in zip(batch.rows, finite.split(lengths), strict=True):
            if not bool(part.all()):
                self._first.setdefault(row.row_id, unit.name)

    def explain(self, row: Sequence) -> None:
        """Adds to a failed sequence's error where it began: in a unit, or in the output head itself."""
        if row.finish_reason == "error":
            row.error = f"{row.error}; they stopped being so in unit {self._first.get(row.row_id, 'head')}"
