"""The Hugging Face cache and hub, by way of huggingface_hub, which is imported only here and only when needed."""

from __future__ import annotations

import errno
import os
import socket
import threading
import urllib.parse
import urllib.request
from pathlib import Path

from h2o_flexgen.checkpoint.shards import wanted_files
from h2o_flexgen.errors import StorageError

_SIDE_FILES = (
    "config.json",
    "generation_config.json",
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
_CONNECT_S = 3.0
_PROBE_S = 5.0  # name resolution has no timeout of its own
_ANSWER_S = 10.0
_TRUE = ("1", "ON", "YES", "TRUE")


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
        raise HubFailure(f"{repo!r} cannot be the name of a model: {_first_line(error)}") from error
    return Path(found).parent if isinstance(found, str) else None


def download(repo: str, revision: str | None, token: str | None, weights: bool) -> Path:
    """Fetch `repo` into the cache, with a progress bar, and return its snapshot.

    Of the weights (if `weights`) the safetensors files are taken, .bin files only where there are none of those. What
    is there already is not fetched again. HubFailure when the hub cannot be reached or has no such model, StorageError
    when the disk is full.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if constants.HF_HUB_OFFLINE:
        raise HubFailure("huggingface_hub was imported with HF_HUB_OFFLINE set")
    _probe(constants.ENDPOINT)
    try:
        info = HfApi().model_info(repo, revision=revision, timeout=_ANSWER_S, token=token)
        names = [file.rfilename for file in info.siblings or ()]
        files = wanted_files(names) if weights else ()
        if weights and not files:
            raise HubFailure(f"{repo} has neither model.safetensors nor pytorch_model.bin, whole or in shards")
        wanted = [*files, *(name for name in _SIDE_FILES if name in names)]
        return Path(snapshot_download(repo, revision=revision, token=token, allow_patterns=wanted))
    except HubFailure:
        raise
    except GatedRepoError as error:
        raise HubFailure(f"{repo} is gated: accept its terms on its page and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise HubFailure(f"{repo} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise HubFailure(f"there is no model {repo}, or it is private and HF_TOKEN does not open it") from error
    except Exception as error:  # the HTTP library below huggingface_hub has changed more than once
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(
                f"downloading {repo} to {cache_folder(repo)} failed: {error.strerror}",
                change="free some space, or name another folder with HF_HOME",
            ) from error
        raise HubFailure(f"{type(error).__name__}: {_first_line(error)}") from error


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


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
