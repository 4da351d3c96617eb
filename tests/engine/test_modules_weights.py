"""Weights that modules have otherwise than checkpoints, or more than once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from h2o_flexgen.config.model.modules import ModuleSpec
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.models.families import spec_from_config
from h2o_flexgen.models.hf.names import checkpoint_names
from h2o_flexgen.models.hf.shrink import random_model, shrunk
from h2o_flexgen.models.stored import Stored
from tests.tiny import prompts_of

NEW = 5


def tokens(folder: Path, prompts: list[list[int]], tier: str) -> list[list[int]]:
    policy = {"gpu_batch_size": 2, "num_gpu_batches": 2, "weights": {tier: 1.0}}
    how: dict[str, Any] = {"dtype": "float32", "model_impl": "transformers", "policy": policy}
    with Engine(str(folder), offload_dir=str(folder / "offload"), **how) as llm:
        return [each.token_ids for each in llm.generate(prompts, max_new_tokens=NEW, ignore_eos=True)]


def by_transformers(model: Any, prompt: list[int]) -> list[int]:
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = torch.tensor([prompt])
    found: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()
    return found


@pytest.mark.parametrize("whole", [False, True])
def test_convolutions_in_pieces_of_several_sizes(whole: bool, tmp_path: Path) -> None:
    """As OLMo Hybrid's files have them, whose values are wider than its keys, or as its modules do."""
    config = shrunk({"model_type": "olmo_hybrid"})
    config.linear_value_head_dim = 2 * config.linear_key_head_dim
    model = random_model(config)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored = {name: tensor for name, tensor in stored.items() if "_conv1d" not in name}
    for name, tensor in model.state_dict().items():
        if whole and "conv1d" in name:
            stored[name] = tensor
        elif "conv1d" in name:
            key = config.linear_num_key_heads * config.linear_key_head_dim
            for letter, part in zip("qkv", tensor.split([key, key, len(tensor) - 2 * key]), strict=True):
                stored[name.replace("conv1d", f"{letter}_conv1d")] = part.clone()
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    prompts = [[token % 120 + 3 for token in ids] for ids in prompts_of([5, 14])]
    wanted = [by_transformers(model, prompt) for prompt in prompts]
    assert tokens(tmp_path, prompts, "cpu") == tokens(tmp_path, prompts, "disk") == wanted


@pytest.mark.parametrize("kind", ["zamba2", "hrm_text"])
def test_weights_of_several_places(kind: str, tmp_path: Path) -> None:
    """Shared by layers, some of which have parts of their own in what is shared, or of layers that are called again."""
    config = shrunk({"model_type": kind})
    if kind == "hrm_text":
        config.num_layers_per_stack, config.H_cycles, config.L_cycles, config.num_hidden_layers = 1, 2, 2, 6
    model = random_model(config)
    model.save_pretrained(tmp_path)
    prompts = [[token % 120 + 3 for token in ids] for ids in prompts_of([5, 14])]
    assert tokens(tmp_path, prompts, "disk") == [by_transformers(model, prompt) for prompt in prompts]
    spec = spec_from_config(json.loads((tmp_path / "config.json").read_text()), kind, "transformers")
    assert isinstance(spec, ModuleSpec)
    names, stored = checkpoint_names(spec), load_file(tmp_path / "model.safetensors")
    wanted = ([each.name if isinstance(each, Stored) else each for each in names[name]] for name in names)
    used = Counter(next(name for name in options if name in stored) for options in wanted)
    assert set(used) == set(stored)
    if kind == "zamba2":  # the block, of which the second layer has no copy; adapters are of one layer each
        assert set(used.values()) == {1, 2}
        assert {used[name] for name in stored if "shared_transformer.self_attn" in name} == {2}
        assert {used[name] for name in stored if "adapter" in name} == {1}
    else:
        low, high = (next(n for key, n in used.items() if "o_proj" in key and f"{word}_module" in key) for word in "LH")
        assert (low, high) == (4, 2)


@pytest.mark.parametrize("kind", ["dbrx", "jetmoe"])
def test_experts_in_tensors_of_a_kind_of_their_own(kind: str, tmp_path: Path) -> None:
    """Rows of matrices; and those of attention, which are read with their layer."""
    model = random_model(shrunk({"model_type": kind}))
    model.save_pretrained(tmp_path)
    prompts = [[token % 120 + 3 for token in ids] for ids in prompts_of([5, 14])]
    assert tokens(tmp_path, prompts, "disk") == [by_transformers(model, prompt) for prompt in prompts]
