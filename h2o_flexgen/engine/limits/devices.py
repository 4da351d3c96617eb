"""The resources of this machine: devices, memory limits, dtype."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from operator import itemgetter
from pathlib import Path, PurePath
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import psutil
import torch

from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.errors import UsageError
from h2o_flexgen.folders import cached, can_write, expanded, nearest
from h2o_flexgen.huge import LARGE
from h2o_flexgen.kernels.native.tiers import cpu_flags
from h2o_flexgen.memory.cuda import Device, open_device
from h2o_flexgen.memory.device_copies import BOUNCE_BYTES
from h2o_flexgen.memory.pinned import PinnedPool, lockable_memory
from h2o_flexgen.memory.tiers import HostMemory, Tier
from h2o_flexgen.units import format_bytes

DEFAULT_OFFLOAD_DIR = "~/.cache/h2o_flexgen/offload"
_SHARE = 0.9  # of what is available: the rest is for the system and for allocator slack
_LATER = 20 << 20  # pages of libraries that only the first products and the first search touch: 17 and 18 MiB measured
_FREE_SHARE = 0.9  # of what is free on the GPU: the rest is for libraries, and for the gaps that an allocator leaves
_LIBRARIES = 64 << 20  # of what torch may allocate, however little, beside gaps of 2 %: cuBLAS takes 2 x 32 MiB
_PINNED_SHARE = 0.8  # of the host's memory: locked pages are lost to everything else, the page cache included
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")

_open: WeakKeyDictionary[object, frozenset[Tier]] = WeakKeyDictionary()
_lock = threading.Lock()  # engines may run in threads of their own
_makers = set[int]()  # the processes that made engines: this one, and those that it was forked from


class Limit(NamedTuple):
    """Bytes that a run may use of a tier, and their origin."""

    nbytes: int
    why: str


_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", (b"total_inactive_file", b"total_active_file")
_HIERARCHIES = (
    (".", "", "memory.max", "memory.current", (b"inactive_file", b"active_file", b"slab_reclaimable")),
    ("memory", "memory", *_V1),
)
"""Mount and name in /proc/self/cgroup (empty in v2) of control groups, files of limit and usage, and the parts of usage
in memory.stat that the kernel reclaims when memory is short."""


def cgroup_limit() -> int | None:
    """Lowest memory limit of this process's control group and its parents, v2 or v1, in bytes; None without any."""
    return min((limit for limit, _ in _limited_groups()), default=None)


def cgroup_room() -> int | None:
    """Bytes that are free within all of these limits; None without any."""
    return min((room for _, room in _limited_groups()), default=None)


def _limited_groups() -> list[tuple[int, int]]:
    """Limit and free bytes of each control group with a memory limit."""
    paths, groups = _own_groups(), list[tuple[int, int]]()
    for mount, controller, limit_file, usage_file, cache_parts in _HIERARCHIES:
        own = PurePath(paths.get(controller, "."))
        # In a container that may be the host's path, which is not there, and the group be what is mounted: the last.
        for folder in (_CGROUPS / mount / path for path in (own, *own.parents)):
            limit = _read_number(folder / limit_file)
            if limit is not None:
                used = (_read_number(folder / usage_file) or 0) - _cache_bytes(folder, cache_parts)
                groups.append((limit, max(0, limit - max(0, used))))
    return groups


def _own_groups() -> dict[str, str]:
    """The path of this process's control group by controller."""
    try:
        lines = _OWN_CGROUPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return {}
    fields = [line.split(":", 2) for line in lines if line.count(":") > 1]
    return {name: path.lstrip("/") for _, controllers, path in fields for name in controllers.split(",")}


def cgroup_cpus() -> float | None:
    """Processors that this process's control group and its parents may use; None without a limit."""
    paths, shares = _own_groups(), list[float]()
    for own in (PurePath(paths.get(name, ".")) for name in ("", "cpu")):
        for path in (own, *own.parents):
            with suppress(OSError, ValueError, ZeroDivisionError):
                quota, period = (_CGROUPS / path / "cpu.max").read_text(encoding="ascii").split()
                shares.append(int(quota) / int(period))
            quota_of = _CGROUPS / "cpu" / path
            quota_us, period_us = (_read_number(quota_of / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
            if quota_us and period_us:
                shares.append(quota_us / period_us)
    return min(shares, default=None)


def _read_number(path: Path) -> int | None:
    try:
        number = int(path.read_bytes())
    except (OSError, ValueError):  # v2 writes "no limit" as "max"
        return None
    # v1 writes it as the largest page-aligned 63-bit number.
    return number if 0 <= number < 1 << 60 else None


def _cache_bytes(folder: Path, names: tuple[bytes, ...]) -> int:
    """Bytes in use that the kernel reclaims when memory is short."""
    try:
        lines = (folder / "memory.stat").read_bytes().splitlines()
    except OSError:
        return 0
    fields = [line.split() for line in lines if line.startswith(names)]
    return sum(int(words[1]) for words in fields if len(words) == 2 and words[0] in names and words[1].isdigit())


def rss() -> int:
    return int(psutil.Process().memory_info().rss)


def before_placement() -> int:
    """Host bytes of this process before placement: resident ones, and those of libraries at their first use."""
    return rss() + _LATER


def peak_rss() -> int:
    """Most bytes that were resident. getrusage's would be at least those of the process that started this one."""
    words = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()
    return int(words[0]) << 10 if words else rss()


def return_free_pages(large: bool = True) -> None:
    """Returns freed host memory to the system, which takes some milliseconds. large: that of large intermediate
    results, too.

    glibc keeps freed pages between others: after prompts of many lengths a process held 120 MiB more than it used.
    """
    if large:
        LARGE.trim()
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def offload_folder(named: str | None) -> Path:
    """The folder of packed weights and the disk tier: `named`, else the environment's, else the default; empty names
    count as none."""
    given = named or os.environ.get("H2O_FLEXGEN_OFFLOAD_DIR")
    usual = expanded(given or DEFAULT_OFFLOAD_DIR)
    return usual if given or usual.exists() or can_write(usual) else cached("offload")


def cpu_limit() -> Limit:
    """Host memory that a run may use, this process included: the available, within the control group's limits."""
    held = rss()
    limits = [(psutil.virtual_memory().available + held, "available")]
    limit, room = cgroup_limit(), cgroup_room()
    if limit is not None:
        limits.append((limit, "that the control group may use"))
        if room is not None:
            limits.append((room + held, "that others in the control group leave"))
    return _share_of(*min(limits, key=itemgetter(0)))


def disk_limit(folder: Path, there: int) -> Limit:
    """Disk space for a run: free bytes at `folder`, and the bytes of weights already `there`. Creates nothing."""
    folder = nearest(folder)
    try:
        info = os.statvfs(folder)
        # /proc and its like have no blocks, and tell root that it may write.
        writable = info.f_blocks > 0 and os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if not writable:
        return Limit(there, f"nothing can be written to {folder}")
    limit = _share_of(info.f_bavail * info.f_frsize, f"free in {folder}")
    beside = f", and {format_bytes(there)} of weights that are on disk" if there else ""
    return Limit(limit.nbytes + there, limit.why + beside)


def _share_of(nbytes: int, what: str) -> Limit:
    return Limit(int(_SHARE * nbytes), f"{_SHARE:.0%} of {format_bytes(nbytes)} {what}")


def cpu_has_bfloat16() -> bool:
    return not cpu_flags().isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))


def resolve_devices(config: EngineConfig, first: torch.device) -> list[torch.device]:
    """The devices of all stages, `first` for the first one. UsageError if there are too few."""
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
    """CUDA if there is one and it was not refused, else the CPU. UsageError if CUDA was asked for in vain."""
    if config.emulate_gpu is not None or config.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if config.device == "cuda":
        why, change = why_no_gpu()
        raise UsageError(f"device is 'cuda', and {why}", change=f"leave --device out; {change}")
    return torch.device("cpu")


def why_no_gpu() -> tuple[str, str]:
    """Why torch has no GPU here, and what would give it one. PyPI's torch is made for CUDA, and is often there."""
    if torch.version.cuda is None:
        return "torch is built without CUDA", "pip install torch for CUDA, on a machine with a GPU"
    needed = f"whether its driver is new enough for CUDA {torch.version.cuda}"
    return "torch finds no CUDA device", f"nvidia-smi tells whether there is a GPU, and {needed}"


def open_gpu(devices: Sequence[torch.device]) -> PinnedPool | None:
    """Opens the GPUs among `devices`, with a pool of pinned host memory; None for the CPU."""
    first, *others = [open_device(device) for device in devices]
    if first is None:
        return None
    host, limit, lockable = psutil.virtual_memory().total, cgroup_limit(), lockable_memory()
    share = int(_PINNED_SHARE * (host if limit is None else min(host, limit)))
    most = share if lockable is None else min(share, lockable)
    bounce = HostMemory().allocate(BOUNCE_BYTES * len(devices)).tensor
    return PinnedPool(first, most, bounce, [other for other in others if other is not None])


def gpu_limit(gpu: Device, asked: int | None, held: int = 0) -> Limit:
    """Bytes that a run may allocate on `gpu`: at most `asked`, and what others and the CUDA context leave, less the
    bytes `held` by other engines of this process, as --gpu-mem is for all of them."""
    room, total = gpu.room()
    what = f"free of the {format_bytes(total)} on the GPU"
    if asked is None:
        limit, why = int(_FREE_SHARE * room), f"{_FREE_SHARE:.0%} of {format_bytes(room)} {what}"
    else:
        most = min(asked, room)
        slack = min(most, _LIBRARIES + most // 50)
        why = "--gpu-mem"
        if asked > room:
            why = f"--gpu-mem asks for {format_bytes(asked)}, {format_bytes(room)} are {what}"
        limit, why = most - slack, f"{why}, less {format_bytes(slack)} for libraries"
    if held:
        why = f"{why}, less {format_bytes(held)} that other engines hold"
    return Limit(max(0, limit - held), why)


def require_threads() -> None:
    """UsageError in a process that was forked from one with an engine, whose OpenMP threads stayed behind: work for
    several threads would wait for them for ever."""
    if _makers - {os.getpid()} and torch.get_num_threads() > 1:
        raise UsageError(
            "this process was forked from one that had made an LLM",
            "torch's threads do not come along, and it would wait for them for ever",
            'start it by multiprocessing.get_context("spawn"), or call torch.set_num_threads(1) in it first',
        )
    _makers.add(os.getpid())


def note_tiers(loaded: object, tiers: Iterable[Tier]) -> None:
    """Counts what `tiers` hold, in `held_bytes`, for as long as `loaded` exists."""
    with _lock:
        _open[loaded] = frozenset(tiers)


def held_bytes(besides: object = None, device: torch.device = HostMemory.device) -> int:
    """Bytes of `device` that engines of this process hold now, without those of `besides`. An emulated gpu is host
    memory."""
    with _lock:
        others = [tiers for loaded, tiers in _open.items() if loaded is not besides]
    return sum(tier.held for tiers in others for tier in tiers if tier.device == device)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Within, new tensors are float32, on the CPU where nothing else is said, and may be recorded for gradients, and no
    operation chooses a dtype.

    Callers change these (torch.set_default_dtype, set_default_device, inference_mode, autocast). Scores of another
    dtype would be other scores, and native kernels write float32 to where they lie. The default dtype is the process's,
    not the thread's: it is set back at the end.
    """
    with ExitStack() as stack:
        if (dtype := torch.get_default_dtype()) != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, dtype)
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.inference_mode(False))
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
