"""What benchmarks/gpu/kernels.py has compiled for its decode steps, on a GPU that is not there.

    python -m tests.kernels.triton_compile_count FOLDER       counts, compiles nothing: {"kernel": how many}, and how
                                                              many "files" the cache's FOLDER has; goes on as without
    python -m tests.kernels.triton_compile_count              compiles one shape side by side, then launches it:
                                                              {"ahead": how many, "launched": how many more}

As `triton_compile_only` does it, here with the 132 processors of an H100.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime import driver

from benchmarks.gpu import kernels
from benchmarks.gpu.kernels import Shape, compile_decode, decode_cache
from benchmarks.gpu.section import Section
from h2o_flexgen.kernels import triton_decode
from h2o_flexgen.kernels.types import Logits
from tests.kernels.triton_compile_only import Machine, NoGpu

SMALL = Shape(2, 2, 2, 40, 16, "small")


class Quiet(NoGpu):
    """Loads kernels and says nothing."""

    class Loader(Machine):
        def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[None, int, int, int, int]:
            return None, 0, 0, 0, 1024

    utils = Loader()


def count() -> dict[str, int]:
    """Kernels by name, of all shapes; launches of others are none either."""
    asked: Counter[str] = Counter()
    keys = set()

    def refuse(*, key: str, fn: Any, **_: Any) -> bool:
        asked[fn.name] += key not in keys
        keys.add(key)
        return True

    knobs.runtime.jit_cache_hook = refuse
    compile_decode(Section("kernels", Path("nowhere"), float("inf")))
    knobs.runtime.jit_cache_hook = None
    return dict(asked)


def together() -> dict[str, int]:
    """Compilations ahead, and those of the launches after it."""
    compiled: list[str] = []
    knobs.compilation.listener = lambda *, src, cache_hit, **_: None if cache_hit else compiled.append(src.name)
    kernels.DECODE = (SMALL,)
    with_scores = Section("kernels", Path("nowhere"), float("inf"), only=("bfloat16, with scores",))
    compile_decode(with_scores)
    ahead = len(compiled)
    kernel, qkv = decode_cache(SMALL, packed=False, scored=True)
    launch = kernel._launch(0, qkv, Logits(0.25))
    for config in kernel._candidates(launch):
        launch.run(config)
        launch.rehearse(config)
    return {"ahead": ahead, "launched": len(compiled) - ahead}


if __name__ == "__main__":
    driver.set_active(Quiet())
    triton_decode.PROCESSORS_INTERPRETED = 132
    for folder in map(Path, sys.argv[1:]):
        print(json.dumps({**count(), "files": len(list(folder.glob("*")))}))  # noqa: T201
    print(json.dumps(together()))  # noqa: T201
