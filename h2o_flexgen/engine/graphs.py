"""Decode steps as CUDA graphs: recorded once, then launched by one call instead of some thousand.

A step can be recorded where all it touches stays in one place: weights, caches and hidden states on the GPU, the rows
of the lane, and what their caches launch (`KVCache.repeats`). Everything else is computed unit by unit as ever: what
moves between tiers, caches that are computed on in host memory, rolling positions, policies with a score rule of their
own, steps with prompts or in which rows leave or come, and runs that are traced or searched for numbers that are not
finite. H2O_FLEXGEN_GRAPHS=0 turns recording off.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.engine.lane import Lane
from h2o_flexgen.kernels.triton_available import interpreting
from h2o_flexgen.schedule.recorded import PATIENCE

log = logging.getLogger(__name__)

Run = Callable[[], Tensor]
"""Launches a step; its result, and all it reads and leaves, lies in tensors that stay."""


class Recording(Protocol):
    """A step that can be launched again."""

    def warm_up(self, run: Run) -> Tensor:
        """Does what `run` does, once, in the way a recording is made: whatever is made at its first use is made now."""

    def record(self, run: Run) -> Tensor:
        """Notes what `run` launches, and launches nothing. Every `replay` fills the result anew."""

    def replay(self) -> None:
        """Launches what was noted."""

    def close(self) -> None:
        """Gives the memory back."""


class CudaGraph:
    """A `Recording` of what goes to a CUDA device."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        """`pool`: a handle of the memory that graphs of one block share; they run one after the other, and nobody reads
        a result after another one has started."""
        self._device, self._pool, self._side = device, pool, _side_stream(device)
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self, run: Run) -> Tensor:
        stream = torch.cuda.current_stream(self._device)
        self._side.wait_stream(stream)
        with torch.cuda.stream(self._side):
            result = run()
        stream.wait_stream(self._side)
        result.record_stream(stream)
        return result

    def record(self, run: Run) -> Tensor:
        # Copies of other threads may go on: only what this one does is a part of the graph. Outside of it the stream is
        # set once more, since a recording that fails does not set it back.
        recording = torch.cuda.graph(self._graph, self._pool, self._side, capture_error_mode="thread_local")
        with torch.cuda.stream(self._side), recording:
            return run()

    def replay(self) -> None:
        self._graph.replay()

    def close(self) -> None:
        self._graph.reset()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Where all recordings are made: each stream that multiplies matrices keeps some 32 MiB of workspace for good."""
    return torch.cuda.Stream(device)


def recorder(device: torch.device) -> Callable[[], Recording] | None:
    """What makes recordings on `device`; None where there are none."""
    refused = os.environ.get("H2O_FLEXGEN_GRAPHS", "1").lower() in ("0", "false", "no", "off")
    if device.type != "cuda" or refused or interpreting():
        return None
    return partial(CudaGraph, device, torch.cuda.graph_pool_handle())


@dataclass
class _Steady:
    """A lane since its last change."""

    steps: int = 0
    recording: Recording | None = None
    logits: Tensor | None = None
    caches: Sequence[KVCache] = field(default_factory=list)


class DecodeGraphs:
    """The recorded steps of a block's lanes, one for each lane, made anew after every change of its rows."""

    def __init__(
        self,
        make: Callable[[], Recording],
        caches: Callable[[Lane], Sequence[KVCache] | None],
        forward: Callable[[Lane, Tensor, Tensor], Tensor],
    ) -> None:
        """`caches`: of a lane, layer by layer; None where a step of it cannot be recorded. `forward`: computes a decode
        step of a lane from token ids and positions, (rows,) int64 each: logits (rows, vocab) float32."""
        self._make, self._caches, self._forward = make, caches, forward
        self._lanes: dict[int, _Steady] = {}
        self.failure: str | None = None
        """Why a step could not be recorded; no other is tried then."""
        self.replayed = 0
        """Steps that were launched as a whole."""

    def step(self, lane: Lane) -> Tensor | None:
        """The whole step of `lane`: its logits, which are the caller's. None: nothing was done, go unit by unit."""
        if lane.kept is not None or self.failure is not None:
            self._drop(lane.index)
            return None
        steady = self._lanes.setdefault(lane.index, _Steady())
        steady.steps += 1
        if steady.steps <= PATIENCE:
            return None
        if steady.recording is None:
            caches = self._caches(lane)
            if caches is None:
                return None
            steady.caches, steady.recording = caches, self._make()
            return steady.recording.warm_up(partial(self._forward, lane, *lane.inputs()))
        run = partial(self._forward, lane, *lane.inputs())
        if steady.logits is None:
            logits = self._recorded(steady, steady.recording, run)
            if logits is None:
                lane.forget_angles()
                return run()
            steady.logits = logits
        else:
            for cache in steady.caches:
                cache.repeat()
        steady.recording.replay()
        self.replayed += 1
        # A row of logits may be kept by whoever asked for it.
        return steady.logits.clone()

    def close(self) -> None:
        """Forgets everything. Nothing that was recorded may be under way."""
        for index in list(self._lanes):
            self._drop(index)

    def _recorded(self, steady: _Steady, recording: Recording, run: Run) -> Tensor | None:
        """The result of a recording, which moves the caches' clocks on, but nothing on the device. None if it fails."""
        before = [cache.next_pos for cache in steady.caches]
        try:
            return recording.record(run)
        except RuntimeError as error:
            log.warning("decode steps cannot be recorded as CUDA graphs, and are launched one by one: %s", error)
            self.failure = f"{type(error).__name__}: {error}"
            for cache, positions in zip(steady.caches, before, strict=True):
                if cache.next_pos != positions:
                    cache.repeat(-1)
            return None

    def _drop(self, index: int) -> None:
        steady = self._lanes.pop(index, None)
        if steady is not None and steady.recording is not None:
            steady.recording.close()
