"""Opens the checkpoint of a model that was found, whatever its format."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from h2o_flexgen.checkpoint.gguf.source import GgufSource
from h2o_flexgen.checkpoint.hub import ResolvedModel
from h2o_flexgen.checkpoint.reader import open_checkpoint
from h2o_flexgen.checkpoint.source import WeightSource
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.errors import ModelError
from h2o_flexgen.models.families import checkpoint_names, ignored_names
from h2o_flexgen.models.quantized import packings_of_config, read_quantization


def open_stored(found: ResolvedModel, spec: ModelSpec) -> WeightSource:
    """The weights of `found`, of the shape of `spec`, as they are stored. ModelError where they cannot be used."""
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
    with closing(open_stored(found, spec)) as source:
        return replace(spec, packings=tuple(sorted(source.packings.items())))
