"""Checkpoints of which some matrices are packed and others not, or otherwise: q without k and v, up without gate, ...

Right is transformers' model of what the weights stand for. Which matrices are packed is seen from the tensors, whatever
`modules_to_not_convert`, `ignored_layers`, `ignore` or `dynamic` says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from h2o_flexgen.engine.engine import Engine
from tests.checkpoint.formats import FORMATS
from tests.checkpoint.gguf_files import MIXTURES, Kind, by_transformers, in_kind, tiny_model, write_gguf
from tests.checkpoint.quantised import Checkpoint, checkpoint
from tests.engine.test_gguf import check
from tests.seeds import python_random, torch_generator
from tests.tiny import prompts_of, transformers_logprobs

QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8}
PHI3 = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "pad_token_id": 0}
GEMMA3 = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "head_dim": 16, "sliding_window": 8}
OPT = {
    "model_type": "opt", "architectures": ["OPTForCausalLM"], "ffn_dim": 96, "word_embed_proj_dim": 64,
    "do_layer_norm_before": True, "dropout": 0.0, "pad_token_id": 1, "num_key_value_heads": None,
}  # fmt: skip
NEOX = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "num_key_value_heads": None}
MIXTRAL = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip
QWEN2_MOE = {
    "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
}  # fmt: skip

CASES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("awq", {}, ("layers.0.mlp.up_proj",)),
    ("awq", {}, ("layers.0.mlp.gate_proj", "self_attn.q_proj")),
    ("gptq act-order", {}, ("layers.1.self_attn.k_proj", "layers.1.mlp.up_proj", "layers.0.self_attn.v_proj")),
    ("gptq 8 zeros", QWEN2, ("q_proj", "k_proj", "gate_proj")),
    ("packed 4", QWEN3, ("layers.0.self_attn.q_proj", "layers.1.self_attn.v_proj", "layers.1.mlp.up_proj")),
    ("fp8 128", MISTRAL, ("v_proj", "up_proj")),
    ("int8", GEMMA3, ("layers.0.self_attn.q_proj", "layers.1.mlp.gate_proj")),
    ("gptq", PHI3, ("layers.0.self_attn.qkv_proj", "layers.1.mlp.gate_up_proj")),
    ("packed 8 zeros", OPT, ("layers.0.self_attn.q_proj", "layers.1.self_attn.k_proj", "layers.1.fc1")),
    ("fp8 channel", NEOX, ("layers.0.attention.query_key_value", "layers.1.mlp.dense_h_to_4h")),
    ("gptq", MIXTRAL, ("experts.0.gate_proj", "experts.1.up_proj", "experts.2.down_proj", "experts.3", "q_proj")),
    ("awq", QWEN3_MOE, ("layers.0.mlp.experts.1.up_proj", "layers.1.mlp.experts.2.gate_proj", "k_proj")),
    ("modelopt nvfp4", QWEN3_MOE, ("layers.0.mlp.experts.1.up_proj", "layers.1.mlp.experts.2.gate_proj", "k_proj")),
    ("mxfp4 packed", MIXTRAL, ("experts.0.up_proj", "experts.3", "q_proj")),
    ("bnb fp4 double", QWEN3, ("layers.0.self_attn.q_proj", "layers.1.mlp.up_proj")),
    ("bnb int8", PHI3, ("layers.0.self_attn.qkv_proj",)),
    ("packed 4", QWEN2_MOE, ("experts.0.up_proj", "experts.1.down_proj", "shared_expert.gate_proj", "mlp.gate.")),
]


def _is_one_of(module: str, parts: tuple[str, ...]) -> bool:
    return any(part in f"{module}." for part in parts)


def _written(name: str, changes: dict[str, Any], parts: tuple[str, ...], other: str | None = None) -> Checkpoint:
    """A checkpoint of which the modules with one of `parts` in their names are plain, or stored as `other`."""
    written = checkpoint(FORMATS[name], num_hidden_layers=2, **changes)
    for stored, dense in list(written.dense.items()):
        module = stored.removesuffix(".weight")
        router = module.endswith((".mlp.gate", ".shared_expert_gate", "block_sparse_moe.gate"))
        if dense.ndim != 2 or ".layers." not in stored or not (router or _is_one_of(module, parts)):
            continue
        matrix = FORMATS[other].write(torch_generator(5), *dense.shape) if other and not router else dense.half()
        bias = written.tensors.get(f"{module}.bias")
        written.put(module, matrix)
        if bias is not None:
            written.tensors[f"{module}.bias"] = bias
    return written


def _model_of(written: Checkpoint, folder: Path) -> PreTrainedModel:
    """transformers' model of what the weights stand for."""
    folder.mkdir()
    plain = {key: value for key, value in written.config.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps({**plain, "torch_dtype": "float32"}))
    save_file(written.dense, folder / "model.safetensors", metadata={"format": "pt"})
    model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not loading["missing_keys"]
    return model.eval()


def _check(written: Checkpoint, tmp_path: Path, packed: int | None = None) -> None:
    chance = python_random(1)
    pairs = [
        ([chance.randrange(3, 40) for _ in range(n)], [chance.randrange(3, 40) for _ in range(6)]) for n in (5, 19)
    ]
    model = _model_of(written, tmp_path / "dense")
    expected = []
    for context, continuation in pairs:
        rows = transformers_logprobs(model, context, continuation)
        expected.append(rows[torch.arange(len(continuation)), torch.tensor(continuation)].tolist())
    (tmp_path / "model").mkdir()
    folder = written.write(tmp_path / "model")
    for place in ("memory", "disk", "bfloat16"):
        policy = {"gpu_batch_size": 2, "weights": {"disk": 1.0} if place == "disk" else {"cpu": 1.0}}
        dtype = "bfloat16" if place == "bfloat16" else "float32"
        with Engine(str(folder), offload_dir=str(tmp_path / place), dtype=dtype, policy=policy) as llm:
            assert packed is None or len(llm.model.spec.packings) == packed
            scores = llm.score(pairs)
        for logprobs, score in zip(expected, scores, strict=True):
            # In bfloat16 products of some kernels round inputs to 8 bits: no more than a check that it is this model.
            assert score.token_logprobs == pytest.approx(logprobs, abs=0.25 if place == "bfloat16" else 1e-4), place


@pytest.mark.turns
@pytest.mark.parametrize(("name", "changes", "parts"), CASES)
def test_part_is_plain(name: str, changes: dict[str, Any], parts: tuple[str, ...], tmp_path: Path) -> None:
    _check(_written(name, changes, parts), tmp_path)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("awq", "modules_to_not_convert", ["layers.0.mlp.up_proj"]),
        ("fp8 128", "ignored_layers", ["model.layers.0.mlp.up_proj"]),
        ("packed 4", "ignore", ["re:.*layers.0.mlp.up_proj$"]),
        ("gptq", "dynamic", {r"-:.*layers\.0\.mlp\.up_proj.*": {}}),
        ("gptq", "modules_in_block_to_quantize", [["self_attn.q_proj"]]),
    ],
)
def test_whatever_says_so(name: str, key: str, value: Any, tmp_path: Path) -> None:
    written = _written(name, {}, ("layers.0.mlp.up_proj",))
    written.config["quantization_config"] = {**written.config["quantization_config"], key: value}
    _check(written, tmp_path, packed=13)


@pytest.mark.parametrize("changes", [{}, MIXTRAL], ids=["llama", "mixtral"])
def test_parts_of_other_bits(changes: dict[str, Any], tmp_path: Path) -> None:
    """GPTQModel's `dynamic`."""
    written = _written("gptq", changes, ("k_proj", "up_proj"), other="gptq 8")
    rules = {r"+:.*\.(k|up)_proj": {"bits": 8}, r".*\.nothing": {"bits": 4}}
    written.config["quantization_config"] = {**written.config["quantization_config"], "dynamic": rules}
    _check(written, tmp_path)


MIXED = {"attn_q": Kind.Q4_0, "attn_k": Kind.F16, "attn_v": Kind.Q8_0, "ffn_gate": Kind.F32, "ffn_up": Kind.Q5_0}


def _mixed(name: str, values: np.ndarray) -> tuple[np.ndarray, Kind]:
    kinds = [kind for part, kind in MIXED.items() if part in name and "gate_inp" not in name]
    return in_kind(kinds[0] if kinds else Kind.F32)(name, values)


@pytest.mark.parametrize("row", ["llama-gqa", "qwen2"])
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_gguf_of_several_kinds(row: str, place: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(row), _mixed)
    check(path, by_transformers(path), place)


@pytest.mark.turns
@pytest.mark.parametrize("row", MIXTURES)
def test_gguf_experts_of_several_kinds(row: str, tmp_path: Path) -> None:
    """transformers reads none of these: as the same file expanded to numbers."""
    path, found = write_gguf(tmp_path / "tiny.gguf", tiny_model(row), _mixed), []
    for dequantize in (False, True):
        with Engine(str(path), dtype="float32", dequantize=dequantize) as llm:
            assert bool(llm.model.spec.packings) != dequantize
            scores = llm.score([(prompt[:-4], prompt[-4:]) for prompt in prompts_of([11, 17])])
        found.append([logprob for score in scores for logprob in score.token_logprobs])
    assert found[0] == pytest.approx(found[1], abs=1e-4)
