"""Blocks of GGUF against the `gguf` package: sizes, and what converted ones stand for."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from h2o_flexgen.checkpoint.gguf.blocks import FORMATS, TYPE_NAMES, _grid
from h2o_flexgen.config.model.packing import LEVELS
from h2o_flexgen.kernels.packed import PackedWeight

PACKED = [name for name, form in FORMATS.items() if form.packing is not None]


def test_types_are_ggmls() -> None:
    assert {int(kind): kind.name for kind in gguf.GGMLQuantizationType} == TYPE_NAMES
    for name, form in FORMATS.items():
        assert (form.numbers, form.nbytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]], name


def random_blocks(name: str, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Any bytes, (rows, blocks, bytes), but for exponents of float16 that make no number."""
    form, generator = FORMATS[name], np.random.default_rng(seed)
    data = generator.integers(0, 256, (rows, blocks, form.nbytes), dtype=np.uint8)
    for at in range(0, form.nbytes - 1, 2):  # wherever a float16 may be
        data[..., at + 1] &= np.where(data[..., at + 1] & 0x7C == 0x7C, 0xBF, 0xFF).astype(np.uint8)
    if name == "MXFP4":  # powers of two, of which the largest make no numbers
        data[..., 0] = generator.integers(100, 140, (rows, blocks))
    if name == "NVFP4":  # scales have no sign
        data[..., :4] &= 0x7F
    if name == "Q8_K":
        data[..., :4] = generator.normal(size=(rows, blocks, 1)).astype("<f4").view(np.uint8)
    if name == "IQ1_M":  # the float16 is the upper halves of four words
        data[..., 55] &= 0xBF
    return data


def dequantised(name: str, blocks: np.ndarray) -> np.ndarray:
    """What the gguf package makes of `blocks` (rows, blocks, bytes); of Q8_K, unknown to it, the definition."""
    if name != "Q8_K":
        return gguf.quants.dequantize(blocks.reshape(len(blocks), -1), gguf.GGMLQuantizationType[name])
    scale = np.ascontiguousarray(blocks[..., :4]).view("<f4")
    return (scale * blocks[..., 4:260].view(np.int8)).reshape(len(blocks), -1)


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"])
def test_grids_are_ggmls(name: str) -> None:
    theirs = getattr(gguf.quants, name)
    theirs.init_grid()
    levels = [-1, 0, 1] if name == "IQ1_S" else np.array(LEVELS[FORMATS[name].packing.levels])  # type: ignore[union-attr]
    step = {"IQ2": 8, "IQ3": 4 if name == "IQ3_XXS" else 1, "IQ1": 1}[name[:3]]
    np.testing.assert_array_equal(np.asarray(levels)[_grid(name)] * step, theirs.grid.reshape(theirs.grid_shape))


@pytest.mark.parametrize("name", PACKED)
def test_converted_blocks_stand_for_what_gguf_says(name: str) -> None:
    form = FORMATS[name]
    assert form.packing is not None
    assert form.convert is not None
    blocks = random_blocks(name, 24, 3)
    wanted = dequantised(name, blocks)
    parts = form.convert(blocks)
    shape = (24, 3 * form.numbers)
    assert {each.name: (each.shape, each.dtype) for each in form.packing.parts(shape)} == {
        part: (values.shape, str(values.dtype)) for part, values in parts.items()
    }
    tensors = {part: torch.from_numpy(np.ascontiguousarray(values)) for part, values in parts.items()}
    found = PackedWeight(form.packing, shape, tensors, torch.float32).expanded()
    assert np.isfinite(wanted).all()
    np.testing.assert_array_equal(found.numpy(), wanted)
