"""Where a model is: in the package, in a folder, in the Hugging Face cache, known by its sizes alone, or on the hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from h2o_flexgen.checkpoint.download import HubFailure, cache_folder, cached_folder, download, offline_wanted
from h2o_flexgen.checkpoint.problems import Problems
from h2o_flexgen.checkpoint.shards import find_shards
from h2o_flexgen.config.folder import read_config
from h2o_flexgen.config.model.known import SHIPPED, known_config, known_names
from h2o_flexgen.errors import ModelError
from h2o_flexgen.registry import suggestion

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
_CONFIG_WANTED = "give a folder that holds its config.json with --model /path/to/folder"
_WAYS_ON = (
    "give the folder of a copy with --model /path/to/folder, or run a model of this shape with random weights: "
    "--weights dummy"
)


@dataclass(frozen=True)
class ResolvedModel:
    """A model that was found.

    `folder` holds its weights (None for "builtin"), `config` is its config.json without the keys that name code,
    `tokenizer_folder` is None where no tokenizer was found, and `searched` says where was looked before, in order.
    """

    name: str
    folder: Path | None
    config: dict[str, Any] = field(repr=False)
    tokenizer_folder: Path | None
    origin: Literal["folder", "cache", "hub", "builtin", "demo"]
    searched: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Request:
    name: str
    revision: str | None
    token: str | None
    need_weights: bool

    @property
    def repo(self) -> str:
        """The hub's name for the model: FlexGen's short names stand for the well-known ones."""
        known = known_config(self.name)
        return str(known["_name_or_path"]) if known else self.name


def resolve_model(
    name: str,
    *,
    path: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    offline: bool | None = None,
    token: str | None = None,
    need_weights: bool = True,
) -> ResolvedModel:
    """Find the model called `name`: one of SHIPPED, a folder, or a name on the hub such as opt-30b or facebook/opt-30b.

    `path` is a folder of models to look in, and then the only place besides the cache. The network is asked last, and
    never for a folder, with `path`, or with `offline` (default: what HF_HUB_OFFLINE says). Without `need_weights` the
    sizes are enough, which are built in for well-known models. Nothing is ever executed, whatever config.json names.

    Raises ModelError that says where was looked and what to do, within seconds on a machine without a network, and
    StorageError where the disk is full.
    """
    request = _Request(name, revision, token, need_weights)
    if name in SHIPPED:
        return _in_folder(name, Path(str(resources.files("h2o_flexgen") / "data" / name)), "demo", ())
    searched: list[str] = []
    for folder in _candidates(name, path):
        searched.append(f"folder {folder}")
        if name and folder.is_dir() and (path is None or (folder / "config.json").exists()):
            return _in_folder(name, folder, "folder", tuple(searched))
    if _is_path(name):
        raise ModelError(
            f"{name!r} is {'a file' if Path(name).expanduser().is_file() else 'not there'}",
            "needed the folder that holds config.json and the weights, or the name of a model",
        )
    return _by_repo(request, searched, offline_wanted() if offline is None else offline, path is not None)


def _by_repo(request: _Request, searched: list[str], offline: bool, stay: bool) -> ResolvedModel:
    """The model from the cache, the built-in sizes, or the hub, in this order."""
    repo, lack = request.repo, None
    try:
        folder = cached_folder(repo, request.revision)
        searched.append(f"cache {cache_folder(repo)}")
        lack = "no config.json of that revision" if folder is None else _lack(folder, request.need_weights)
        if folder is not None and lack is None:
            return _in_folder(request.name, folder, "cache", tuple(searched))
        if not request.need_weights:
            known = known_config(request.name)
            searched.append("built-in sizes")
            if known is not None:
                return ResolvedModel(request.name, None, known, None, "builtin", tuple(searched))
        if stay:
            raise HubFailure("a folder of models is given, so that it is not asked")
        if offline:
            raise HubFailure("the run is offline (--offline, HF_HUB_OFFLINE)")
        folder = download(repo, request.revision, request.token, request.need_weights)
    except HubFailure as error:
        raise _not_found(request, searched, lack, str(error)) from error
    return _in_folder(request.name, folder, "hub", (*searched, "hub"))


def _not_found(request: _Request, searched: list[str], lack: str | None, why: str) -> ModelError:
    called = request.name if request.repo == request.name else f"{request.name} ({request.repo})"
    places = "".join(f"\n  {place}" for place in searched) + (f" ({lack})" if lack and request.need_weights else "")
    near = "" if known_config(request.name) else suggestion(request.name, known_names())
    return ModelError(
        f"the model {called} was not found",
        near,
        (_WAYS_ON if request.need_weights else _CONFIG_WANTED) + f". Looked in:{places}\n  hub: {why}",
    )


def _in_folder(
    name: str, folder: Path, origin: Literal["folder", "cache", "hub", "demo"], searched: tuple[str, ...]
) -> ResolvedModel:
    tokenizer = folder if any((folder / file).is_file() for file in _TOKENIZER_FILES) else None
    return ResolvedModel(name, folder, read_config(folder), tokenizer, origin, searched)


def _candidates(name: str, path: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Folders that `name` may mean."""
    if path is None or _is_path(name):
        yield Path(name).expanduser()
        return
    root = Path(path).expanduser()
    for child in dict.fromkeys((name, name.rpartition("/")[2], name.rpartition("/")[2].lower())):
        yield root / child
    yield root


def _is_path(name: str) -> bool:
    """Whether `name` can only be a path: the hub's names have one slash at most, and start with a letter or digit."""
    return not name or name.startswith((".", "~", os.sep)) or name.count("/") > 1 or "\\" in name or name.endswith("/")


def _lack(folder: Path, need_weights: bool) -> str | None:
    """What a folder of the cache lacks, because a download was cut short or never asked for it."""
    if not need_weights:
        return None
    shards = find_shards(str(folder), Problems())
    if shards is None:
        return f"{folder} holds no weights"
    return f"{folder} lacks {', '.join(shards.missing)}" if shards.missing else None
