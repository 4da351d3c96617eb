"""Checkpoints of floats of 4 bits, of ModelOpt and of bitsandbytes that are not what they say are refused for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint.formats import FORMATS, bnb4
from tests.checkpoint.quantised import checkpoint
from tests.checkpoint.refusals import UP, Edit, changed, check_one_problem, extra, refused_quantised, without

STATE = "weight.quant_state.bitsandbytes__nf4"


def state(old: str, new: str) -> Edit:
    """Another text in what bitsandbytes says of a matrix in JSON."""

    def replaced(text: torch.Tensor) -> torch.Tensor:
        return torch.tensor(list(bytes(text.tolist()).replace(old.encode(), new.encode())), dtype=torch.uint8)

    return changed(STATE, replaced)


@pytest.mark.parametrize(
    ("name", "edit", "fault"),
    [
        ("bnb nf4", without(STATE), f"tensor '{UP}.{STATE}' is missing"),
        ("bnb nf4", without("weight.absmax"), f"tensor '{UP}.weight.absmax' is missing"),
        ("bnb nf4", without("weight"), f"tensor '{UP}.weight' is missing"),
        ("bnb nf4", changed("weight", lambda x: x[:-1]), "weight': expected shape (3072, 1), found (3071, 1)"),
        ("bnb nf4", changed("weight", lambda x: torch.ones(96, 64)), "expected shape (3072, 1), found (24576, 1)"),
        ("bnb nf4", changed("weight.absmax", lambda x: x[:-1]), "absmax': expected shape (96,), found (191,)"),
        ("bnb nf4", changed("weight.absmax", lambda x: x.to(torch.uint8)), "expected dtype float32, found uint8"),
        ("bnb nf4", changed("weight.absmax", lambda x: x[::2]), f"{STATE}': expected blocksize 64, found 32"),
        ("bnb nf4", changed("weight.quant_map", lambda x: x.flip(0)), "quant_map': expected the levels of nf4"),
        ("bnb nf4", changed("weight.quant_map", lambda x: x * torch.nan), "quant_map': expected the levels of nf4"),
        ("bnb nf4", extra("weight.quant_state.bitsandbytes__fp4"), "bitsandbytes__fp4' has no place"),
        ("bnb nf4", state("[96, 64]", "[64, 96]"), "expected shape [96, 64], found [64, 96]"),
        ("bnb nf4", state('"nf4"', '"fp4"'), "expected quant_type nf4, found 'fp4'"),
        ("bnb nf4", state('"nf4"', "NaN"), "expected JSON (NaN"),
        ("bnb nf4", state("}", ""), "expected JSON ("),
        ("bnb nf4", changed(STATE, lambda x: x * 0 + 49), "expected quant_type nf4, found None"),
        ("bnb nf4", changed(STATE, lambda x: x[:0]), "expected JSON ("),
        ("bnb nf4", changed(STATE, lambda x: x.repeat(100)), "expected shape (4096,), found (7"),
        ("bnb nf4 double", without("weight.nested_absmax"), "weight.nested_absmax' is missing"),
        ("bnb nf4 double", changed("weight.nested_quant_map", lambda x: x[1:]), "expected shape (256,), found (255,)"),
        ("bnb nf4 double", state("0.2103645", "1e30"), "expected a number as nested_offset, found inf"),
        ("bnb nf4 double", state("256", "128"), "expected nested_blocksize 256, found 128"),
        ("bnb int8", without("SCB"), f"tensor '{UP}.SCB' is missing"),
        ("bnb int8", changed("SCB", lambda x: x[:1]), "SCB': expected shape (96,), found (1,)"),
        ("bnb int8", changed("weight_format", lambda x: x + 2), "weight_format': expected 0, rows, found 2"),
        ("bnb int8", extra("weight.absmax"), f"tensor '{UP}.weight.absmax' has no place"),
        ("nvfp4", without("weight_global_scale"), f"tensor '{UP}.weight_global_scale' is missing"),
        ("nvfp4", changed("weight_global_scale", lambda x: x * 0), "expected a number above 0, found 0.0"),
        ("nvfp4", changed("weight_global_scale", lambda x: x * torch.nan), "expected a number above 0, found nan"),
        ("nvfp4", changed("weight_global_scale", lambda x: x.repeat(2)), "expected shape () or (1,) or (1, 1), found"),
        ("nvfp4", changed("weight_packed", lambda x: x.to(torch.int32)), "expected dtype uint8, found int32"),
        ("nvfp4", changed("weight_scale", lambda x: x.half()), "expected dtype float8_e4m3fn, found float16"),
        ("nvfp4", extra("input_global_scale"), "input_global_scale' of model.safetensors is not part of this model"),
        ("mxfp4 packed", changed("weight_scale", lambda x: x[:, :1]), "expected shape (96, 2), found (96, 1)"),
        ("mxfp4 packed", extra("weight_global_scale"), "weight_global_scale' has no place"),
        ("modelopt nvfp4", without("weight_scale_2"), f"tensor '{UP}.weight_scale_2' is missing"),
        ("modelopt nvfp4", changed("weight_scale_2", lambda x: -x), "weight_scale_2': expected a number above 0"),
        ("modelopt nvfp4", extra("pre_quant_scale"), "pre_quant_scale' of model.safetensors is not part of"),
        ("modelopt fp8", extra("weight_scale_2"), "weight_scale_2' has no place"),
        ("modelopt fp8", changed("weight", lambda x: x.view(torch.uint8)), "expected dtype float8_e4m3fn, found uint8"),
        ("modelopt fp8 blocks", changed("weight_scale", lambda x: x.repeat(2, 1, 1, 1)), "expected shape (1, 1), f"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_as_config_json_says(tmp_path: Path, name: str, edit: Edit, fault: str) -> None:
    check_one_problem(checkpoint(FORMATS[name]), tmp_path, edit, fault)


def test_blocks_that_lie_across_rows(tmp_path: Path) -> None:
    written = checkpoint(bnb4("nf4", 64))
    fault = "down_proj cannot be quantised as config.json says: blocks of 64 numbers do not lie within its rows of 96"
    assert fault in refused_quantised(written, tmp_path)
