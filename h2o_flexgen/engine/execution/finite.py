"""Where numbers stop being finite: the search behind `--check-finite`."""

from __future__ import annotations

import torch

from h2o_flexgen.config.model.spec import UnitSpec
from h2o_flexgen.engine.batching.gpu_batch import GpuBatch
from h2o_flexgen.engine.requests.sequence import Sequence


class FiniteCheck:
    """Remembers, for every sequence, the first unit after which its hidden states held nan or infinity.

    Costs a pass over the hidden states per unit and a wait for the device: for finding a fault, not for every run.
    """

    def __init__(self) -> None:
        self._first: dict[int, str] = {}

    def look(self, unit: UnitSpec, gpu_batch: GpuBatch) -> None:
        """Called after each unit but the output head."""
        hidden = gpu_batch.take_hidden()
        finite = torch.isfinite(hidden).all(-1)
        if bool(finite.all()):
            return
        for span, rows in gpu_batch.rows_at():
            if not bool(finite[span].all()):
                for row in rows:
                    self._first.setdefault(row.row_id, unit.name)

    def explain(self, row: Sequence) -> None:
        """Adds to a failed sequence's error where it began: in a unit, or in the output head itself."""
        if row.finish_reason == "error":
            row.error = f"{row.error}; they stopped being so in unit {self._first.get(row.row_id, 'head')}"
