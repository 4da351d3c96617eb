"""GGUF files of architectures that transformers' modules compute: tokens are those of the model that was written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.model.modules import ModuleSpec
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.errors import ModelError
from h2o_flexgen.models.hf.shrink import random_model, shrunk
from tests.checkpoint.gguf_files import FLOATS, Blocks, Kind, in_kind, written
from tests.engine.test_gguf import check

_THETA = {"rope_type": "default", "rope_theta": 2000.0}
_TIMES = {"attention_in_multiplier": 0.7, "attention_out_multiplier": 1.4, "key_multiplier": 0.6}
_TIMES |= {"ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.8, "embedding_multiplier": 1.5, "lm_head_multiplier": 0.6}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "starcoder2": ("starcoder2", {"rope_parameters": _THETA, "sliding_window": None}),
    "stablelm": ("stablelm", {"rope_parameters": {**_THETA, "partial_rotary_factor": 0.5}, "use_qkv_bias": True}),
    "stablelm-12b": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "phi2": ("phi", {"rope_parameters": {**_THETA, "partial_rotary_factor": 0.5}, "tie_word_embeddings": False}),
    "nemotron": ("nemotron", {"rope_parameters": {**_THETA, "partial_rotary_factor": 0.5}}),
    "gemma": ("gemma", {"rope_parameters": _THETA}),
    "olmo": ("olmo", {"clip_qkv": 0.9}),
    "arcee": ("arcee", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                            "original_max_position_embeddings": 32}}),
    "command-r": ("cohere", {"use_qk_norm": True, "logit_scale": 0.25}),
    "lfm2": ("lfm2", {}),
    "mamba": ("mamba", {}),
    "falcon-mamba": ("falcon_mamba", {}),
    "falcon-h1": ("falcon_h1", {**_TIMES, "mlp_multipliers": [0.7, 1.2], "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
                                "mamba_rms_norm": True}),
}  # fmt: skip
"""Of each architecture the type in transformers, and what is said besides sizes."""
READ = ("gpt2", "starcoder2", "stablelm", "nemotron", "lfm2", "mamba")
"""What transformers reads, too."""
PERMUTED, ADDED = ("olmo", "arcee", "falcon-h1"), ("gemma", "nemotron")


def stored(row: str, model: PreTrainedModel, name: str, x: torch.Tensor) -> torch.Tensor:
    """A tensor as llama.cpp's converter has it."""
    config = model.config
    if row == "gpt2" and re.search(r"\.c_\w+\.weight$", name):
        return x.T
    if "conv" in name and x.dim() == 3:
        x = x.squeeze(1)
    if row in PERMUTED and (found := re.search(r"\.([qk])_proj\.weight$", name)):
        heads = config.num_attention_heads if found[1] == "q" else config.num_key_value_heads
        x = x.view(heads, 2, -1, x.shape[1]).transpose(1, 2).reshape(x.shape)
    if name.endswith("A_log"):
        x = -x.exp()
    if row in ADDED and name.endswith(("norm.weight", "layernorm.weight")):
        x = x + 1
    return multiplied(config, name, x) if row == "falcon-h1" else x


def multiplied(config: Any, name: str, x: torch.Tensor) -> torch.Tensor:
    """A tensor of Falcon-H1, with the config's factors in it."""
    inner, state = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    rows = torch.tensor([inner, inner, state, state, config.mamba_n_heads])
    parts = torch.tensor(config.ssm_multipliers).repeat_interleave(rows)[:, None]
    factors = {
        "feed_forward.down_proj": config.mlp_multipliers[1],
        "feed_forward.gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "mamba.out_proj": config.ssm_out_multiplier,
        "mamba.in_proj": config.ssm_in_multiplier * parts,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    if name.endswith("mamba.norm.weight"):
        x = x.view(config.mamba_n_groups, -1)
    if name.endswith(("A_log", ".D")):
        x = x[:, None]
    return x * next((factor for part, factor in factors.items() if f"{part}.weight" in name), 1.0)


def write(path: Path, row: str, model: PreTrainedModel, blocks: Blocks = FLOATS) -> Path:
    word = {"stablelm-12b": "stablelm", "falcon-mamba": "mamba"}.get(row, row)
    writer, config = gguf.GGUFWriter(str(path), word), model.config
    known = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == word)
    names, lists = gguf.get_tensor_name_map(known, config.num_hidden_layers), dict[str, list[np.ndarray]]()
    keys(writer, word, config)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        plain = re.sub(r"\.norms\.\d+", "", name.replace(".dt_bias", ".dt_proj.bias"))
        found = names.get_name(plain, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        lists.setdefault(found, []).append(stored(row, model, name, tensor.float()).contiguous().numpy())
    for name, values in lists.items():
        whole = values[0] if len(values) == 1 else np.stack(values)
        matrix = whole.ndim == 2 and not re.search("norm|conv|ssm_[ad]", name) and whole.shape[1] % 32 == 0
        data, kind = blocks(name, whole) if matrix else (whole, Kind.F32)
        writer.add_tensor(name, data, raw_dtype=None if kind == Kind.F32 else kind)
    return written(writer, path)


def keys(writer: gguf.GGUFWriter, word: str, config: Any) -> None:
    heads, hidden, mamba = config.num_attention_heads if word != "mamba" else 0, config.hidden_size, word == "mamba"
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(1 << 20 if mamba else config.max_position_embeddings)
    writer.add_embedding_length(hidden)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(0 if mamba else config.n_inner if word == "gpt2" else config.intermediate_size)
    writer.add_head_count(heads)
    rms = word in ("gemma", "arcee", "lfm2", "mamba", "falcon-h1")
    eps = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    found = next((getattr(config, name) for name in eps if hasattr(config, name)), 1e-5)
    (writer.add_layer_norm_rms_eps if rms else writer.add_layer_norm_eps)(found)
    rope = getattr(config, "rope_parameters", None)
    if rope:
        dim = getattr(config, "head_dim", None) or hidden // heads
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1.0)))
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if dim * heads != hidden or word in ("gemma", "falcon-h1", "nemotron"):
            writer.add_key_length(dim)
            writer.add_value_length(dim)
        count = config.num_key_value_heads
        kinds = getattr(config, "layer_types", None) if word == "lfm2" else None
        writer.add_head_count_kv([count if kind != "conv" else 0 for kind in kinds] if kinds else count)
    if word == "stablelm":
        writer.add_parallel_residual(config.use_parallel_residual)
    if word == "olmo":
        writer.add_clamp_kqv(config.clip_qkv)
    if word == "command-r":
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if word == "lfm2":
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if mamba:
        writer.add_ssm_conv_kernel(config.conv_kernel)
        writer.add_ssm_inner_size(config.intermediate_size)
        writer.add_ssm_state_size(config.state_size)
        writer.add_ssm_time_step_rank(config.time_step_rank)
        writer.add_ssm_dt_b_c_rms(config.model_type == "falcon_mamba")
    if word == "falcon-h1":
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_inner_size(config.mamba_d_ssm)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
        writer.add_ssm_group_count(config.mamba_n_groups)


def made(row: str) -> PreTrainedModel:
    kind, changes = ROWS[row]
    config = shrunk({"model_type": kind, **changes})
    if kind == "gpt2":
        config.n_inner = 96
    if kind == "lfm2":
        config.block_auto_adjust_ff_dim = False
    if "mamba" in kind:
        config.intermediate_size = config.expand * config.hidden_size
    model = random_model(config)
    with torch.no_grad():  # else none of them would tell an order or a shift
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", ".D")) or "norm" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    return model


@pytest.mark.parametrize(
    "row", [row if row == "falcon-h1" else pytest.param(row, marks=pytest.mark.slow) for row in ROWS]
)
def test_tokens_are_those_of_the_model_that_was_written(row: str, tmp_path: Path) -> None:
    model = made(row)
    path = write(tmp_path / "tiny.gguf", row, model)
    llm = check(path, model, "disk" if len(row) % 2 else "cpu")
    assert isinstance(llm.model.spec, ModuleSpec)
    if row not in READ:
        return
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert len(tensors) > 10
    for name, found in tensors.items():
        torch.testing.assert_close(found.float(), model.state_dict()[name], atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "kind"), [("starcoder2", "Q4_0"), ("stablelm", "Q8_0"), ("nemotron", "Q5_1")])
def test_blocks_stay_packed(row: str, kind: str, tmp_path: Path) -> None:
    """What matrices stand for is what transformers expands them to."""
    model = made(row)
    path = write(tmp_path / "tiny.gguf", row, model, in_kind(Kind[kind]))
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=False)
    model.tie_weights()
    llm = check(path, model, "disk")
    assert llm.last_record is not None
    assert llm.last_record.quantization["weights"]["format"] == "gguf"
    with Engine(str(path), eviction=EvictionConfig("h2o", ratio=0.5)) as llm:
        assert len(llm.generate([[5, 9, 30, 7, 12, 3]], max_new_tokens=4, ignore_eos=True)[0].token_ids) == 4


def test_another_implementation_and_another_architecture_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", "olmo", made("olmo"))
    with pytest.raises(ModelError, match=r"GGUF file of olmo\. needed safetensors for --model-impl native"):
        Engine(str(path), model_impl="native")
    writer = gguf.GGUFWriter(str(tmp_path / "other.gguf"), "plamo")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"'plamo', which is not supported.* from its checkpoint in safetensors"):
        Engine(str(tmp_path / "other.gguf"))
