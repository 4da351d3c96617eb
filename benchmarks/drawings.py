"""A drawing for the documentation: the first ticks of a decode step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from h2o_flexgen.config.model.known import known_config
from h2o_flexgen.models.families import spec_from_config
from h2o_flexgen.schedule.tasks import ScheduleShape, Task, TaskKind, Tick
from h2o_flexgen.schedule.zigzag import zigzag

BLUE, ORANGE, GREEN = "#0b5cad", "#b8430a", "#1f7a4d"


def draw_schedule(path: Path) -> None:
    """The first ticks of a decode step of two GPU batches, with weights and caches off the device.

    Weights are drawn from the tick that asks for them to the one before their use.
    """
    from matplotlib.figure import Figure

    config = known_config("opt-125m")
    assert config is not None, "the sizes of opt-125m are shipped"
    spec = spec_from_config(config, "opt-125m")
    units = spec.units
    caches = frozenset((layer, batch) for layer in range(spec.num_layers) for batch in range(2))
    shape = ScheduleShape(units, 3, 2, frozenset(unit.weights for unit in units), caches, frozenset())
    step = [tick for tick in zigzag(shape) if tick.compute is not None and tick.compute.step == 1][:10]
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axes: Any = figure.subplots()
    lanes = ["store cache", "load cache", "load weights", "compute"]
    for at, tick in enumerate(step):
        assert tick.compute is not None
        _tick(axes, at, 3, 1, f"{_name(units[tick.compute.unit].name)}\nbatch {tick.compute.batch}", BLUE)
        for task in (*tick.loads, *tick.stores):
            until = _used(step, task) or at + 1
            if task.kind is TaskKind.LOAD_WEIGHTS:
                _tick(axes, at, 2, min(until, len(step)) - at, _name(units[task.unit].name), ORANGE)
            elif task.kind in (TaskKind.LOAD_CACHE, TaskKind.STORE_CACHE):
                text = f"{_name(units[task.unit].name).split()[1]}\nbatch {task.batch}"
                lane = 1 if task.kind is TaskKind.LOAD_CACHE else 0
                _tick(axes, at, lane, 1, f"layer {text}", GREEN)
    axes.set(xlim=(0, len(step)), ylim=(-0.5, 3.5), xlabel="ticks of a decode step", yticks=range(4), yticklabels=lanes)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    figure.savefig(path, metadata={"Date": None}, facecolor="white")


def _used(step: Sequence[Tick], load: Task) -> int:
    """The index of the first tick that computes what a load is for; 0 for other tasks."""
    if load.kind is not TaskKind.LOAD_WEIGHTS:
        return 0
    ticks = (at for at, tick in enumerate(step) if tick.compute is not None and tick.compute.unit == load.unit)
    return next(ticks, len(step))


def _name(unit: str) -> str:
    return unit.replace("layers.", "layer ").replace(".", " ")


def _tick(axes: Any, at: int, lane: int, ticks: int, text: str, colour: str) -> None:
    axes.barh(lane, ticks - 0.04, left=at + 0.02, height=0.7, color=colour)
    axes.text(at + ticks / 2, lane, text, ha="center", va="center", color="white", fontsize=7.5)
