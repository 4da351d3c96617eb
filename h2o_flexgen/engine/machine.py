"""What this machine has to give: memory within its limits, and the dtype its processor is fast in."""

from __future__ import annotations

import ctypes
import os
import resource
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.errors import UsageError
from h2o_flexgen.kernels.large import LARGE
from h2o_flexgen.units import format_bytes

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
DEFAULT_OFFLOAD_DIR = "~/.cache/h2o_flexgen/offload"
_SHARE = 0.9  # of what is available: the rest is for the system and for allocator slack
_LATER = 20 << 20  # pages of libraries that only the first products and the first search touch: 17 and 18 MiB measured


class Limit(NamedTuple):
    """Bytes that a run may use of a tier, and where the number comes from."""

    nbytes: int
    why: str


def cgroup_limit() -> int | None:
    """Memory limit of this process's own control group, v2 or v1, in bytes; None where there is none."""
    limits = [limit for limit in (_read_limit(path) for path in _limit_files()) if limit is not None]
    return min(limits, default=None)


def _limit_files() -> list[Path]:
    files = [Path(limit) for limit, _ in _CGROUPS]
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return files
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files.append(Path("/sys/fs/cgroup") / path.lstrip("/") / "memory.max")
        elif "memory" in controllers.split(","):
            files.append(Path("/sys/fs/cgroup/memory") / path.lstrip("/") / "memory.limit_in_bytes")
    return files


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    # v1 writes "no limit" as the largest page-aligned 63-bit number.
    return int(text) if text.isdigit() and int(text) < 1 << 60 else None


def rss() -> int:
    """Resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)


def before_placement() -> int:
    """Host bytes that this process holds, whatever it places: what is resident now, and libraries as they wake up."""
    return rss() + _LATER


def peak_rss() -> int:
    """The most bytes this process ever had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def return_free_pages() -> None:
    """Gives pages of host memory that was freed back to the system, some milliseconds' work.

    glibc keeps activations that were freed below others that were not, and what comes later may not fit between: after
    prompts of many lengths a process held 120 MiB more than it used. Nothing happens with another C library.
    """
    LARGE.trim()
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def offload_folder(named: str | None) -> Path:
    """Where packed weights and the disk tier go: the folder `named`, else the environment's; an empty name is none."""
    return Path(named or os.environ.get("H2O_FLEXGEN_OFFLOAD_DIR") or DEFAULT_OFFLOAD_DIR).expanduser()


def cpu_limit() -> Limit:
    """Host memory a run may use in all, this process included: available, within the cgroup's limit."""
    available, limit = psutil.virtual_memory().available + rss(), cgroup_limit()
    if limit is None or available <= limit:
        return _share_of(available, "available")
    return _share_of(limit, "that the control group may use")


def disk_limit(folder: Path, there: int) -> Limit:
    """Disk space for a run whose offload folder is `folder`: what is free, and the bytes of weights that are `there`
    already and take no more. Nothing is made."""
    # Path.exists raises where a parent cannot be searched, or a name is too long.
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    try:
        info = os.statvfs(folder)
    except OSError:
        return Limit(there, f"nothing can be written to {folder}")
    limit = _share_of(info.f_bavail * info.f_frsize, f"free in {folder}")
    beside = f", and {format_bytes(there)} of weights that are on disk" if there else ""
    return Limit(limit.nbytes + there, limit.why + beside)


def _share_of(nbytes: int, what: str) -> Limit:
    return Limit(int(_SHARE * nbytes), f"{_SHARE:.0%} of {format_bytes(nbytes)} {what}")


def cpu_has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 natively; else bfloat16 is emulated and float32 is faster."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags or " bf16" in flags


def resolve_dtype(wanted: str, stored: str, device: torch.device) -> str:
    """The dtype to compute in: the checkpoint's on a GPU; on a CPU bfloat16 where it is native, else float32.

    float32 checkpoints stay float32: nothing is rounded unasked.
    """
    if wanted != "auto":
        return wanted
    if device.type == "cuda" or stored == "float32":
        return stored
    return "bfloat16" if cpu_has_bfloat16() else "float32"


def resolve_devices(config: EngineConfig, first: torch.device) -> list[torch.device]:
    """The devices of all stages, of which `first` computes the first one. UsageError where there are too few."""
    if config.num_gpus == 1:
        return [first]
    if first.type == "cuda":
        there = torch.cuda.device_count()
        if there < config.num_gpus:
            raise UsageError(f"--num-gpus is {config.num_gpus}, and torch finds {there}", f"needed 1 to {there}")
        return [torch.device("cuda", index) for index in range(config.num_gpus)]
    if config.emulate_gpu is None:
        raise UsageError(
            f"--num-gpus is {config.num_gpus}, and this run computes on the CPU",
            change="leave --num-gpus out, or give --emulate-gpu, which makes so many of that size in host memory",
        )
    return [first] * config.num_gpus


def resolve_device(config: EngineConfig) -> torch.device:
    """CUDA where there is one and it was not refused, else the CPU. UsageError for a CUDA that is not there."""
    if config.emulate_gpu is not None or config.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if config.device == "cuda":
        raise UsageError(
            "device is 'cuda', and torch finds no CUDA device", change="leave --device out, or install torch for CUDA"
        )
    return torch.device("cpu")
