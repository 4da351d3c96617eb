"""The config.json in a model's folder, read without torch and as warily as any file that somebody else wrote."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

from h2o_flexgen.errors import ModelError

log = logging.getLogger(__name__)

_MOST = 16 << 20  # bytes


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json in `folder` says, less `auto_map`; ModelError where it is missing, torn or no JSON object."""
    path = folder / "config.json"
    needed = "needed the config.json that belongs to the weights"
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


def _head(path: Path) -> bytes:
    """As much of a regular file as any config.json has."""
    # Without O_NONBLOCK, opening a named pipe would wait for a writer for ever.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(0, "not a regular file", str(path))
        return file.read(_MOST)
