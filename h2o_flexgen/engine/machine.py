"""What this machine has to give: memory within its limits, and the dtype its processor is fast in."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil
import torch

from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.errors import UsageError

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
_CPU_SHARE = 0.9  # of what is available: the rest is for the system and for allocator slack


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


def peak_rss() -> int:
    """The most bytes this process ever had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def default_cpu_memory() -> int:
    """Bytes of host memory a run may use in all, this process included: available, within the cgroup's limit."""
    available = psutil.virtual_memory().available + rss()
    limit = cgroup_limit()
    return int(_CPU_SHARE * (available if limit is None else min(available, limit)))


def default_gpu_memory(device: torch.device) -> int:
    """Free bytes of a CUDA device, less a tenth for the allocator and the context."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(0.9 * free)


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
