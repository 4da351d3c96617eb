"""Folders as people have them: files beside the checkpoint, stale indexes, odd names, more layers than are asked for.

Which file counts is asked of transformers, which loads the same folders.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from h2o_flexgen.checkpoint.hub import resolve_model
from h2o_flexgen.checkpoint.shards import other_layout, wanted_files
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.errors import ModelError
from h2o_flexgen.models.families import spec_from_config
from tests.checkpoint.formats import FORMATS
from tests.checkpoint.models import (
    INDEX,
    SINGLE,
    make_spec,
    open_tiny,
    weights,
    write_config,
    write_shards,
    write_single,
)
from tests.checkpoint.quantised import checkpoint
from tests.checkpoint.refusals import refused

TOKENS = "model.decoder.embed_tokens.weight"


def _tokens_read(folder: Path) -> torch.Tensor:
    spec = make_spec()
    out = torch.empty(spec.vocab_size, spec.embed_dim)
    with open_tiny(folder, spec) as source:
        source.read_into("embed.tokens", out)
    return out


def _theirs(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.get_input_embeddings().weight.detach()


def _other(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each + 1 for name, each in tensors.items()}


def _stale_index(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {TOKENS: "model-00001-of-00009.safetensors"}}))


def _old_shards(folder: Path) -> None:
    write_shards(folder, _other(weights(make_spec())))


def _index_of_one_file(folder: Path) -> None:
    names = load_file(folder / SINGLE)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, SINGLE)}))


def _torn_index(folder: Path) -> None:
    (folder / INDEX).write_text("{")


def _others(folder: Path) -> None:
    for name in ("value_head", "model.fp16", "adapter_model", "consolidated", "model-00001-of-00009"):
        save_file({"v_head.weight": torch.ones(3)}, folder / f"{name}.safetensors")
    torch.save({"a": torch.ones(1)}, folder / "pytorch_model.bin")
    (folder / "training_args.bin").write_bytes(b"not ours")
    (folder / "optimizer.pt").write_bytes(b"not ours")
    (folder / "original").mkdir()
    (folder / "original" / SINGLE).write_bytes(b"not ours")


@pytest.mark.parametrize("beside", [_stale_index, _old_shards, _index_of_one_file, _torn_index, _others])
def test_the_single_file_goes_first(tmp_path: Path, beside: Any, caplog: pytest.LogCaptureFixture) -> None:
    write_config(tmp_path)
    write_single(tmp_path, weights(make_spec()))
    beside(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(_tokens_read(tmp_path), _theirs(tmp_path))
    if beside is _others:
        assert "value_head.safetensors" in caplog.text
        assert "is not read" in caplog.text


@pytest.mark.parametrize("binary", [False, True])
def test_shards_of_any_name(tmp_path: Path, binary: bool) -> None:
    write_config(tmp_path)
    paths = write_shards(tmp_path, weights(make_spec()), binary=binary)
    index = tmp_path / ("pytorch_model.bin.index.json" if binary else INDEX)
    text = index.read_text()
    for path, stem in zip(paths, ("model-00001-of-000002", "consolidated half"), strict=True):
        text = text.replace(path.name, stem + path.suffix)
        path.rename(tmp_path / (stem + path.suffix))
    index.write_text(text)
    save_file({"v_head.weight": torch.ones(3)}, tmp_path / "value_head.safetensors")
    assert torch.equal(_tokens_read(tmp_path), _theirs(tmp_path))


@pytest.mark.parametrize("name", ["lm_head.weight", "decoder.version"])
def test_an_index_may_name_what_no_part_is_read_from(tmp_path: Path, name: str) -> None:
    """Copies of the embedding and buffers of older versions, which the file is without."""
    write_config(tmp_path)
    (first, _) = write_shards(tmp_path, weights(make_spec()))
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"][name] = first.name
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert torch.equal(_tokens_read(tmp_path), _theirs(tmp_path))


def test_a_bin_beside_safetensors_of_another_kind(tmp_path: Path) -> None:
    write_config(tmp_path)
    torch.save(weights(make_spec()), tmp_path / "pytorch_model.bin")
    save_file({"v_head.weight": torch.ones(3)}, tmp_path / "value_head.safetensors")
    assert torch.equal(_tokens_read(tmp_path), _theirs(tmp_path))


def test_an_adapter_alone(tmp_path: Path) -> None:
    save_file({"base_model.model.q.lora_A.weight": torch.ones(3)}, tmp_path / "adapter_model.safetensors")
    message = refused(tmp_path)
    assert "LoRA adapter" in message
    assert "merge" in message


def test_a_folder_in_another_layout(tmp_path: Path) -> None:
    (tmp_path / "consolidated.safetensors").write_bytes(b"not ours")
    assert "consolidated" in refused(tmp_path)


@pytest.mark.parametrize(
    "files", [("adapter_config.json", "adapter_model.safetensors"), ("consolidated.00.pth", "params.json")]
)
def test_a_folder_that_is_no_model(files: tuple[str, ...], tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=r"adapter_model\) alone: merge|own layout"):
        resolve_model(str(tmp_path))


def test_a_repository_of_gguf_files() -> None:
    """Which is found by its files alone: there is nothing to begin with, and what to do is said."""
    names = ["README.md", "config.json", "m-Q4_K_M.gguf", "Q8_0/m-00001-of-00002.gguf"]
    assert wanted_files(names) is None
    assert "give it with --model /path/to/file.gguf" in other_layout(names)


def test_several_files_of_which_any_may_be_the_model(tmp_path: Path) -> None:
    for name in ("model.fp16", "model.fp32"):
        save_file({"a": torch.ones(3)}, tmp_path / f"{name}.safetensors")
    assert f"rename the one that is the model to {SINGLE}" in refused(tmp_path)


def test_the_only_weight_file_may_have_any_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """AutoGPTQ's names and settings: transformers' model of the same file under the usual names is the same."""
    written = checkpoint(FORMATS["gptq"])
    settings = {key: value for key, value in written.config.pop("quantization_config").items() if key != "quant_method"}
    written.write(tmp_path)
    (tmp_path / SINGLE).rename(tmp_path / "gptq_model-4bit-128g.safetensors")
    settings |= {"damp_percent": 0.01, "is_marlin_format": False}
    (tmp_path / "quantize_config.json").write_text(json.dumps(settings))
    with caplog.at_level(logging.WARNING), Engine(str(tmp_path), dtype="float32") as llm:
        assert len(llm.model.spec.packings) == 7
    assert "gptq_model-4bit-128g.safetensors" in caplog.text
    (tmp_path / "quantize_config.json").unlink()
    with pytest.raises(ModelError, match=r"quantize_config\.json"):
        Engine(str(tmp_path))


def test_settings_of_awq_beside(tmp_path: Path) -> None:
    written = checkpoint(FORMATS["awq"])
    written.config.pop("quantization_config")
    written.write(tmp_path)
    settings = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(settings))
    with Engine(str(tmp_path), dtype="float32") as llm:
        assert len(llm.model.spec.packings) == 7
    (tmp_path / "quant_config.json").write_text(json.dumps({**settings, "w_bit": 3}))
    with pytest.raises(ModelError, match=r"w_bit is 3 in quant_config\.json"):
        Engine(str(tmp_path))
    (tmp_path / "quant_config.json").write_text("[")
    with pytest.raises(ModelError, match=r"quant_config\.json"):
        Engine(str(tmp_path))


def test_settings_of_modelopt_beside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With scales of keys and values, and of activations, none of which is used."""
    written = checkpoint(FORMATS["modelopt nvfp4"])
    written.config.pop("quantization_config")
    for name in ("k_proj.k_scale", "v_proj.v_scale"):
        written.tensors[f"model.layers.0.self_attn.{name}"] = torch.tensor(0.5)
    written.write(tmp_path)
    said = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head*"]}
    settings = {"producer": {"name": "modelopt", "version": "0.27.1"}, "quantization": said}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(settings))
    with caplog.at_level(logging.WARNING), Engine(str(tmp_path), dtype="float32") as llm:
        assert len(llm.model.spec.packings) == 7
    for what in ("static scales of activations", "scales of caches"):
        assert f"its {what} are not used" in caplog.text
    said["quant_algo"] = "W4A8_AWQ"
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"quantization\.quant_algo is 'W4A8_AWQ' in hf_quant_config\.json"):
        Engine(str(tmp_path))


def test_scales_of_caches_alone(tmp_path: Path) -> None:
    written = checkpoint(FORMATS["modelopt fp8"])
    for name in [name for name in written.dense if name.endswith("_proj.weight")]:
        written.put(name.removesuffix(".weight"), written.dense[name].half())
    written.tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
    del written.config["quantization_config"]["quant_algo"]
    with written.open(written.write(tmp_path)) as source:
        assert (source.format, source.packings) == (None, {})
    scheme = written.config["quantization_config"].pop("kv_cache_scheme")
    with pytest.raises(ModelError, match="quant_algo is ''"):
        written.open(written.write(tmp_path))
    packed = checkpoint(FORMATS["packed 4"])
    packed.config["quantization_config"]["kv_cache_scheme"] = scheme
    packed.tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.5)
    with packed.open(packed.write(tmp_path)) as source:
        assert len(source.packings) == 7


@pytest.mark.parametrize("form", [None, "gptq"])
def test_more_layers_than_config_json_says(tmp_path: Path, form: str | None, caplog: pytest.LogCaptureFixture) -> None:
    if form is None:
        write_config(tmp_path)
        write_single(tmp_path, weights(make_spec(num_hidden_layers=5)))
    else:
        checkpoint(FORMATS[form], num_hidden_layers=5).write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING), Engine(str(tmp_path), dtype="float32") as llm:
        assert llm.model.spec.num_layers == 2
    lines = [record.getMessage() for record in caplog.records if "layers" in record.getMessage()]
    assert lines == ["layers 2, 3 and 4 of the checkpoint are not read: config.json has num_hidden_layers 2"]
    if form is None:
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        assert theirs.config.num_hidden_layers == 2


@pytest.mark.parametrize("ids", [-1, 40, [-1], [40, 99], None])
def test_ids_that_are_no_ids(tmp_path: Path, ids: Any) -> None:
    written = checkpoint(FORMATS["gptq"], pad_token_id=ids, eos_token_id=ids)
    written.write(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"pad_token_id": ids if type(ids) is int else None, "eos_token_id": ids})
    )
    with Engine(str(tmp_path), dtype="float32") as llm:
        assert (llm.model.spec.pad_token_id, llm.model.spec.eos_token_ids) == (None, ())
        out = llm.generate([[3, 4, 5]], max_new_tokens=3)[0]
        assert (len(out.token_ids), out.finish_reason) == (3, "length")
        assert llm.generate_ids(torch.tensor([[3, 4, 5]]), max_new_tokens=2).shape == (1, 5)


def test_counts_and_ids_that_are_written_as_floats(tmp_path: Path) -> None:
    """As transformers takes them, and behind a byte order mark, as the same file's eos is taken."""
    checkpoint(FORMATS["gptq"]).write(tmp_path)
    said = {"max_new_tokens": 2.0, "eos_token_id": 7.0, "pad_token_id": 9.0}
    (tmp_path / "generation_config.json").write_text(json.dumps(said), encoding="utf-8-sig")
    with Engine(str(tmp_path), dtype="float32") as llm:
        assert llm.model.spec.eos_token_ids == (7,)
        assert llm.generate_ids(torch.tensor([[3, 4, 5]])).shape == (1, 5)


def test_an_id_among_those_that_are_none(tmp_path: Path) -> None:
    spec = checkpoint(FORMATS["gptq"], eos_token_id=[-1, 7, 7, 40, 9.0], bos_token_id=-1).spec
    assert (spec.eos_token_id, spec.bos_token_id) == ((7, 9), 7)
    for wrong in ("</s>", [True], [1.5]):
        with pytest.raises(ModelError, match="eos_token_id"):
            checkpoint(FORMATS["gptq"], eos_token_id=wrong).spec  # noqa: B018 - raises


def test_numbers_written_as_floats_and_words_for_dtypes() -> None:
    usual = checkpoint(FORMATS["gptq"]).config
    floats = {key: float(value) if type(value) is int else value for key, value in usual.items()}
    assert spec_from_config({**floats, "torch_dtype": "half"}, "x") == spec_from_config(usual, "x")
    with pytest.raises(ModelError, match=r"hidden_size is 64\.5"):
        spec_from_config({**usual, "hidden_size": 64.5}, "x")
