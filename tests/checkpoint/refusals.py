"""How a broken checkpoint is refused, and the tensor that is broken in most of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.errors import ModelError
from tests.checkpoint.models import make_spec, open_tiny

TOKENS = "model.decoder.embed_tokens.weight"


def refused(folder: Path, **changes: Any) -> str:
    """The message with which the checkpoint in `folder` is refused."""
    open_fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ModelError) as caught:
        open_tiny(folder, make_spec(**changes))
    assert caught.value.exit_code == 4
    assert len(os.listdir("/proc/self/fd")) == open_fds
    return str(caught.value)
