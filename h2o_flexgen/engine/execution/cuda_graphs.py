"""Decode steps as CUDA graphs: recorded once, then launched by one call instead of some thousand.

A recorded step ends by making the inputs of the next one. If all rows take their likeliest tokens, the next step is
launched before the host has read the tokens of this one, so that the GPU never waits for the host; a row that turns
out to be finished idles for one step. Steps can be recorded if nothing moves (`schedule.tasks.recordable`), caches
launch the same each time (`KVCache.repeats`) and rows do not change. H2O_FLEXGEN_GRAPHS=0 turns recording off.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.engine.batching.gpu_batch import GpuBatch
from h2o_flexgen.engine.sampling.sampler import pack
from h2o_flexgen.errors import required
from h2o_flexgen.kernels.triton_available import interpreting
from h2o_flexgen.schedule.tasks import PATIENCE

log = logging.getLogger(__name__)

Read = Callable[[], Tensor]
"""Waits for numbers on their way from the device; returns them in host memory."""


class Result(NamedTuple):
    """The outcome of a step: logits (rows, vocab) float32, and of each row the largest and its token, by `pack`."""

    logits: Tensor
    likeliest: Tensor


Run = Callable[[], Result]
"""Launches a step, all of whose inputs and results lie in tensors that stay."""

Launched = Tensor | Callable[[], tuple[list[float], list[int]]]
"""The outcome of a launched step: logits, owned by the caller; or, if no row needs them, a function that waits for the
largest ones and their tokens."""


class GraphMemory:
    """A memory pool that the graphs of one block share: they run one after the other, and no result is read after
    another graph has started. A graph is in it from its recording until it is closed."""

    def __init__(self) -> None:
        self._graphs = 0
        self._handle: Any = None

    def enter(self) -> Any:
        """The handle to record another graph with; a new one if no graph is left."""
        if not self._graphs:
            # Recordings take memory of their own: frees what prompts have left. Slow, as it waits for the device.
            torch.cuda.empty_cache()
            self._handle = torch.cuda.graph_pool_handle()
        self._graphs += 1
        return self._handle

    def leave(self) -> None:
        self._graphs -= 1


class CudaGraph:
    """A recording of a step that goes to a CUDA device, to be launched again."""

    def __init__(self, device: torch.device, memory: GraphMemory) -> None:
        self._device, self._memory, self._side = device, memory, _side_stream(device)
        self._graph, self._entered = torch.cuda.CUDAGraph(), False

    def warm_up(self, run: Run) -> Result:
        """Runs `run` once as a recording would, so that everything that is made at first use is made now."""
        stream = torch.cuda.current_stream(self._device)
        self._side.wait_stream(stream)
        with torch.cuda.stream(self._side):
            result = run()
        stream.wait_stream(self._side)
        for tensor in result:
            tensor.record_stream(stream)
        return result

    def record(self, run: Run) -> Result:
        """Records what `run` launches, without launching it. Every `replay` fills the result anew."""
        # Not by torch.cuda.graph, which waits for the device and empties the cache each time.
        pool, self._entered = self._memory.enter(), True
        with torch.cuda.stream(self._side):
            # Copies of other threads may go on: only what this one does is a part of the graph.
            self._graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                result = run()
            except BaseException:
                with suppress(RuntimeError):  # the recording is void, which is known
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
        return result

    def replay(self) -> None:
        self._graph.replay()

    def fetch(self, numbers: Tensor) -> Read:
        """Starts copying `numbers` to the host, after everything launched so far."""
        host, event = numbers.to("cpu", non_blocking=True), torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))

        def read() -> Tensor:
            event.synchronize()
            return host

        return read

    def close(self) -> None:
        self._graph.reset()
        if self._entered:
            self._memory.leave()
            self._entered = False


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all recordings: each stream that multiplies matrices keeps some 32 MiB of workspace for good."""
    return torch.cuda.Stream(device)


def recorder(device: torch.device) -> Callable[[], CudaGraph] | None:
    """Makes recordings on `device`; None if that is impossible or turned off."""
    refused = os.environ.get("H2O_FLEXGEN_GRAPHS", "1").lower() in ("0", "false", "no", "off")
    if device.type != "cuda" or refused or interpreting():
        return None
    return partial(CudaGraph, device, GraphMemory())


@dataclass
class _Steady:
    """A GPU batch since its last change.

    steps        that were not launched as a whole
    result       of the recorded step, once there is one
    launched     steps that `caches` are yet to be told of
    under_way    likeliest tokens of steps that the host has not read: two steps at most
    next_tokens  the tokens that the device goes on with, if known
    """

    steps: int = 0
    result: Result | None = None
    caches: Sequence[KVCache] = ()
    launched: int = 0
    under_way: deque[Read] = field(default_factory=deque)
    next_tokens: list[int] | None = None


class DecodeGraphs:
    """The recorded steps of a block, one for each GPU batch, recorded anew after every change of its rows.

    A recording is kept until the next one has taken its place in the same memory.
    """

    def __init__(
        self,
        make: Callable[[], CudaGraph],
        caches: Callable[[GpuBatch], Sequence[KVCache] | None],
        forward: Callable[[GpuBatch, Tensor, Tensor], Tensor],
    ) -> None:
        """caches: of a GPU batch, layer by layer; None if its steps cannot be recorded. forward: a decode step of a GPU
        batch from token ids and positions, (rows,) int64 each, to logits (rows, vocab) float32."""
        self._make, self._caches, self._forward = make, caches, forward
        self._gpu_batches: dict[int, _Steady] = {}
        self._recordings: dict[int, CudaGraph] = {}
        self._warm: CudaGraph | None = None  # that warmed up, and has recorded nothing yet
        self._cold = True
        self.failure: str | None = None
        """Why recording failed; it is not tried again then."""
        self.launches = 0
        """Steps launched as a whole."""

    def step(self, gpu_batch: GpuBatch) -> Launched | None:
        """Launches the whole step of a GPU batch. None: none was launched, go unit by unit."""
        if gpu_batch.kept is not None:
            self._forget(gpu_batch)
        steady = self._gpu_batches.setdefault(gpu_batch.index, _Steady())
        if steady.result is None:
            if gpu_batch.kept is not None or self.failure is not None or not self._pays(gpu_batch, steady):
                return None
            eager = self._begin(gpu_batch, steady)
            if steady.result is None:
                return None if eager is None else eager.logits
            self._launch(gpu_batch, steady)
        elif not steady.under_way:
            if steady.next_tokens == [row.last_token for row in gpu_batch.rows]:
                gpu_batch.advance()
            else:
                gpu_batch.inputs()
            self._launch(gpu_batch, steady)
        if not all(row.finished or row.takes_likeliest for row in gpu_batch.rows):
            # The caller may keep a row of logits, and the next GPU batch's step may write over them.
            steady.under_way.clear()
            steady.next_tokens = None
            return steady.result.logits.clone()
        gpu_batch.ahead = all(not row.finished and row.remaining > 1 for row in gpu_batch.rows)
        if gpu_batch.ahead:
            gpu_batch.advance()
            self._launch(gpu_batch, steady)
        return partial(self._read, steady, steady.under_way.popleft())

    def close(self) -> None:
        """Waits for launched steps and drops everything."""
        for steady in self._gpu_batches.values():
            for read in steady.under_way:
                read()
        for recording in (*self._recordings.values(), self._warm):
            if recording is not None:
                recording.close()
        self._gpu_batches.clear()
        self._recordings.clear()
        self._warm = None

    def _pays(self, gpu_batch: GpuBatch, steady: _Steady) -> bool:
        """Whether enough steps without a change lie behind the GPU batch and, by its lengths, before it."""
        steady.steps += 1
        left = min(row.remaining for row in gpu_batch.rows if not row.finished)
        return steady.steps > PATIENCE and left >= PATIENCE

    def _begin(self, gpu_batch: GpuBatch, steady: _Steady) -> Result | None:
        """Records a step of the GPU batch and returns None; or runs it, to warm up or because recording failed."""
        caches = self._caches(gpu_batch)
        if caches is None:
            return None
        run = partial(self._run, gpu_batch, *gpu_batch.inputs())
        if self._cold:
            self._cold, self._warm = False, self._make()
            return self._warm.warm_up(run)
        recording, self._warm = self._warm or self._make(), None
        before = [kv.next_pos for kv in caches]
        try:
            steady.result, steady.caches = recording.record(run), caches
        except RuntimeError as error:
            log.warning("decode steps cannot be recorded as CUDA graphs, and are launched one by one: %s", error)
            self.failure = f"{type(error).__name__}: {error}"
            recording.close()
        # A recording moves the caches' clocks on, but nothing on the device.
        for kv, positions in zip(caches, before, strict=True):
            if kv.next_pos != positions:
                kv.repeat(-1)
        if steady.result is None:
            gpu_batch.forget_angles()
            return run()
        old = self._recordings.get(gpu_batch.index)
        self._recordings[gpu_batch.index] = recording
        if old is not None:
            old.close()
        return None

    def _run(self, gpu_batch: GpuBatch, tokens: Tensor, positions: Tensor) -> Result:
        logits = self._forward(gpu_batch, tokens, positions)
        best, chosen = torch.max(logits, dim=-1)
        gpu_batch.follow(chosen)
        return Result(logits, pack((best, chosen)))

    def _launch(self, gpu_batch: GpuBatch, steady: _Steady) -> None:
        recording, result = self._recordings[gpu_batch.index], required(steady.result, "no step was recorded")
        recording.replay()
        # At once: GPU batches share the memory of their results.
        steady.under_way.append(recording.fetch(result.likeliest))
        steady.launched += 1
        self.launches += 1

    def _read(self, steady: _Steady, read: Read) -> tuple[list[float], list[int]]:
        best, tokens = read().view(2, -1)
        steady.next_tokens = [int(token) for token in tokens.tolist()]
        return best.tolist(), steady.next_tokens

    def _forget(self, gpu_batch: GpuBatch) -> None:
        """The GPU batch's rows change: its caches are told what was launched, and its recording is not used again."""
        steady = self._gpu_batches.pop(gpu_batch.index, _Steady())
        for read in steady.under_way:
            read()
        for kv in steady.caches:
            kv.repeat(steady.launched)
        gpu_batch.ahead = False
