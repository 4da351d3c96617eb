"""Configs from the metadata of GGUF files: what the model was that the file was made of, or a clear refusal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from h2o_flexgen.checkpoint.gguf.config import config_of
from h2o_flexgen.checkpoint.gguf.header import GgufHeader, read_header
from h2o_flexgen.checkpoint.gguf.names import bind
from h2o_flexgen.config.model.arch import RotarySpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.errors import ModelError
from h2o_flexgen.models.families import spec_from_config
from tests.checkpoint.gguf_files import SIZES, tiny_model, write_gguf
from tests.tiny import make_model

Extra = Callable[[gguf.GGUFWriter], None]


def header_of(folder: Path, row: str, extra: Extra = lambda writer: None, **tensors: np.ndarray) -> GgufHeader:
    named = {f"{name}.weight": values for name, values in tensors.items()}
    return read_header(write_gguf(folder / "x.gguf", tiny_model(row), extra=extra, tensors=named))


def spec_of(header: GgufHeader) -> ModelSpec:
    return spec_from_config(config_of(header), "tiny")


def rotary_of(folder: Path, extra: Extra = lambda writer: None, **tensors: np.ndarray) -> RotarySpec:
    rotary = spec_of(header_of(folder, "llama", extra, **tensors)).arch.rotary
    assert rotary is not None
    return rotary


def llama3_factors(theta: float, dim: int, **scaling: Any) -> np.ndarray:
    """What transformers divides each frequency by."""
    parameters = {"rope_type": "llama3", "rope_theta": theta, **scaling}
    config = LlamaConfig(hidden_size=dim, num_attention_heads=1, rope_parameters=parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    return (1 / theta ** (torch.arange(0, dim, 2) / dim) / scaled).numpy().astype(np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3s_scaling_is_known_by_its_factors(factor: float, tmp_path: Path) -> None:
    usual = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    factors = llama3_factors(10000.0, 16, factor=factor, **usual)
    found = rotary_of(tmp_path, rope_freqs=factors)
    wanted = RotarySpec(16, 10000.0, "llama3", factor, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    assert found == wanted


def test_other_factors_are_taken_one_by_one(tmp_path: Path) -> None:
    factors = np.array([1, 1.5, 2, 2.5, 3, 4, 5, 7], np.float32)
    found = rotary_of(tmp_path, rope_freqs=factors)
    assert found.short_factors == found.long_factors == tuple(factors.tolist())
    assert found.attention_factor == 1


def test_linear_scaling(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    assert rotary_of(tmp_path, extra) == RotarySpec(16, 10000.0, "linear", 4.0)


def test_yarn(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    settings = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    wanted = make_model("llama", **SIZES, rope_parameters=settings).config.to_dict()
    assert rotary_of(tmp_path, extra) == spec_from_config(wanted, "x").arch.rotary


def test_phi3_keeps_its_factors_in_tensors(tmp_path: Path) -> None:
    short, long = np.linspace(1, 2, 6, dtype=np.float32), np.linspace(2, 9, 6, dtype=np.float32)

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("phi3.rope.dimension_count")
        writer.add_rope_dimension_count(12)
        writer.add_rope_scaling_orig_ctx_len(64)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(2) / math.log(64)))
        writer.add_sliding_window(0)

    found = spec_of(header_of(tmp_path, "phi3", extra, rope_factors_short=short, rope_factors_long=long)).arch
    longrope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    factors = {"short_factor": short.tolist(), "long_factor": long.tolist()}
    config = make_model("phi3", **SIZES).config.to_dict()
    config |= {"rope_parameters": {**longrope, **factors}, "original_max_position_embeddings": 64}
    wanted = spec_from_config({**config, "sliding_window": None, "partial_rotary_factor": 0.75}, "x").arch
    assert found.window is None
    assert found.rotary is not None
    assert wanted.rotary is not None
    assert found.rotary.attention_factor == pytest.approx(wanted.rotary.attention_factor, rel=1e-6)
    assert replace(found.rotary, attention_factor=0.0) == replace(wanted.rotary, attention_factor=0.0)


def test_gemmas_pattern_may_be_given(tmp_path: Path) -> None:
    flags = [True, False, True, True, False, True]

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window_pattern(flags)
        writer.add_key_value("gemma3.rope.freq_base_swa", 500.0, gguf.GGUFValueType.FLOAT32)

    arch = spec_of(header_of(tmp_path, "gemma3", extra)).arch
    assert [arch.window_of(layer) is not None for layer in range(6)] == flags
    assert arch.local_rotary is not None
    assert arch.local_rotary.theta == 500.0


@pytest.mark.parametrize(("layers", "windowed"), [(4, 0), (64, 48)])
def test_exaone_has_windows_in_its_large_model_alone_where_no_key_says_so(
    layers: int, windowed: int, tmp_path: Path
) -> None:
    made = 6  # enough tensors for 64 layers to be believed
    model = make_model("exaone4-full", num_hidden_layers=made, layer_types=["full_attention"] * made)
    header = read_header(write_gguf(tmp_path / "x.gguf", model))
    arch = spec_of(header._replace(metadata={**header.metadata, "exaone4.block_count": layers})).arch
    found = [layer for layer in range(layers) if arch.window_of(layer) is not None]
    assert found == [layer for layer in range(layers) if windowed and (layer + 1) % 4]
    assert arch.window == (4096 if windowed else None)
    assert arch.unrotated == (tuple(range(3, 64, 4)) if windowed else ())


def test_granite_4_without_mixers_has_their_keys(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("granite.attention.head_count_kv")
        writer.add_head_count_kv([2, 2, 2])
        for add in (writer.add_ssm_conv_kernel, writer.add_ssm_state_size, writer.add_ssm_group_count):
            add(4)
        writer.add_ssm_inner_size(128)
        writer.add_ssm_time_step_rank(8)
        writer.add_expert_shared_feed_forward_length(64)
        writer.add_rope_scaling_finetuned(True)

    assert spec_of(header_of(tmp_path, "granite", extra)) == spec_of(header_of(tmp_path, "granite"))


def test_layers_that_predict_more_tokens_are_left_out(tmp_path: Path) -> None:
    """They stand behind the others and are counted with them."""

    def extra(writer: gguf.GGUFWriter) -> None:
        changed("glm4moe.block_count", 4, "UINT32")(writer)
        writer.add_nextn_predict_layers(1)

    tensors = {"blk.3.nextn.eh_proj": np.zeros((64, 128), np.float32), "blk.3.attn_k": np.zeros((32, 64), np.float32)}
    header = header_of(tmp_path, "glm4moe", extra, **tensors)
    spec = spec_of(header)
    assert spec.num_layers == 3
    assert all(each.place.name.split(".")[1] != "3" for parts in bind(header, spec).values() for each in parts)


def test_yarns_factor_of_logits_is_the_configs(tmp_path: Path) -> None:
    """llama.cpp's converter writes transformers' attention_factor as it is, as OLMo 3 has it."""

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_yarn_attn_factor(1.25)

    rotary = spec_of(header_of(tmp_path, "olmo3", extra)).arch.rotary
    assert rotary is not None
    assert rotary.attention_factor == 1.25


@pytest.mark.parametrize(
    ("row", "key", "value", "message"),
    [
        ("glm4moe", "expert_gating_func", 1, "glm4moe.expert_gating_func is 1. needed 2"),
        ("glm4moe", "nextn_predict_layers", "x", "glm4moe.nextn_predict_layers is 'x'. needed a whole number"),
        ("glm4moe", "nextn_predict_layers", 3, "needed fewer than block_count, 3"),
        ("ernie4_5-moe", "expert_gating_func", 2, "ernie4_5-moe.expert_gating_func is 2. needed 1"),
        ("minimax-m2", "expert_gating_func", 1, "minimax-m2.expert_gating_func is 1. needed 2"),
        ("glm4", "rope.dimension_count", 7, "needed an even part of heads of 16 dimensions"),
        ("glm4", "rope.dimension_count", 32, "needed an even part of heads of 16 dimensions"),
        ("gpt-oss", "expert_feed_forward_length", 32, "needed feed_forward_length"),
        ("gpt-oss", "attention.sliding_window_pattern", "x", "gpt-oss.attention.sliding_window_pattern is 'x'"),
        ("granite", "expert_shared_feed_forward_length", 32, "needed feed_forward_length"),
        ("dots1", "expert_group_used_count", 8, "topk_group"),
    ],
)
def test_what_an_architecture_alone_refuses(row: str, key: str, value: Any, message: str, tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        name = f"{writer.arch}.{key}"
        writer.kv_data[0].pop(name, None)
        kind = gguf.GGUFValueType.STRING if isinstance(value, str) else gguf.GGUFValueType.UINT32
        writer.add_key_value(name, value, kind)

    with pytest.raises(ModelError) as caught:
        spec_of(header_of(tmp_path, row, extra))
    assert message in str(caught.value)


def test_a_turn_and_a_text_may_end_with_different_tokens(tmp_path: Path) -> None:
    spec = spec_of(header_of(tmp_path, "llama", lambda writer: writer.add_eot_token_id(7)))
    assert (spec.bos_token_id, spec.eos_token_ids, spec.pad_token_id) == (2, (2, 7), 1)
    none = spec_of(header_of(tmp_path, "llama", lambda writer: writer.add_eot_token_id(2**32 - 1)))
    assert none.eos_token_ids == (2,), "-1 in 32 bits is none"


def key(name: str, value: Any, kind: str) -> Extra:
    return lambda writer: writer.add_key_value(name, value, gguf.GGUFValueType[kind])


def changed(name: str, value: Any, kind: str) -> Extra:
    """A key that is there already, with another value."""

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(name)
        writer.add_key_value(name, value, gguf.GGUFValueType[kind])

    return extra


REFUSED: dict[str, tuple[Extra, str]] = {
    "architecture": (changed("general.architecture", "bloom", "STRING"), "the architecture 'bloom', which is not"),
    "type": (key("general.type", "adapter", "STRING"), "an adapter (LoRA), which is not read"),
    "blocks": (key("general.quantization_version", 1, "UINT32"), "blocks of another version"),
    "experts": (key("llama.expert_count", 8, "UINT32"), "llama.expert_used_count is missing."),
    "scale": (key("llama.attention.scale", 0.5, "FLOAT32"), "llama.attention.scale is 0.5"),
    "window": (key("llama.attention.sliding_window", 8, "UINT32"), "llama.attention.sliding_window is 8"),
    "no layers": (changed("llama.block_count", 0, "UINT32"), "llama.block_count is 0. needed a whole number"),
    "layers": (changed("llama.block_count", 1 << 31, "UINT32"), "no more layers than there are tensors"),
    "heads": (changed("llama.attention.head_count", "4", "STRING"), "llama.attention.head_count is '4'"),
    "value": (changed("llama.attention.value_length", 8, "UINT32"), "needed that of a key, 16"),
    "turned": (changed("llama.rope.dimension_count", 8, "UINT32"), "needed whole heads, of 16 dimensions"),
    "eps": (changed("llama.attention.layer_norm_rms_epsilon", -1.0, "FLOAT32"), "needed a number above 0"),
    "bos": (changed("tokenizer.ggml.bos_token_id", "<s>", "STRING"), "needed the id of a token"),
    "tokens": (lambda writer: writer.add_token_list(["x"] * 98), "has 98 tokens. needed at most 97"),
    "scaling": (key("llama.rope.scaling.type", "longrope", "STRING"), "needed one of none, linear, yarn"),
    "factor": (key("llama.rope.scaling.factor", 2.0, "FLOAT32"), "needed a rope.scaling.type that it belongs to"),
    "causal": (key("llama.attention.causal", False, "BOOL"), "llama.attention.causal is False. needed true"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_not_supported_is_refused_by_its_key(fault: str, tmp_path: Path) -> None:
    extra, message = REFUSED[fault]
    with pytest.raises(ModelError) as caught:
        spec_of(header_of(tmp_path, "llama", extra))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (np.ones(5, np.float32), "rope_freqs.weight has 5 numbers. needed 8"),
        (np.zeros(8, np.float32), "numbers that are not above 0"),
        (np.ones((8, 1), np.float32), "rope_freqs.weight is F32 of shape (8, 1)"),
    ],
)
def test_factors_that_cannot_be_are_refused(factors: np.ndarray, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        spec_of(header_of(tmp_path, "llama", rope_freqs=factors))
    assert message in str(caught.value)


def test_a_file_without_weights_is_no_model(tmp_path: Path) -> None:
    header = header_of(tmp_path, "llama")
    with pytest.raises(ModelError, match="a vocabulary without weights"):
        config_of(header._replace(tensors={}))
