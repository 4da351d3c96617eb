"""Where the Triton kernels are tested: on a GPU if there is one, else in Triton's interpreter. Import this first.

TRITON_INTERPRET=1 asks for the interpreter beside a GPU, too. Without Triton the importing module is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from h2o_flexgen.kernels.triton_available import interpreting, why_not

DEVICE = "cpu" if interpreting() else "cuda"

if interpreting() and isinstance(tl.max, JITFunction):
    pytest.skip("something has imported Triton before TRITON_INTERPRET=1 was set", allow_module_level=True)
if (reason := why_not(DEVICE)) is not None:
    pytest.skip(reason, allow_module_level=True)


def _whole_numbers_of_one_element_arrays(patch: Callable[..., None]) -> Callable[..., None]:
    """Loop bounds in the interpreter of Triton 3.6 with numpy 2.4, which converts no array of one element to int."""

    def patched(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    return patched


if interpreting() and not getattr(interpreter, "patched_for_numpy", False):
    interpreter._patch_lang_tensor = _whole_numbers_of_one_element_arrays(interpreter._patch_lang_tensor)
    interpreter.patched_for_numpy = True
