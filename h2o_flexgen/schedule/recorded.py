"""Decode steps that are recorded once and launched again as a whole, as CUDA graphs: where, and from which step on."""

from __future__ import annotations

PATIENCE = 3
"""Steps that a GPU batch has to go on without a change before one is recorded, and that no row of it may be about to
end in. Recording takes as long as a step that is launched bit by bit. A step that is launched as a whole saves nearly
all of that where the GPU waits for the host, and a seventh where it is busy: recording pays after one step in small
models, after some seven in large ones. At three, nobody ever pays much more than with foresight."""
FIRST_REPLAYED = PATIENCE + 3
"""The first decode step, counted from 1, that is nothing but launched, where no row leaves or comes: of those before it
one warms up, and one is recorded."""


def recordable(*, moves: bool, elsewhere: bool, rolling: bool) -> bool:
    """Whether the decode steps of a block can be recorded, if the GPU has what it takes for that.

    moves: whether weights, caches or hidden states of the block move between tiers. elsewhere: whether any cache is
    attended to anywhere but on the GPU. rolling: whether keys are turned by their places in the cache.
    """
    return not (moves or elsewhere or rolling)
