"""The GPU of an engine: what it may take of it, and how much host memory is page-locked for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch

from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.engine.limits.devices import Limit, cgroup_limit, cpu_limit, disk_limit
from h2o_flexgen.engine.limits.plan import Caps
from h2o_flexgen.memory.cuda import Device, open_device
from h2o_flexgen.memory.device_copies import BOUNCE_BYTES
from h2o_flexgen.memory.pages import HostMemory
from h2o_flexgen.memory.pinned import PinnedPool, lockable_memory
from h2o_flexgen.units import format_bytes

_FREE_SHARE = 0.9  # of what is free on the GPU: the rest is for libraries, and for the gaps that an allocator leaves
_LIBRARIES = (
    64 << 20
)  # of what torch may allocate, however little: cuBLAS works in two buffers of 32 MiB; and gaps, 2 %
_PINNED_SHARE = 0.8  # of the host's memory: locked pages are lost to everything else, the page cache included


def open_gpu(devices: Sequence[torch.device]) -> PinnedPool | None:
    """The GPUs that `devices` are, and what locks host memory for them; None for the CPU."""
    first, *others = [open_device(device) for device in devices]
    if first is None:
        return None
    host, limit, lockable = psutil.virtual_memory().total, cgroup_limit(), lockable_memory()
    share = int(_PINNED_SHARE * (host if limit is None else min(host, limit)))
    most = share if lockable is None else min(share, lockable)
    bounce = HostMemory().allocate(BOUNCE_BYTES * len(devices)).tensor
    return PinnedPool(first, most, bounce, [other for other in others if other is not None])


def caps_of(
    config: EngineConfig,
    pins: PinnedPool | None,
    folder: Path,
    there: Callable[[], int],
    held: Callable[[torch.device], int],
) -> Caps:
    """What was given, else what the machine has free, and where each number comes from; of the GPU with least, where
    there are several. `folder`: of the disk tier, where weights of `there` bytes lie already. `held`: what other
    engines of this process hold on a GPU."""
    why = {"cpu": "--cpu-mem", "disk": "--nvme-mem", "gpu": "--gpu-mem"}
    on_gpu, cpu, disk = None, config.cpu_mem, config.disk_mem
    if config.emulate_gpu is not None:
        on_gpu, why["gpu"] = config.emulate_gpu, "--emulate-gpu"
    elif pins is not None:
        limits = (gpu_limit(each, config.gpu_mem, held(each.torch_device)) for each in pins.devices)
        on_gpu, why["gpu"] = min(limits)
    if config.num_gpus > 1:
        why["gpu"] += ", of each GPU"
    if cpu is None:
        cpu, why["cpu"] = cpu_limit()
    if disk is None:
        disk, why["disk"] = disk_limit(folder, there())
    return Caps(on_gpu, cpu, disk, emulated=config.emulate_gpu is not None, why=why)


def gpu_limit(gpu: Device, asked: int | None, held: int = 0) -> Limit:
    """What a run may plan to allocate on `gpu`: of what was `asked`, at most what others and the CUDA context leave.

    `held`: by other engines of this process, which the GPU takes for this one's, and --gpu-mem is for all of them.
    """
    limit = _process_limit(gpu, asked)
    if not held:
        return limit
    return Limit(max(0, limit.nbytes - held), f"{limit.why}, less {format_bytes(held)} that other engines hold")


def _process_limit(gpu: Device, asked: int | None) -> Limit:
    room, total = gpu.room()
    what = f"free of the {format_bytes(total)} on the GPU"
    if asked is None:
        return Limit(int(_FREE_SHARE * room), f"{_FREE_SHARE:.0%} of {format_bytes(room)} {what}")
    most = min(asked, room)
    slack = min(most, _LIBRARIES + most // 50)
    why = "--gpu-mem" if asked <= room else f"--gpu-mem asks for {format_bytes(asked)}, {format_bytes(room)} are {what}"
    return Limit(most - slack, f"{why}, less {format_bytes(slack)} for libraries")
