"""The config.json of well-known models, so that their sizes are known without a network."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any


def known_config(name: str) -> dict[str, Any] | None:
    """The config.json contents of the model called `name`, or None for a name that is not known.

    `opt-30b`, `facebook/opt-30b` and either in any case are the same; another owner's `opt-30b` is not.
    """
    path = _paths().get(name.lower())
    return None if path is None else _read(path)


def known_names() -> tuple[str, ...]:
    """The short names (`opt-30b`), each family from small to large."""

    def size(path: Path) -> tuple[str, int]:
        config = _read(path)
        return path.stem.rpartition("-")[0], config.get("num_hidden_layers", 0) * config.get("hidden_size", 0)

    return tuple(path.stem for path in sorted(set(_paths().values()), key=size))


@functools.cache
def _paths() -> dict[str, Path]:
    """Every file under the names it answers to, all in lower case."""
    names: dict[str, Path] = {}
    folder = _folder()
    for path in sorted(folder.glob("*.json")) if folder else ():
        names[path.stem.lower()] = path
        names[str(_read(path)["_name_or_path"]).lower()] = path
    return names


def _folder() -> Path | None:
    """configs/models, as installed inside the package, or beside it in a checkout of the sources."""
    package = Path(__file__).resolve().parent.parent
    installed, checkout = package / "configs" / "models", package.parent / "configs" / "models"
    if installed.is_dir():
        return installed
    return checkout if (package.parent / "pyproject.toml").is_file() and checkout.is_dir() else None


def _read(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config
