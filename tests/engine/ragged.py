"""Prompts and outputs of unequal lengths, and an engine for them on each tier."""

from __future__ import annotations

from typing import Any

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.engine import Engine
from tests.tiny import prompts_of

CPU, DISK, GPU, THREE = {"cpu": 1.0}, {"disk": 1.0}, {"gpu": 1.0}, {"gpu": 0.3, "cpu": 0.3, "disk": 0.4}
TIERS: dict[str, tuple[dict[str, Any], str | None]] = {
    "cpu": ({"weights": CPU, "cache": CPU, "hidden": CPU}, None),
    "disk": ({"weights": DISK, "cache": DISK, "hidden": DISK}, None),
    "gpu": ({"weights": THREE, "cache": THREE, "hidden": THREE}, "1GiB"),
    "cpu beside gpu": ({"weights": GPU, "cache": CPU, "hidden": CPU, "cpu_cache_compute": True}, "1GiB"),
}
LENGTHS = [23, 40, 12, 33, 31, 8, 19, 27, 5, 14, 3]
"""Of the prompts: more than any of the blocks has places for."""
NEW = [12, 3, 7, 1, 17, 2, 9, 5, 14, 1, 4]
PROMPTS = prompts_of(LENGTHS)


def params(sampled: bool = True) -> list[SamplingParams]:
    """Every third row is sampled."""
    return [
        SamplingParams(max_new_tokens=new, ignore_eos=True, logprobs=0, do_sample=sampled and i % 3 == 1)
        for i, new in enumerate(NEW)
    ]


def run(folder: str, eviction: EvictionConfig, shape: tuple[int, int], tier: str = "cpu", **engine: Any) -> Engine:
    placement, gpu = TIERS[tier]
    policy = {**placement, "gpu_batch_size": shape[0], "num_gpu_batches": shape[1], **engine.pop("policy", {})}
    settings = {"policy": policy, "emulate_gpu": gpu, "seed": eviction.seed, **engine}
    return Engine(folder, dtype="float32", eviction=eviction, **settings)
