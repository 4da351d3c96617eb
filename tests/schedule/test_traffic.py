"""Loads and bytes, by hand."""

from __future__ import annotations

import pytest

from h2o_flexgen.config.placement import Placement
from h2o_flexgen.schedule.tasks import Task, TaskKind
from h2o_flexgen.schedule.work import links
from h2o_flexgen.schedule.zigzag import zigzag
from tests.oracles.traffic import expected_loads, planned_bytes
from tests.schedule.shapes import make_shape


def test_tied_weights_are_read_once_more_than_there_are_steps() -> None:
    layers = {"layers.0.attn": 7, "layers.0.mlp": 7}
    assert expected_loads(make_shape(steps=7)) == {"vocab": 8, **layers}
    assert expected_loads(make_shape(steps=7, tied=False)) == {"embed": 7, "head": 7, **layers}
    assert expected_loads(make_shape(steps=7), passes=2) == {"vocab": 3, "layers.0.attn": 2, "layers.0.mlp": 2}
    assert expected_loads(make_shape(steps=7, streamed={"layers.0.mlp"})) == {"layers.0.mlp": 7}


@pytest.mark.parametrize(
    ("home", "compute", "inward", "expected"),
    [
        ("cpu", "gpu", True, ("cpu->gpu",)),
        ("cpu", "gpu", False, ("gpu->cpu",)),
        ("disk", "gpu", True, ("disk->cpu", "cpu->gpu")),
        ("disk", "gpu", False, ("gpu->cpu", "cpu->disk")),
        ("disk", "cpu", True, ("disk->cpu",)),
        ("gpu", "gpu", True, ()),
    ],
)
def test_links(home: str, compute: str, inward: bool, expected: tuple[str, ...]) -> None:
    assert links(home, compute, inward=inward) == expected


def test_planned_bytes_of_a_small_block() -> None:
    """One layer, 3 steps, 2 batches: cache of batch 1 and weights of the MLP on disk, hidden states on cpu."""
    placement = Placement(
        weights={"vocab": "gpu", "layers.0.attn": "cpu", "layers.0.mlp": "disk"},
        cache={(0, 0): "gpu", (0, 1): "disk"},
        hidden={0: "cpu", 1: "cpu"},
    )
    shape = make_shape(1, 3, 2, streamed={"layers.0.attn", "layers.0.mlp"})
    shape = type(shape)(**{**shape.__dict__, "cache_moves": frozenset({(0, 1)})})

    def state_bytes(task: Task) -> int:
        if task.kind in (TaskKind.LOAD_HIDDEN, TaskKind.STORE_HIDDEN):
            return 1
        return 1000 * (task.step + 1)

    moved = planned_bytes(
        zigzag(shape),
        shape,
        placement,
        compute_tier="gpu",
        group_bytes={"layers.0.attn": 10_000_000, "layers.0.mlp": 100_000_000},
        state_bytes=state_bytes,
    )
    hidden = 3 * 2 * 3  # steps, batches, gaps between the four units
    cache_in, cache_out = 2000 + 3000, 1000 + 2000  # not at the prompt; not in the last step
    mlp = 3 * 100_000_000
    assert moved == {
        "disk->cpu": mlp + cache_in,
        "cpu->gpu": mlp + cache_in + 3 * 10_000_000 + hidden,
        "gpu->cpu": cache_out + hidden,
        "cpu->disk": cache_out,
    }
