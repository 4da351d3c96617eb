"""Blocks of GGUF against the `gguf` package: sizes, and what converted ones stand for."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from h2o_flexgen.checkpoint.gguf.blocks import FORMATS, TYPE_NAMES
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
    return data


@pytest.mark.parametrize("name", PACKED)
def test_converted_blocks_stand_for_what_gguf_says(name: str) -> None:
    form = FORMATS[name]
    assert form.packing is not None
    assert form.convert is not None
    blocks = random_blocks(name, 24, 3)
    wanted = gguf.quants.dequantize(blocks.reshape(24, -1), gguf.GGMLQuantizationType[name])
    parts = form.convert(blocks)
    shape = (24, 3 * form.numbers)
    assert {each.name: (each.shape, each.dtype) for each in form.packing.parts(shape)} == {
        part: (values.shape, str(values.dtype)) for part, values in parts.items()
    }
    tensors = {part: torch.from_numpy(np.ascontiguousarray(values)) for part, values in parts.items()}
    found = PackedWeight(form.packing, shape, tensors, torch.float32).expanded()
    assert np.isfinite(wanted).all()
    np.testing.assert_array_equal(found.numpy(), wanted)
