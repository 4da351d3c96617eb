"""By transformers' modules, too, a sequence's tokens are its own: its neighbours, the block, tiers, parts of prompts,
threads and a new start change none of them; experts and packed weights included."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.engine.engine import Engine
from tests.engine.test_modules import tiny
from tests.pairs import pairs
from tests.tiny import prompts_of

HEADER = prompts_of([30], seed=9)[0]
PROMPTS = prompts_of([5, 33, 17, 1, 60, 17, 9, 24])
PROMPTS += [HEADER + prompt[1:] for prompt in PROMPTS[:3]]
NEW = 8
KINDS = ("olmo", "gemma2", "deepseek_v3", "gpt_oss", "qwen3_moe")
WEIGHTS: dict[str, dict[str, Any]] = {
    "16 bits": {},
    "8 bits": {"weight_bits": 8, "weight_group": 32},
    "4 bits": {"weight_bits": 4, "weight_group": 32, "weight_importance": False},
}
MIXED = {"gpu": 0.5, "cpu": 0.5}
PLACES: dict[str, dict[str, Any]] = {
    "together": {"policy": {"gpu_batch_size": 11, "num_gpu_batches": 1}},
    "batches": {"policy": {"gpu_batch_size": 3, "num_gpu_batches": 2}},
    "disk": {"policy": {"gpu_batch_size": 2, "num_gpu_batches": 3, "weights": {"disk": 1.0}, "cache": {"disk": 1.0}}},
    "parts": {"policy": {"gpu_batch_size": 4, "num_gpu_batches": 2, "prefill_chunk": 16}},
    "gpu": {
        "policy": {"gpu_batch_size": 4, "num_gpu_batches": 1, "weights": MIXED, "cache": {"gpu": 1.0}},
        "emulate_gpu": "1GiB",
    },
    "threads": {"policy": {"gpu_batch_size": 11, "num_gpu_batches": 1}, "threads": 2},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory):
    """A model's folder, and the tokens of each prompt alone."""

    @cache
    def make(kind: str, weights: str) -> tuple[str, list[list[int]]]:
        folder = str(tmp_path_factory.mktemp(kind))
        tiny(kind).save_pretrained(folder)
        return folder, run(folder, [[prompt] for prompt in PROMPTS], weights, {})

    return make


def run(folder: str, calls: list[list[list[int]]], weights: str, settings: dict[str, Any]) -> list[list[int]]:
    """The tokens of all prompts of all calls of one engine."""
    threads, before = settings.get("threads", 1), torch.get_num_threads()
    rest = {key: value for key, value in settings.items() if key != "threads"}
    how = {"dtype": "float32", "model_impl": "transformers", "eviction": EvictionConfig("h2o", ratio=0.5)}
    torch.set_num_threads(threads)
    try:
        with Engine(folder, offload_dir=f"{folder}/offload", **how, **WEIGHTS[weights], **rest) as llm:
            outputs = [llm.generate(prompts, max_new_tokens=NEW, ignore_eos=True) for prompts in calls]
            return [output.token_ids for each in outputs for output in each]
    finally:
        torch.set_num_threads(before)


@pytest.mark.turns
@pytest.mark.parametrize(("kind", "weights", "place"), pairs(KINDS, WEIGHTS, PLACES))
def test_tokens_are_a_sequences_own(kind: str, weights: str, place: str, alone) -> None:
    folder, expected = alone(kind, weights)
    assert run(folder, [PROMPTS], weights, PLACES[place]) == expected
