"""Mixers of transformers that compute recurrences by kernels in C give the tokens and logits that they gave before."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from h2o_flexgen.kernels.native import why_not
from h2o_flexgen.models.hf import mixers

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

VOCAB, NEW = 128, 6
COMMON = {"hidden_size": 64, "vocab_size": VOCAB, "num_hidden_layers": 2, "intermediate_size": 96, "head_dim": 16}
COMMON |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"layer_types": ["linear_attention", "full_attention"]}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
DELTAS = {"torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"}
CONVS = {"causal_conv1d_fn", "causal_conv1d_update"}
SCANS = {"mamba2_chunk_scan", "mamba2_selective_state_update"}
FIRST = {"mamba_selective_scan", "mamba_selective_state_update"}
KINDS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "qwen3_5_text": (DELTA, DELTAS | CONVS),
    "qwen3_next": (DELTA | EXPERTS, DELTAS | CONVS),
    "olmo_hybrid": (DELTA, DELTAS | CONVS),
    "kimi_linear": (
        {
            **EXPERTS,
            **{"linear_head_dim": 16, "linear_num_heads": 4, "layer_types": ["linear_attention", "full_attention"]},
            **{"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8},
            **{"n_group": 1, "topk_group": 1, "num_key_value_heads": 4},
        },
        {"chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"} | CONVS,
    ),
    "falcon_h1": (
        {"mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 24, "mamba_chunk_size": 8},
        SCANS | CONVS,
    ),
    "bamba": (
        {
            **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 24, "mamba_chunk_size": 8},
            **{"attn_layer_indices": [1]},
        },
        SCANS | CONVS,
    ),
    "nemotron_h": (
        {
            **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 24, "n_groups": 2, "chunk_size": 8},
            **{"layers_block_type": ["linear_attention", "full_attention"]},
        },
        SCANS | CONVS,
    ),
    "mamba2": ({"num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": 2, "chunk_size": 8}, SCANS | CONVS),
    "mamba": ({"state_size": 12}, FIRST | CONVS),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, CONVS),
}


def tiny(kind: str, given: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**COMMON, **given})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 1.3 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.15
            parameter.add_(torch.randn(parameter.shape) * scale)
    return model


def generated(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    settings = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return out.sequences, torch.stack(out.logits)


def fails(*_: Any, **__: Any) -> None:
    raise AssertionError("transformers' own function is called")


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_stay_those_of_transformers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, names = KINDS[kind]
    model = tiny(kind, given)
    ids = torch.randint(3, VOCAB, (3, 13))
    wanted, logits = generated(model, ids)
    for place in {sys.modules[type(module).__module__] for module in model.modules()}:
        for name in names & vars(place).keys():
            monkeypatch.setattr(place, name, fails)
    with pytest.raises(AssertionError, match="own function"):
        generated(model, ids)
    assert set(mixers.take_recurrences(model)) == names
    found, near = generated(model, ids)
    assert torch.equal(found, wanted)
    torch.testing.assert_close(near, logits, rtol=0, atol=2e-4 * logits.std().item())


@pytest.mark.parametrize("kind", ["qwen3_5_text", "falcon_h1", "mamba", "lfm2"])
def test_sixteen_bits(kind: str) -> None:
    """As near to float32 as transformers' own functions are."""
    model = tiny(kind, KINDS[kind][0])
    ids = torch.randint(3, VOCAB, (3, 13))
    with torch.inference_mode():
        model = model.bfloat16().float()
        exact = model(ids).logits
        model = model.bfloat16()
        theirs = (model(ids).logits - exact).abs().mean()
        mixers.take_recurrences(model)
        ours = (model(ids).logits - exact).abs().mean()
    assert ours <= 1.5 * theirs


def test_what_the_kernels_do_not_take_is_left_to_transformers() -> None:
    """Numbers of 64 bits, in all of a model's functions."""
    for kind in ("qwen3_5_text", "falcon_h1", "mamba", "lfm2"):
        model = tiny(kind, KINDS[kind][0]).double()
        ids = torch.randint(3, VOCAB, (2, 9))
        wanted = generated(model, ids)
        mixers.take_recurrences(model)
        assert all(torch.equal(one, other) for one, other in zip(generated(model, ids), wanted, strict=True))


def test_modules_without_recurrences_stay_as_they_are() -> None:
    model = tiny("llama", {})
    before = [module.forward.__func__ for module in model.modules()]
    assert mixers.take_recurrences(model) == []
    assert [module.forward.__func__ for module in model.modules()] == before
