"""Two stages on real devices: on one GPU that plays both, and on two where there are two."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.engine.engine import Engine
from tests.tiny import prompts_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GPU, CPU = {"gpu": 1.0}, {"cpu": 1.0}
PLACES: dict[str, dict[str, Any]] = {
    "resident": {"weights": GPU, "cache": GPU, "hidden": GPU},
    "all on cpu": {"weights": CPU, "cache": CPU, "hidden": CPU},
    "attention on the host": {"weights": CPU, "cache": CPU, "hidden": GPU, "cpu_cache_compute": True},
}
LENGTHS = [23, 40, 12, 40, 31, 8, 19, 27]


@pytest.mark.parametrize("devices", [(0, 0), (0, 1)], ids=str)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["opt", "llama-gqa"])
def test_the_tokens_of_one_device(name: str, place: str, devices: tuple[int, int], checkpoint, monkeypatch) -> None:
    if max(devices) >= torch.cuda.device_count():
        pytest.skip("needs two CUDA devices")
    found = [torch.device("cuda", index) for index in devices]
    monkeypatch.setattr(devices, "resolve_devices", lambda config, first: found)
    folder, settings = checkpoint(name)[1], {"max_new_tokens": 20, "ignore_eos": True}
    engine: dict[str, Any] = {"dtype": "float32", "eviction": EvictionConfig("h2o", ratio=0.3), "device": "cuda"}
    with Engine(folder, policy={**PLACES["resident"], "gpu_batch_size": 8}, **engine) as llm:
        alone = [output.token_ids for output in llm.generate(prompts_of(LENGTHS), **settings)]
    policy = {**PLACES[place], "gpu_batch_size": 2, "num_gpu_batches": 4}
    with Engine(folder, num_gpus=2, policy=policy, **engine) as llm:
        for _ in range(2):
            assert [output.token_ids for output in llm.generate(prompts_of(LENGTHS), **settings)] == alone
        assert llm.last_record.bytes_moved["gpu->gpu"] > 0
