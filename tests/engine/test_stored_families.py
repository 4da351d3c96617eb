"""Families in stored formats, under the names and in the shapes of the hub, beside what transformers makes of the same
weights dequantised: per-expert tensors, routers and their biases in 16 and 32 bits, tied heads, shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from h2o_flexgen.engine.engine import Engine
from tests.checkpoint.formats import FORMATS
from tests.checkpoint.quantised import Checkpoint, checkpoint
from tests.engine.test_stored_formats import pairs_to_score
from tests.tiny import transformers_logprobs

_WINDOWED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 16, "attn_logit_softcapping": 2.0, "tie_word_embeddings": True, **_WINDOWED},
    "ministral3": {"head_dim": 16},
    "granite": {"attention_multiplier": 0.4, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    "olmo2": {"attention_bias": True},
    "olmo3": _WINDOWED,
    "smollm3": {"no_rope_layers": [1, 0], "tie_word_embeddings": True},
    "seed_oss": {"head_dim": 16, "attention_out_bias": True},
    "exaone4": _WINDOWED,
    "cohere2": {"tie_word_embeddings": False, **_WINDOWED},
    "glm4": {"head_dim": 16},
    "glm4_moe": {"head_dim": 16, "use_qk_norm": True, **_ROUTED},
    "dots1": {"n_shared_experts": 2, "sliding_window": None, "layer_types": ["full_attention"] * 2, **_ROUTED},
    "minimax_m2": {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "hy_v3": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "tie_word_embeddings": True},
}
KINDS = ("gptq act-order", "awq", "packed 8 zeros", "int8", "fp8 blocks", "float channel")
CASES = [(family, kind, (i + k) % 3) for i, family in enumerate(FAMILIES) for k, kind in enumerate(KINDS)]


def by_transformers(written: Checkpoint, folder: Path) -> PreTrainedModel:
    """What it makes of files with the same names."""
    folder.mkdir()
    config = {key: value for key, value in written.config.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    tensors = {name: tensor.contiguous() for name, tensor in written.dense.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model, said = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not said["missing_keys"], said
    assert not said["unexpected_keys"], said
    return model.eval()


def write_in_shards(written: Checkpoint, folder: Path) -> None:
    """Every other tensor in one of two files, with an index."""
    written.write(folder)
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(written.tensors)}
    for file in set(files.values()):
        part = {name: written.tensors[name] for name in files if files[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind", "place"), CASES)
def test_log_probabilities(family: str, kind: str, place: int, tmp_path: Path) -> None:
    changes = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **FAMILIES[family]}
    written = checkpoint(FORMATS[kind], num_hidden_layers=2, model_type=family, **changes)
    folder = tmp_path / "model"
    folder.mkdir()
    write_in_shards(written, folder) if place else written.write(folder)
    model = by_transformers(written, tmp_path / "dense")
    policy = {"gpu_batch_size": 2, "weights": {"disk": 1.0} if place == 1 else {"cpu": 1.0}}
    offload = str(tmp_path / "offload")
    with Engine(
        str(folder), offload_dir=offload, dtype="float32", model_impl="native", policy=policy, dequantize=place == 2
    ) as llm:
        assert bool(llm.model.spec.packings) == (place != 2)
        scores = llm.score(pairs_to_score())
    for (context, continuation), score in zip(pairs_to_score(), scores, strict=True):
        rows = transformers_logprobs(model, context, continuation)
        expected = rows[torch.arange(len(continuation)), torch.tensor(continuation)].tolist()
        assert score.token_logprobs == pytest.approx(expected, abs=2e-4)
