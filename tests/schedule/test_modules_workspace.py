"""What transformers' modules really have alive while they compute, against what the plan allows."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen import LLM, EvictionConfig, OffloadPolicy
from h2o_flexgen.engine.execution import attention
from h2o_flexgen.kernels import torch_attention
from h2o_flexgen.models.families import spec_from_config
from tests.engine.test_modules import tiny
from tests.pairs import pairs
from tests.schedule.test_workspace import COUNTED, MANY, WORK, Live
from tests.tiny import prompts_of

LINEAR: dict[str, Any] = {
    **{"hidden_size": 64, "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_attention_heads": 4},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "num_key_value_heads": 2},
    "layer_types": ["linear_attention", "full_attention"],
}
KINDS: dict[str, dict[str, Any]] = {
    "olmo": {},
    "gemma2": {},
    "deepseek_v3": {},
    "qwen3_moe": {},
    "phi": {},
    "gpt2": {"n_embd": 64, "n_positions": 512},
    "cohere2": {},
    "granite": {},
    "gpt_oss": {},
    "qwen3_next": LINEAR,
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 2, "mamba_d_head": 64, "mamba_d_state": 64},
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        tiny(kind, **{"hidden_size": 64, "max_position_embeddings": 512, **KINDS[kind]}).save_pretrained(folder)
        return folder

    return make


@pytest.mark.turns
@pytest.mark.parametrize(("kind", "work", "mode"), pairs(KINDS, WORK, ["full", "h2o"]))
def test_what_is_alive_was_allowed(kind: str, work: str, mode: str, folder_of, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, shared, chunk, dtype, native = WORK[work]
    if not native:
        monkeypatch.setattr(attention, "prefill_attention", torch_attention.prefill_attention)
    eviction = EvictionConfig() if mode == "full" else EvictionConfig("h2o", 0.3)
    prompts = prompts_of(lengths)
    prompts = [prompts[0][:shared] + prompt[shared:] for prompt in prompts]
    policy = OffloadPolicy(len(prompts), prefill_chunk=chunk)
    settings: dict[str, Any] = {"dtype": dtype, "eviction": eviction, "model_impl": "transformers"}
    with LLM(str(folder_of(kind)), policy=policy, **settings) as llm, Live() as live:
        llm.generate(prompts, max_new_tokens=16 if lengths is MANY else 4, ignore_eos=True)
        assert llm.last_plan is not None
        allowed = sum(item.nbytes for item in llm.last_plan.footprint.items if item.what in COUNTED)
    assert live.peak <= allowed


def test_states_are_no_memory_of_each_token() -> None:
    """States are as large as some hundred tokens, and torch pads a prompt to whole chunks: both count once."""
    found = spec_from_config({"model_type": "qwen3_next", **LINEAR}, "tiny", "transformers").activations
    state = 2 * 4 * 128 * 128
    assert found.working + found.mixing[0] < state / 4
    assert state < found.mixing[1] < found.in_torch[1]
    assert found.mixing[0] < found.in_torch[0]
