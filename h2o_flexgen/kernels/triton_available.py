"""Whether the Triton kernels can be used here, and are to be. Imports neither them nor Triton before it has to.

None of them has been measured yet: all were compiled for NVIDIA's architecture 9.0 and run in Triton's interpreter.

H2O_FLEXGEN_TRITON=0 leaves them out. With TRITON_INTERPRET=1 and H2O_FLEXGEN_TRITON=1, both, what lies in host memory
is worked on by Triton's interpreter: thousands of times slower, for tests of the whole engine. (Beside a numpy of 2.4
or newer the interpreter of Triton 3.6 needs the mending that `tests/kernels/triton_device.py` does.)
"""

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
    """Why tensors on `device` cannot be worked on by Triton kernels, one sentence; None: they can be.

    On a GPU one small kernel is compiled and run at the first call.
    """
    device = torch.device(device)
    if _switch() is False:
        return "H2O_FLEXGEN_TRITON is 0"
    if (missing := _missing()) is not None:
        return missing
    if interpreting():
        return None
    if device.type != "cuda":
        return f"Triton has no kernels for a {device.type} device, other than in its interpreter (TRITON_INTERPRET=1)"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if torch.version.hip is None and (found := torch.cuda.get_device_capability(device)) < CAPABILITY:
        return f"the GPU has compute capability {found[0]}.{found[1]}, needed {CAPABILITY[0]}.{CAPABILITY[1]} or newer"
    return _failing(device)


def serves(device: torch.device) -> bool:
    """Whether the engine's caches and prompts on `device` are worked on by Triton. Asked often: the answer is kept."""
    interpreted = interpreting()
    return (interpreted or device.type == "cuda") and _serves(device, interpreted, _switch())


@cache
def _serves(device: torch.device, interpreted: bool, switch: bool | None) -> bool:
    asked_for = device.type == "cuda" or (interpreted and switch is True)
    return asked_for and why_not(device) is None


def _switch() -> bool | None:
    """H2O_FLEXGEN_TRITON, if it says yes or no."""
    said = os.environ.get("H2O_FLEXGEN_TRITON", "").lower()
    return True if said in ("1", "true", "yes", "on") else False if said in ("0", "false", "no", "off") else None


@cache
def _failing(device: torch.device) -> str | None:
    """Which kernel goes wrong on this GPU, and how. Triton needs a C compiler for the host's side of a launch, say."""
    kernel = "quantise"
    try:
        from h2o_flexgen.kernels import triton_quant

        x = torch.linspace(-1, 1, 64, device=device).view(1, 64)
        packed = triton_quant.quantise(x, bits=8)
        torch.cuda.synchronize(device)  # an error of a launch would be told at a later one
        kernel = "dequantise"
        if float((triton_quant.dequantise(packed, torch.float32, bits=8) - x).abs().max()) > 0.05:
            return "Triton's kernels quantise and dequantise give wrong numbers on this GPU"
    except Exception as error:  # whatever it is: torch does the same work
        lines = str(error).strip().splitlines()
        said = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
        return f"Triton cannot run the kernel {kernel} here: {said}"
    return None


@cache
def _missing() -> str | None:
    """The fault of Triton itself."""
    if util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None  # built beside torch under another name, as vendors do: of torch's own age
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        return f"Triton {version} is installed, needed {OLDEST[0]}.{OLDEST[1]} or newer"
    return None
