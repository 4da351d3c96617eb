"""A model before it is placed: its shape, its source of weights, its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from h2o_flexgen.checkpoint.gguf.source import GgufSource
from h2o_flexgen.checkpoint.hub import resolve_model
from h2o_flexgen.checkpoint.quantising import QuantisingSource
from h2o_flexgen.checkpoint.reader import open_checkpoint
from h2o_flexgen.checkpoint.source import DummySource, WeightSource
from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.engine.limits.devices import resolve_dtype
from h2o_flexgen.engine.requests.tokenizer import TextCodec, read_json
from h2o_flexgen.errors import ModelError, UsageError
from h2o_flexgen.models.families import checkpoint_names, ignored_names, spec_from_config
from h2o_flexgen.models.quantized import read_quantization


@dataclass
class Model:
    """What `open_model` found. `source` holds open files until it is closed."""

    spec: ModelSpec
    source: WeightSource
    codec: TextCodec | None
    dtype: str
    folder: Path | None
    origin: str

    @property
    def dummy(self) -> bool:
        return self.source.dummy


def open_model(config: EngineConfig, device: torch.device) -> Model:
    """Finds the model that `config` names and checks all of it that can be checked without reading weights.

    ModelError saying what was looked for and where. With dummy weights only a config.json is needed.
    """
    dummy = config.weights == "dummy"
    found = resolve_model(
        config.model, path=config.path, revision=config.revision, offline=config.offline, need_weights=not dummy
    )
    spec = _with_generation_eos(spec_from_config(found.config, found.name), found.folder)
    spec = spec.with_cache_bits(config.cache_bits)
    source: WeightSource
    if dummy:
        source = DummySource(spec, spec.dtype, config.seed)
    elif found.gguf is not None:
        source = GgufSource(found.gguf, spec)
    elif found.folder is None:
        raise ModelError(f"{found.name} has a known shape, and no checkpoint was found")
    else:
        quantization = read_quantization(found.config, found.name)
        names, ignored = checkpoint_names(spec), ignored_names(spec)
        source = open_checkpoint(str(found.folder), spec, names, ignored, quantization)
    dtype = resolve_dtype(config.dtype, source.dtype, device)
    if found.gguf is not None:
        codec = TextCodec.of_gguf(found.gguf.metadata, found.gguf.path)
    else:
        codec = TextCodec.open(Path(found.tokenizer_folder) if found.tokenizer_folder else None)
    if dummy:
        # Random numbers have no stored dtype: making them in the dtype they are used in saves a conversion.
        source = DummySource(spec, dtype, config.seed)
    spec, source = _with_bits(spec, source, config)
    return Model(spec, source, codec, dtype, Path(found.folder) if found.folder else None, found.origin)


def _with_bits(spec: ModelSpec, source: WeightSource, config: EngineConfig) -> tuple[ModelSpec, WeightSource]:
    """The model as it is kept: packed as it is stored or as the settings say."""
    if source.packings and not config.dequantize:
        if config.weight_bits != 16:
            source.close()
            raise UsageError(
                f"weight_bits is {config.weight_bits} for {spec.name}, whose checkpoint has packed weights",
                "needed a checkpoint of 16 bits or more",
                "leave it out, or dequantize as well: what is expanded is then packed anew",
            )
        return replace(spec, packings=tuple(sorted(source.packings.items()))), source
    if config.weight_bits == 16:
        return spec, source
    made = spec.with_bits(config.weight_bits, config.weight_group)
    return made, QuantisingSource(source, made)


def _with_generation_eos(spec: ModelSpec, folder: Path | None) -> ModelSpec:
    """generation_config.json goes before config.json, as in transformers: what ends a turn of a chat is only there."""
    if folder is None:
        return spec
    path = Path(folder) / "generation_config.json"
    try:
        eos = read_json(path).get("eos_token_id")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", "needed JSON", "download it again") from error
    said = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token) is int for token in said):
        raise ModelError(f"eos_token_id is {eos!r} in {path}", "needed a token id or a list of them")
    tokens = tuple(token for token in said if 0 <= token < spec.vocab_size)  # others can never be chosen
    if not tokens:
        return spec
    return replace(spec, eos_token_id=tokens[0] if len(tokens) == 1 else tokens)
