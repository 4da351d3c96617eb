"""Where the Triton kernels are tested: on a GPU if there is one, else in Triton's interpreter. Import this first.

TRITON_INTERPRET=1 asks for the interpreter beside a GPU, too. Without Triton the importing module is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
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


class _Language:
    """Puts the interpreter's functions in the places of Triton's, for the time of a launch.

    The interpreter looks for all of them at every launch and at every call of a function within a kernel, `tl.sum`
    among them, which takes most of its time. They are always the same: they are looked for once here.
    """

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        # As for a kernel that sees both modules: functions of tl.standard see the second one.
        scope = patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        self._patched = [(owner, name, getattr(owner, name)) for owner, name, _ in scope._changes]
        scope.restore()
        self._running = False

    def __call__(self, function: object) -> _Language:
        if not self._running:
            self._running, self._scope = True, interpreter._LangPatchScope()
            for change in self._patched:
                self._scope.set_attr(*change)
        return self

    def restore(self) -> None:
        """The launch is over: the interpreter calls this for kernels alone, not for the functions within."""
        self._running = False
        self._scope.restore()


if interpreting() and not isinstance(interpreter._patch_lang, _Language):
    interpreter._patch_lang_tensor = _whole_numbers_of_one_element_arrays(interpreter._patch_lang_tensor)
    interpreter._patch_lang = _Language(interpreter._patch_lang)
