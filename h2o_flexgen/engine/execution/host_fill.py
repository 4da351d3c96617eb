"""Prompts on their way from a GPU into caches in host memory, while the GPU computes what comes next."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.config.model.tensors import TENSOR_ALIGN, round_up
from h2o_flexgen.engine.state.kv_store import BatchCache
from h2o_flexgen.memory.copies import CopyEngine
from h2o_flexgen.memory.pinned import Pin
from h2o_flexgen.memory.tiers import Tiers
from h2o_flexgen.memory.transfers import Ticket
from h2o_flexgen.schedule.host_attention import FILL_BUFFERS, HOST_ATTENTION


class _FillingPrompt(NamedTuple):
    """What `KVCache.fill` is given: K, V and perhaps column sums of some rows, and K and V of what they follow."""

    k: Tensor
    v: Tensor
    past: tuple[Tensor, Tensor] | None
    sums: Tensor | None

    def tensors(self) -> list[Tensor]:
        return [self.k, self.v, *(self.past or ()), *(() if self.sums is None else (self.sums,))]

    def of(self, tensors: list[Tensor]) -> _FillingPrompt:
        """The same of other tensors."""
        past = None if self.past is None else (tensors[2], tensors[3])
        return _FillingPrompt(tensors[0], tensors[1], past, None if self.sums is None else tensors[-1])


class HostFill:
    """Fills caches in host memory on the thread that attends to them, see `engine.execution.host_attention`; copies go
    beside the compute.

    A cache that is being filled belongs to that thread: `LaneCache.settled` waits for it.
    """

    def __init__(self, tiers: Tiers, copies: CopyEngine, nbytes: int) -> None:
        """`nbytes`: of the largest prompts that are filled in at once, `prompt_bytes`; larger ones are waited for."""
        self._copies, self._link = copies, f"{tiers.compute.name}->cpu"
        self._busy: list[Ticket | None] = [None] * FILL_BUFFERS
        self._turn = 0
        with ExitStack() as stack:
            self._stages = [
                [
                    stack.enter_context(tier.allocate(nbytes, "prompts for the cpu", Pin.FIRST)).tensor
                    for tier in (tiers.compute, tiers.cpu)
                ]
                for _ in range(FILL_BUFFERS)
            ]
            self._resources = stack.pop_all()

    def fill(
        self,
        cache: BatchCache,
        rows: list[int],
        k: Tensor,
        v: Tensor,
        sums: Tensor | None,
        past: tuple[Tensor, Tensor] | None,
    ) -> None:
        """`KVCache.fill` of the fresh rows of `cache`, from tensors where they were computed."""
        if cache.fresh is None:
            raise RuntimeError("prompts are in hand, and no cache to fill from them")
        prompt = _FillingPrompt(k, v, past, sums)
        here, there = self._stages[self._turn]
        spans = _spans(prompt.tensors())
        if spans[-1].stop > here.numel():
            if cache.filling is not None:
                cache.filling.wait()
            _fill(cache.fresh, rows, prompt.of([tensor.to(cache.fresh.device) for tensor in prompt.tensors()]))
            return
        busy = self._busy[self._turn]
        if busy is not None:
            busy.wait()
        for span, tensor in zip(spans, prompt.tensors(), strict=True):
            _view(here, span, tensor).copy_(tensor)
        used = slice(0, spans[-1].stop)
        down = self._copies.copy(there[used], here[used], self._link, label="prompts")
        arrived = prompt.of([_view(there, span, tensor) for span, tensor in zip(spans, prompt.tensors(), strict=True)])
        after = (down, cache.filling)
        cache.filling = self._copies.run(partial(_fill, cache.fresh, rows, arrived), HOST_ATTENTION, after=after)
        self._busy[self._turn] = cache.filling
        self._turn = (self._turn + 1) % FILL_BUFFERS

    def close(self) -> None:
        """Gives all memory back. Nothing may be under way."""
        self._resources.close()


def _fill(cache: KVCache, rows: list[int], prompt: _FillingPrompt) -> None:
    with torch.inference_mode():
        cache.fill(rows, prompt.k, prompt.v, prompt.sums, past=prompt.past)


def _spans(tensors: list[Tensor]) -> list[slice]:
    """Where the bytes of each go, one behind the other."""
    spans, start = [], 0
    for tensor in tensors:
        spans.append(slice(start, start + tensor.numel() * tensor.element_size()))
        start = round_up(spans[-1].stop, TENSOR_ALIGN)
    return spans


def _view(flat: Tensor, span: slice, like: Tensor) -> Tensor:
    return flat[span].view(like.dtype).view(like.shape)
