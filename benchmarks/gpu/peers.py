"""The cells of the section paper, and how the other systems run theirs: at which batches, and what bench says of them.

FlexGen runs at two: as many sequences as fit with everything on the GPU, and as many as host memory holds the cache
of, in GPU batches, as its authors' policies for 16 GB do. Accelerate and DeepSpeed keep caches on the GPU: the largest
power of two whose cache and activations take 40 % of it, the rest being for weights.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu.section import FEWEST, scratch_folder
from h2o_flexgen.baselines.flexgen_placement import GPU_BATCH
from h2o_flexgen.baselines.process import RunFailed, run_command
from h2o_flexgen.config.model.known import known_config
from h2o_flexgen.models.families import spec_from_config
from h2o_flexgen.schedule.tasks import FIRST_REPLAYED
from h2o_flexgen.units import format_bytes, parse_bytes

RATIOS = {"h2o": 0.2, "full": 1.0}
"""Our systems, and their KV budgets."""
PROBE = 4
OWN_PROBE = FIRST_REPLAYED + FEWEST + 3
"""New tokens of a cell's first run: of ours as many as tell what a step takes once it is a recorded one."""
PEERS = ("flexgen", "accelerate", "deepspeed")
MODULES = {"flexgen": "flexgen.flex_opt", "accelerate": "accelerate", "deepspeed": "deepspeed"}
PAPER_HOST = 208 * 10**9
USABLE = 0.88  # of host memory that is free
CACHE_SHARE = 0.4
MOST = {"flexgen": 192, "accelerate": 64, "deepspeed": 64}


def host_bytes() -> int:
    """Host memory that a system may use: that of the paper's machine at most."""
    return min(PAPER_HOST, int(USABLE * psutil.virtual_memory().available))


@dataclass(frozen=True)
class Cell:
    """One figure of the table."""

    model: str
    gen_len: int
    system: str
    prompt_len: int = 512
    gpu_mem: str = "16GiB"
    emulated: bool = False

    @property
    def name(self) -> str:
        """For records and tables."""
        return f"{Path(self.model).name}, {self.prompt_len}+{self.gen_len}, {self.system}"

    @property
    def probe(self) -> int:
        """New tokens of the first run."""
        return min(self.gen_len, OWN_PROBE if self.system in RATIOS else PROBE)

    @property
    def dtype(self) -> str:
        """FlexGen computes in float16 alone on a GPU."""
        return "float16" if self.system == "flexgen" and not self.emulated else "bfloat16"


def sizes(cell: Cell, peers: str) -> list[int]:
    """Batches to try. RunFailed where the machine has no room for the work at all."""
    problem = why_not(cell.system, peers)
    if problem is not None:
        raise RunFailed(problem)
    if cell.emulated:
        return [2]
    config = known_config(cell.model)
    if config is None:
        raise RunFailed(f"{cell.model} is not a model that is known by name")
    spec, host, gpu = spec_from_config(config, cell.model), host_bytes(), parse_bytes(cell.gpu_mem)
    weights = sum(group.nbytes("bfloat16") for group in spec.weight_groups)
    token = 4 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    row = token * (cell.prompt_len + cell.gen_len)
    inner = 8 * cell.prompt_len * (spec.hidden_size + spec.ffn_size)
    if weights > host:
        raise RunFailed(f"weights take {format_bytes(weights)}, and host memory has {format_bytes(host)}")
    if cell.system == "flexgen":
        return flexgen_sizes(weights, row, inner, gpu, host)
    _check_disk(cell.model, weights)
    fitting = max(1, int(CACHE_SHARE * gpu / (row + inner)))
    return [min(MOST[cell.system], 1 << (fitting.bit_length() - 1))]


def _check_disk(model: str, weights: int) -> None:
    """These two load a checkpoint, so that random weights have to be written first."""
    if any((scratch_folder() / model).rglob("model.safetensors.index.json")):
        return
    free = shutil.disk_usage(scratch_folder()).free
    if free < 1.05 * weights:
        raise RunFailed(f"a checkpoint takes {format_bytes(weights)}, and the disk has {format_bytes(free)} free")


def command(cell: Cell, peers: str, size: int, generated: int, seconds: float, output: Path) -> list[str]:
    """h2o_flexgen.bench with this system alone, once."""
    flags = {
        "systems": cell.system,
        "model": cell.model,
        "weights": "dummy",
        "dtype": cell.dtype,
        "batch-size": size,
        "prompt-len": cell.prompt_len,
        "gen-len": generated,
        "repetitions": 1,
        "timeout": max(1.0, seconds),
        "peers": peers,
        "scratch-dir": scratch_folder() if not cell.emulated else output.parent / "scratch",
        "output-dir": output,
    }
    if not cell.emulated:
        flags |= {"gpu-mem": cell.gpu_mem, "device": "cuda"}
        if psutil.virtual_memory().available > PAPER_HOST:
            flags["cpu-mem"] = f"{PAPER_HOST}B"
    named = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "h2o_flexgen.bench", *named]


@cache
def why_not(name: str, peers: str) -> str | None:
    """Why a peer cannot be imported by its own interpreter; None where it can."""
    path = Path(peers) / name / "bin" / "python"
    if not path.is_file():
        return f"{name} is not installed"
    tried = run_command([str(path), "-c", f"import {MODULES[name]}"], 120)
    return f"{name} cannot be imported: {tried.last_error[:300]}" if tried.exit_code else None


def flexgen_sizes(weights: int, row: int, inner: int, gpu: int, host: int) -> list[int]:
    """FlexGen's two batches; `row` are bytes of cache per sequence, `inner` those of its activations."""
    beside = int((0.85 * gpu - weights) / (row + inner))
    held = int((0.85 * host - weights) / row)
    most = min(MOST["flexgen"], held)
    offloaded = most // GPU_BATCH * GPU_BATCH or most
    sizes = [min(beside, 16), offloaded]
    found = [size for size in dict.fromkeys(sizes) if size > 0]
    if not found:
        raise RunFailed(f"host memory of {format_bytes(host)} holds the weights and no cache beside them")
    return found


def one_of(summary: dict[str, Any], name: str, size: int, generated: int) -> dict[str, Any]:
    """What a summary of bench says of its only system; RunFailed where that did not run."""
    if name not in summary["systems"]:
        raise RunFailed(" ".join(str(summary["failed"].get(name, "no reason is known")).split())[:400])
    found = summary["systems"][name]
    seconds = {key: found[key]["median"] for key in ("prefill_s", "decode_s", "load_s")}
    facts = {"peer_versions": found["versions"], "peak_bytes": json.loads(json.dumps(found["peak_bytes"]["median"]))}
    return {**seconds, "sequences": size, "generated": generated, "facts": facts}
