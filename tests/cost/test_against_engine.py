"""The engine does what was simulated: the same computes in order, as many transfers, and the same bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.cost.model import CostModel
from h2o_flexgen.cost.simulate import simulate
from h2o_flexgen.engine.engine import Engine
from tests.cost.machines import profile
from tests.tiny import make_model, prompts_of, save

NEW, PROMPT, ROWS, BATCHES = 20, 24, 2, 3
CPU, DISK, GPU = {"cpu": 1.0}, {"disk": 1.0}, {"gpu": 1.0}
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "half the weights on disk": ({"weights": {"cpu": 0.5, "disk": 0.5}, "cache": CPU, "hidden": CPU}, None),
    "all on disk": ({"weights": DISK, "cache": DISK, "hidden": DISK}, None),
    "all on cpu beside a gpu": ({"weights": CPU, "cache": CPU, "hidden": CPU}, "1GiB"),
    "all on disk beside a gpu": ({"weights": DISK, "cache": DISK, "hidden": DISK}, "1GiB"),
    "caches half on cpu, computed there": (
        {"weights": GPU, "cache": {"gpu": 0.5, "cpu": 0.5}, "hidden": GPU, "cpu_cache_compute": True},
        "1GiB",
    ),
    "all on cpu beside a gpu, attention too": (
        {"weights": CPU, "cache": CPU, "hidden": CPU, "cpu_cache_compute": True},
        "1GiB",
    ),
}


@pytest.mark.turns
@pytest.mark.parametrize(
    ("case", "family", "bits"),
    [(case, *how) for case, how in zip(CASES, cycle(product(["opt", "mistral"], [16, 4])), strict=False)],
)
def test_a_run_is_the_simulated_one(case: str, family: str, bits: int, tmp_path: Path) -> None:
    placement, gpu = CASES[case]
    policy = {**placement, "gpu_batch_size": ROWS, "num_gpu_batches": BATCHES}
    eviction = EvictionConfig("h2o", ratio=0.3)
    settings: dict[str, Any] = {"dtype": "bfloat16", "eviction": eviction, "emulate_gpu": gpu, "trace": True}
    settings["cache_bits"] = bits
    with Engine(str(save(make_model(family), tmp_path)), policy=policy, **settings) as llm:
        llm.generate(prompts_of([PROMPT] * ROWS * BATCHES), max_new_tokens=NEW, ignore_eos=True)
        moved, plan, ran = llm.last_record.bytes_moved, llm.last_plan, llm.timeline
    assert plan.request.workload == Workload(PROMPT, NEW, ROWS * BATCHES)
    model = CostModel(replace(plan.request, profile=profile()), plan.policy, plan.placement)
    found = simulate(model, steps=NEW)
    assert found.bytes_moved == {link: nbytes for link, nbytes in moved.items() if nbytes}
    computed = [row.task for row in ran.rows if row.resource == "compute"]
    # The second half of an attention unit has a name of its own there.
    computed = [task.replace(" output ", " ") for task in computed]
    assert computed == [row.task for row in found.timeline.rows if row.resource == "compute"]
    counted = Counter(row.resource for row in ran.rows)
    assert counted == Counter(row.resource for row in found.timeline.rows)
    few = simulate(model)
    assert few.bytes_moved == found.bytes_moved
