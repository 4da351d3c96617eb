"""A whole call: the blocks that a workload is divided into, each simulated."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from h2o_flexgen.config.reports.record import DERIVED, Throughput
from h2o_flexgen.cost.case import block_rows
from h2o_flexgen.cost.simulate import Bound, Simulation, bound_of, simulate
from h2o_flexgen.cost.terms import CostModel


@dataclass(frozen=True)
class Prediction(Throughput):
    """What a run of the whole workload will report; the same names and units as a RunRecord.

    block: the first block, which is as large as any.
    """

    sequences: int
    prompt_tokens: int
    generated_tokens: int
    prefill_s: float
    decode_s: float
    busy: Mapping[str, float]
    bytes_moved: Mapping[str, int]
    bound: Bound
    blocks: int
    block: Simulation = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """The `predicted` object of a RunRecord: seconds, bytes, tokens per second."""
        return {
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            **{name: getattr(self, name) for name in DERIVED},
            "busy": dict(self.busy),
            "bytes_moved": dict(self.bytes_moved),
            "bound": self.bound._asdict(),
            "blocks": self.blocks,
        }


def predict(model: CostModel) -> Prediction:
    """All blocks of the workload under the plan of `model`, whatever block that is of."""
    first, *others = block_rows(model.workload.num_sequences, model.policy)
    # Where new memory costs nothing, a later block is like the first.
    priced = any(rates.fresh_bytes_per_s is not None for rates in model.profile.compute.values())
    shapes = Counter([(first, model.later), *((rows, model.later or priced) for rows in others)])
    simulated = [(simulate(model.with_rows(rows, later=later)), count) for (rows, later), count in shapes.items()]
    busy, moved = defaultdict[str, float](float), Counter[str]()
    for block, count in simulated:
        for resource, seconds in block.busy.items():
            busy[resource] += count * seconds
        for link, nbytes in block.bytes_moved.items():
            moved[link] += count * nbytes
    prefill = sum(count * block.prefill_s for block, count in simulated)
    decode = sum(count * block.decode_s for block, count in simulated)
    sequences = model.workload.num_sequences
    return Prediction(
        sequences=sequences,
        prompt_tokens=sequences * model.workload.prompt_len,
        generated_tokens=sequences * model.workload.gen_len,
        prefill_s=prefill,
        decode_s=decode,
        busy=dict(busy),
        bytes_moved=dict(moved),
        bound=bound_of(prefill, decode, busy),
        blocks=sum(shapes.values()),
        block=simulated[0][0],
    )
