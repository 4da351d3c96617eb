"""Every family's ModelSpec against transformers: tensors, names and sizes of tiny random models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from h2o_flexgen.config.model import ModelSpec
from h2o_flexgen.models.families import FAMILIES, checkpoint_names, spec_from_config
from h2o_flexgen.models.stored import Stored

TINY: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
LAYERS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 2.0, 3.0]}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-multi-head": {"num_key_value_heads": None},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-head-dim": {"head_dim": 10},
    "mistral": {"sliding_window": 8},
    "mistral-no-window": {"sliding_window": None, "head_dim": 10},
    "qwen2": {},
    "qwen2-windows": {**WINDOWS, "tie_word_embeddings": True},
    "qwen2-layers": {**WINDOWS, **LAYERS},
    "qwen3": {"head_dim": 16},
    "qwen3-windows": {**WINDOWS, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    "phi3": {},
    "phi3-partial": {"partial_rotary_factor": 0.75, "rope_scaling": LONG, "sliding_window": 8},
    "phi3-multi-head": {"num_key_value_heads": None, "tie_word_embeddings": True, "head_dim": 6},
    "gemma3_text": {"head_dim": 16, "sliding_window_pattern": 2, "sliding_window": 8},
    "gemma3_text-layers": {**LAYERS, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": False},
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt_neox-serial": {"rotary_pct": 1.0, "use_parallel_residual": False, "tie_word_embeddings": True},
    "gpt_neox-no-bias": {"rotary_pct": 0.5, "attention_bias": False},
}


def written(variant: str) -> dict[str, Any]:
    """The config.json of a variant, every key spelled out, as save_pretrained of transformers 5 writes it."""
    config = AutoConfig.for_model(variant.partition("-")[0], **{**TINY, **VARIANTS[variant]})
    plain: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return plain


def tiny(variant: str) -> tuple[torch.nn.Module, ModelSpec]:
    config = written(variant)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    return model, spec_from_config(config, variant)


def stored_in(places: tuple[str | Stored, ...], state: dict[str, torch.Tensor]) -> Stored:
    """The first of the places that a checkpoint has."""
    every = [place if isinstance(place, Stored) else Stored(place) for place in places]
    return next(place for place in every if place.name in state)


def covered(spec: ModelSpec, state: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    """How often each row of each stored tensor is used; checks that every canonical tensor gets its shape."""
    uses = {name: [0] * len(tensor) for name, tensor in state.items()}
    names = checkpoint_names(spec)
    tensors = {tensor.name: tensor for group in spec.weight_groups for tensor in group.tensors}
    assert set(names) == set(tensors)
    for name, tensor in tensors.items():
        place = stored_in(names[name], state)
        whole = state[place.name]
        assert place.spans is None or place.rows == len(whole)
        rows = [row for start, stop in place.spans or [(0, len(whole))] for row in range(start, stop)]
        assert (len(rows), *whole.shape[1:]) == tensor.shape, name
        for row in rows:
            uses[place.name][row] += 1
    return uses


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_row_of_a_checkpoint_is_used_once(variant: str, tmp_path: Path) -> None:
    """Of the names in memory and of those in a saved file, which are not the same for gpt_neox."""
    from safetensors.torch import load_file

    model, spec = tiny(variant)
    model.save_pretrained(tmp_path)
    state = dict(model.state_dict())
    if spec.arch.tied_head:
        del state["lm_head.weight"]
    for tensors in (state, load_file(tmp_path / "model.safetensors")):
        assert all(set(rows) == {1} for rows in covered(spec, tensors).values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_those_of_transformers(variant: str) -> None:
    model, spec = tiny(variant)
    assert spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert spec.arch.family == variant.partition("-")[0]


def test_every_family_has_a_variant() -> None:
    assert {variant.partition("-")[0] for variant in VARIANTS} == set(FAMILIES.names()) - {"opt"}
