"""A sequence's tokens alone and in blocks of several shapes, over some families, bits and policies, in float32."""

from __future__ import annotations

from typing import Any

import pytest

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.engine.engine import Engine
from tests.tiny import prompts_of

PROMPTS = prompts_of([5, 17, 9, 12], seed=8)
SHAPES: list[dict[str, Any]] = [
    {"gpu_batch_size": 4},
    {"gpu_batch_size": 2, "num_gpu_batches": 2},
    {"gpu_batch_size": 1, "num_gpu_batches": 3, "prefill_chunk": 16},
]
CASES: list[tuple[str, dict[str, Any], EvictionConfig]] = [
    ("llama", {}, EvictionConfig()),
    ("opt", {"weight_bits": 8}, EvictionConfig(name="h2o", budget=8)),
    ("qwen2", {"weight_bits": 4, "weight_group": 32}, EvictionConfig(name="streaming", budget=9, sinks=2)),
    ("mistral", {"cache_bits": 8}, EvictionConfig(name="h2o", budget=8)),
    ("llama-gqa", {"cache_bits": 4}, EvictionConfig()),
]


@pytest.mark.parametrize(("family", "bits", "eviction"), CASES, ids=[case[0] for case in CASES])
def test_alone_and_in_any_block(family: str, bits: dict[str, Any], eviction: EvictionConfig, checkpoint: Any) -> None:
    _, folder = checkpoint(family)
    settings: dict[str, Any] = {"dtype": "float32", "eviction": eviction, **bits}
    draws: dict[str, Any] = {"max_new_tokens": 5, "ignore_eos": True, "do_sample": True, "seed": 3}
    with Engine(folder, policy={}, **settings) as llm:
        # The place in the call seeds what is drawn: others stand before it, and have ended.
        alone = [llm.generate([*[[5]] * n, prompt], **draws)[n].token_ids for n, prompt in enumerate(PROMPTS)]
    for shape in SHAPES:
        with Engine(folder, policy=shape, **settings) as llm:
            assert [output.token_ids for output in llm.generate(PROMPTS, **draws)] == alone
