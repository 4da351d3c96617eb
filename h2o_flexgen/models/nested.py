"""The language model of a multimodal checkpoint: its config inside the other, its tensors behind a prefix. No torch.

Text only. Tensors that belong to images are left where they are, and never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from h2o_flexgen.errors import ModelError
from h2o_flexgen.models.stored import Names, Stored

_TEXT_TYPES = {"gemma3": "gemma3_text", "mistral3": "mistral"}
"""The model_type of multimodal models, and that of their language model where the file leaves it out."""

_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
"""Keys that a file may have outside of the language model's config."""
_AS_WELL = ("quantization_config", "_name_or_path")
_TIED = "tie_word_embeddings"
"""Of which that of the whole model decides, as in transformers."""

IGNORED = (r"^(model\.)?(vision_tower|multi_modal_projector)\.",)
"""Regular expressions, to be searched for, of tensors that belong to images."""


def text_config(config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The config of the language model inside `config`, as a config.json of its own; None: `config` is of no known
    multimodal model. ModelError where it has none that makes sense."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _TEXT_TYPES:
        return None
    inner = config.get("text_config", {})
    if not isinstance(inner, dict):
        raise ModelError(f"{name}: text_config is {str(inner)[:80]!r} in config.json", "needed an object")
    outer = {key: config[key] for key in (*_SHARED, *_AS_WELL) if config.get(key) is not None}
    given = {key: value for key, value in inner.items() if value is not None or key not in outer}
    tied = {} if config.get(_TIED) is None else {_TIED: config[_TIED]}
    return {"model_type": _TEXT_TYPES[kind], **outer, **given, **tied}


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config`, of any model, with an output head of its own."""
    inner = config.get("text_config")
    within = {"text_config": {**inner, _TIED: False}} if isinstance(inner, Mapping) else {}
    return {**config, _TIED: False, **within}


def within(names: Names) -> Names:
    """`names` of a language model in a multimodal checkpoint: as on the hub, and as newer transformers write it."""
    return {name: tuple(inner for place in places for inner in _inside(place)) for name, places in names.items()}


def _inside(place: str | Stored) -> list[str | Stored]:
    old = place if isinstance(place, str) else place.name
    if old.startswith("model."):
        new = [f"language_model.{old}", f"model.language_model.{old.removeprefix('model.')}"]
    else:
        new = [f"language_model.{old}", old] if old == "lm_head.weight" else []
    return [each if isinstance(place, str) else replace(place, name=each) for each in new]
