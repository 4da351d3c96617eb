"""Mixers of transformers that compute recurrences by kernels in C give the tokens and logits that they gave before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from h2o_flexgen.kernels.native import why_not
from h2o_flexgen.kernels.states import GatedNorm
from h2o_flexgen.models.hf import fused, mixers

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
        {
            "mamba_d_ssm": 96,
            "mamba_n_heads": 6,
            "mamba_d_head": 16,
            "mamba_d_state": 24,
            "mamba_chunk_size": 8,
            "mamba_rms_norm": True,
            "mamba_n_groups": 2,
        },
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


def failing(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the arguments of another."""

    @wraps(original)
    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("transformers' own function is called")

    return fails


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_stay_those_of_transformers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, names = KINDS[kind]
    model = tiny(kind, given)
    ids = torch.randint(3, VOCAB, (3, 13))
    wanted, logits = generated(model, ids)
    for place in {sys.modules[type(module).__module__] for module in model.modules()}:
        for name in names & vars(place).keys():
            monkeypatch.setattr(place, name, failing(vars(place)[name]))
    with pytest.raises(AssertionError, match="own function"):
        generated(model, ids)
    assert set(mixers.take_recurrences(model)) == names
    mixers.take_gated_norms(model)
    for module in model.modules():  # whatever has a gate is ours; with another way of doing it, it would not be
        assert ("RMSNormGated" in type(module).__name__) == (getattr(module.forward, "func", None) is mixers._normed)
    found, near = generated(model, ids)
    assert torch.equal(found, wanted)
    torch.testing.assert_close(near, logits, rtol=0, atol=2e-4 * logits.std().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["qwen3_5_text", "falcon_h1", "mamba", "mamba2", "lfm2"])
def test_sixteen_bits(kind: str, dtype: torch.dtype) -> None:
    """As near to float32 as transformers' own functions are."""
    model = tiny(kind, KINDS[kind][0])
    ids = torch.randint(3, VOCAB, (3, 13))
    with torch.inference_mode():
        model = model.to(dtype).float()
        exact = model(ids).logits
        model = model.to(dtype)
        theirs = (model(ids).logits - exact).abs().mean()
        mixers.take_recurrences(model)
        mixers.take_gated_norms(model)
        fused.take_norms(model)
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


def test_a_norm_that_is_something_else_stays_as_it_is() -> None:
    """One that adds its gate, and one whose weight is one more than what is stored."""

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(24)), 1e-6

        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.rms_norm(x, (24,), self.weight, self.eps) + gate

    class More(Added):
        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            normed = torch.nn.functional.rms_norm(x, (24,), self.weight + 1, self.eps)
            return normed * torch.nn.functional.silu(gate)

    for module in (Added(), More()):
        mixers.take_gated_norms(module)
        assert "forward" not in vars(module)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32,) * 3, (torch.bfloat16,) * 3, (torch.float32, torch.bfloat16, torch.bfloat16)]
)
def test_gated_norms(dtypes: tuple[torch.dtype, ...]) -> None:
    """In float64, at every size and switch; rows apart in a wider tensor."""
    generator = torch.Generator().manual_seed(0)
    for size, groups, rows in ((1, 1, 1), (15, 2, 3), (128, 1, 70), (100, 4, 9)):
        n = size * groups
        x, gate = (torch.randn(rows, 2 * n, generator=generator).to(each)[:, n:] for each in dtypes[:2])
        weight = torch.randn(n, generator=generator).to(dtypes[2])
        for first, sigmoid in ((False, False), (True, False), (False, True)):
            found = GatedNorm(1e-5, size, first, sigmoid, False)(x, gate, weight)
            wide, given = gate.double().sigmoid(), x.double()
            wide = wide if sigmoid else wide * gate.double()
            given = (given * wide if first else given).unflatten(1, (groups, size))
            normed = given / (given.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            expected = normed.flatten(1) * weight.double() * (1 if first else wide)
            assert found.dtype is x.dtype
            rounding = 2.0**-8 if x.dtype is torch.bfloat16 else 2e-6
            torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=2e-6)
            assert torch.equal(found[:1], GatedNorm(1e-5, size, first, sigmoid, False)(x[:1], gate[:1], weight))


def test_modules_without_recurrences_stay_as_they_are() -> None:
    model = tiny("llama", {})
    before = [module.forward.__func__ for module in model.modules()]
    assert mixers.take_recurrences(model) == []
    assert [module.forward.__func__ for module in model.modules()] == before
