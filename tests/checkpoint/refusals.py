"""How a broken checkpoint is refused, the tensor that is broken in most of them, and the matrix in quantised ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_flexgen.errors import ModelError
from tests.checkpoint.models import make_spec, open_tiny
from tests.checkpoint.quantised import Checkpoint

TOKENS = "model.decoder.embed_tokens.weight"
UP = "model.layers.0.mlp.up_proj"


Edit = Callable[[dict[str, Tensor]], object]
"""A change of the tensors of a checkpoint."""


def refused(folder: Path, **changes: Any) -> str:
    """The message with which the checkpoint in `folder` is refused."""
    return _message(lambda: open_tiny(folder, make_spec(**changes)))


def refused_quantised(written: Checkpoint, folder: Path) -> str:
    """The message with which `written` is refused, once it is written to `folder`."""
    written.write(folder)
    return _message(lambda: written.open(folder))


def check_one_problem(written: Checkpoint, folder: Path, edit: Edit, fault: str) -> None:
    """`written` is refused for `fault` alone, once its tensors are changed."""
    edit(written.tensors)
    message = refused_quantised(written, folder)
    assert fault in message
    assert "one problem" in message


def _message(opening: Callable[[], object]) -> str:
    open_fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ModelError) as caught:
        opening()
    assert caught.value.exit_code == 4
    assert len(os.listdir("/proc/self/fd")) == open_fds
    return str(caught.value)


def without(part: str) -> Edit:
    return lambda tensors: tensors.pop(f"{UP}.{part}")


def changed(part: str, change: Callable[[Tensor], Tensor]) -> Edit:
    return lambda tensors: tensors.__setitem__(f"{UP}.{part}", change(tensors[f"{UP}.{part}"]).contiguous())


def extra(part: str) -> Edit:
    return lambda tensors: tensors.__setitem__(f"{UP}.{part}", torch.ones(1))
