"""The checkpoint of a model that was found: opened, whatever its format, or refused before torch is imported, which
takes seconds, for all that its tables show."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from h2o_flexgen.checkpoint.binding import Binding, bind_files
from h2o_flexgen.checkpoint.files import CheckpointFile, Fault, Problems
from h2o_flexgen.checkpoint.hub import ResolvedModel
from h2o_flexgen.checkpoint.shards import find_shards
from h2o_flexgen.checkpoint.tables import bin_table, safetensors_table
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import WEIGHT_DTYPES
from h2o_flexgen.errors import H2OFlexGenError, ModelError
from h2o_flexgen.models.families import by_modules, check_config, checkpoint_names, ignored_names
from h2o_flexgen.models.quantized import packings_of_config, read_quantization

if TYPE_CHECKING:
    from h2o_flexgen.checkpoint.source import WeightSource


def check_model(found: ResolvedModel, impl: str, weights: bool) -> None:
    """ModelError for what cannot be used of `found`: its shape, and of its `weights` what the tables of GGUF and
    safetensors files say. Where transformers' modules compute, and for pickled files, loading sees the rest."""
    check_config(found.config, found.name, found.impl(impl))
    if found.gguf is not None:
        if found.impl(impl) == "native":
            found.spec()
        return
    if not weights or found.folder is None:
        return
    root, problems = str(found.folder), Problems()
    shards = find_shards(root, problems)
    if shards is None or not shards.present:
        problems.raise_any(root)
    elif shards.kind == "safetensors" and not by_modules(found.config, found.name, impl):
        spec, quantization = found.spec("native"), read_quantization(found.config, found.name)
        binding = Binding(spec, checkpoint_names(spec), ignored_names(spec), problems, quantization)
        with ExitStack() as opened:
            bind_files(root, shards, binding, opened)
            problems.raise_any(root)


def open_stored(found: ResolvedModel, spec: ModelSpec) -> WeightSource:
    """The weights of `found`, of the shape of `spec`, as they are stored. ModelError where they cannot be used."""
    from h2o_flexgen.checkpoint.gguf.source import GgufSource
    from h2o_flexgen.checkpoint.reader import open_checkpoint

    if found.gguf is not None:
        return GgufSource(found.gguf, spec)
    if found.folder is None:
        raise ModelError(f"{found.name} has a known shape, and no checkpoint was found")
    quantization = read_quantization(found.config, found.name)
    return open_checkpoint(str(found.folder), spec, checkpoint_names(spec), ignored_names(spec), quantization)


def stored_spec(found: ResolvedModel, impl: str = "auto") -> ModelSpec:
    """The shape of `found`, with the dtype and the packings of its checkpoint: where there may be any its tables are
    read, and where only its sizes are known they are what config.json says."""
    spec = found.spec(impl)
    if found.gguf is not None:
        return spec
    if read_quantization(found.config, found.name) is None:
        return as_stored(spec, found.folder)
    if found.folder is None:
        return replace(spec, packings=tuple(packings_of_config(found.config, spec).items()))
    with open_stored(found, spec) as source:
        return replace(spec, dtype=source.dtype, packings=tuple(sorted(source.packings.items())))


def as_stored(spec: ModelSpec, folder: Path | None) -> ModelSpec:
    """`spec` of plain weights, in the dtype of most bytes of the files in `folder`, whatever config.json says; as it is
    where these are missing or damaged."""
    problems, sizes = Problems(), Counter[str]()
    shards = None if folder is None else find_shards(str(folder), problems)
    for name in () if shards is None else sorted(shards.present):
        with suppress(OSError, Fault, H2OFlexGenError), CheckpointFile(f"{folder}/{name}") as file:
            safe = name.endswith(".safetensors")
            table = safetensors_table(file, problems) if safe else bin_table(file, problems, 0)
            for tensor in table.values():
                sizes[tensor.dtype] += tensor.nbytes if tensor.dtype in WEIGHT_DTYPES else 0
    most = max(sizes, key=lambda dtype: (sizes[dtype], dtype), default=spec.dtype)
    return replace(spec, dtype=most) if sizes[most] else spec
