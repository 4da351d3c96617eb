"""Checkpoints that the library compressed-tensors wrote stand for what it takes them for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.formats import Format, Matrix, compressed
from tests.checkpoint.quantised import checkpoint, expected_tensors, read_tensor, shapes_of

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize


def _official(form: str, **weights: Any) -> Format:
    """What the library's compressor of the format `form` makes of random weights, and dequantises it to."""
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    compressor = BaseCompressor.get_value_from_registry(form)

    def write(generator: torch.Generator, outs: int, ins: int) -> Matrix:
        tall, wide = args.block_structure or (1, 1)
        shape = {
            "tensor": (1,),
            "channel": (outs, 1),
            **dict.fromkeys(("group", "tensor_group"), (outs, ins // (args.group_size or 1))),
            "block": (-(-outs // tall), -(-ins // wide)),
        }[str(args.strategy)]
        floats4 = args.type == "float" and args.num_bits == 4
        peak = 6.0 if floats4 else 240.0 if args.type == "float" else float(1 << (args.num_bits - 1))
        weight = torch.randn(outs, ins, generator=generator)
        state = {"weight": weight, "weight_scale": (torch.rand(shape, generator=generator) + 2.5) / peak}
        if not args.symmetric:
            half = 1 << (args.num_bits - 1)
            state["weight_zero_point"] = torch.randint(-half, half, shape, generator=generator).to(torch.int8)
        state["weight_scale"] = state["weight_scale"].half().float()  # so that products with codes are exact
        if args.strategy == "tensor_group":
            state["weight_global_scale"] = torch.tensor([181.3])
            state["weight_scale"] = (state["weight_scale"] * 181.3).to(torch.float8_e4m3fn).float()
        parts = compressor.compress(state, scheme)
        meant = compressor.decompress(parts, scheme)["weight"]
        if floats4:  # which it gives in bfloat16
            codes = unpack_fp4_from_uint8(parts["weight_packed"], outs, ins, torch.float32)
            factors = compressor._decompress_scale(parts["weight_scale"], torch.float32)
            rounded, whole = meant, parts.get("weight_global_scale")
            meant = dequantize(codes, factors, args=args, global_scale=whole, dtype=torch.float32)
            assert torch.equal(meant.bfloat16(), rounded)
        return Matrix(dict(parts), meant)

    return Format(compressed(args.model_dump(mode="json"), form), write)


FORMATS = {
    "4 bits in groups": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "4 bits with zero points": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
    ),
    "4 bits in rows": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    "8 bits with zero points": (
        "pack-quantized",
        {"num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "8 bits in rows": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8 with zero points": ("naive-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "float8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "float8 in rows": ("naive-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "float8 in blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]},
    ),
    "NVFP4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ),
    "MXFP4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_what_compressed_tensors_writes(tmp_path: Path, name: str) -> None:
    form, weights = FORMATS[name]
    written = checkpoint(_official(form, **weights))
    expected, shapes = expected_tensors(written), shapes_of(written.spec)
    with written.open(written.write(tmp_path)) as source:
        assert len(source.packings) == 7
        for key, meant in expected.items():
            found, off = read_tensor(source, key, shapes[key], torch.float32), 3e-7 * (name == "NVFP4")
            torch.testing.assert_close(found, meant, rtol=off, atol=0, msg=key)  # it divides where we multiply
