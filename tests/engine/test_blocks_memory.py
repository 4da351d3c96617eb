"""Blocks of one call share their host memory, one after the other."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.execution import block
from h2o_flexgen.engine.execution.mixture import Mixture
from h2o_flexgen.engine.limits import devices
from h2o_flexgen.memory.pinned import PinnedPool
from h2o_flexgen.memory.tiers import Allocation, HostMemory
from tests.memory.fake_cuda import FakeDevice
from tests.tiny import config_of, prompts_of

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


def test_prompts_of_many_gpu_batches_stay_within_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither does the heap grow in every layer, nor are the tokens of a mixture there more often than planned."""
    experts = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64}
    sizes = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8}
    config_of("olmoe", **experts, **sizes).save_pretrained(tmp_path)
    seen, compute = list[int](), Mixture.compute

    def looked(mixture: Mixture, *arguments: Any) -> None:
        seen.append(devices.rss())
        compute(mixture, *arguments)

    monkeypatch.setattr(Mixture, "compute", looked)
    policy = {"gpu_batch_size": 16, "num_gpu_batches": 12, "weights": {"cpu": 1.0}}
    eviction = EvictionConfig("h2o", ratio=0.2)
    devices.return_free_pages()
    with Engine(str(tmp_path), weights="dummy", dtype="bfloat16", policy=policy, eviction=eviction) as llm:
        llm.generate(prompts_of([40] * 192), max_new_tokens=2, ignore_eos=True)
        plan = llm.last_plan
    assert plan is not None
    assert max(seen) <= plan.footprint.total("cpu")


def test_freed_memory_goes_back_in_every_layer_near_the_cap(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one GPU batch, too: SmolLM2 135M took 619 MiB of a cap of 600 for prompts of 200 to 1,500 tokens."""
    returned = list[bool]()
    monkeypatch.setattr(block, "return_free_pages", lambda large=True: returned.append(large))
    for held in (0, 1 << 60):
        monkeypatch.setattr(block, "rss", lambda held=held: held)
        with Engine(checkpoint("opt")[1], dtype="float32", cpu_mem="4GiB") as llm:
            llm.generate(prompts_of([LENGTH, 5]), max_new_tokens=2)
            layers = llm.model.spec.num_layers
        assert returned == [False] * (layers if held else 0) + [True]
        returned.clear()
