"""Two drawings for the documentation: the way of data through the rooms, and the first ticks of a decode step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from h2o_flexgen.config.model.known import known_config
from h2o_flexgen.models.families import spec_from_config
from h2o_flexgen.schedule.tasks import ScheduleShape, Task, TaskKind, Tick
from h2o_flexgen.schedule.zigzag import zigzag

BLUE, ORANGE, GREEN, VIOLET, GREY = "#0b5cad", "#b8430a", "#1f7a4d", "#6a4c93", "#5b6470"


class Room(NamedTuple):
    """A box: its middle in inches, its colour, and the lines in it, the first in bold."""

    x: float
    y: float
    colour: str
    lines: Sequence[str]


ROOMS = {
    "programs": Room(1.3, 5.2, GREY, ["run, batch, LLM", "cli, jobs, ray", "flags, files of prompts"]),
    "planning": Room(4.2, 5.2, VIOLET, ["planning", "block, placement,", "footprint: a Plan"]),
    "cost": Room(7.1, 5.2, VIOLET, ["cost", "prices, simulation,", "search (linear program)"]),
    "calibration": Room(10.0, 5.2, VIOLET, ["calibration", "rates of links, disk", "and products, once"]),
    "requests": Room(1.3, 3.5, BLUE, ["engine/requests", "token ids, checked;", "a budget per sequence"]),
    "execution": Room(4.2, 3.5, BLUE, ["engine/execution", "walks the ticks of a block,", "decides nothing"]),
    "schedule": Room(7.1, 3.5, VIOLET, ["schedule", "zig-zag: stores, loads,", "compute, frees as ticks"]),
    "sampling": Room(10.0, 3.5, BLUE, ["engine/sampling", "logits to tokens;", "finished rows leave"]),
    "models": Room(1.3, 1.8, BLUE, ["models, kernels", "a layer half at a time,", "in C, Triton or torch"]),
    "cache": Room(4.2, 1.8, GREEN, ["cache, cache/eviction", "keys and values at their", "budget, in place"]),
    "state": Room(7.1, 1.8, BLUE, ["engine/state, memory", "weights, caches, hidden", "states come and go"]),
    "answers": Room(10.0, 1.8, GREY, ["RequestOutput", "answers; a RunRecord for", "reporting and pages"]),
}
TIERS = (("GPU", 4.6), ("CPU", 7.1), ("disk", 9.6))
ARROWS = (
    ("programs", "requests", "prompts"),
    ("programs", "planning", ""),
    ("planning", "execution", "Plan"),
    ("cost", "planning", ""),
    ("calibration", "cost", ""),
    ("requests", "execution", ""),
    ("schedule", "execution", ""),
    ("schedule", "cost", "the same ticks"),
    ("execution", "models", ""),
    ("execution", "cache", ""),
    ("execution", "state", ""),
    ("sampling", "answers", ""),
)
WIDTH, HEIGHT = 2.35, 0.95


def draw_rooms(path: Path) -> None:
    """The rooms of the package as boxes, the way of prompts, plans and bytes as arrows, and the tiers at the bottom."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.3, 6.0))
    axes: Any = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 11.3), ylim=(0, 6))
    axes.axis("off")
    for room in ROOMS.values():
        _room(axes, room)
    for start, end, text in ARROWS:
        _arrow(axes, ROOMS[start], ROOMS[end], text)
    # Past the schedule's box: what a head computed goes to the sampler, and its tokens come back for the next step.
    bend = {"arrowstyle": "<|-|>", "color": GREY, "lw": 1.4, "connectionstyle": "arc3,rad=-0.28"}
    axes.annotate("", (9.2, 3.0), (5.35, 3.1), arrowprops=bend | {"connectionstyle": "arc3,rad=0.09"})
    axes.text(8.45, 2.66, "logits, tokens", fontsize=8.5, color=GREY, ha="center")
    for name, x in TIERS:
        _box(axes, (x - 1.1, 0.15), (2.2, 0.6), ORANGE)
        axes.text(x, 0.45, name, ha="center", va="center", color="white", fontsize=11, weight="bold")
        axes.annotate("", (x, 0.76), (7.1 + (x - 7.1) * 0.3, 1.31), arrowprops=bend | {"connectionstyle": "arc3"})
    axes.text(
        0.15, 0.45, "tiers: each weight group, cache and\nhidden state has a share on each", fontsize=9, color=GREY
    )
    figure.savefig(path, metadata={"Date": None}, facecolor="white")


def _room(axes: Any, room: Room) -> None:
    _box(axes, (room.x - WIDTH / 2, room.y - HEIGHT / 2), (WIDTH, HEIGHT), room.colour)
    for line, text in enumerate(room.lines):
        weight = "normal" if line else "bold"
        y = room.y + 0.27 - 0.27 * line
        axes.text(
            room.x, y, text, ha="center", va="center", color="white", fontsize=10 if not line else 9, weight=weight
        )


def _box(axes: Any, corner: tuple[float, float], size: tuple[float, float], colour: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    axes.add_patch(FancyBboxPatch(corner, *size, boxstyle="round,pad=0,rounding_size=0.08", fc=colour, ec="none"))


def _arrow(axes: Any, start: Room, end: Room, text: str) -> None:
    """From edge to edge: sideways between neighbours of a row, else between the lower edge and the upper one."""
    if start.y == end.y:
        side = WIDTH / 2 if end.x > start.x else -WIDTH / 2
        a, b = (start.x + side, start.y), (end.x - side, end.y)
    else:
        edge = HEIGHT / 2 if start.y > end.y else -HEIGHT / 2
        lean = (end.x - start.x) * 0.25
        a, b = (start.x + lean, start.y - edge), (end.x, end.y + edge)
    axes.annotate("", b, a, arrowprops={"arrowstyle": "-|>", "color": GREY, "lw": 1.6})
    if text:
        axes.text((a[0] + b[0]) / 2 + 0.08, (a[1] + b[1]) / 2, text, fontsize=8.5, color=GREY, va="center")


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
