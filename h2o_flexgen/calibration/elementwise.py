"""Norms, activations and residuals on a chunk of a prompt, and memory that is written for the first time."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.calibration.bench import Bench
from h2o_flexgen.calibration.timing import sample_of
from h2o_flexgen.kernels import ACTIVATIONS, gated, layer_norm, rms_norm
from h2o_flexgen.memory.pages import Allocation, HostMemory
from h2o_flexgen.units import MIB

_PIECE = 32 * MIB
_PIECES = 16
_FIXED = 10.0  # an activation leaves it about as it is, so that working in place changes nothing from call to call


@torch.inference_mode()
def elementwise_rate(bench: Bench, seconds: float) -> float:
    """Bytes per second, read and written together, of one layer's two norms, two residuals and activation.

    Bytes are counted as `cost.compute` counts them.
    """
    spec, arch, size = bench.spec, bench.spec.arch, bench.itemsize
    width, ffn = spec.hidden_size, spec.ffn_size
    tokens = max(1, min(bench.chunk, len(bench.arena) // (2 * ffn * size)))
    hidden, inner = bench.noise(tokens, width), bench.noise(tokens, width)
    weight, bias = bench.noise(width), bench.noise(width)
    wide = torch.full((tokens, ffn * (2 if arch.gated_mlp else 1)), _FIXED, dtype=bench.dtype, device=bench.device)
    if arch.gated_mlp:
        wide[:, :ffn] = 1.0
    activation = ACTIVATIONS[arch.activation]

    def norm() -> Tensor:
        if arch.norm == "rmsnorm":
            return rms_norm(hidden, weight, arch.norm_eps, arch.norm_offset)
        return layer_norm(hidden, weight, bias, arch.norm_eps)

    def layer() -> None:
        for _ in range(2):
            norm()
            hidden.add_(inner)
        if arch.gated_mlp:
            up, gate = wide.chunk(2, dim=-1)
            gated(gate, up, arch.activation)
        else:
            activation(wide)

    norm_bytes = 2 * size
    if arch.norm == "rmsnorm" and bench.name == "cpu":
        norm_bytes = 20 if size == 4 else 20 + 4 * size
    nbytes = 2 * tokens * width * (norm_bytes + 3 * size) + tokens * ffn * size * (5 if arch.gated_mlp else 2)
    sample = bench.spreads.note(f"{bench.name} elementwise", bench.timer.measure(layer, seconds))
    return nbytes / sample.seconds


def fresh_rate(bench: Bench, seconds: float) -> float | None:
    """Bytes per second by which the first write to new host memory takes longer than the second; None for no longer.

    Nothing is given back before the end: what the system has just got back it would hand out again.
    """
    source = bench.noise(min(_PIECE, len(bench.arena)) // bench.itemsize)
    pages, blocks = HostMemory(), list[Allocation]()
    first: list[float] = []
    again: list[float] = []
    start = bench.timer.clock()
    try:
        while len(blocks) < _PIECES and (not blocks or bench.timer.clock() - start < seconds):
            blocks.append(pages.allocate(source.nbytes))
            piece = blocks[-1].tensor.view(bench.dtype)
            for taken in (first, again):
                taken.append(bench.timer.once(lambda piece=piece: piece.copy_(source)))  # type: ignore[misc]
    finally:
        for block in blocks:
            block.free()
    longer = bench.spreads.note(f"{bench.name} fresh memory", sample_of(first)).seconds - sample_of(again).seconds
    return source.nbytes / longer if longer > 0 else None
