"""That the kernels compile to machine code, which the interpreter does not show; how many, and side by side."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tests.kernels.triton_device  # noqa: F401  (skips without Triton)
from benchmarks.gpu.check import pack, unpack

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def program(folder: Path, *command: str) -> list[dict[str, object]]:
    """What a program prints that runs beside a GPU that is not there, with an empty cache."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = {**kept, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder), "TRITON_STORE_BINARY_ONLY": "1"}
    run = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    """For architecture 9.0, into the shared memory and the registers there are: what spills goes to `STACK`."""
    kernels = program(tmp_path, "tests.kernels.triton_compile_only")
    names = {kernel["kernel"] for kernel in kernels}
    assert names == {
        "step_kernel",
        "split_kernel",
        "join_kernel",
        "forward_kernel",
        "sums_kernel",
        "_quantise",
        "rotate_kernel",
        "_linear",
        "_gate_up",
        "_down",
        "_add_up",
    }
    assert not [kernel for kernel in kernels if kernel["STACK"] > 32 or kernel["LOCAL"]]


def test_what_gpu_check_compiles_is_what_is_launched_and_can_be_carried(tmp_path: Path) -> None:
    """Three configurations of each kind of decode step, one join for all three, whatever else differs: when tuning
    compiled what it tried apart from what is run, and joins for each, there were 133.

    Every configuration, side by side; neither a run nor a rehearsal compiles another one, nor does a later call."""
    here, there = tmp_path / "here", tmp_path / "there"
    counted, done = program(here, "tests.kernels.triton_compile_count", str(here))
    compiled = {"step_kernel": 24, "split_kernel": 24, "join_kernel": 8, "_quantise": 1}
    assert counted == {**compiled, "files": 0}, "counting compiles nothing"
    assert done == {"ahead": 3, "launched": 0}
    pack(here, tmp_path)
    shutil.rmtree(here)
    unpack(tmp_path, there)
    (counted,) = program(there, "tests.kernels.triton_compile_count")
    assert counted == {"ahead": 0, "launched": 0}
