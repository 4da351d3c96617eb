"""Which units each of several devices computes."""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.errors import UsageError


@cache
def stages_of(spec: ModelSpec, count: int) -> tuple[range, ...]:
    """The units of `count` devices: neighbours, so that the device with most has as few weights as can be.

    Weights stand for the work as well: a decode step reads each of them once. Those that the embedding and the head
    share are counted at both, as they are held at both. UsageError where there are fewer units than devices.
    """
    groups, units = spec.groups_by_key, spec.units
    if not 1 <= count <= len(units):
        raise UsageError(
            f"--num-gpus is {count}, and {spec.name} has {len(units)} units: the embedding, halves of layers, the head",
            f"needed 1 to {len(units)}",
        )
    sizes = [sum(tensor.numel for tensor in groups[unit.weights].tensors) for unit in units]
    before = [0, *accumulate(sizes)]
    # least[n], if the first n units are those of the stages so far: the most weights of any, where the last one begins
    least = [(before[n], 0) for n in range(len(units) + 1)]
    starts = [[0] * (len(units) + 1)]
    for stage in range(1, count):
        least = [
            min((max(least[cut][0], before[n] - before[cut]), -cut) for cut in range(stage, n)) if n > stage else (0, 0)
            for n in range(len(units) + 1)
        ]
        least = [(most, -cut) for most, cut in least]
        starts.append([cut for _, cut in least])
    stop, cuts = len(units), [len(units)]
    for stage in range(count - 1, 0, -1):
        stop = starts[stage][stop]
        cuts.append(stop)
    cuts = [0, *reversed(cuts)]
    return tuple(range(start, end) for start, end in pairwise(cuts))
