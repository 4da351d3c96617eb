"""Blocks of one call share their host memory, one after the other."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.limits import devices
from h2o_flexgen.memory.pages import Allocation, HostMemory
from h2o_flexgen.memory.pinned import PinnedPool
from tests.memory.fake_cuda import FakeDevice
from tests.tiny import prompts_of

LENGTH, NEW = 24, 6


@pytest.mark.parametrize(("cache", "gpu"), [("cpu", None), ("gpu", "1GiB"), ("cpu", "1GiB")])
@pytest.mark.parametrize("eviction", ["full", "h2o"])
def test_later_blocks_ask_the_system_for_no_memory(
    eviction: str, cache: str, gpu: str | None, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    allocate = HostMemory.allocate

    def counted(memory: HostMemory, nbytes: int) -> Allocation:
        asked.append(nbytes)
        return allocate(memory, nbytes)

    monkeypatch.setattr(HostMemory, "allocate", counted)
    _, folder = checkpoint("opt")
    prompts = prompts_of([LENGTH] * 6)
    config = EvictionConfig(eviction, **({} if eviction == "full" else {"ratio": 0.5}))
    policy = {"gpu_batch_size": 2, "num_gpu_batches": 1, "cache": {cache: 1.0}}

    def tokens(prompts: list[list[int]]) -> list[list[int]]:
        asked.clear()
        with Engine(folder, dtype="float32", eviction=config, policy=policy, emulate_gpu=gpu) as llm:
            return [output.token_ids for output in llm.generate(prompts, max_new_tokens=NEW, ignore_eos=True)]

    one_by_one = [row for start in (0, 2, 4) for row in tokens(prompts[start : start + 2])]
    of_one_block = len(asked)
    assert tokens(prompts) == one_by_one, "what a block left behind is nowhere in the next"
    assert len(asked) == of_one_block


def test_later_blocks_lock_no_memory_anew(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU copies from and to stays page-locked from block to block, and is unlocked with the call."""
    folder, locks = checkpoint("opt")[1], []

    class Noted(FakeDevice):
        def lock(self, tensor: torch.Tensor) -> bool:
            locks.append(tensor.numel())
            return super().lock(tensor)

    monkeypatch.setattr(devices, "open_gpu", lambda _: PinnedPool(device))
    policy = {"gpu_batch_size": 1, "num_gpu_batches": 2, "cache": {"cpu": 1.0}, "hidden": {"cpu": 1.0}}
    counts = []
    for blocks in (1, 3):
        device = Noted()
        locks.clear()
        with Engine(folder, dtype="float32", policy={**policy, "weights": {"gpu": 1.0}}, emulate_gpu="1GiB") as llm:
            llm.generate(prompts_of([LENGTH] * 2 * blocks), max_new_tokens=NEW, ignore_eos=True)
            assert not device._locked, "no weights are on the cpu tier"
        counts.append(Counter(locks))
    assert counts[0] == counts[1]
    assert sum(counts[0].values()) > 4
