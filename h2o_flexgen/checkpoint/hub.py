"""Where a model is: in the package, in a folder, in the Hugging Face cache, known by its sizes alone, or on the hub.

huggingface_hub is imported only here and only when needed.
"""

from __future__ import annotations

import errno
import glob
import logging
import os
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from h2o_flexgen.checkpoint.files import Problems
from h2o_flexgen.checkpoint.gguf.architectures import ARCHITECTURES
from h2o_flexgen.checkpoint.gguf.config import MODULES, config_of, not_a_model
from h2o_flexgen.checkpoint.gguf.header import GgufHeader, part_number, read_header
from h2o_flexgen.checkpoint.gguf.names import packings_of
from h2o_flexgen.checkpoint.shards import find_shards, other_layout, shards_of, wanted_files
from h2o_flexgen.config.model.known import (
    SHIPPED,
    is_gguf,
    known_config,
    known_names,
    model_folder,
    only_gguf,
    read_config,
)
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.errors import H2OFlexGenError, ModelError, StorageError, first_line
from h2o_flexgen.folders import ask_for, expanded
from h2o_flexgen.models.families import spec_from_config
from h2o_flexgen.models.quantized import SETTINGS_FILES, read_quantization
from h2o_flexgen.registry import suggestion

log = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
_CONFIG_WANTED = "give a folder that holds its config.json with --model /path/to/folder"
_WAYS_ON = (
    "give the folder of a copy with --model /path/to/folder, or run a model of this shape with random weights: "
    "--weights dummy"
)
TOKENIZER_SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_SIDE_FILES = ("config.json", "generation_config.json", *SETTINGS_FILES, *TOKENIZER_SIDE_FILES)
_BESIDE_MODELS = ("mmproj", "imatrix", "ggml-vocab", "ggml-lora")
"""Words in the names of GGUF files that belong to a model and are none."""
_CONNECT_S = 3.0
_PROBE_S = 5.0  # name resolution has no timeout of its own
_ANSWER_S = 10.0
_TRUE = ("1", "ON", "YES", "TRUE")


@dataclass(frozen=True)
class ResolvedModel:
    """A model that was found.

    `folder` holds its weights (None for "builtin"), `config` is its config.json without the keys that name code,
    `tokenizer_folder` is None where no tokenizer was found, and `searched` says where was looked before, in order.
    Where `gguf` is not None the weights, `config` and the tokenizer are those of a GGUF file in `folder`.
    """

    name: str
    folder: Path | None
    config: dict[str, Any] = field(repr=False)
    tokenizer_folder: Path | None
    origin: Literal["folder", "cache", "hub", "builtin", "demo"]
    searched: tuple[str, ...] = ()
    gguf: GgufHeader | None = field(default=None, repr=False)

    def spec(self, impl: str = "auto") -> ModelSpec:
        """The shape of the model, for one of `config.engine.MODEL_IMPLS`. ModelError for what is not supported."""
        spec = spec_from_config(self.config, self.name, self.impl(impl))
        return spec if self.gguf is None else replace(spec, packings=packings_of(self.gguf, spec))

    def impl(self, wanted: str) -> str:
        """`wanted` of `config.engine.MODEL_IMPLS`; of a GGUF file one that its architecture has, the native one before
        the other, and ModelError where that is not wanted."""
        if self.gguf is None:
            return wanted
        architecture = self.gguf.metadata.get("general.architecture")
        tables: dict[str, Mapping[str, object]] = {"native": ARCHITECTURES, "transformers": MODULES}
        ways = [way for way, table in tables.items() if architecture in table]
        if wanted not in ("auto", *ways):
            needed = f"needed safetensors for --model-impl {wanted}"
            raise ModelError(f"{self.name} is a GGUF file of {architecture}", needed, "use --model-impl auto")
        return ways[0] if wanted == "auto" else wanted


def resolve_model(
    name: str,
    *,
    path: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    offline: bool | None = None,
    need_weights: bool = True,
) -> ResolvedModel:
    """Find the model called `name`: one of SHIPPED, a folder, or a name on the hub such as opt-30b or facebook/opt-30b.

    A .gguf file is a model, and so is a folder with one of them and no other weights. `path` is a folder of
    models to look in, and then the only place besides the cache. The network is asked last, and never for a folder,
    with `path`, or with `offline` (default: as HF_HUB_OFFLINE says). Without `need_weights` the sizes are enough,
    which are built in for well-known models. No code of a model is ever executed, even if config.json names some.

    Raises ModelError that says where was looked and what to do, within seconds on a machine without a network, and
    StorageError where the disk is full.
    """
    if name in SHIPPED:
        if path is not None:
            log.warning("--path has no effect on %s, which is shipped; name another with --model", name)
        return _in_folder(name, model_folder(name), "demo", ())
    searched: list[str] = []
    for folder in _candidates(name, path):
        searched.append(f"folder {folder}")
        folder = folder.absolute()  # files are opened later, wherever the process is then
        ask_for(folder)
        file = _gguf_file(folder) if name else None
        if file is not None:
            header = read_header(file)
            return ResolvedModel(name, file.parent, config_of(header), None, "folder", tuple(searched), header)
        if name and folder.is_dir() and (path is None or (folder / "config.json").exists()):
            return _in_folder(name, folder, "folder", tuple(searched))
    if _is_path(name):
        raise ModelError(
            f"{name!r} is {'a file' if expanded(name).is_file() else 'not there'}",
            "needed the folder that holds config.json and the weights, a .gguf file, or the name of a model",
        )
    if path is not None:
        barred = "a folder of models is given, so that it is not asked"
    elif offline_wanted() if offline is None else offline:
        barred = "the run is offline (--offline, HF_HUB_OFFLINE)"
    else:
        barred = ""
    return _by_repo(name, revision, need_weights, searched, barred)


def _by_repo(name: str, revision: str | None, need_weights: bool, searched: list[str], barred: str) -> ResolvedModel:
    """The model from the cache, the built-in sizes, or the hub, in this order. `barred`: why the hub is not asked."""
    known, lack = known_config(name), None
    # The hub's name for the model: FlexGen's short names stand for the well-known ones.
    repo = str(known["_name_or_path"]) if known else name
    try:
        folder = cached_folder(repo, revision)
        searched.append(f"cache {cache_folder(repo)}")
        lack = "no config.json of that revision" if folder is None else _lack(folder, need_weights)
        if folder is not None and lack is None:
            return _in_folder(name, folder, "cache", tuple(searched))
        if not need_weights:
            searched.append("built-in sizes")
            if known is not None:
                return ResolvedModel(name, None, known, None, "builtin", tuple(searched))
        if barred:
            raise HubFailure(barred)
        folder = download(repo, revision, need_weights)
    except HubFailure as error:
        called = name if repo == name else f"{name} ({repo})"
        places = "".join(f"\n  {place}" for place in searched) + (f" ({lack})" if lack and need_weights else "")
        ways = _WAYS_ON if need_weights else _CONFIG_WANTED
        raise ModelError(
            f"the model {called} was not found",
            "" if known else suggestion(name, known_names()),
            f"{ways}. Looked in:{places}\n  hub: {error}",
        ) from error
    return _in_folder(name, folder, "hub", (*searched, "hub"))


def _in_folder(
    name: str, folder: Path, origin: Literal["folder", "cache", "hub", "demo"], searched: tuple[str, ...]
) -> ResolvedModel:
    tokenizer = folder if any((folder / file).is_file() for file in _TOKENIZER_FILES) else None
    if not (folder / "config.json").exists():
        other = other_layout(os.listdir(folder))
        if other:
            raise ModelError(f"{folder} is no model: {other}")
    return ResolvedModel(name, folder, _with_settings(read_config(folder), folder), tokenizer, origin, searched)


def _with_settings(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`config` with the settings of a quantiser from a file of their own, where it has none: AutoGPTQ and AutoAWQ wrote
    them beside config.json before transformers read them. ModelError for such a file that is not understood."""
    if config.get("quantization_config") or config.get("compression_config"):
        return config
    for file in SETTINGS_FILES:
        if (folder / file).is_file():
            settings = read_config(folder, file)
            awq = "w_bit" in settings or "zero_point" in settings
            method = "modelopt" if file == SETTINGS_FILES[2] else "awq" if awq else "gptq"
            whole = {**config, "quantization_config": {"quant_method": method, **settings}}
            try:
                read_quantization(whole, str(folder))
            except ModelError as error:
                raise error.reworded(
                    lambda text: text.replace("quantization_config.", "").replace("config.json", file)  # noqa: B023
                ) from error
            return whole
    return config


def _gguf_file(place: Path) -> Path | None:
    """The GGUF file that `place` is, or the language model among those that it holds, if it has no other weights.

    Of a split model this is the first part. ModelError where several models are there.
    """
    if place.is_file():
        return place if is_gguf(place.name) else None
    if not only_gguf(place):
        return None
    files = [file for file in sorted(place.iterdir()) if is_gguf(file.name) and file.is_file()]
    first = [file for file in files if part_number(file.name) in (None, 1)]
    models = [file for file in first if not any(word in file.name.lower() for word in _BESIDE_MODELS)]
    if len(models) > 1:
        models = [file for file in models if _is_model(file)] or models
    first = models or first
    if len(first) > 1:
        names = ", ".join(file.name for file in first[:5]) + (", ..." if len(first) > 5 else "")
        raise ModelError(f"{place} holds {len(first)} GGUF models: {names}", change="give one of them with --model")
    return first[0] if first else files[0] if files else None


def _is_model(file: Path) -> bool:
    """Whether a GGUF file says that it is one, or cannot be read to the end of its header."""
    try:
        return not_a_model(read_header(file)) is None
    except ModelError:
        return True


def _candidates(name: str, path: str | os.PathLike[str] | None) -> Iterator[Path]:
    if path is None or _is_path(name):
        yield expanded(name)
        return
    root = expanded(path)
    for child in dict.fromkeys((name, name.rpartition("/")[2], name.rpartition("/")[2].lower())):
        yield root / child
    yield root


def _is_path(name: str) -> bool:
    """Whether `name` can only be a path: the hub's names have one slash at most, and start with a letter or digit."""
    return not name or name.startswith((".", "~", os.sep)) or name.count("/") > 1 or "\\" in name or name.endswith("/")


def _lack(folder: Path, need_weights: bool) -> str | None:
    """The files that a folder of the cache lacks, because a download was cut short or never asked for it."""
    if not need_weights:
        return None
    shards = find_shards(str(folder), Problems())
    if shards is None:
        return f"{folder} holds no weights"
    return f"{folder} lacks {', '.join(shards.missing)}" if shards.missing else None


class HubFailure(Exception):
    """Why the hub did not deliver; the message completes "hub: ..."."""


def offline_wanted() -> bool:
    """Whether the environment forbids the network, as huggingface_hub and transformers read it."""
    return any(os.environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def cache_folder(repo: str) -> Path:
    """Where the cache keeps `repo`, whether it does or not."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def cached_folder(repo: str, revision: str | None) -> Path | None:
    """The snapshot of `repo` in the cache, if it has at least a config.json; opens no socket.

    HubFailure for what cannot be the name of a model.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repo, "config.json", revision=revision)
    except (HFValidationError, ValueError) as error:
        raise HubFailure(f"{repo!r} cannot be the name of a model: {first_line(error)}") from error
    return Path(found).parent if isinstance(found, str) else None


def download(repo: str, revision: str | None, weights: bool) -> Path:
    """Fetch `repo` into the cache, with a progress bar, and return its snapshot.

    Of the weights (if `weights`) the safetensors files are taken, .bin files only where there are none of those, and of
    an index the files that it names. Files in the cache are not fetched again. HubFailure when the hub cannot be
    reached or has no such model, ModelError for an index that cannot be used, StorageError when the disk is full.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if constants.HF_HUB_OFFLINE:
        raise HubFailure("huggingface_hub was imported with HF_HUB_OFFLINE set")
    _probe(constants.ENDPOINT)
    try:
        info = HfApi().model_info(repo, revision=revision, timeout=_ANSWER_S)
        names = [file.rfilename for file in info.siblings or ()]
        wanted = [name for name in _SIDE_FILES if name in names]
        first = wanted_files(names) if weights else None
        if weights and first is None:
            none, other = "neither model.safetensors nor pytorch_model.bin, whole or in shards", other_layout(names)
            raise HubFailure(f"{repo} has {none}" + (f": {other}" if other else ""))
        fetch = partial(snapshot_download, repo, revision=revision)
        wanted += [first] if first is not None else []
        if first is not None and first.endswith(".index.json"):
            shards = shards_of(Path(fetch(allow_patterns=glob.escape(first)), first))
            lacking = [name for name in shards if name not in names]
            if lacking:
                raise HubFailure(f"{repo} has no {lacking[0]}, which its {first} names")
            wanted += shards
        return Path(fetch(allow_patterns=[glob.escape(name) for name in wanted]))
    except (HubFailure, H2OFlexGenError):
        raise
    except GatedRepoError as error:
        raise HubFailure(f"{repo} is gated: accept its terms on its page and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise HubFailure(f"{repo} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise HubFailure(f"the hub has no model {repo}, or it is private and HF_TOKEN does not open it") from error
    except Exception as error:  # the HTTP library below huggingface_hub has changed more than once
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(
                f"downloading {repo} to {cache_folder(repo)} failed: {error.strerror}",
                change="free some space, or name another folder with HF_HOME",
            ) from error
        raise HubFailure(f"{type(error).__name__}: {first_line(error)}") from error


def _probe(endpoint: str) -> None:
    """HubFailure unless something accepts a connection at `endpoint`, or at the proxy on the way, within seconds."""
    parts = urllib.parse.urlsplit(endpoint)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        parts = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    where = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
    outcome: list[str] = []

    def connect() -> None:
        try:
            socket.create_connection(where, timeout=_CONNECT_S).close()
            outcome.append("")
        except (OSError, UnicodeError) as error:
            outcome.append(str(error))

    thread = threading.Thread(target=connect, name="hub-probe", daemon=True)
    thread.start()
    thread.join(_PROBE_S)
    reason = outcome[0] if outcome else f"no answer within {_PROBE_S:g} s"
    if reason:
        raise HubFailure(f"{where[0]} cannot be reached: {reason}")
