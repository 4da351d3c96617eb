"""What the files of a tokenizer ask for: the light `tokenizers` library, or transformers' AutoTokenizer."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from h2o_flexgen.errors import ModelError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")

_OTHERS = (
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)
"""What says more than a tokenizer.json beside it, other than tokenizer_config.json."""

_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_PLAIN_SETTINGS = ("backend", "model_input_names", "model_max_length", "padding_side", "tokenizer_class")
_PLAIN_VOCABULARY = 100_000  # above it transformers may repair a fault that early Mistral files have
_OVERRULED = ("qwen2",)
"""model_types of ours for which transformers puts a class of its own in the place of a plain one."""


def is_plain(folder: Path) -> bool:
    """Whether tokenizer.json says all there is to say, so that AutoTokenizer would encode and decode as it does."""
    if not (folder / "tokenizer.json").exists() or any((folder / name).exists() for name in _OTHERS):
        return False
    if not (folder / "tokenizer_config.json").exists():
        return True
    settings = read_json(folder / "tokenizer_config.json")
    if settings.get("tokenizer_class") not in _PLAIN_CLASSES:
        return False
    tokenizer = read_json(folder / "tokenizer.json")
    special = {token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    return (
        len(tokenizer["model"]["vocab"]) <= _PLAIN_VOCABULARY
        and read_json(folder / "config.json").get("model_type") not in _OVERRULED
        and all(_adds_nothing(name, value, special) for name, value in settings.items())
    )


def _adds_nothing(name: str, value: Any, special: set[str]) -> bool:
    """Whether a setting of tokenizer_config.json changes no id and no text."""
    if name in _PLAIN_SETTINGS or value is None:
        return True
    if name == "clean_up_tokenization_spaces":
        return value is False
    return name.endswith("_token") and isinstance(value, str) and value in special


def require_sentencepiece(folder: Path) -> None:
    """ModelError where a sentencepiece model is all there is, and what reads it is not installed."""
    if (folder / "tokenizer.json").exists() or not (folder / "tokenizer.model").exists():
        return
    missing = [name for name in ("sentencepiece", "google.protobuf") if not _installed(name)]
    if missing:
        raise ModelError(
            f"the tokenizer in {folder} is a sentencepiece model (tokenizer.model), and {' and '.join(missing)} "
            "cannot be imported",
            "needed a tokenizer.json, or what reads tokenizer.model",
            "pip install 'h2o_flexgen[sentencepiece]'",
        )


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, empty where there is no file. ValueError or OSError for one that cannot be read."""
    loaded = json.loads(path.read_text(encoding="utf-8-sig")) if path.exists() else {}
    if not isinstance(loaded, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return loaded
