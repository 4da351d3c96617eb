"""Weights and configs of GGUF files against transformers' own dequantised load of the same file."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from h2o_flexgen.checkpoint import reader
from h2o_flexgen.checkpoint.gguf.blocks import FORMATS
from h2o_flexgen.checkpoint.gguf.config import config_of
from h2o_flexgen.checkpoint.gguf.header import read_header
from h2o_flexgen.checkpoint.gguf.source import GgufSource
from h2o_flexgen.checkpoint.reader import open_checkpoint
from h2o_flexgen.config.model.packing import Packing
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.errors import ModelError
from h2o_flexgen.kernels.packed import PackedWeight
from h2o_flexgen.models.families import checkpoint_names, ignored_names, spec_from_config
from tests.checkpoint.gguf_files import MIXTURES, ROWS, SIZES, Kind, by_transformers, in_kind, tiny_model, write_gguf
from tests.checkpoint.test_gguf_blocks import PACKED, random_blocks
from tests.tiny import make_model, save

OURS_ONLY = ("granite", "smollm3", "olmo2", "seed_oss", "exaone4", "exaone4-full", "gptneox", "gptneox-serial")
OURS_ONLY += ("olmo3", "cohere2", "glm4", "mistral3")
"""What transformers does not read from GGUF: compared with the model that was written."""
QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
"""The blocks that the gguf package can make."""


def opened(path: Path) -> tuple[ModelSpec, GgufSource]:
    header = read_header(path)
    spec = spec_from_config(config_of(header), "tiny")
    return spec, GgufSource(header, spec)


def same_weights(spec: ModelSpec, source: GgufSource, folder: Path) -> None:
    """Every tensor equals that of the checkpoint in `folder` in float32, read either way."""
    with open_checkpoint(str(folder), spec, checkpoint_names(spec), ignored_names(spec)) as other, source:
        for tensor in (each for group in spec.weight_groups for each in group.tensors):
            wanted, found = torch.empty(tensor.shape), torch.empty(tensor.shape)
            other.read_into(tensor.name, wanted)
            source.read_into(tensor.name, found)
            assert torch.equal(found, wanted), tensor.name
            if tensor.name in source.packings:
                packed = PackedWeight.empty(source.packings[tensor.name], tensor.shape)
                source.read_into(tensor.name, packed)
                assert torch.equal(packed.expanded(), wanted), tensor.name


def comparable(spec: ModelSpec) -> ModelSpec:
    """Without what GGUF rounds to float32 or says in other words."""
    arch = replace(spec.arch, norm_eps=round(spec.arch.norm_eps, 9))
    for name in ("attention_scale", "embed_scale", "residual_scale", "logit_scale"):
        if getattr(arch, name) is not None:
            arch = replace(arch, **{name: float(np.float32(getattr(arch, name)).round(6))})
    if arch.experts is not None:
        scale = float(np.float32(arch.experts.scale).round(6))
        arch = replace(arch, experts=replace(arch.experts, scale=scale))
    if arch.rotary is not None:
        rotary = replace(arch.rotary, growth=float(np.float32(arch.rotary.growth).round(6)))
        arch = replace(arch, rotary=rotary)
    return replace(spec, arch=arch, dtype="float32", packings=())


@pytest.mark.turns
@pytest.mark.parametrize("row", [*ROWS, *MIXTURES])
def test_floats_and_shape_are_the_models(row: str, tmp_path: Path) -> None:
    model = tiny_model(row)
    spec, source = opened(write_gguf(tmp_path / "tiny.gguf", model))
    assert comparable(spec) == comparable(spec_from_config(model.config.to_dict(), "tiny"))
    assert source.packings == {}
    if "gemma" in row:  # 1 added and taken away again is rounding
        assert source.dtype == "float32"
        source.close()
    else:
        same_weights(spec, source, save(model, tmp_path / "folder"))


READ = [row for row in ROWS if row not in OURS_ONLY]


@pytest.mark.turns
@pytest.mark.parametrize(("row", "kind"), [*zip(READ, itertools.cycle(QUANTISED), strict=False)])
def test_blocks_are_what_transformers_makes_of_them(row: str, kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(row), in_kind(Kind[kind]))
    spec, source = opened(path)
    matrices = {each.name for group in spec.weight_groups for each in group.tensors if len(each.shape) == 2}
    assert set(source.packings) == matrices
    same_weights(spec, source, save(by_transformers(path), tmp_path / "folder"))


@pytest.mark.turns
@pytest.mark.parametrize("kind", [kind for kind in PACKED if kind != "Q8_K"])  # which the package does not expand
def test_every_kind_of_block_is_read_in_its_place(kind: str, tmp_path: Path) -> None:
    """Made of random bytes, in a model whose rows are long enough for super-blocks."""
    path, number = tmp_path / "blocks.gguf", itertools.count()

    def random(name: str, values: np.ndarray) -> tuple[np.ndarray, Kind]:
        blocks = random_blocks(kind, len(values), 256 // FORMATS[kind].numbers, next(number))
        return blocks.reshape(len(values), -1), Kind[kind]

    write_gguf(path, make_model("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1), random)
    spec, source = opened(path)
    same_weights(spec, source, save(by_transformers(path), tmp_path / "folder"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_tensor_is_expanded_to_what_is_wanted(dtype: torch.dtype, tmp_path: Path) -> None:
    spec, source = opened(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama-gqa"), in_kind(Kind.Q5_1)))
    with source:
        assert source.dtype == "bfloat16"
        for tensor in (each for group in spec.weight_groups for each in group.tensors):
            exact, found = torch.empty(tensor.shape), torch.empty(tensor.shape, dtype=dtype)
            source.read_into(tensor.name, exact)
            source.read_into(tensor.name, found)
            assert torch.equal(found, exact.to(dtype)), tensor.name


def test_q_and_k_of_llama_are_put_in_order_with_their_biases(tmp_path: Path) -> None:
    model = make_model("llama-bias", **SIZES)
    spec, source = opened(write_gguf(tmp_path / "tiny.gguf", model))
    assert spec.arch.qkv_bias
    assert spec.arch.mlp_bias
    same_weights(spec, source, save(model, tmp_path / "folder"))


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_bytes_that_lie_as_they_are_wanted_are_named(kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama-gqa"), in_kind(Kind[kind]))
    _, source = opened(path)
    with source:
        assert source.dtype == {"F16": "float16", "BF16": "bfloat16"}[kind]
        for name in ("layers.0.attn.q.weight", "layers.0.attn.norm.weight"):  # out of order; of another dtype
            assert source.location(name) is None
        for name, shape in (("layers.1.attn.v.weight", (32, 64)), ("embed.tokens", (97, 64))):
            place = source.location(name)
            assert place is not None
            wanted = torch.empty(shape, dtype=getattr(torch, source.dtype))
            source.read_into(name, wanted)
            raw = path.read_bytes()[place.file_offset : place.file_offset + place.nbytes]
            assert torch.equal(torch.frombuffer(bytearray(raw), dtype=wanted.dtype).view(shape), wanted)


def test_rows_of_fused_tensors_have_a_place_of_their_own(tmp_path: Path) -> None:
    _, source = opened(write_gguf(tmp_path / "tiny.gguf", tiny_model("phi3")))
    with source:
        places = [source.location(f"layers.0.attn.{part}.weight") for part in "qkv"]
        starts = [place.file_offset for place in places if place is not None]
        assert [start - starts[0] for start in starts] == [0, 4 * 64 * 64, 4 * 64 * 96]


def test_gates_and_ups_of_gpt_oss_may_be_of_two_kinds(tmp_path: Path) -> None:
    """Their rows take turns: as floats where no layout has both."""
    model = tiny_model("gpt-oss")

    def blocks(name: str, values: np.ndarray) -> tuple[np.ndarray, Kind]:
        kind = Kind.MXFP4 if "gate_exps" in name else Kind.Q8_0 if "_exps" in name else Kind.F32
        return in_kind(kind)(name, values)

    _, source = opened(write_gguf(tmp_path / "tiny.gguf", model, blocks))
    state = model.state_dict()
    with source:
        assert {name.split(".")[-2] for name in source.packings} == {"down"}
        for name, kinds in (("gate_up", (Kind.MXFP4, Kind.Q8_0)), ("down", (Kind.Q8_0, Kind.Q8_0))):
            wanted = state[f"model.layers.1.mlp.experts.{name}_proj"][2].T.contiguous()
            rows = [wanted[turn::2] for turn in (0, 1)]
            for turn, kind in enumerate(kinds):
                codes = gguf.quants.quantize(rows[turn].contiguous().numpy(), kind)
                rows[turn] = torch.from_numpy(gguf.quants.dequantize(codes, kind))
            found = torch.empty(wanted.shape)
            source.read_into(f"layers.1.mlp.experts.2.{name}.weight", found)
            assert torch.equal(found, torch.stack(rows, 1).flatten(0, 1)), name


def test_what_is_missing_of_gates_and_ups_is_told(tmp_path: Path) -> None:
    biases = {"blk.1.ffn_up_exps.bias": np.zeros((64, 8), np.float32)}  # the other way round
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("gpt-oss"), tensors=biases)
    header = read_header(path)
    tensors = {name: tensor for name, tensor in header.tensors.items() if name != "blk.2.ffn_gate_exps.weight"}
    header = header._replace(tensors=tensors)
    with pytest.raises(ModelError) as caught:
        GgufSource(header, spec_from_config(config_of(header), "tiny"))
    assert "tensor 'blk.2.ffn_gate_exps.weight' (layers.2.mlp.experts.0.gate_up.weight) is missing" in str(caught.value)
    assert "'blk.1.ffn_up_exps.bias': expected shape (8, 64) from the metadata, found (64, 8)" in str(caught.value)


def test_a_long_tensor_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama-gqa", **SIZES, num_hidden_layers=1)
    monkeypatch.setattr(reader, "CHUNK", 200)  # five rows of 34 bytes and a rest
    path = write_gguf(tmp_path / "tiny.gguf", model, in_kind(Kind.Q8_0))
    spec, source = opened(path)
    same_weights(spec, source, save(by_transformers(path), tmp_path / "folder"))


def test_a_packed_tensor_wants_the_layout_that_was_announced(tmp_path: Path) -> None:
    _, source = opened(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), in_kind(Kind.Q4_0)))
    with source:
        for packing, shape in ((Packing(), (97, 64)), (source.packings["embed.tokens"], (96, 64))):
            with pytest.raises(ValueError, match=r"embed\.tokens is Packing"):
                source.read_into("embed.tokens", PackedWeight.empty(packing, shape))


def test_a_closed_source_says_so(tmp_path: Path) -> None:
    _, source = opened(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama")))
    source.close()
    with pytest.raises(ValueError, match="the checkpoint is closed"):
        source.read_into("embed.tokens", torch.empty(97, 64))


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    header = read_header(path)
    spec, source = opened(path)
    before = source.fingerprint
    with source:
        os.truncate(path, path.stat().st_size - 4000)
        with pytest.raises(ModelError, match="changed during the run"):
            source.read_into("layers.2.mlp.down.weight", torch.empty(64, 64))
    with pytest.raises(ModelError, match="changed while it was read"):
        GgufSource(header, spec)
    write_gguf(path, tiny_model("llama"))
    _, again = opened(path)
    again.close()
    assert again.fingerprint != before


def without(name: str, path: Path, **others: np.ndarray) -> str:
    """The message for a model that lacks tensor `name`, or has `others` besides."""
    model = tiny_model("llama")
    write_gguf(path, model, tensors=others)
    header = read_header(path)
    tensors = {each: tensor for each, tensor in header.tensors.items() if each != name}
    header = header._replace(tensors=tensors)
    with pytest.raises(ModelError) as caught:
        GgufSource(header, spec_from_config(config_of(header), "tiny"))
    return str(caught.value)


def test_all_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    others = {
        "extra.weight": np.zeros((2, 2), np.float32),
        "blk.0.attn_k.weight": np.zeros((5, 64), np.float32),
        "blk.3.attn_k.weight": np.zeros((64, 64), np.float32),
    }
    said = without("blk.1.ffn_up.weight", tmp_path / "x.gguf", **others)
    assert "tensor 'blk.1.ffn_up.weight' (layers.1.mlp.up.weight) is missing" in said
    assert "tensor 'blk.0.attn_k.weight': expected shape (64, 64) from the metadata, found (5, 64)" in said
    assert "tensor 'extra.weight' is not part of this model" in said
    assert "tensor 'blk.3.attn_k.weight' is not part of this model" in said
    assert "4 problems" in said
