"""OPT's ModelSpec against transformers: names, shapes, bytes and FLOPs of tiny random models."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import OPTConfig, OPTForCausalLM

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.errors import ModelError
from h2o_flexgen.models.families import FAMILIES, checkpoint_names, family_of, ignored_names, spec_from_config
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.schedule.work import PhaseWork
from tests.oracles.parameters import parameters_of

OPT = FAMILIES.get("opt")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "350m": {"word_embed_proj_dim": 12, "do_layer_norm_before": False},
    "bridged-pre-norm": {"word_embed_proj_dim": 12},
    "no-final-norm": {"_remove_final_layer_norm": True},
    "no-bias": {"enable_bias": False, "activation_function": "gelu"},
    "no-affine": {"layer_norm_elementwise_affine": False},
    "galactica": {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
    "untied": {"tie_word_embeddings": False},
    "untied-bridged": {"tie_word_embeddings": False, "word_embed_proj_dim": 12},
}


def tiny(variant: str) -> tuple[OPTForCausalLM, ModelSpec]:
    config = OPTConfig(
        vocab_size=50,
        hidden_size=24,
        num_hidden_layers=2,
        ffn_dim=40,
        num_attention_heads=4,
        max_position_embeddings=32,
        attn_implementation="eager",
        **VARIANTS[variant],
    )
    written = json.loads(config.to_json_string(use_diff=False))
    return OPTForCausalLM(config).eval(), spec_from_config(written, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_tensors_equal_those_of_transformers(variant: str) -> None:
    model, spec = tiny(variant)
    stored = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if spec.arch.tied_head:
        del stored["lm_head.weight"]
    names = checkpoint_names(spec)
    ours = {names[tensor.name][0]: tensor.shape for group in spec.weight_groups for tensor in group.tensors}
    assert ours == stored
    assert len(names) == len(ours)


@pytest.mark.parametrize("variant", VARIANTS)
def test_bytes_equal_those_of_transformers(variant: str) -> None:
    model, spec = tiny(variant)
    parameters = list(model.parameters())  # a shared one comes once
    assert parameters_of(spec) == sum(parameter.numel() for parameter in parameters)
    assert spec.weight_bytes("float32") == sum(parameter.nbytes for parameter in parameters)
    assert sum(group.nbytes("float16") for group in spec.weight_groups) == spec.weight_bytes("float16")


def flops(spec: ModelSpec, tokens: int, rows: int, **attention: Any) -> float:
    """Of one pass over the model as the engine counts it, the head at one position of each of `rows`."""
    layers = spec.num_layers
    products = {("embed", tokens): 1, ("attn", tokens): layers, ("mlp", tokens): layers, ("head", rows): 1}
    work = PhaseWork(products=products, **attention)
    return work.product_flops(spec) + work.attention_flops(spec)


@pytest.mark.parametrize("variant", ["plain", "350m", "galactica", "untied-bridged"])
def test_flops_equal_those_torch_counts(variant: str) -> None:
    model, spec = tiny(variant)
    batch, prompt_len = 3, 7
    # transformers applies project_out at every position, this engine at the last one.
    bridge = (
        0 if spec.embed_dim == spec.hidden_size else 2 * batch * (prompt_len - 1) * spec.hidden_size * spec.embed_dim
    )
    tokens = torch.randint(4, 50, (batch, prompt_len + 1))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        cache = model(tokens[:, :prompt_len], logits_to_keep=1).past_key_values
    prompts = {"prompt_pairs": {(None, prompt_len): batch * prompt_len**2}}
    assert flops(spec, batch * prompt_len, batch, **prompts) == counter.get_total_flops() - bridge
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens[:, prompt_len:], past_key_values=cache, logits_to_keep=1)
    cached = {"cache_tokens": {(None, "cpu"): spec.num_layers * batch * (prompt_len + 1)}}
    assert flops(spec, batch, batch, **cached) == counter.get_total_flops()


def test_names_with_and_without_the_model_prefix() -> None:
    names = checkpoint_names(tiny("350m")[1])
    assert names["layers.1.attn.o.bias"] == (
        "model.decoder.layers.1.self_attn.out_proj.bias",
        "decoder.layers.1.self_attn.out_proj.bias",
    )
    assert names["embed.project_in"][1] == "decoder.project_in.weight"
    assert checkpoint_names(tiny("untied")[1])["head.vocab"] == ("lm_head.weight",)
    every = [name for options in names.values() for name in options]
    assert len(every) == len(set(every))


def test_an_empty_config_has_the_defaults_of_transformers() -> None:
    spec, theirs = OPT.spec_from_config(ConfigReader({"model_type": "opt"}, "x")), OPTConfig()
    assert (spec.vocab_size, spec.hidden_size, spec.ffn_size) == (theirs.vocab_size, theirs.hidden_size, theirs.ffn_dim)
    assert (spec.num_layers, spec.num_heads) == (theirs.num_hidden_layers, theirs.num_attention_heads)
    assert (spec.embed_dim, spec.max_positions) == (theirs.word_embed_proj_dim, theirs.max_position_embeddings)
    assert (spec.bos_token_id, spec.eos_token_id, spec.pad_token_id) == (2, 2, 1)
    assert spec.arch.activation == theirs.activation_function
    assert spec.arch.position_offset == 2
    assert spec.arch.final_norm


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "float32"),
        ({"dtype": None, "torch_dtype": "torch.float32"}, "float32"),
        ({}, "float16"),
    ],
)
def test_the_dtype_of_the_checkpoint(config: dict[str, Any], expected: str) -> None:
    assert OPT.spec_from_config(ConfigReader(config, "x")).dtype == expected


def test_special_tokens() -> None:
    assert OPT.spec_from_config(ConfigReader({"eos_token_id": [2, 50]}, "x")).eos_token_id == (2, 50)
    spec = OPT.spec_from_config(ConfigReader({"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}, "x"))
    assert (spec.eos_token_ids, spec.bos_token_id, spec.pad_token_id) == ((), 0, None)
    assert OPT.spec_from_config(ConfigReader({"eos_token_id": 7, "bos_token_id": None}, "x")).bos_token_id == 7


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 770}, "x: hidden_size 770 is not a multiple of num_attention_heads 12"),
        ({"hidden_size": "768"}, "x: hidden_size is '768' in config.json. needed a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"enable_bias": "yes"}, "enable_bias is 'yes' in config.json. needed true or false"),
        ({"activation_function": "rleu"}, "activation_function is 'rleu'.*did you mean 'relu'"),
        ({"activation_function": ["relu"]}, r"activation_function is \['relu'\]"),
        ({"torch_dtype": "int8"}, "torch_dtype is 'int8'"),
        ({"dtype": {"a": 1}}, "dtype is"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"bos_token_id": [1, 2]}, r"bos_token_id is \[1, 2\] in config.json. needed one token id"),
    ],
)
def test_broken_configs_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        OPT.spec_from_config(ConfigReader(config, "x"))
    assert caught.value.exit_code == 4


def test_families() -> None:
    assert "opt" in FAMILIES.names()
    assert family_of({"model_type": "opt"}, "x") is OPT
    assert ignored_names(OPT.spec_from_config(ConfigReader({}, "x"))) == OPT.ignored
    with pytest.raises(ModelError, match=r"x is of the family 'mamba', which is not supported. needed one of .*opt"):
        spec_from_config({"model_type": "mamba"}, "x")
    with pytest.raises(ModelError, match=r"x: config.json has no model_type"):
        spec_from_config({}, "x")
