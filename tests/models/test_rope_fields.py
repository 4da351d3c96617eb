"""Rotary fields, old spellings and new, against the cosines and sines that transformers makes of the same config."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.errors import ModelError
from h2o_flexgen.models.families import spec_from_config
from h2o_flexgen.models.rotary import Rotary

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}


def scaled(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **fields}}


TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "theta": ("llama", {"rope_theta": 500000.0}),
    "new-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5000}}),
    "old-before-new": (
        "llama",
        {
            "rope_scaling": {"type": "linear", "factor": 2},
            "rope_parameters": {"rope_type": "dynamic", "factor": 3, "rope_theta": 7},
        },
    ),
    "empty-old": (
        "llama",
        {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 3}, "rope_theta": 300.0},
    ),
    "head-dim": ("llama", {"head_dim": 10}),
    "linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "dynamic": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "dynamic-original": ("llama", scaled("dynamic", factor=2.0, original_max_position_embeddings=16)),
    "llama3": ("llama", scaled("llama3", **LLAMA3)),
    "llama3-outer-original": ("llama", {**scaled("llama3", **LLAMA3), "original_max_position_embeddings": 32}),
    "llama3-no-original": (
        "llama",
        scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "yarn": ("qwen2", {"rope_scaling": YARN}),
    "yarn-no-original": ("llama", scaled("yarn", factor=4.0)),
    "yarn-no-factor": ("llama", {"rope_scaling": {**YARN, "factor": None}}),
    "yarn-attention": ("qwen3", {"rope_scaling": {**YARN, "attention_factor": 0.5}, "head_dim": 16}),
    "yarn-mscale": ("llama", {"rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}}),
    "yarn-one-mscale": ("llama", {"rope_scaling": {**YARN, "mscale": 0.707}}),
    "yarn-mscale-zero": ("llama", {"rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0}}),
    "yarn-betas": ("mistral", {"rope_scaling": {**YARN, "beta_fast": 20, "beta_slow": 2, "truncate": False}}),
    "yarn-beta-zero": ("llama", {"rope_scaling": {**YARN, "beta_fast": 0}}),
    "longrope": ("phi3", {**scaled("longrope", **LONG), "original_max_position_embeddings": 16}),
    "longrope-su": (
        "phi3",
        {
            "rope_scaling": {"type": "su", "original_max_position_embeddings": 64, **LONG},
            "original_max_position_embeddings": 16,
        },
    ),
    "longrope-yarn": ("phi3", {"rope_scaling": {"type": "yarn", **LONG}, "original_max_position_embeddings": 16}),
    "longrope-factor": (
        "phi3",
        {**scaled("longrope", factor=3.0, **LONG), "original_max_position_embeddings": 16},
    ),
    "longrope-attention": (
        "phi3",
        {**scaled("longrope", attention_factor=1.5, **LONG), "original_max_position_embeddings": 16},
    ),
    "longrope-inner-original": ("llama", scaled("longrope", original_max_position_embeddings=32, **LONG)),
    "longrope-default-original": ("phi3", scaled("longrope", original_max_position_embeddings=16, **LONG)),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.75}),
    "phi3-inner-partial": ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "neox-default": ("gpt_neox", {}),
    "neox": ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 500}),
    "neox-linear": ("gpt_neox", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "neox-dynamic": ("gpt_neox", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rotary_pct": 1.0}),
    "gemma3": ("gemma3_text", {"head_dim": 16}),
    "gemma3-old": (
        "gemma3_text",
        {**scaled("linear", factor=8.0), "rope_theta": 9e5, "rope_local_base_freq": 500.0, "head_dim": 16},
    ),
    "olmo3": (
        "olmo3",
        {
            **scaled("yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.2),
            "rope_theta": 5e5,
            **TWO_KINDS,
        },
    ),
    "olmo3-new": (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 9e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 7e4},
            },
            **TWO_KINDS,
        },
    ),
    "glm4": ("glm4", {"head_dim": 16, "rope_theta": 7e4}),
    "glm4-share": ("glm4", {"head_dim": 16, "partial_rotary_factor": 0.25}),
    "gemma3-new": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 9e5},
                "sliding_attention": {"rope_type": "linear", "factor": 3.0},
            },
            "rope_local_base_freq": 700.0,
            "head_dim": 16,
        },
    ),
}


def transformers_angles(rotary: Any, length: int, layer_type: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (length, dim) of a sequence of `length` tokens, the first that `rotary` sees."""
    kind = {} if layer_type is None else {"layer_type": layer_type}
    cos, sin = deepcopy(rotary)(torch.zeros(1), torch.arange(length)[None], **kind)
    return cos[0], sin[0]


def rotary_module(config: Any) -> Any:
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config).eval()
    (rotary,) = [module for name, module in model.named_modules() if name.endswith("rotary_emb")]
    return rotary


def check(spec: ModelSpec, config: Any, module: Any) -> None:
    """In every layer, within the trained context and beyond it."""
    for layer in range(spec.num_layers):
        kind = config.layer_types[layer] if spec.arch.family in ("gemma3_text", "olmo3") else None
        rotary = spec.arch.rotary_of(layer)
        assert rotary is not None
        for length in (12, 64, 100):
            ours = Rotary(rotary, spec.max_positions).table(length, torch.float32, torch.device("cpu"))
            cos, sin = transformers_angles(module, length, kind)
            torch.testing.assert_close(ours.cos, cos, rtol=0, atol=1e-5)
            torch.testing.assert_close(ours.sin, sin, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_angles_are_those_of_transformers(case: str) -> None:
    """Of the file as somebody wrote it, and of the one that transformers 5 writes after reading it."""
    family, changes = CASES[case]
    raw = {**SIZES, "sliding_window_pattern": 2, "model_type": family, **changes}
    config = AutoConfig.for_model(**json.loads(json.dumps(raw)))
    module = rotary_module(config)
    check(spec_from_config(raw, case), config, module)
    check(spec_from_config(json.loads(config.to_json_string(use_diff=False)), case), config, module)


def test_early_phi3_files_need_no_original_context_inside() -> None:
    """transformers refuses them by mistake, before it takes the one outside."""
    raw = {"rope_scaling": {"type": "su", **LONG}, "original_max_position_embeddings": 16, "model_type": "phi3"}
    rotary = spec_from_config({**SIZES, **raw}, "x").arch.rotary
    assert rotary is not None
    assert (rotary.scaling, rotary.original_positions, rotary.factor) == ("longrope", 16, 4.0)


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({}, 64),
        (scaled("linear", factor=4.0), 256),
        (scaled("dynamic", factor=2.5), 160),
        (scaled("llama3", **LLAMA3), 64),
        ({"rope_scaling": YARN}, 64),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 64}}, 256),
        (scaled("longrope", original_max_position_embeddings=16, **LONG), 64),
    ],
)
def test_the_longest_sequence(changes: dict[str, Any], context: int) -> None:
    assert spec_from_config({**SIZES, **changes, "model_type": "llama"}, "x").max_positions == context


def test_gemma3_files_give_the_stretched_context() -> None:
    raw = {**SIZES, **scaled("linear", factor=8.0), "model_type": "gemma3_text"}
    assert spec_from_config(raw, "x").max_positions == 64


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "llama",
            scaled("proportional", factor=2.0),
            r"x: rope_scaling.rope_type is 'proportional' in config.json. needed one of default, linear, dynamic",
        ),
        ("llama", scaled("lamma3", factor=2.0), "rope_type is 'lamma3'.*did you mean 'llama3'"),
        (
            "llama",
            {"rope_scaling": {"type": "linear"}},
            "factor is missing in config.json. needed a number",
        ),
        ("llama", scaled("linear", factor=0), "rope_scaling.factor is 0 in"),
        ("llama", scaled("linear", factor=float("nan")), "rope_scaling.factor is nan in"),
        ("llama", scaled("linear", factor="2"), "rope_scaling.factor is '2' in"),
        ("llama", scaled("dynamic", factor=True), "rope_scaling.factor is True in"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear' in config.json. needed an object"),
        ("llama", {"rope_theta": -1}, "rope_theta is -1 in"),
        ("llama", {"rope_theta": [1e4]}, r"rope_theta is \[10000.0\] in"),
        ("llama", scaled("llama3", factor=8.0, high_freq_factor=4.0), "low_freq_factor is missing"),
        (
            "llama",
            scaled("llama3", **{**LLAMA3, "high_freq_factor": 1.0}),
            "high_freq_factor is 1.0.*than low_freq",
        ),
        ("llama", scaled("llama3", **{**LLAMA3, "original_max_position_embeddings": 0}), "original_max_.* is 0 in"),
        ("llama", {"rope_scaling": YARN, "rope_theta": 1}, "rope_theta is 1.0 .*needed another base"),
        ("llama", {"rope_scaling": {**YARN, "truncate": 1}}, "rope_scaling.truncate is 1 in"),
        ("llama", scaled("longrope", short_factor=[1.0], long_factor=[1.0]), "short_factor is .*a list of 8 numbers"),
        ("llama", scaled("longrope", **{**LONG, "long_factor": [0.0] * 8}), "long_factor is .*a list of 8 numbers"),
        ("llama", scaled("longrope", original_max_position_embeddings=1, **LONG), "embeddings is 1 .*at least 2"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5 .*turns whole heads"),
        ("llama", {"head_dim": 7}, "a share of head_dim 7 that is an even number"),
        ("llama", {**scaled("dynamic", factor=2.0), "head_dim": 2}, "dynamic scaling of 2 dimensions is undefined"),
        ("phi3", {"partial_rotary_factor": 0.2}, "partial_rotary_factor is 0.2 .*head_dim 16 that is an even"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ("phi3", scaled("linear", factor=2.0), "rope_type is 'linear' .*needed one of default, longrope"),
        ("phi3", {"rope_scaling": {"type": "su", "short_factor": LONG["short_factor"]}}, "long_factor is missing"),
        ("gpt_neox", {"rotary_pct": 0.0}, "rotary_pct is 0.0"),
        ("gpt_neox", {"rotary_pct": 0.07}, "partial_rotary_factor is 0.07"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters is .*each for full_attention"),
        ("gemma3_text", {"rope_parameters": {"full_attention": 1}}, "rope_parameters.full_attention is 1 in"),
        ("gemma3_text", {"rope_local_base_freq": 0}, "rope_local_base_freq is 0"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "axial"}}},
            "rope_parameters.sliding_attention.rope_type is 'axial'",
        ),
        ("gemma3_text", {"rope_scaling": {**YARN, "truncate": False}}, "rope_scaling.truncate is False"),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": {**YARN, "truncate": False}}},
            "truncate is False.* needed true",
        ),
        ("olmo3", {"rope_theta": 1e6}, "rope_theta is 1000000.0 .*one for each kind of layers"),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}, "rope_theta": 1e6},
            "rope_theta is 1000000.0 .*one for each kind of layers",
        ),
        (
            "qwen2",
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parame.*for all layers",
        ),
    ],
)
def test_what_is_not_done_is_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        spec_from_config({**SIZES, **changes, "model_type": family}, "x")
    assert caught.value.exit_code == 4
