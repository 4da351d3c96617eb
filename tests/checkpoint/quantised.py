"""Tiny quantised checkpoints, and what their weights stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from h2o_flexgen.checkpoint.reader import CheckpointSource, open_checkpoint
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.families import checkpoint_names, ignored_names, spec_from_config
from h2o_flexgen.models.quantized import read_quantization
from tests.checkpoint.formats import FORMATS, Format, Matrix
from tests.seeds import torch_generator

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "torch_dtype": "float16",
}


_PLAIN = re.compile(r"\.(gate|router)\.weight$|correction_bias$|expert_bias$")
"""Routers, and their biases in float32: quantisers leave them as they are."""


class Checkpoint(NamedTuple):
    """A checkpoint to be written, and what its tensors stand for, by their usual names."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    dense: dict[str, Tensor]

    @property
    def spec(self) -> ModelSpec:
        return spec_from_config(self.config, "tiny")

    def put(self, module: str, weight: Matrix | Tensor) -> None:
        """Store the weight of `module` anew: quantised, or as it is."""
        for name in [name for name in self.tensors if name.startswith(f"{module}.")]:
            self.tensors.pop(name)
        matrix = weight if isinstance(weight, Matrix) else Matrix({"weight": weight}, weight.float())
        self.tensors.update({f"{module}.{part}": each for part, each in matrix.parts.items()})
        self.dense[f"{module}.weight"] = matrix.dense

    def write(self, folder: Path) -> Path:
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def open(self, folder: Path) -> CheckpointSource:
        return open_folder(folder)


def checkpoint(form: Format, **changes: Any) -> Checkpoint:
    """A tiny model whose projections are all stored so. What slow loops wrote of FORMATS is kept."""
    name = next((name for name, known in FORMATS.items() if known is form), None)
    made = _written(name, json.dumps(changes)) if name else _made(form, changes)
    return Checkpoint(json.loads(json.dumps(made.config)), dict(made.tensors), dict(made.dense))


@cache
def _written(name: str, changes: str) -> Checkpoint:
    return _made(FORMATS[name], json.loads(changes))


def _made(form: Format, changes: Mapping[str, Any]) -> Checkpoint:
    plain = {**CONFIG, **changes}
    generator = torch_generator(3)
    spec = spec_from_config(plain, "tiny")
    shapes = {tensor.name: tensor.shape for group in spec.weight_groups for tensor in group.tensors}
    sizes: dict[str, tuple[int, ...]] = {}
    for name, options in checkpoint_names(spec).items():
        option = options[0]
        stored, rows = (option, shapes[name][0]) if isinstance(option, str) else (option.name, option.rows)
        whole = () if isinstance(option, str) else option.shape
        sizes[stored] = whole or (rows, *shapes[name][1:])
    tensors: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for stored, size in sizes.items():
        module = stored.removesuffix(".weight")
        if len(size) == 2 and ".layers." in stored and not _PLAIN.search(stored):
            matrix = form.write(generator, *size)
            tensors |= {f"{module}.{part}": each for part, each in matrix.parts.items()}
            meant[stored] = matrix.dense
        else:
            drawn = torch.randn(size, generator=generator) * 0.1
            tensors[stored] = drawn if stored.endswith("bias") and _PLAIN.search(stored) else drawn.half()
            meant[stored] = tensors[stored].float()
    return Checkpoint({**plain, "quantization_config": form.config}, tensors, meant)


def open_folder(folder: Path) -> CheckpointSource:
    config = json.loads((folder / "config.json").read_text())
    spec = spec_from_config(config, "tiny")
    quantization = read_quantization(config, "tiny")
    return open_checkpoint(folder, spec, checkpoint_names(spec), ignored_names(spec), quantization)


def expected_tensors(written: Checkpoint) -> dict[str, Tensor]:
    """What each canonical tensor stands for."""
    found = {}
    for name, options in checkpoint_names(written.spec).items():
        option = options[0]
        if isinstance(option, str):
            found[name] = written.dense[option]
        else:
            found[name] = torch.cat([written.dense[option.name][start:stop] for start, stop in option.spans or ()])
    return found


def shapes_of(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tuple(tensor.shape) for group in spec.weight_groups for tensor in group.tensors}


def read_tensor(source: CheckpointSource, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    out = torch.full(shape, float("nan"), dtype=dtype)
    source.read_into(name, out)
    return out
