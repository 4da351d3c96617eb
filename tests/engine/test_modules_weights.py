"""Weights that modules have otherwise than checkpoints, or more than once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.models.hf.shrink import random_model, shrunk
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
