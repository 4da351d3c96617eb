"""Whether the Triton kernels can be used here. This module imports neither them nor Triton."""

from __future__ import annotations

import os
from functools import cache
from importlib import metadata, util

import torch

OLDEST = (3, 6)
"""The oldest Triton that the kernels were tested with: they take named tuples as arguments."""
CAPABILITY = (8, 0)
"""The oldest NVIDIA architecture: matrix products of bfloat16."""


def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter, on any device: TRITON_INTERPRET=1 before it is first imported."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "y", "yes")


def why_not(device: torch.device | str) -> str | None:
    """Why tensors on `device` cannot be worked on by Triton kernels, one sentence; None: they can be."""
    device, missing = torch.device(device), _missing()
    if missing is not None:
        return missing
    if interpreting():
        return None
    if device.type != "cuda":
        return f"Triton has no kernels for a {device.type} device, other than in its interpreter (TRITON_INTERPRET=1)"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if torch.version.hip is None and (found := torch.cuda.get_device_capability(device)) < CAPABILITY:
        return f"the GPU has compute capability {found[0]}.{found[1]}, needed {CAPABILITY[0]}.{CAPABILITY[1]} or newer"
    return None


def available(device: torch.device | str) -> bool:
    """Whether `why_not` has nothing to say."""
    return why_not(device) is None


@cache
def _missing() -> str | None:
    """What is wrong with Triton itself."""
    if util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None  # built beside torch under another name, as vendors do: of torch's own age
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        return f"Triton {version} is installed, needed {OLDEST[0]}.{OLDEST[1]} or newer"
    return None
