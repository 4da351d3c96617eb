"""That the kernels compile to machine code, which the interpreter does not show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import tests.kernels.triton_device  # noqa: F401  (skips without Triton)

ROOT = Path(__file__).parents[2]


def test_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    """For architecture 9.0, into the shared memory and the registers there are: what spills goes to `STACK`."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton_compile_only"],
        cwd=ROOT,
        env={**kept, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    names = {kernel["kernel"] for kernel in kernels}
    assert names == {
        "step_kernel",
        "split_kernel",
        "join_kernel",
        "forward_kernel",
        "sums_kernel",
        "_quantise",
        "rotate_kernel",
    }
    assert not [kernel for kernel in kernels if kernel["STACK"] > 32 or kernel["LOCAL"]]
