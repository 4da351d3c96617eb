"""The checkpoint of a model that was found: opened, whatever its format, or refused before torch is imported, which
takes seconds, for all that its tables show."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from h2o_flexgen.checkpoint.binding import Binding, bind_files
from h2o_flexgen.checkpoint.files import Problems
from h2o_flexgen.checkpoint.hub import ResolvedModel
from h2o_flexgen.checkpoint.shards import find_shards
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.errors import ModelError
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
    """The shape of `found`, with the packings of its checkpoint: where there may be any its tables are read, and where
    only its sizes are known they are what config.json says."""
    spec = found.spec(impl)
    if found.gguf is not None or read_quantization(found.config, found.name) is None:
        return spec
    if found.folder is None:
        return replace(spec, packings=tuple(packings_of_config(found.config, spec).items()))
    with open_stored(found, spec) as source:
        return replace(spec, packings=tuple(sorted(source.packings.items())))
