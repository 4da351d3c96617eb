"""The config.json of well-known models, so that their sizes are known without a network."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

SHIPPED = ("demo", "demo-stream")
"""The models that are in the package, in data/ under these names."""

_VARIANTS = "_variants"


class _Model(NamedTuple):
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
        return path.stem.rpartition("-")[0], config.get("num_hidden_layers", 0) * config.get("hidden_size", 0)

    return tuple(path.stem for path in sorted(dict.fromkeys(model.path for model in _models().values()), key=size))


@functools.cache
def _models() -> dict[str, _Model]:
    """Every model under the names it answers to, in lower case: the file's, the hub's, and that without its owner."""
    models: dict[str, _Model] = {}
    folder = configs_folder("models")
    for path in sorted(folder.glob("*.json")) if folder else ():
        config = _read(path)
        models[path.stem.lower()] = _Model(config["_name_or_path"], path)
        for name in (config["_name_or_path"], *config.get(_VARIANTS, ())):
            models[name.lower()] = models[name.rpartition("/")[2].lower()] = _Model(name, path)
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
