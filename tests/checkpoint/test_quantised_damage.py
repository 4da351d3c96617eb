"""Quantised checkpoints that are not what they say: every one refused before anything is read, with all its faults."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoRoundConfig, AwqConfig, FineGrainedFP8Config, GPTQConfig

from h2o_flexgen.errors import H2OFlexGenError, ModelError
from h2o_flexgen.models.families import spec_from_config
from h2o_flexgen.models.quantized import read_quantization
from tests.checkpoint.formats import FORMATS
from tests.checkpoint.models import write_shards
from tests.checkpoint.quantised import CONFIG, checkpoint, open_folder
from tests.checkpoint.refusals import UP, Edit, changed, check_one_problem, extra, refused_quantised, without
from tests.checkpoint.test_headers import edited_header
from tests.seeds import python_random, torch_generator


@pytest.mark.parametrize(
    ("name", "edit", "fault"),
    [
        ("gptq", without("scales"), f"tensor '{UP}.scales' is missing"),
        ("gptq", without("qweight"), f"tensor '{UP}.qweight' is missing"),
        ("gptq", changed("scales", lambda x: x[:1]), "scales': expected shape (2, 96), found (1, 96)"),
        ("gptq", changed("qweight", lambda x: x.T), "qweight': expected shape (8, 96), found (96, 8)"),
        ("gptq", changed("qweight", lambda x: x.float()), "qweight': expected dtype int32, found float32"),
        ("gptq", changed("scales", lambda x: x.double()), "expected dtype float16 or bfloat16 or float32, found F64"),
        ("gptq", changed("g_idx", lambda x: x.long()), "g_idx': expected dtype int32, found int64"),
        ("gptq", changed("g_idx", lambda x: x + 1), "g_idx': expected 2 groups of 32 inputs"),
        ("gptq", changed("g_idx", lambda x: x - 1), "g_idx': expected 2 groups of 32 inputs"),
        ("gptq", changed("g_idx", lambda x: x * (1 << 30)), "g_idx': expected 2 groups of 32 inputs"),
        ("gptq", changed("g_idx", lambda x: x * 0), "g_idx': expected 2 groups of 32 inputs"),
        ("gptq act-order", without("g_idx"), f"tensor '{UP}.g_idx' is missing"),
        ("packed 4 act-order", without("weight_g_idx"), f"tensor '{UP}.weight_g_idx' is missing"),
        ("gptq", extra("weight"), f"tensor '{UP}.weight' has no place in weights quantised as config.json says"),
        ("gptq", extra("weight_scale"), f"tensor '{UP}.weight_scale' has no place"),
        ("gptq", extra("input_scale"), f"tensor '{UP}.input_scale' of model.safetensors is not part of this model"),
        ("gptq", extra("qzeros.absmax"), "qzeros.absmax' of model.safetensors is not part of this model"),
        ("awq", without("qzeros"), f"tensor '{UP}.qzeros' is missing"),
        ("awq", changed("qweight", lambda x: x[:-1]), "qweight': expected shape (64, 12), found (63, 12)"),
        ("awq", extra("g_idx"), f"tensor '{UP}.g_idx' has no place"),
        ("packed 4", without("weight_shape"), f"tensor '{UP}.weight_shape' is missing"),
        ("packed 4", changed("weight_shape", lambda x: x.flip(0)), "(96, 64) from config.json, found (64, 96)"),
        ("packed 4", changed("weight_packed", lambda x: x[:, 1:]), "expected shape (96, 8), found (96, 7)"),
        ("packed 4", extra("weight_zero_point"), f"tensor '{UP}.weight_zero_point' has no place"),
        ("packed 4 zeros", without("weight_zero_point"), f"tensor '{UP}.weight_zero_point' is missing"),
        ("packed 4 act-order", changed("weight_g_idx", lambda x: x // 2), "weight_g_idx': expected 2 groups"),
        ("fp8 128", without("weight_scale_inv"), f"tensor '{UP}.weight_scale' is missing"),
        ("fp8 128", extra("weight_scale"), f"tensor '{UP}.weight_scale' has no place"),
        ("fp8 blocks", changed("weight_scale_inv", lambda x: x[:1]), "expected shape (3, 4), found (1, 4)"),
        ("fp8 tensor", changed("weight_scale", lambda x: x.repeat(7)), "shape () or (1,) or (1, 1) or (96,) or"),
        ("fp8 tensor", changed("weight", lambda x: x.to(torch.float8_e5m2)), "dtype float8_e4m3fn, found F8_E5M2"),
        ("fp8 tensor", changed("weight", lambda x: x.half()), "expected dtype float8_e4m3fn, found float16"),
        ("int8", changed("weight", lambda x: x.to(torch.uint8)), "weight': expected dtype int8, found uint8"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_as_config_json_says(tmp_path: Path, name: str, edit: Edit, fault: str) -> None:
    check_one_problem(checkpoint(FORMATS[name]), tmp_path, edit, fault)


def test_all_faults_are_listed_at_once(tmp_path: Path) -> None:
    written = checkpoint(FORMATS["gptq"])
    for edit in (without("scales"), changed("qzeros", lambda x: x[:, 1:]), extra("weight_packed")):
        edit(written.tensors)
    written.tensors.pop("model.norm.weight")
    message = refused_quantised(written, tmp_path)
    for fault in ("scales' is missing", "qzeros': expected shape", "weight_packed' has no place", "model.norm.weight"):
        assert fault in message


def test_quantised_weights_without_a_quantization_config(tmp_path: Path) -> None:
    written = checkpoint(FORMATS["gptq"])
    written.config.pop("quantization_config")
    assert "of quantised weights, which are not read" in refused_quantised(written, tmp_path)


def test_a_quantised_module_that_config_json_leaves_out(tmp_path: Path) -> None:
    written = checkpoint(FORMATS["packed 4"])
    written.config["quantization_config"]["ignore"].append(UP)
    assert f"quantization_config in config.json leaves {UP} out" in refused_quantised(written, tmp_path)


def test_a_packed_head_of_a_tied_model(tmp_path: Path) -> None:
    form = FORMATS["gptq"]
    written = checkpoint(form, tie_word_embeddings=True)
    written.put("lm_head", form.write(torch_generator(5), 40, 64))
    assert "unless config.json has tie_word_embeddings false" in refused_quantised(written, tmp_path)
    written.config["tie_word_embeddings"] = False
    with written.open(written.write(tmp_path)) as source:
        assert "head.vocab" in source.packings


def test_sizes_that_do_not_fit_into_words(tmp_path: Path) -> None:
    written = checkpoint(FORMATS["gptq"])
    written.config["intermediate_size"] = 94
    message = refused_quantised(written, tmp_path)
    assert f"{UP} cannot be quantised as config.json says: its sizes are not multiples of 8" in message


def test_a_lost_shard_is_one_problem(tmp_path: Path) -> None:
    written = checkpoint(FORMATS["gptq"])
    (tmp_path / "config.json").write_text(json.dumps(written.config))
    paths = write_shards(tmp_path, written.tensors, 5)
    paths[2].unlink()
    with pytest.raises(ModelError, match="one problem") as caught:
        open_folder(tmp_path)
    assert f"{paths[2].name} is missing" in str(caught.value)


def test_a_part_in_two_shards(tmp_path: Path) -> None:
    written = checkpoint(FORMATS["gptq"])
    (tmp_path / "config.json").write_text(json.dumps(written.config))
    paths = write_shards(tmp_path, written.tensors, 2)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    from safetensors.torch import load_file, save_file

    name = next(name for name in index if index[name] == paths[0].name and name.endswith("scales"))
    save_file({**load_file(paths[1]), name: written.tensors[name]}, paths[1])
    with pytest.raises(ModelError, match=f"tensor '{name}' is in {paths[0].name} and in {paths[1].name}"):
        open_folder(tmp_path)


def test_a_truncated_file(tmp_path: Path) -> None:
    path = checkpoint(FORMATS["gptq act-order"]).write(tmp_path) / "model.safetensors"
    data = path.read_bytes()
    for size in (len(data) - 1, len(data) // 2, 1000):
        path.write_bytes(data[:size])
        with pytest.raises(ModelError, match="is truncated"):
            open_folder(tmp_path)


def _config(form: str, /, **changes: Any) -> dict[str, Any]:
    config = json.loads(json.dumps(FORMATS[form].config))
    group = config.get("config_groups", {}).get("group_0", {})
    for key, value in changes.items():
        (group.get("weights", {}) if key.startswith("weights_") else config)[key.removeprefix("weights_")] = value
    return config


def _targets(targets: list[str]) -> dict[str, Any]:
    config = _config("packed 4")
    config["config_groups"]["group_0"]["targets"] = targets
    return config


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ([1], "quantization_config is [1] in config.json. needed an object"),
        ({"bits": 4}, "quantization_config.quant_method is missing"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit is missing in config.json. needed either it or load_in_8bit"),
        (_config("bnb nf4", load_in_8bit=True), "load_in_4bit is True"),
        (_config("bnb nf4", bnb_4bit_quant_type="af4"), "bnb_4bit_quant_type is 'af4' in config.json. needed one of"),
        ({"quant_method": "exl2"}, "quant_method is 'exl2'"),
        ({"quant_method": "gguf"}, "name the .gguf file itself"),
        (_config("gptq", bits=3), "quantization_config.bits is 3 in config.json. needed 4 or 8"),
        (_config("gptq", bits=True), "bits is True"),
        (_config("gptq", group_size=48), "group_size is 48 in config.json. needed groups of inputs of a power of two"),
        (_config("gptq", group_size=8), "group_size is 8"),
        (_config("gptq", group_size=0), "group_size is 0"),
        (_config("gptq", group_size=-2), "group_size is -2"),
        (_config("gptq", checkpoint_format="marlin"), "checkpoint_format is 'marlin'"),
        (_config("gptq", is_marlin_format=True), "is_marlin_format is True in config.json. needed a checkpoint of"),
        (_config("gptq", dynamic={".*": {"bits": 3}}), "dynamic..*.bits is 3 in config.json. needed 4 or 8"),
        (_config("gptq", dynamic={"+:(a+)+b": {"bits": 8}}), "needed patterns of at most"),
        (_config("gptq", dynamic={".*": {"rotation": "x"}}), "dynamic..*.rotation is 'x'"),
        (_config("gptq", dynamic=[1]), "dynamic is [1]"),
        (_config("gptq", method="awq"), "method is 'awq' in config.json. needed the same as quant_method, 'gptq'"),
        (_config("gptq", checkpoint_format="gptq", format="gptq_v2"), "format is 'gptq_v2' in config.json. needed the"),
        (_config("gptq", packing_format="auto_round:auto_awq"), "packing_format is 'auto_round:auto_awq'"),
        (_config("gptq", quant_method="auto-round", packing_format="auto_round:exl"), "packing_format is 'auto_round:"),
        (_config("gptq", quant_method="auto-round", sym=False), "packing_format is missing in config.json"),
        (_config("gptq", adapter={"rank": 64}), "adapter is {'rank': 64}"),
        (_config("awq", method="gptq"), "method is 'gptq'"),
        (_config("awq", checkpoint_format="gptq"), "checkpoint_format is 'gptq'"),
        (_config("awq", q_group_size=64), "group_size is 32 in config.json. needed the same as q_group_size, 64"),
        (_config("awq", w_bit=8), "w_bit is 8"),
        (_config("awq", extra_config={"a": {"bits": 8}}), "extra_config is {'a'"),
        (_config("gptq", pack_dtype="int64"), "pack_dtype is 'int64'"),
        (_config("gptq", act_bits=8), "act_bits is 8"),
        (_config("gptq", rotation="hadamard"), "rotation is 'hadamard' in config.json. needed a checkpoint of gptq"),
        (_config("gptq", **{"rotation" * 50: 1}), "'" + ("rotation" * 50)[:79] + " is 1"),
        (_config("gptq", **{"rotation\nb": 1}), "'rotation\\nb' is 1"),
        (_config("awq", bits=8), "bits is 8 in config.json. needed 4"),
        (_config("awq", version="gemv"), "version is 'gemv'"),
        (_config("awq", zero_point=False), "zero_point is False"),
        (_config("awq", backend="llm-awq"), "backend is 'llm-awq'"),
        (_config("awq", modules_to_not_convert="lm_head"), "modules_to_not_convert is 'lm_head'"),
        (_config("fp8 128", activation_scheme="once"), "activation_scheme is 'once'"),
        (_config("fp8 128", weight_block_size=[128]), "weight_block_size is [128]"),
        (_config("fp8 128", weight_block_size=[128, 100]), "weight_block_size is [128, 100]"),
        (_config("fp8 128", weight_block_size=[0, 128]), "weight_block_size is [0, 128]"),
        (_config("fp8 128", weight_block_size="128"), "weight_block_size is '128'"),
        (_config("fp8 128", fmt="e5m2"), "fmt is 'e5m2'"),
        (_config("packed 4", format="marlin-24"), "format is 'marlin-24'"),
        (_config("packed 4", format="mxfp6-pack-quantized"), "format is 'mxfp6-pack-quantized'"),
        (_config("packed 4", format="nvfp4-pack-quantized"), "type is 'int' in config.json. needed 'float' in the f"),
        (_config("nvfp4", weights_num_bits=8), "weights.num_bits is 8 in config.json. needed 4"),
        (_config("nvfp4", weights_symmetric=False), "weights.symmetric is False"),
        (_config("nvfp4", weights_strategy="channel"), "weights.strategy is 'channel'"),
        (_config("nvfp4", weights_group_size=32), "group_size is 32 in config.json. needed 16 in the format nvfp4"),
        (_config("mxfp4 packed", weights_group_size=16), "group_size is 16 in config.json. needed 32 in the format mx"),
        (_config("modelopt fp8", quant_algo="W4A16_AWQ"), "quant_algo is 'W4A16_AWQ' in config.json. needed one of NV"),
        (_config("modelopt fp8", quant_algo="MIXED_PRECISION"), "quant_algo is 'MIXED_PRECISION'"),
        (_config("modelopt fp8", quant_algo="NVFP4"), "weights.num_bits is 8 in config.json. needed 4 of the type"),
        (_config("modelopt nvfp4", group_size=32), "group_size is 32 in config.json. needed 16 for NVFP4"),
        (_config("modelopt nvfp4", pre_quant_scale=True), "pre_quant_scale is True"),
        (_config("modelopt nvfp4", config_groups={"a": 1}), "config_groups.a is 1"),
        ({"quant_method": "modelopt"}, "quant_algo is ''"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": [8]}}, "quantization.quant_algo is '[8]'"),
        (_config("packed 4", transform_config={"config_groups": {"R1": {}}}), "transform_config is {"),
        (_config("packed 4", sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format is 'sparse-24"),
        (_config("packed 4", quantization_status="initialized"), "quantization_status is 'initialized'"),
        (_config("packed 4", config_groups={}), "config_groups is {} in config.json. needed at least one group"),
        (_config("packed 4", config_groups={"W4A16": ["Linear"]}), "config_groups.W4A16 is ['Linear']"),
        (_config("packed 4", config_groups={"a": {"targets": ["Linear"]}}), "config_groups.a.weights is missing"),
        (_config("packed 4", config_groups={"a": {"weights": {}}}), "config_groups.a.targets is missing"),
        (_config("packed 4", weights_num_bits=3), "group_0.weights.num_bits is 3 in config.json. needed 4 or 8"),
        (_config("packed 4", weights_type="float"), "weights.type is 'float'"),
        (_config("packed 4", weights_strategy="tensor"), "weights.strategy is 'tensor'"),
        (_config("packed 4", weights_strategy="block"), "weights.strategy is 'block'"),
        (_config("packed 4", weights_strategy="group", weights_group_size=None), "weights.group_size is missing"),
        (_config("packed 4", weights_strategy="channel"), "weights.group_size is 32 in config.json. needed no size"),
        (_config("packed 4", weights_group_size=24), "weights.group_size is 24"),
        (_config("packed 4", weights_dynamic=True), "weights.dynamic is True"),
        (_config("packed 4", weights_novel_scale=1), "weights.novel_scale is 1 in config.json. needed"),
        (_config("float block", weights_block_structure=None), "weights.block_structure is missing"),
        (_config("float block", weights_symmetric=False), "weights.symmetric is False"),
        (_config("int8", weights_num_bits=4), "weights.num_bits is 4 in config.json. needed 8"),
        (_targets(["re:(a+)+b"]), "targets is ['re:(a+)+b'] in config.json. needed patterns of"),
        (_targets(["re:.*.*.*.*.*x"]), "at most 4 repetitions and 3 groups"),
        (_targets(["re:" + ".?" * 40 + "x"]), "at most 4 repetitions and 3 groups"),
        (_targets(["re:" + "(.|.)" * 30 + "x"]), "at most 4 repetitions and 3 groups"),
        (_targets(["re:(a|b)?c"]), "none of them repeated"),
        (_targets(["re:(?=a)"]), "none of them repeated"),
        (_targets(["re:" + "a" * 300]), "patterns of at most 200 characters"),
        (_targets(["re:["]), "needed regular expressions"),
        (_targets(["re:a"] * 100), "at most 64 patterns"),
        (_config("packed 4", ignore=[1]), "ignore is [1] in config.json. needed a list of names"),
    ],
)  # fmt: skip
def test_configs_that_are_not_understood(config: object, fault: str) -> None:
    with pytest.raises(ModelError) as caught:
        spec_from_config({**CONFIG, "quantization_config": config}, "tiny")
    assert fault in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("gptq", {"method": "gptq", "quant_lm_head": False, "vram_strategy": "exclusive", "offload_to_disk": True}),
        ("gptq", {"checkpoint_format": "gptq", "format": "GPTQ", "gptaq": {"alpha": 0.25}, "mock_quantization": True}),
        ("gptq", {"dynamic": {"-:.*lm_head.*": {}, "-:^(?!.*x)a": {}}, "dense_vram_strategy": {"devices": ["cpu"]}}),
        ("gptq", {"packing_format": "auto_round:auto_gptq", "autoround_version": "0.9", "nblocks": 1, "\nb": 1}),
        ("gptq", {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "data_type": "int"}),
        ("gptq zeros", {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}),
        ("gptq", {"quant_method": "intel/auto-round", "extra_config": {"lm_head": {"bits": 16}}}),
        ("awq", {"method": "awq", "format": "gemm", "checkpoint_format": "gemm", "pack_dtype": "int32", "sym": True}),
        ("awq", {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "version": None}),
        ("awq", {"quant_method": "AWQ", "w_bit": 4, "q_group_size": 32, "modules_to_not_convert": ["lm_head"]}),
        ("fp8 128", {"modules_to_not_convert": ["lm_head"], "ignored_layers": None, "method": "fp8", "novel": 1}),
        ("packed 4", {"ignore": ["lm_head", "re:(a+)+b", "re:^(?!.*mlp).*x$", "re:["]}),
        ("awq", {"avg_bits": 4.25, "weight_only": True, "duo_scaling": True, "n_grid": 20}),
        ("bnb nf4", {"quant_method": None, "bnb_4bit_quant_storage": "uint8", "bnb_4bit_compute_dtype": "bfloat16"}),
        ("packed 4", {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}}),
        ("packed 4", {"run_compressed": True, "novel": {"a": 1}, "producer": "llmcompressor 1.0"}),
    ],
)
def test_keys_that_only_repeat(name: str, more: dict[str, Any]) -> None:
    """Whatever newer writers add: the same schemes as without it."""
    plain = read_quantization({"quantization_config": _config(name)}, "x")
    found = read_quantization({"quantization_config": {**_config(name), **more}}, "x")
    assert plain is not None
    assert found is not None
    assert found.schemes == plain.schemes


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("gptq", GPTQConfig(4, group_size=32)),
        ("awq", AwqConfig(4, group_size=32)),
        ("fp8 128", FineGrainedFP8Config()),
        ("gptq", AutoRoundConfig(4, group_size=32, packing_format="auto_round:auto_gptq")),
        ("gptq", AutoRoundConfig(4, group_size=32)),
    ],
)
def test_what_transformers_writes(name: str, theirs: Any) -> None:
    found = read_quantization({"quantization_config": json.loads(theirs.to_json_string(use_diff=False))}, "x")
    plain = read_quantization({"quantization_config": _config(name)}, "x")
    assert found is not None
    assert plain is not None
    assert found.schemes == plain.schemes


def test_rules_for_some_modules() -> None:
    """GPTQModel's `dynamic`: the first rule that fits a module's name from its beginning counts."""
    rules = {"-:.*q_proj": {}, "+:.*layers\\.0\\.mlp.*": {"bits": 8, "group_size": 64}, ".*mlp.*": {"sym": False}}
    found = read_quantization({"quantization_config": _config("gptq", dynamic=rules)}, "x")
    assert found is not None
    usual = found.scheme("model.layers.0.self_attn.k_proj", "Linear")
    first, second = found.scheme(UP, "Linear"), found.scheme("model.layers.10.mlp.up_proj", "Linear")
    assert usual is not None
    assert first is not None
    assert second is not None
    assert (usual.bits, usual.block, usual.symmetric) == (4, (1, 32), True)
    assert (first.bits, first.block, first.symmetric) == (8, (1, 64), True)
    assert (second.bits, second.block, second.symmetric) == (4, (1, 32), False)


@pytest.mark.parametrize(
    "pattern",
    [
        *(".*self_attn.(q|k|v)_proj$", "model.layers.0.*", r".*\.layers\.[0-9]+\.mlp\..*up_proj.*", ".*lm_head"),
        *("(?:model|vision_tower).*gate$", r"model\.layers\.\d{1,2}\.mlp.*", "^model[.]layers[.](0|1|2)[.]mlp.+"),
    ],
)
def test_patterns_that_people_have(pattern: str) -> None:
    quantization = read_quantization({"quantization_config": _config("packed 4", ignore=[f"re:{pattern}"])}, "x")
    assert quantization is not None
    for module in (UP, "model.layers.0.self_attn.k_proj", "lm_head"):
        assert (quantization.scheme(module, "Linear") is None) == bool(re.match(pattern, module))


def test_static_scales_of_activations(caplog: pytest.LogCaptureFixture) -> None:
    config = _config("int8")
    inputs = config["config_groups"]["group_0"].pop("input_activations")
    for where, said in (("input_activations", "once"), ("output_activations", "local")):
        config["config_groups"]["group_0"] |= {where: {**inputs, "dynamic": said}}
        with pytest.raises(ModelError, match=f"{where} is .* static scales of activations are not used"):
            read_quantization({"quantization_config": config}, "tiny")
        del config["config_groups"]["group_0"][where]
    for name, said in (("static", False), ("local", "local")):
        config["config_groups"]["group_0"]["input_activations"] = {**inputs, "dynamic": said}
        found = read_quantization({"quantization_config": config}, f"{name} tiny")
        assert found is not None
        assert found.static
        assert f"{name} tiny: its static scales of activations are not used" in caplog.text


def test_the_first_name_of_the_section_is_known() -> None:
    config = _config("packed 4")
    assert read_quantization({"compression_config": config}, "x") == read_quantization(
        {"quantization_config": config}, "x"
    )


JUNK: list[Any] = [0, -1, 1, 4, 8, 128, 10**400, 1e300, float("nan"), "", "x", "int", "float", "block", True, False]
JUNK += [{".*": {"bits": 8}}, {"-:x": {}, "+:[": {}}, {"a": {"bits": 16}}, {"a": [1]}, {"": {"group_size": 0}}]
JUNK += ["nvfp4-pack-quantized", "mxfp4-pack-quantized", "NVFP4", "FP8", {"quant_algo": "FP8"}]
JUNK += ["gptq", "gptq_v2", "auto_round:auto_awq", "auto_round:auto_gptq", "auto_round", "gemm", "int32"]
OTHERS = ("dynamic", "extra_config", "method", "packing_format", "checkpoint_format", "pack_dtype", "w_bit", "novel")
OTHERS += ("quant_algo", "quantization", "kv_cache_quant_algo", "format")
JUNK += [[], [1], [16, 16], ["Linear"], ["re:.*"], {}, {"a": 1}, {"dynamic": True}, None]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(data=st.data())
def test_junk_in_configs_is_a_model_error(data: st.DataObject) -> None:
    config = json.loads(json.dumps(FORMATS[data.draw(st.sampled_from(sorted(FORMATS)))].config))
    group = config.get("config_groups", {}).get("group_0", {})
    places = [place for place in (config, group, group.get("weights")) if place]
    for place in places:
        keys = sorted({*place, *OTHERS} - {"quant_method"}) if place is config else sorted(place)
        for key in data.draw(st.lists(st.sampled_from(keys), max_size=3)):
            place[key] = data.draw(st.sampled_from(JUNK))
    if data.draw(st.booleans()):
        config["quant_method"] = data.draw(
            st.sampled_from(["gptq", "awq", "auto-round", "fp8", "mxfp4", "modelopt", "bitsandbytes"])
        )
    with contextlib.suppress(ModelError):
        quantization = read_quantization({"quantization_config": config}, "x")
        assert quantization is not None
        quantization.scheme(UP, "Linear")


SHUFFLED = ("gptq act-order", "awq", "packed 4 zeros", "fp8 blocks", "nvfp4", "bnb nf4 double", "bnb int8")


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_headers_of_quantised_files_with_other_records(tmp_path: Path, data: st.DataObject) -> None:
    """Names, dtypes and shapes of tensors exchanged: accepted and read, or an error of ours."""
    written = checkpoint(FORMATS[data.draw(st.sampled_from(SHUFFLED))])
    path = written.write(tmp_path) / "model.safetensors"

    def edit(header: dict[str, Any]) -> None:
        names = sorted(name for name in header if name != "__metadata__")
        for _ in range(data.draw(st.integers(1, 3))):
            one, other = data.draw(st.sampled_from(names)), data.draw(st.sampled_from(names))
            key = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "all"]))
            if key == "all":
                header[one], header[other] = header[other], header[one]
            else:
                header[one][key] = header[other][key]
            if data.draw(st.booleans()):
                header[one]["dtype"] = data.draw(
                    st.sampled_from(["I32", "F16", "F8_E4M3", "I8", "F8_E8M0", "X", "I64"])
                )

    edited_header(path, edit)
    with contextlib.suppress(H2OFlexGenError), open_folder(tmp_path) as source:
        for group in written.spec.weight_groups:
            for tensor in group.tensors:
                source.read_into(tensor.name, torch.empty(tensor.shape))


@pytest.mark.slow
def test_random_damage_never_crashes(tmp_path: Path) -> None:
    written, chance = checkpoint(FORMATS["gptq act-order"]), python_random(4)
    path = written.write(tmp_path) / "model.safetensors"
    data = path.read_bytes()
    for _ in range(200):
        damaged = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(4000)] = chance.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(H2OFlexGenError), open_folder(tmp_path) as source:
            for group in written.spec.weight_groups:
                for tensor in group.tensors:
                    source.read_into(tensor.name, torch.empty(tensor.shape))
