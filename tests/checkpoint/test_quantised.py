"""Quantised safetensors: every format, written by slow loops, is read as what it stands for, packed or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from h2o_flexgen.checkpoint import matrices, reader
from h2o_flexgen.config.model.packing import Packing
from h2o_flexgen.errors import ModelError
from h2o_flexgen.kernels.packed import PackedWeight
from h2o_flexgen.models.schemes import MXFP4
from tests.checkpoint.formats import FORMATS
from tests.checkpoint.models import write_shards
from tests.checkpoint.quantised import checkpoint, expected_tensors, read_tensor, shapes_of
from tests.seeds import torch_generator


@pytest.mark.turns
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read_as_what_it_stands_for(tmp_path: Path, name: str) -> None:
    written = checkpoint(FORMATS[name])
    expected, shapes = expected_tensors(written), shapes_of(written.spec)
    with written.open(written.write(tmp_path)) as source:
        assert source.dtype == "float16"
        assert set(source.packings) == {key for key in expected if key.startswith("layers") and expected[key].ndim == 2}
        for key, meant in expected.items():
            for dtype in (torch.float32, torch.bfloat16):
                assert torch.equal(read_tensor(source, key, shapes[key], dtype), meant.to(dtype))
            if key in source.packings:
                packed = PackedWeight.empty(source.packings[key], shapes[key])
                source.read_into(key, packed)
                assert torch.equal(packed.expanded(torch.float32), meant)
                assert source.location(key) is None


PHI3 = {"model_type": "phi3", "pad_token_id": 0}
NEOX = {"model_type": "gpt_neox", "num_key_value_heads": None}
OPT = {"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 64}


FUSED = (
    *("gptq 8 act-order", "gptq zeros", "awq", "packed 4 zeros", "packed 8 act-order", "float channel"),
    *("float block", "int8 zeros", "fp8 tensor", "fp8 blocks", "nvfp4", "mxfp4 packed"),
    *("bnb nf4 double", "bnb int8"),
)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, NEOX) for name in FUSED),
        *((name, PHI3) for name in FUSED[::2]),
        *((name, OPT) for name in FUSED[1::4]),
    ],
)
def test_rows_of_fused_matrices(tmp_path: Path, name: str, changes: dict[str, object]) -> None:
    """Phi-3's q, k and v are one matrix, GPT-NeoX's one with turns for every head; OPT has biases beside them."""
    written = checkpoint(FORMATS[name], **changes)
    expected, shapes = expected_tensors(written), shapes_of(written.spec)
    with written.open(written.write(tmp_path)) as source:
        for key, meant in expected.items():
            assert torch.equal(read_tensor(source, key, shapes[key], torch.float32), meant)
            if key in source.packings:
                packed = PackedWeight.empty(source.packings[key], shapes[key])
                source.read_into(key, packed)
                assert torch.equal(packed.expanded(torch.float32), meant)


@pytest.mark.parametrize("changes", [{}, NEOX], ids=["llama", "gpt_neox"])
@pytest.mark.parametrize(
    "name", ["gptq 8 act-order", "gptq", "awq", "packed 4 zeros", "fp8 blocks", "nvfp4", "bnb nf4 double"]
)
def test_matrices_in_many_blocks(
    tmp_path: Path, name: str, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrices, "_BLOCK", 1500)
    monkeypatch.setattr(reader, "_EXPANDED", 200)
    written = checkpoint(FORMATS[name], **changes)
    expected, shapes = expected_tensors(written), shapes_of(written.spec)
    with written.open(written.write(tmp_path)) as source:
        for key in source.packings:
            assert torch.equal(read_tensor(source, key, shapes[key], torch.float32), expected[key])


def test_the_layouts_that_formats_become(tmp_path: Path) -> None:
    expected = {
        "gptq": Packing("uint4", 32, "float16", "zero"),
        "gptq rows": Packing("uint4", 0, "float16", "zero"),
        "gptq 8 zeros": Packing("int8", 32, "bfloat16", "zero"),
        "gptq act-order": Packing("uint4", 32, "float16", "zero", ordered=True),
        "awq 128": Packing("uint4", 128, "float16", "zero"),
        "packed 4": Packing("uint4", 32, "bfloat16", "middle"),
        "packed 4 zeros": Packing("uint4", 32, "float16", "zero"),
        "packed 8 rows": Packing("int8", 0, "bfloat16", "none"),
        "int8": Packing("int8", 0, "bfloat16", "none"),
        "float tensor": Packing("e4m3", 0, "bfloat16", "none"),
        "fp8 128": Packing("e4m3", 128, "float32", "none"),
        "nvfp4": Packing("e2m1", 16, "e4m3", "none"),
        "modelopt nvfp4": Packing("e2m1", 16, "e4m3", "none"),
        "mxfp4 packed": MXFP4,
        "bnb nf4": Packing("nf4", 32, "float32", "none"),
        "bnb fp4 double": Packing("fp4", 32, "float32", "none"),
        "bnb int8": Packing("int8", 0, "float32", "none"),
    }
    for name, packing in expected.items():
        written = checkpoint(FORMATS[name])
        with written.open(written.write(tmp_path)) as source:
            assert set(source.packings.values()) == {packing}, name


@pytest.mark.parametrize("tied", [False, True])
def test_a_quantised_embedding_and_head(tmp_path: Path, tied: bool) -> None:
    form = FORMATS["packed 8"]
    written = checkpoint(form, tie_word_embeddings=tied)
    group = {**form.config["config_groups"]["group_0"], "targets": ["Linear", "Embedding"]}
    written.config["quantization_config"] = {**form.config, "config_groups": {"all": group}, "ignore": []}
    for module in ("model.embed_tokens", *(() if tied else ("lm_head",))):
        written.put(module, form.write(torch_generator(5), 40, 64))
    expected = expected_tensors(written)
    with written.open(written.write(tmp_path)) as source:
        assert ("embed.tokens" in source.packings, "head.vocab" in source.packings) == (True, not tied)
        for name in ("embed.tokens", *(() if tied else ("head.vocab",))):
            assert torch.equal(read_tensor(source, name, (40, 64), torch.float32), expected[name])


def test_several_groups_by_name_pattern_and_kind(tmp_path: Path) -> None:
    """The name of a module goes before a pattern, and that before "Linear"; what is ignored is plain."""
    four, eight, rows = FORMATS["packed 4"], FORMATS["packed 8 zeros"], FORMATS["float channel"]
    written, layer = checkpoint(four), "model.layers.0"
    groups = {
        "linear": {**four.config["config_groups"]["group_0"]},
        "some": {**eight.config["config_groups"]["group_0"], "targets": ["re:.*mlp.(up|gate)_proj$"]},
        "one": {**rows.config["config_groups"]["group_0"], "targets": [f"{layer}.mlp.up_proj"]},
    }
    groups["one"]["format"] = "float-quantized"
    ignore = ["lm_head", f"{layer}.self_attn.q_proj", "re:.*k_proj"]
    written.config["quantization_config"] = {**four.config, "config_groups": groups, "ignore": ignore}
    replaced = {"mlp.gate_proj": eight, "mlp.up_proj": rows, "self_attn.q_proj": None, "self_attn.k_proj": None}
    for part, form in replaced.items():
        module = f"{layer}.{part}"
        outs, ins = written.dense[f"{module}.weight"].shape
        written.put(module, form.write(torch_generator(5), outs, ins) if form else torch.ones(outs, ins).half())
    expected, shapes = expected_tensors(written), shapes_of(written.spec)
    with written.open(written.write(tmp_path)) as source:
        for key, meant in expected.items():
            assert torch.equal(read_tensor(source, key, shapes[key], torch.float32), meant)
        assert source.packings["layers.0.mlp.gate.weight"].levels == "int8"
        assert source.packings["layers.0.mlp.up.weight"].levels == "e4m3"
        assert not {"layers.0.attn.q.weight", "layers.0.attn.k.weight"} & set(source.packings)


@pytest.mark.parametrize("name", ["gptq zeros", "packed 4 zeros", "fp8 128"])
@pytest.mark.parametrize("binary", [False, True])
def test_parts_of_a_matrix_in_several_shards(tmp_path: Path, name: str, binary: bool) -> None:
    written = checkpoint(FORMATS[name])
    (tmp_path / "config.json").write_text(json.dumps(written.config))
    write_shards(tmp_path, written.tensors, 5, binary=binary)
    expected, shapes = expected_tensors(written), shapes_of(written.spec)
    with written.open(tmp_path) as source:
        for key, meant in expected.items():
            assert torch.equal(read_tensor(source, key, shapes[key], torch.float32), meant)


def test_zero_points_of_symmetric_weights_that_nothing_was_subtracted_from(tmp_path: Path) -> None:
    """Some programs write the zero points of gptq_v2 and say that they are those of gptq."""
    written = checkpoint(FORMATS["gptq"])
    for name in written.tensors:
        if name.endswith("qzeros"):
            assert (written.tensors[name] == 0x77777777).all()
            written.tensors[name] += 0x11111111
    expected = expected_tensors(written)
    with written.open(written.write(tmp_path)) as source:
        got = read_tensor(source, "layers.0.mlp.up.weight", (96, 64), torch.float32)
    assert torch.equal(got, expected["layers.0.mlp.up.weight"])


def test_zeros_that_some_programs_store_besides(tmp_path: Path) -> None:
    """AutoGPTQ gave every module a bias, compressed-tensors symmetric weights zero points."""
    for name, part in (("gptq", "bias"), ("packed 4", "weight_zero_point"), ("int8", "weight_zero_point")):
        written = checkpoint(FORMATS[name])
        written.tensors["model.layers.0.mlp.up_proj." + part] = torch.zeros(96, dtype=torch.float16)
        with written.open(written.write(tmp_path)) as source:
            assert len(source.packings) == 7
        written.tensors["model.layers.0.mlp.up_proj." + part][5] = 1
        with pytest.raises(ModelError, match=part):
            written.open(written.write(tmp_path))


def test_what_is_asked_for_must_be_what_is_there(tmp_path: Path) -> None:
    written = checkpoint(FORMATS["gptq"])
    name = "layers.0.mlp.up.weight"
    with written.open(written.write(tmp_path)) as source:
        with pytest.raises(ValueError, match="got Packing"):
            source.read_into(name, PackedWeight.empty(Packing("int8", 32, "float16", "zero"), (96, 64)))
        with pytest.raises(ValueError, match=r"got .* of \(96, 32\)"):
            source.read_into(name, PackedWeight.empty(source.packings[name], (96, 32)))
        with pytest.raises(ValueError, match="is not packed"):
            source.read_into("embed.tokens", PackedWeight.empty(source.packings[name], (40, 64)))
        with pytest.raises(ValueError, match="needs a contiguous float tensor"):
            source.read_into(name, torch.empty(96, 64, dtype=torch.int8))
    with pytest.raises(ValueError, match="is closed"):
        source.read_into(name, torch.empty(96, 64))


def test_the_fingerprint_knows_how_weights_are_read(tmp_path: Path) -> None:
    """The same files with another quantization_config are other weights."""
    written = checkpoint(FORMATS["gptq zeros"])
    with written.open(written.write(tmp_path)) as source:
        first = source.fingerprint
    written.config["quantization_config"] = {**written.config["quantization_config"], "checkpoint_format": "gptq_v2"}
    (tmp_path / "config.json").write_text(json.dumps(written.config))
    with written.open(tmp_path) as source:
        assert source.fingerprint != first
