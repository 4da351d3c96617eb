"""Which GPU the tests of this folder run on: a CUDA device, or the emulated tier where the environment asks for it.

H2O_FLEXGEN_GPU_TESTS=emulated has the tests of tokens run without a GPU, in host memory: what `scripts/gpu_check.sh
--dry-run` walks through, and how these tests are tested.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

EMULATED = os.environ.get("H2O_FLEXGEN_GPU_TESTS") == "emulated"
CUDA = torch.cuda.is_available()

on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not (CUDA or EMULATED), reason="needs a CUDA device")]
"""The marks of a module of tests that may run on the emulated tier."""


def engine_settings() -> dict[str, Any]:
    """What tells an engine to compute on the GPU under test."""
    return {"device": "cuda"} if CUDA else {"emulate_gpu": "1GiB"}
