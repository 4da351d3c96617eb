"""Weights and configs of GGUF files against transformers' own dequantised load of the same file."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from h2o_flexgen.checkpoint.gguf.blocks import FORMATS
from h2o_flexgen.checkpoint.gguf.config import config_of
from h2o_flexgen.checkpoint.gguf.header import read_header
from h2o_flexgen.checkpoint.gguf.source import GgufSource
from h2o_flexgen.checkpoint.reader import open_checkpoint
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.kernels.packed import PackedWeight
from h2o_flexgen.models.families import checkpoint_names, ignored_names, spec_from_config
from tests.checkpoint.gguf_files import ROWS, Kind, by_transformers, in_kind, tiny_model, write_gguf
from tests.checkpoint.test_gguf_blocks import PACKED, random_blocks
from tests.tiny import make_model, save

OURS_ONLY = ("gptneox", "gptneox-serial")
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
    return replace(spec, arch=arch, dtype="float32", packings=())


@pytest.mark.parametrize("row", ROWS)
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


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("row", [row for row in ROWS if row not in OURS_ONLY])
def test_blocks_are_what_transformers_makes_of_them(row: str, kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(row), in_kind(Kind[kind]))
    spec, source = opened(path)
    matrices = {each.name for group in spec.weight_groups for each in group.tensors if len(each.shape) == 2}
    assert set(source.packings) == matrices
    same_weights(spec, source, save(by_transformers(path), tmp_path / "folder"))


@pytest.mark.parametrize("kind", PACKED)
def test_every_kind_of_block_is_read_in_its_place(kind: str, tmp_path: Path) -> None:
    """Made of random bytes, in a model whose rows are long enough for super-blocks."""
    path, number = tmp_path / "blocks.gguf", itertools.count()

    def random(name: str, values: np.ndarray) -> tuple[np.ndarray, Kind]:
        blocks = random_blocks(kind, len(values), 256 // FORMATS[kind].numbers, next(number))
        return blocks.reshape(len(values), -1), Kind[kind]

    write_gguf(path, make_model("llama", hidden_size=256, intermediate_size=256), random)
    spec, source = opened(path)
    same_weights(spec, source, save(by_transformers(path), tmp_path / "folder"))
