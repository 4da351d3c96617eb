"""Bytes that the copy threads counted equal the bytes that the schedule plans, link by link, to the last one."""

from __future__ import annotations

from typing import Any

import pytest

from h2o_flexgen.cache.shape import CacheShape
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.model.tensors import page_ceil
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.execution import block
from h2o_flexgen.schedule.footprint import REWRITE_EVERY
from h2o_flexgen.schedule.tasks import ScheduleShape, Task, TaskKind, Tick
from tests.oracles.schedule import check
from tests.oracles.traffic import expected_loads, planned_bytes
from tests.tiny import prompts_of

NEW, PROMPT, ROWS, BATCHES = 20, 24, 2, 3
CPU, DISK, GPU = {"cpu": 1.0}, {"disk": 1.0}, {"gpu": 1.0}
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "weights on disk": ({"weights": DISK, "cache": CPU, "hidden": CPU}, None),
    "half the weights on disk": ({"weights": {"cpu": 0.5, "disk": 0.5}, "cache": CPU, "hidden": CPU}, None),
    "all on disk": ({"weights": DISK, "cache": DISK, "hidden": DISK}, None),
    "gpu, all on cpu": ({"weights": CPU, "cache": CPU, "hidden": CPU}, "1GiB"),
    "gpu, all on disk": ({"weights": DISK, "cache": DISK, "hidden": DISK}, "1GiB"),
    "gpu, weights on disk": ({"weights": DISK, "cache": GPU, "hidden": GPU}, "1GiB"),
}


@pytest.mark.turns
@pytest.mark.parametrize(
    ("name", "case"), [*(("opt", case) for case in CASES), ("gemma3", "gpu, all on disk"), ("gpt-neox", "all on disk")]
)
def test_counted_bytes_equal_the_plan(name: str, case: str, checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    placement, gpu = CASES[case]
    ticks: list[Tick] = []
    shapes: list[ScheduleShape] = []

    def recorded(shape: ScheduleShape, *questions: Any) -> Any:
        shapes.append(shape)
        for tick in zigzag(shape, *questions):
            ticks.append(tick)
            yield tick

    zigzag = block.zigzag
    monkeypatch.setattr(block, "zigzag", recorded)
    policy = {**placement, "gpu_batch_size": ROWS, "num_gpu_batches": BATCHES}
    eviction = EvictionConfig("h2o", ratio=0.3)
    with Engine(checkpoint(name)[1], dtype="float32", eviction=eviction, policy=policy, emulate_gpu=gpu) as llm:
        llm.generate(prompts_of([PROMPT] * ROWS * BATCHES), max_new_tokens=NEW, ignore_eos=True)
        moved, plan, spec = llm.last_record.bytes_moved, llm.last_plan, llm.model.spec
        homes = llm._loaded.stages[0].weights._locations
    (shape,) = shapes
    report = check(ticks, shape)
    assert report.loads == expected_loads(shape)
    budget = eviction.resolve(PROMPT, NEW)

    def cache(layer: int | None) -> int:
        assert layer is not None
        within = budget.within(spec.arch.window_of(layer))
        slots = CacheShape.of([within] * ROWS, spec.num_kv_heads, spec.head_dim).capacity
        return page_ceil(ROWS * slots * spec.kv_bytes_per_token_and_layer("float32"))

    def state_bytes(task: Task) -> int:
        if task.kind in (TaskKind.LOAD_CACHE, TaskKind.STORE_CACHE):
            waits = task.kind is TaskKind.STORE_CACHE and task.step % REWRITE_EVERY
            return (
                0 if waits else cache(spec.units[task.unit].layer)
            )  # new tokens wait on the compute tier between two rewrites
        unit, store = spec.units[task.unit], task.kind is TaskKind.STORE_HIDDEN
        past_last_attention = unit.kind == "head" or (
            unit.layer == spec.num_layers - 1 and (unit.kind == "mlp" or (unit.kind == "attn" and store))
        )
        tokens = ROWS if task.step > 0 or past_last_attention else ROWS * PROMPT
        return page_ceil(spec.hidden_bytes(tokens, "float32"))

    def planned(link: str) -> int:
        """In a buffer a group takes its layout's bytes, in a file those of its extents."""
        group_bytes = {
            key: sum(extent.nbytes for extent in homes[key].unit.extents)
            if link == "disk->cpu" and homes[key].unit
            else homes[key].layout.nbytes
            for key in shape.streamed
        }
        tier = "cpu" if gpu is None else "gpu"
        return planned_bytes(
            ticks, shape, plan.placement, compute_tier=tier, group_bytes=group_bytes, state_bytes=state_bytes
        )[link]

    assert moved
    assert dict(moved) == {link: planned(link) for link in moved}
