"""The units, groups and buffers of a ModelSpec; its agreement with transformers is in tests/models."""

from __future__ import annotations

import dataclasses

import pytest

from h2o_flexgen.config.model.arch import ArchSpec, ExpertSpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import PAGE, TENSOR_ALIGN, TensorSpec, WeightGroup
from h2o_flexgen.errors import ModelError, UsageError
from tests.oracles.parameters import parameters_of

SPEC = ModelSpec(
    name="tiny",
    vocab_size=50,
    hidden_size=16,
    ffn_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    embed_dim=16,
    max_positions=32,
    arch=ArchSpec("opt"),
    bos_token_id=2,
    eos_token_id=2,
    pad_token_id=1,
)


def test_units_are_in_the_order_of_compute() -> None:
    assert [unit.name for unit in SPEC.units] == [
        "embed",
        "layers.0.attn",
        "layers.0.mlp",
        "layers.1.attn",
        "layers.1.mlp",
        "head",
    ]
    assert [unit.index for unit in SPEC.units] == list(range(6))
    assert [unit.kind for unit in SPEC.units] == ["embed", "attn", "mlp", "attn", "mlp", "head"]
    assert [unit.layer for unit in SPEC.units] == [None, 0, 0, 1, 1, None]


def test_a_tied_model_has_one_vocabulary_group() -> None:
    assert SPEC.units[0].weights == SPEC.units[-1].weights == "vocab"
    names = [tensor.name for tensor in SPEC.weight_groups[0].tensors]
    assert names == ["embed.tokens", "embed.positions", "head.norm.weight", "head.norm.bias"]
    assert [group.key for group in SPEC.weight_groups][-1] == "layers.1.mlp"


def test_an_untied_model_has_an_embedding_and_a_head_group() -> None:
    untied = dataclasses.replace(SPEC, arch=ArchSpec("opt", tied_head=False), embed_dim=8)
    assert [untied.units[0].weights, untied.units[-1].weights] == ["embed", "head"]
    groups = untied.weight_groups
    assert [tensor.name for tensor in groups[0].tensors] == ["embed.tokens", "embed.positions", "embed.project_in"]
    assert groups[-1].key == "head"
    head = {tensor.name: tensor.shape for tensor in groups[-1].tensors}
    assert head["head.project_out"] == (8, 16)
    assert head["head.vocab"] == (50, 8)


@pytest.mark.parametrize("tied", [True, False])
def test_every_unit_finds_its_group(tied: bool) -> None:
    spec = dataclasses.replace(SPEC, arch=ArchSpec("opt", tied_head=tied))
    assert {unit.weights for unit in spec.units} == set(spec.groups_by_key)
    assert parameters_of(spec) * 4 == sum(group.nbytes("float32") for group in spec.weight_groups)


def test_tensors_of_a_layer_are_in_the_order_of_the_buffer() -> None:
    attn, mlp = SPEC.weight_groups[1:3]
    assert [tensor.name.removeprefix("layers.0.attn.") for tensor in attn.tensors] == [
        *("norm.weight", "norm.bias", "q.weight", "k.weight", "v.weight"),
        *("q.bias", "k.bias", "v.bias", "o.weight", "o.bias"),
    ]
    assert [tensor.shape for tensor in attn.tensors[2:5]] == [(16, 16), (8, 16), (8, 16)]
    assert [tensor.name.removeprefix("layers.0.mlp.") for tensor in mlp.tensors] == [
        *("norm.weight", "norm.bias", "up.weight", "down.weight", "up.bias", "down.bias"),
    ]


def test_a_gated_model_without_biases() -> None:
    arch = ArchSpec(
        "llama", "rmsnorm", gated_mlp=True, qkv_bias=False, output_bias=False, mlp_bias=False, positions="rotary"
    )
    spec = dataclasses.replace(SPEC, arch=arch)
    names = [tensor.name for group in spec.weight_groups for tensor in group.tensors if ".1." not in tensor.name]
    assert names == [
        *("embed.tokens", "head.norm.weight"),
        *(f"layers.0.attn.{part}.weight" for part in ("norm", "q", "k", "v", "o")),
        *(f"layers.0.mlp.{part}.weight" for part in ("norm", "up", "gate", "down")),
    ]
    assert sum(out * into for out, into in spec.products("mlp")) == 16 * 40 * 3


def test_buffers_are_aligned() -> None:
    group = WeightGroup("g", (TensorSpec("a", (3,)), TensorSpec("b", (5, 7)), TensorSpec("c", (2048,))))
    assert group.nbytes("float16") == 2 * (3 + 35 + 2048)
    assert group.buffer_bytes("float16") == 2 * PAGE  # 64 + 128 + 4096, rounded up
    assert group.buffer_bytes("float32") == 3 * PAGE
    assert PAGE % TENSOR_ALIGN == 0


def test_cache_and_hidden_bytes() -> None:
    assert SPEC.kv_bytes_per_token_and_layer("float16") == 2 * 2 * 4 * 2
    assert SPEC.hidden_bytes(10, "float32") == 640


def test_eos_is_a_tuple_in_every_case() -> None:
    assert SPEC.eos_token_ids == (2,)
    assert dataclasses.replace(SPEC, eos_token_id=(2, 5)).eos_token_ids == (2, 5)


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(ModelError, match="tiny: num_layers is 0"):
        dataclasses.replace(SPEC, num_layers=0)
    with pytest.raises(ModelError, match=r"tiny has 1,000,000,000 layers\. needed at most 1,000"):
        dataclasses.replace(SPEC, num_layers=10**9)
    many = dataclasses.replace(SPEC.arch, experts=ExpertSpec(10**9, 1, 8))
    with pytest.raises(ModelError, match=f"tiny has {10**9 * SPEC.num_layers:,} experts"):
        dataclasses.replace(SPEC, arch=many)
    with pytest.raises(ModelError, match="4 query heads do not divide among 3 KV heads"):
        dataclasses.replace(SPEC, num_kv_heads=3)
    with pytest.raises(ModelError, match=r"unknown dtype 'flaot16'.*did you mean 'float16'"):
        dataclasses.replace(SPEC, dtype="flaot16")
    with pytest.raises(UsageError, match="unknown dtype 'int8'"):
        SPEC.weight_bytes("int8")
