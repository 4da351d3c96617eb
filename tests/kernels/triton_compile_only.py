"""Compiles the kernels for an NVIDIA GPU that is not there: a program that prints a line of JSON for each.

The host code runs as it would, with tensors in host memory; a driver of our own takes the place of CUDA's, says that it
is a GPU of architecture 9.0, and launches nothing. Triton brings the compiler down to machine code with it.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from h2o_flexgen.config.model.packing import Packing
from h2o_flexgen.kernels import triton_experts, triton_linear, triton_prompt, triton_quant, triton_rotate
from h2o_flexgen.kernels.packed import PackedWeight
from h2o_flexgen.kernels.triton_decode import TritonAttend
from h2o_flexgen.kernels.types import KeysValues, Logits

SHARED_BYTES = 232448  # that one program may have: 227 KiB
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Machine:
    """What Triton asks of a loader."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES, "multiprocessor_count": 132}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[None, int, int, int, int]:
        with NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary)
            file.flush()
            said = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
        print(json.dumps({"kernel": name, "shared": shared, **used}), flush=True)  # noqa: T201
        return None, 0, 0, 0, 1024


class NoGpu:
    """What Triton asks of a driver."""

    utils = Machine()

    class launcher_cls:
        def __init__(self, source: Any, metadata: Any) -> None:
            pass

        def __call__(self, *args: Any) -> None:
            pass

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def decode(group: int, *, bits: int = 16, splits: int = 1) -> None:
    """One step of a scored cache, dimension 128, bfloat16."""
    size = (2, 2, 512, 128)
    ranking = torch.rand(size[:3]), torch.zeros(size[:3], dtype=torch.int32), torch.tensor([0, 512, 1024, 1536])
    rules = [(400, 512, 500, 0, 0, 0, 100, 0)] * 2
    kernel = TritonAttend(rules, size, "cpu", ranking=ranking, adds=True, splits=splits, tune=False)
    k, v = torch.randn(2, *size).bfloat16().unbind(0)
    if bits != 16:
        kernel.attach_packed(*(triton_quant.quantise(x, bits) for x in (k, v)))
    else:
        kernel.attach(k, v)
    # Counted on the device, as the engine has it, or told.
    number = 5 if bits != 16 else torch.full((2, 2), 5)
    kernel.step(number, tuple(torch.randn(2, heads, 128).bfloat16() for heads in (2 * group, 2, 2)), Logits(0.1))


def prompt() -> None:
    """After a past, in a window: every branch."""
    q, k, v = (torch.randn(2, heads, 256, 128).bfloat16() for heads in (8, 2, 2))
    past = KeysValues(*torch.randn(2, 2, 128, 128).bfloat16())
    triton_prompt.forward(q, k, v, Logits(0.1), past, 100)
    triton_prompt.sum_columns(q, k, torch.zeros(2, 8, 256), Logits(0.1), past.k, 100)


def rotate() -> None:
    """A part of each head, of a wider product."""
    q, k = torch.randn(5, 10, 128).bfloat16().split([8, 2], dim=1)
    triton_rotate.rotate_both(q, k, *torch.randn(2, 5, 96).bfloat16())


def linear(packing: Packing, rows: int) -> None:
    """A product of so many rows, with all that may come after it."""
    weight = PackedWeight.empty(packing, (256, 512))
    y = torch.empty(rows, 256, dtype=torch.bfloat16)
    triton_linear.packed_linear(torch.randn(rows, 512).bfloat16(), weight, y[0], y, relu=True, add=True)


def experts(rows: int, packing: Packing | None = None, clamp: float | None = None) -> None:
    """Two experts, each for so many tokens; gpt-oss's with a clamp."""
    shapes = {"gate_up": (256, 512)} if clamp else {"up": (128, 512), "gate": (128, 512)}
    w: dict[str, Any] = {}
    for name, shape in {**shapes, "down": (512, 128)}.items():
        weight = torch.zeros(shape, dtype=torch.bfloat16) if packing is None else PackedWeight.empty(packing, shape)
        w |= {f"{name}.weight": weight}
        if clamp:
            w[f"{name}.bias"] = torch.zeros(shape[0], dtype=torch.bfloat16)
    place = triton_experts.TritonExpert.of(w)
    if place is None:
        raise RuntimeError("these experts are not taken")
    x, tokens = torch.zeros(rows, 512, dtype=torch.bfloat16), torch.arange(rows).repeat(2)
    choices = tokens, torch.ones(2 * rows), tokens.argsort(stable=True).view(rows, 2)
    triton_experts.add_experts(x, x.clone(), choices, [0, rows, 2 * rows], [place, place], clamp, 2 * rows)


if __name__ == "__main__":
    driver.set_active(NoGpu())
    decode(1)
    decode(4, splits=3)
    decode(4, bits=4)
    decode(4, bits=8)
    prompt()
    rotate()
    for rows in (1, 64, 128):
        linear(Packing(), rows)
    linear(Packing("uint4", 32, "super", "super"), 1)
    linear(Packing("e2m1", 32, "e8m0", "none"), 1)
    linear(Packing("nf4", 64, "float32", "none"), 1)
    linear(Packing("e4m3", 128, "float32", "none"), 1)
    for rows in (1, 64, 128):
        experts(rows)
    experts(1, Packing("uint4", 32, "super", "super"))
    experts(128, Packing())
    experts(64, Packing("e2m1", 32, "e8m0", "none"), clamp=7.0)
