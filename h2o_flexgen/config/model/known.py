"""config.json: of well-known models, so that their sizes are known without a network, and of a model's folder."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import stat
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from h2o_flexgen.errors import ModelError
from h2o_flexgen.folders import expanded
from h2o_flexgen.registry import suggestion

log = logging.getLogger(__name__)

SHIPPED = ("demo", "demo-stream", "demo-sums")
"""The models that are in the package, in data/ under these names."""

_VARIANTS = "_variants"
_OTHER_WEIGHTS = re.compile(r".+\.safetensors|(pytorch_model|gptq_model-).*\.bin")  # other .bin files are no weights
_MOST = 16 << 20  # bytes of a config.json


class _KnownModel(NamedTuple):
    """A model of the hub by its name there, and the file that describes it or the one that it is a variant of."""

    name: str
    path: Path


def known_config(name: str) -> dict[str, Any] | None:
    """The config.json contents of the model called `name`, or None for a name that is not known.

    `opt-30b`, `facebook/opt-30b` and either in any case are the same; another owner's `opt-30b` is not. A file's
    `_variants` are models of the same shape by their names, and in what their config.json differs from the file.
    """
    model = _models().get(name.lower())
    if model is None:
        return None
    config = _read(model.path)
    changes = config.pop(_VARIANTS, {}).get(model.name, {})
    return {**config, **changes, "_name_or_path": model.name}


def known_names() -> tuple[str, ...]:
    """The short names (`opt-30b`), each family from small to large; of equal sizes in the order of their names."""

    def size(path: Path) -> tuple[str, int]:
        config = _read(path)
        config = config.get("text_config", config)
        return path.stem.rpartition("-")[0], config.get("num_hidden_layers", 0) * config.get("hidden_size", 0)

    return tuple(path.stem for path in sorted(dict.fromkeys(model.path for model in _models().values()), key=size))


@functools.cache
def _models() -> dict[str, _KnownModel]:
    """Every model under the names it answers to, in lower case: the file's, the hub's, and that without its owner."""
    models: dict[str, _KnownModel] = {}
    folder = configs_folder("models")
    for path in sorted(folder.glob("*.json")) if folder else ():
        config = _read(path)
        models[path.stem.lower()] = _KnownModel(config["_name_or_path"], path)
        for name in (config["_name_or_path"], *config.get(_VARIANTS, ())):
            models[name.lower()] = models[name.rpartition("/")[2].lower()] = _KnownModel(name, path)
    return models


def configs_folder(kind: str) -> Path | None:
    """configs/models or another, as installed inside the package, or beside it in a checkout of the sources."""
    package = Path(__file__).resolve().parents[2]
    installed, checkout = package / "configs" / kind, package.parent / "configs" / kind
    if installed.is_dir():
        return installed
    return checkout if (package.parent / "pyproject.toml").is_file() and checkout.is_dir() else None


def _read(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """The file `name` in `folder`, less `auto_map`; ModelError where it is missing, torn or not a JSON object.

    The file is not trusted: it may be a pipe, endless, or nested too deeply.
    """
    path = folder / name
    needed = f"needed the {name} that belongs to the weights"
    try:
        text = _head(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", needed) from error
    try:
        config = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{path} ({len(text)} bytes) is torn or not JSON: {error}", needed, "download it again"
        ) from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object", needed, "download it again")
    if config.pop("auto_map", None) is not None:
        log.warning("%s names code of its own (auto_map), which is never run", path)
    return config


def model_folder(name: str) -> Path:
    """The folder of a model that is shipped; of another its name as a path, which may lead nowhere."""
    return Path(str(resources.files("h2o_flexgen") / "data" / name)) if name in SHIPPED else expanded(name)


def unknown_model(name: str) -> ModelError:
    """To be raised for a name that is no folder of a model and not known."""
    near = suggestion(name, known_names())
    return ModelError(f"no model {name!r}: neither a folder with a config.json nor a well-known name", near)


def only_gguf(folder: Path) -> bool:
    """Whether `folder` holds GGUF files and no other weights: a config.json beside them says little, or nothing new."""
    names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    return any(is_gguf(name) for name in names) and not any(_OTHER_WEIGHTS.fullmatch(name) for name in names)


def is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def _head(path: Path) -> bytes:
    """As much of a regular file as any config.json has."""
    # Without O_NONBLOCK, opening a named pipe would wait for a writer for ever.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(0, "not a regular file", str(path))
        return file.read(_MOST)
