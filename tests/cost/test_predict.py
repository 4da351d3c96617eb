"""Calls of several blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.cost.predict import predict
from h2o_flexgen.cost.terms import CostModel
from tests.cost.machines import TINY, model_of, profile, rates

CACHE = 24576  # bytes of a layer for 3 rows of 24 + 8 tokens


def call(sequences: int, **of_machine: float) -> CostModel:
    """So many sequences in blocks of three."""
    model = model_of(OffloadPolicy(3), machine=profile(rates(**of_machine)))
    return replace(model, workload=Workload(24, 8, num_sequences=sequences))


@pytest.mark.parametrize("sequences", [3, 9, 11])
def test_only_the_first_block_of_a_call_writes_to_new_memory(sequences: int) -> None:
    usual, slow = predict(call(sequences)), predict(call(sequences, fresh_bytes_per_s=1e6))
    assert slow.blocks == usual.blocks == -(-sequences // 3)
    assert slow.prefill_s - usual.prefill_s == pytest.approx(TINY.num_layers * CACHE / 1e6)
    assert slow.decode_s == pytest.approx(usual.decode_s)


def test_a_block_among_endless_ones_writes_to_none() -> None:
    later = replace(call(9, fresh_bytes_per_s=1e6), later=True)
    assert predict(later).prefill_s == pytest.approx(predict(call(9)).prefill_s)
