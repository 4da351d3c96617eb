"""Every stored format of quantised checkpoints, its matrices written with slow loops, and what these stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Matrix(NamedTuple):
    """A stored matrix: its tensors by their names in their module, and what it stands for in float32."""

    parts: dict[str, Tensor]
    dense: Tensor


Writer = Callable[[torch.Generator, int, int], Matrix]


class Format(NamedTuple):
    """The quantization_config of a checkpoint and what writes its matrices."""

    config: dict[str, Any]
    write: Writer


def _codes(generator: torch.Generator, outs: int, ins: int, bits: int) -> Tensor:
    return torch.randint(0, 1 << bits, (outs, ins), generator=generator)


def _scales(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(shape, generator=generator) * 0.02 + 0.002).to(dtype)


def words(rows: list[list[int]], bits: int) -> Tensor:
    """Codes side by side in words of 32 bits, the first lowest; the last word of a row is filled up with zeros."""
    per_word, packed = 32 // bits, []
    for row in rows:
        line = []
        for start in range(0, len(row), per_word):
            word = 0
            for place, code in enumerate(row[start : start + per_word]):
                word |= int(code) << (bits * place)
            line.append(word - (1 << 32) if word >= 1 << 31 else word)
        packed.append(line)
    return torch.tensor(packed, dtype=torch.int32)


def dense(codes: Tensor, zeros: Tensor, scales: Tensor, group_of: list[int]) -> Tensor:
    """(code - zero) * scale of its group, number by number; zeros and scales (outs, groups)."""
    rows = zip(codes.tolist(), zeros.tolist(), scales.float().tolist(), strict=True)
    values = [
        [
            float(np.float32(code - zero[group]) * np.float32(scale[group]))
            for code, group in zip(row, group_of, strict=True)
        ]
        for row, zero, scale in rows
    ]
    return torch.tensor(values)


def groups_of(ins: int, size: int) -> list[int]:
    return [0 if size < 0 else i // size for i in range(ins)]


class _Grouped(NamedTuple):
    """The group of each input, codes (outs, ins), zeros and scales (outs, groups)."""

    group_of: list[int]
    codes: Tensor
    zeros: Tensor
    scales: Tensor


def _grouped(
    generator: torch.Generator,
    shape: tuple[int, int],
    bits: int,
    size: int,
    sym: bool,
    shuffled: bool,
    dtype: torch.dtype,
) -> _Grouped:
    (outs, ins), group_of = shape, groups_of(shape[1], size)
    count = group_of[-1] + 1
    if shuffled:
        group_of = [group_of[i] for i in torch.randperm(ins, generator=generator).tolist()]
    codes, scales = _codes(generator, outs, ins, bits), _scales(generator, outs, count, dtype=dtype)
    zeros = torch.full((outs, count), 1 << (bits - 1)) if sym else _codes(generator, outs, count, bits)
    return _Grouped(group_of, codes, zeros, scales)


def gptq(
    bits: int = 4,
    size: int = 32,
    sym: bool = True,
    shuffled: bool = False,
    dtype: torch.dtype = torch.float16,
    **more: Any,
) -> Format:
    step = 0 if more.get("checkpoint_format") == "gptq_v2" else 1
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": sym, "desc_act": shuffled, **more}

    def write(generator: torch.Generator, outs: int, ins: int) -> Matrix:
        group_of, codes, zeros, scales = _grouped(generator, (outs, ins), bits, size, sym, shuffled, dtype)
        stored = (zeros - step) % (1 << bits)
        parts = {
            "qweight": words(codes.tolist(), bits).T.contiguous(),
            "qzeros": words(stored.T.tolist(), bits),
            "scales": scales.T.contiguous(),
            "g_idx": torch.tensor(group_of, dtype=torch.int32),
        }
        return Matrix(parts, dense(codes, zeros, scales, group_of))

    return Format(config, write)


def awq(size: int = 32, **more: Any) -> Format:
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True, **more}

    def interleaved(rows: list[list[int]]) -> list[list[int]]:
        return [[row[8 * (n // 8) + (0, 2, 4, 6, 1, 3, 5, 7)[n % 8]] for n in range(len(row))] for row in rows]

    def write(generator: torch.Generator, outs: int, ins: int) -> Matrix:
        group_of = groups_of(ins, size)
        count = group_of[-1] + 1
        codes, zeros = _codes(generator, outs, ins, 4), _codes(generator, outs, count, 4)
        scales = _scales(generator, outs, count)
        parts = {
            "qweight": words(interleaved(codes.T.tolist()), 4),
            "qzeros": words(interleaved(zeros.T.tolist()), 4),
            "scales": scales.T.contiguous(),
        }
        return Matrix(parts, dense(codes, zeros, scales, group_of))

    return Format(config, write)


def compressed(weights: Mapping[str, Any], form: str, **more: Any) -> dict[str, Any]:
    """The config of compressed-tensors for one group of all linear modules."""
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "global_compression_ratio": 1.5,
        "kv_cache_scheme": None,
        **more,
    }


def packed(
    bits: int = 4, size: int = 32, sym: bool = True, shuffled: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Format:
    strategy = "group" if size > 0 else "channel"
    said: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": sym, "strategy": strategy, "dynamic": False}
    said |= {"group_size": size if size > 0 else None, "actorder": "group" if shuffled else None}

    def write(generator: torch.Generator, outs: int, ins: int) -> Matrix:
        group_of, codes, zeros, scales = _grouped(generator, (outs, ins), bits, size, sym, shuffled, dtype)
        parts = {
            "weight_packed": words(codes.tolist(), bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([outs, ins]),
        }
        if not sym:
            parts["weight_zero_point"] = words(zeros.T.tolist(), bits).T.contiguous()
        if shuffled:
            parts["weight_g_idx"] = torch.tensor(group_of, dtype=torch.int32)
        return Matrix(parts, dense(codes, zeros, scales, group_of))

    return Format(compressed(said, "pack-quantized"), write)


def scaled(
    config: dict[str, Any], name: str, block: tuple[int, int], dtype: torch.dtype = torch.float32, flat: bool = False
) -> Format:
    """fp8 with a scale for each block of (outputs, inputs); 0: all."""

    def write(generator: torch.Generator, outs: int, ins: int) -> Matrix:
        tall, wide = block[0] or outs, block[1] or ins
        scales = _scales(generator, -(-outs // tall), -(-ins // wide), dtype=dtype)
        weight = (torch.randn(outs, ins, generator=generator) * 100).to(torch.float8_e4m3fn)
        numbers, factors = weight.float().tolist(), scales.float().tolist()
        values = [
            [np.float32(numbers[o][i]) * np.float32(factors[o // tall][i // wide]) for i in range(ins)]
            for o in range(outs)
        ]
        meant = torch.from_numpy(np.array(values, np.float32))
        return Matrix({"weight": weight, name: scales.view(-1) if flat else scales}, meant)

    return Format(config, write)


def static(form: Format, scale: str, config: dict[str, Any]) -> Format:
    """The same with a scale of activations beside each matrix, and scales that have no dimensions."""

    def write(generator: torch.Generator, outs: int, ins: int) -> Matrix:
        made = form.write(generator, outs, ins)
        parts = {name: part.view(()) if part.numel() == 1 else part for name, part in made.parts.items()}
        return Matrix({**parts, scale: torch.tensor(0.125, dtype=torch.bfloat16)}, made.dense)

    return Format({**form.config, **config}, write)


def int8(sym: bool = True) -> Format:
    """W8A8 of compressed-tensors: whole rows, activations as they come."""
    said = {"num_bits": 8, "type": "int", "symmetric": sym, "strategy": "channel", "dynamic": False}
    config = compressed(said, "int-quantized")
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True, "strategy": "token"}

    def write(generator: torch.Generator, outs: int, ins: int) -> Matrix:
        weight = torch.randint(-128, 128, (outs, ins), generator=generator)
        zeros = torch.zeros(outs, 1) if sym else torch.randint(-128, 128, (outs, 1), generator=generator)
        scales = _scales(generator, outs, 1, dtype=torch.bfloat16)
        parts = {"weight": weight.to(torch.int8), "weight_scale": scales}
        if not sym:
            parts["weight_zero_point"] = zeros.to(torch.int8)
        return Matrix(parts, dense(weight, zeros, scales, [0] * ins))

    return Format(config, write)


_SIZES4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def floats4(names: tuple[str, str, str], config: dict[str, Any], size: int = 16) -> Format:
    """e2m1 with the names of codes, of scales and, in groups of 16, of what all of these are divided by, or multiplied
    where it is called weight_scale_2."""
    weight, scale, whole = names

    def write(generator: torch.Generator, outs: int, ins: int) -> Matrix:
        codes = _codes(generator, outs, ins, 4)
        pairs = [[low + 16 * high for low, high in zip(row[::2], row[1::2], strict=True)] for row in codes.tolist()]
        parts = {weight: torch.tensor(pairs, dtype=torch.uint8)}
        if size == 32:
            parts[scale] = torch.randint(118, 123, (outs, ins // 32), generator=generator, dtype=torch.uint8)
            factors = [[np.float32(2.0 ** (number - 127)) for number in row] for row in parts[scale].tolist()]
        else:
            parts[scale] = (torch.rand(outs, ins // 16, generator=generator) * 400 + 1).to(torch.float8_e4m3fn)
            multiplied = whole == "weight_scale_2"
            parts[whole] = torch.tensor(1.7e-5) if multiplied else torch.tensor([61234.5])
            by = np.float32(parts[whole].item() if multiplied else 1 / parts[whole].item())
            rows = [[np.float32(number) for number in row] for row in parts[scale].float().tolist()]
            factors = [[number * by for number in row] for row in rows]
        meant = [
            [np.float32(_SIZES4[code & 7] * (-1 if code > 7 else 1)) * row[i // size] for i, code in enumerate(line)]
            for line, row in zip(codes.tolist(), factors, strict=True)
        ]
        return Matrix(parts, torch.from_numpy(np.array(meant, np.float32)))

    return Format(config, write)


def tall(form: Format, one: bool = False) -> Format:
    """The same with scales as ModelOpt keeps those of blocks, or of one block."""

    def write(generator: torch.Generator, outs: int, ins: int) -> Matrix:
        made = form.write(generator, outs, ins)
        scale = made.parts["weight_scale"]
        return Matrix({**made.parts, "weight_scale": scale.squeeze() if one else scale[:, None, :, None]}, made.dense)

    return Format(form.config, write)


_NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635)
_NF4 += (-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725)
_NF4 += (0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
_FP4 = tuple(sign * size / 12 for sign in (1, -1) for size in (0, 0.0625, 8, 12, 4, 6, 2, 3))


def bnb4(levels: str, size: int = 32, double: bool = False, storage: torch.dtype = torch.uint8) -> Format:
    """bitsandbytes in 4 bits: all rows one after another, the upper half of a byte first, `size` sharing a scale."""
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "_load_in_4bit": True}
    config |= {"bnb_4bit_quant_type": levels, "bnb_4bit_use_double_quant": double, "llm_int8_threshold": 6.0}
    values = [np.float32(value) for value in (_NF4 if levels == "nf4" else _FP4)]

    def write(generator: torch.Generator, outs: int, ins: int) -> Matrix:
        codes = _codes(generator, outs, ins, 4).view(-1).tolist()
        data = torch.tensor([16 * one + other for one, other in zip(codes[::2], codes[1::2], strict=True)])
        parts = {"weight": data.to(torch.uint8).view(storage)[:, None]}
        said = {"quant_type": levels, "blocksize": size, "dtype": "bfloat16", "shape": [outs, ins]}
        count = -(-len(codes) // size)
        if double:
            packed, table = torch.randint(0, 256, (count,), generator=generator), torch.rand(256, generator=generator)
            tops = torch.rand(-(-count // 256), generator=generator) + 0.5
            said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.21036450564861298}
            parts |= {"weight.absmax": packed.to(torch.uint8), "weight.nested_absmax": tops}
            parts["weight.nested_quant_map"] = table
            rows, largest = [np.float32(x) for x in table.tolist()], [np.float32(x) for x in tops.tolist()]
            offset = np.float32(said["nested_offset"])
            scales = [np.float32(rows[c] * largest[i // 256]) + offset for i, c in enumerate(packed.tolist())]
        else:
            parts["weight.absmax"] = torch.rand(count, generator=generator) + 0.1
            scales = [np.float32(x) for x in parts["weight.absmax"].tolist()]
        parts["weight.quant_map"] = torch.tensor(np.array(values))
        text = json.dumps(said).encode()
        parts[f"weight.quant_state.bitsandbytes__{levels}"] = torch.tensor(list(text), dtype=torch.uint8)
        meant = [values[code] * scales[i // size] for i, code in enumerate(codes)]
        return Matrix(parts, torch.from_numpy(np.array(meant, np.float32)).view(outs, ins))

    return Format(config, write)


def bnb8() -> Format:
    def write(generator: torch.Generator, outs: int, ins: int) -> Matrix:
        weight = torch.randint(-127, 128, (outs, ins), generator=generator)
        largest = torch.rand(outs, generator=generator) + 0.1
        parts = {"weight": weight.to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        scales = largest[:, None] * torch.tensor(1 / 127)
        return Matrix(parts, dense(weight, torch.zeros(outs, 1), scales, [0] * ins))

    return Format({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]}, write)


_NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 16, "strategy": "tensor_group"}
_NVFP4 |= {"dynamic": False, "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
_MXFP4 = {**_NVFP4, "group_size": 32, "strategy": "group", "scale_dtype": "torch.uint8", "zp_dtype": None}
_PACKED4 = ("weight_packed", "weight_scale", "weight_global_scale")

_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}

FORMATS: dict[str, Format] = {
    "gptq": gptq(),
    "gptq 128": gptq(size=128, checkpoint_format="gptq", meta={"quantizer": ["gptqmodel:5.0.0"]}, lm_head=False),
    "gptq rows": gptq(size=-1),
    "gptq zeros": gptq(sym=False, size=16),
    "gptq 8": gptq(bits=8, size=32),
    "gptq 8 zeros": gptq(bits=8, sym=False, dtype=torch.bfloat16),
    "gptq act-order": gptq(shuffled=True),
    "gptq act-order ragged": gptq(size=64, shuffled=True, sym=False),
    "gptq 8 act-order": gptq(bits=8, shuffled=True, sym=False),
    "gptq v2": gptq(sym=False, checkpoint_format="gptq_v2"),
    "gptq v2 8": gptq(bits=8, sym=False, checkpoint_format="gptq_v2"),
    "awq": awq(),
    "awq 128": awq(128, modules_to_not_convert=None, backend="autoawq"),
    "awq rows": awq(-1),
    "packed 4": packed(),
    "packed 4 zeros": packed(sym=False, dtype=torch.float16),
    "packed 4 rows": packed(size=-1),
    "packed 4 rows zeros": packed(size=-1, sym=False),
    "packed 8": packed(bits=8),
    "packed 8 zeros": packed(bits=8, sym=False),
    "packed 8 rows": packed(bits=8, size=-1),
    "packed 4 act-order": packed(shuffled=True),
    "packed 8 act-order": packed(bits=8, shuffled=True, sym=False),
    "float tensor": scaled(
        compressed({**_FLOAT, "strategy": "tensor"}, "float-quantized"),
        "weight_scale",
        (0, 0),
        torch.bfloat16,
        flat=True,
    ),
    "float channel": scaled(
        compressed({**_FLOAT, "strategy": "channel"}, "naive-quantized"), "weight_scale", (1, 0), torch.bfloat16
    ),
    "float block": scaled(
        compressed({**_FLOAT, "strategy": "block", "block_structure": [32, 64]}, "float-quantized"),
        "weight_scale",
        (32, 64),
    ),
    "int8": int8(),
    "int8 zeros": int8(sym=False),
    "fp8 tensor": scaled(_FP8, "weight_scale", (0, 0), flat=True),
    "fp8 tensor inverse": scaled({**_FP8, "weight_block_size": None}, "weight_scale_inv", (0, 0)),
    "fp8 channel": scaled(_FP8, "weight_scale", (1, 0)),
    "fp8 128": scaled({**_FP8, "weight_block_size": [128, 128]}, "weight_scale_inv", (128, 128)),
    "fp8 blocks": scaled({**_FP8, "weight_block_size": [32, 16]}, "weight_scale_inv", (32, 16), torch.bfloat16),
    "fp8 static": static(
        scaled(_FP8, "weight_scale_inv", (0, 0), torch.bfloat16),
        "activation_scale",
        {"activation_scheme": "static", "dequantize": False, "weight_block_size": None},
    ),
}
_STATIC = compressed({**_FLOAT, "strategy": "tensor"}, "float-quantized")
_STATIC["config_groups"]["group_0"]["input_activations"] = {**_FLOAT, "strategy": "tensor"}
_LOCAL = compressed(_NVFP4, "mixed-precision")
_LOCAL["config_groups"]["group_0"] |= {
    "input_activations": {**_NVFP4, "dynamic": "local"},
    "format": "nvfp4-pack-quantized",
}
_ACTS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
_MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {"group_0": {"input_activations": _ACTS, "weights": _ACTS, "targets": ["Linear"]}},
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "ignore": ["lm_head", "model.layers.3.*"],
    "producer": {"name": "modelopt", "version": "0.29.0"},
}
_BLOCKS8 = {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}
_MODELOPT8 = {**_MODELOPT, "quant_algo": "FP8", "config_groups": {"group_0": {"weights": _FLOAT}}}


FORMATS |= {
    "bnb nf4": bnb4("nf4"),
    "bnb nf4 double": bnb4("nf4", double=True),
    "bnb fp4": bnb4("fp4", storage=torch.bfloat16),
    "bnb fp4 double": bnb4("fp4", double=True, storage=torch.float32),
    "bnb int8": bnb8(),
    "modelopt nvfp4": static(floats4(("weight", "weight_scale", "weight_scale_2"), _MODELOPT), "input_scale", {}),
    "modelopt fp8": static(scaled(_MODELOPT8, "weight_scale", (0, 0)), "input_scale", {}),
    "modelopt fp8 channel": scaled(
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "weight_scale", (1, 0), flat=True
    ),
    "modelopt fp8 block": tall(scaled(_BLOCKS8, "weight_scale", (128, 128)), one=True),
    "modelopt fp8 blocks": tall(scaled(_BLOCKS8, "weight_scale", (128, 128))),
    "nvfp4": floats4(_PACKED4, compressed(_NVFP4, "nvfp4-pack-quantized")),
    "nvfp4 static": static(floats4(_PACKED4, _LOCAL), "input_global_scale", {}),
    "mxfp4 packed": floats4(_PACKED4, compressed(_MXFP4, "mxfp4-pack-quantized"), 32),
}
FORMATS["float static"] = static(FORMATS["float tensor"], "input_scale", _STATIC)
