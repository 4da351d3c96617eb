"""What a schedule has to move: the loads of each weight group, and the links that a move crosses."""

from __future__ import annotations

from collections import Counter
from itertools import groupby, pairwise

from h2o_flexgen.schedule.tasks import ScheduleShape


def expected_loads(shape: ScheduleShape, passes: int | None = None) -> dict[str, int]:
    """How often each streamed group has to be read in `passes` walks over all units.

    None: one walk per step, which is zig-zag without early finishes; row-by-row makes one per step and GPU batch.
    Laid end to end, a walk reads a group once per run of consecutive units that use it: every group once per walk, and
    a tied one (the head of a walk and the embedding of the next are one run) once more in all.
    """
    keys = [unit.weights for unit in shape.units] * (shape.num_steps if passes is None else passes)
    return dict(Counter(key for key, _ in groupby(keys) if key in shape.streamed))


def links(home: str, compute_tier: str, *, inward: bool) -> tuple[str, ...]:
    """The links that a move between `home` and the compute tier crosses: disk and gpu meet on the cpu.

    inward: towards the compute tier. ("disk", "gpu") gives ("disk->cpu", "cpu->gpu"); inside one tier there are none.
    """
    if home == compute_tier:
        return ()
    stops = [home, "cpu", compute_tier] if "cpu" not in (home, compute_tier) else [home, compute_tier]
    if not inward:
        stops.reverse()
    return tuple(f"{source}->{target}" for source, target in pairwise(stops))
