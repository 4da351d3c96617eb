"""The facts of a machine for a bug report: tiers, bandwidths, limits, versions, kernels, features off and why.

No user names, host names or secrets: paths have ~ for the home folder, and of the environment only our own switches are
told.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from h2o_flexgen.calibration.links import Disk
from h2o_flexgen.config.hardware.profile import kept_profiles
from h2o_flexgen.config.reports.record import host_facts, version_of
from h2o_flexgen.engine.limits import devices
from h2o_flexgen.errors import H2OFlexGenError
from h2o_flexgen.folders import cached, expanded, nearest
from h2o_flexgen.kernels import native, triton_available
from h2o_flexgen.units import MIB

PACKAGES = (
    *("h2o_flexgen", "torch", "numpy", "transformers", "safetensors", "tokenizers", "huggingface_hub", "pulp"),
    *("highspy", "psutil", "triton", "xgrammar", "ray", "sentencepiece", "pyarrow", "matplotlib"),
    *("accelerate", "flexgen"),
)
EXTRAS = {
    "lm_eval": ("EleutherAI's lm-evaluation-harness (python -m h2o_flexgen.lm_eval)", "lm-eval"),
    "xgrammar": ("JSON schemas (response_format, --json-schema)", "schemas"),
    "ray": ("Ray Data (h2o_flexgen.ray)", "ray"),
    "sentencepiece": ("tokenizers that are only a tokenizer.model", "sentencepiece"),
    "pyarrow": ("files of requests in Parquet (batch --format parquet)", "parquet"),
    "matplotlib": ("pictures of reports", "report"),
}
"""Packages that a feature needs: the feature, and the extra that installs them."""
INSTRUCTIONS = (
    *("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"),
    *("asimddp", "i8mm", "bf16", "sve"),  # ARM's
)
SWITCHES = (
    *("H2O_FLEXGEN_NATIVE", "H2O_FLEXGEN_KERNELS", "H2O_FLEXGEN_TRITON", "H2O_FLEXGEN_MEMLOCK", "OMP_NUM_THREADS"),
    "HF_HUB_OFFLINE",
)

_FILE, _UNIT = 128 * MIB, 8 * MIB
_COPIED = 256 * MIB
_FEW_FILES = 1024  # open files: fewer leave too little for sharded checkpoints and the streams of a run


def checkup(offload_dir: str | None = None) -> dict[str, Any]:
    """All of the facts, as plain JSON values; takes a second or two. Never raises: a fact that cannot be had says why.

    Keys: versions, machine, tiers, bandwidth, limits, kernels, features (only features that are off, with a reason
    and advice), folders, switches.
    """
    folder = devices.offload_folder(offload_dir)
    kernels, limits = _kernels(), _limits(folder)
    found = {
        "versions": {name: version_of(name) for name in PACKAGES},
        "machine": {**host_facts(), "threads": torch.get_num_threads()},
        "tiers": _tiers(folder),
        "bandwidth": _bandwidth(folder),
        "limits": limits,
        "kernels": kernels,
        "features": _off(kernels, limits),
        "folders": _folders(folder),
        "switches": {name: os.environ[name] for name in SWITCHES if name in os.environ},
    }
    home = json.dumps(str(expanded("~")))[1:-1]
    private: dict[str, Any] = json.loads(json.dumps(found).replace(home, "~") if len(home) > 1 else json.dumps(found))
    return private


def _tiers(folder: Path) -> dict[str, Any]:
    """Bytes that a run may use of each tier now, and where the number comes from."""
    tiers: dict[str, Any] = {"gpu": None}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        tiers["gpu"] = {"bytes": free, "why": f"free on {torch.cuda.get_device_name()}", "total": total}
    for name, limit in (("cpu", devices.cpu_limit()), ("disk", devices.disk_limit(folder, 0))):
        tiers[name] = {"bytes": limit.nbytes, "why": limit.why}
    return tiers


def _limits(folder: Path) -> dict[str, Any]:
    """Bytes and counts that the system sets; None where it sets none."""

    def of(number: int) -> int | None:
        soft = resource.getrlimit(number)[0]
        return None if soft == resource.RLIM_INFINITY else soft

    free = None
    with suppress(OSError):
        free = shutil.disk_usage(nearest(folder)).free
    return {
        "memlock": of(resource.RLIMIT_MEMLOCK),
        "open_files": of(resource.RLIMIT_NOFILE),
        "file_size": of(resource.RLIMIT_FSIZE),
        "address_space": of(resource.RLIMIT_AS),
        "cgroup_memory": devices.cgroup_limit(),
        "cgroup_cpus": devices.cgroup_cpus(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "disk_free": free,
    }


def _kernels() -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = native.library() is not None
    return {
        "native": {
            "computes": native.what_computes(),
            "loaded": loaded,
            "why_not": None if loaded else native.why_not() or "they could not be compiled",
        },
        "instructions": [name for name in INSTRUCTIONS if name in native.cpu_flags()],
        "native_bfloat16": devices.cpu_has_bfloat16(),
        "triton": {"device": device, "why_not": triton_available.why_not(device)},
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def _off(kernels: dict[str, Any], limits: dict[str, Any]) -> list[dict[str, str]]:
    """Features that are off or held back here, each with the reason and what to install or change."""

    def entries() -> Iterable[tuple[str, str, str]]:
        if why := kernels["native"]["why_not"]:
            advice = {
                "NATIVE": "unset H2O_FLEXGEN_NATIVE",
                "no C": "install gcc or clang",
                "not be": "see run's warning",
            }
            yield "native kernels", why, next((each for word, each in advice.items() if word in why), "")
        if not kernels["native_bfloat16"]:
            yield "bfloat16 on the CPU", "the processor does not multiply it natively", "it is multiplied as float32"
        if not kernels["gpus"]:
            yield "gpu", *devices.why_no_gpu()
        elif why := kernels["triton"]["why_not"]:
            yield "Triton kernels", why, "pip install 'h2o_flexgen[gpu]'"
        for package, (feature, extra) in EXTRAS.items():
            if find_spec(package) is None:
                yield feature, f"{package} is not installed", f"pip install 'h2o_flexgen[{extra}]'"
        files = limits["open_files"]
        if files is not None and files < _FEW_FILES:
            yield "checkpoints of many shards", f"{files} files may be open", f"ulimit -n {_FEW_FILES}"
        if limits["file_size"] is not None:
            why = f"files may have {limits['file_size']} bytes at most"
            yield "large files in the offload folder", why, "ulimit -f unlimited"
        cpus, cores = limits["cgroup_cpus"], limits["usable_cores"]
        if cpus is not None and cpus < cores:
            todo = f"OMP_NUM_THREADS={max(1, int(cpus))}"
            yield "all cores", f"the control group may use {cpus:g} of the {cores} cores", todo

    return [{"feature": feature, "why": why, "change": change} for feature, why, change in entries()]


def _bandwidth(folder: Path) -> dict[str, Any]:
    """Bytes per second of the links: as the newest calibration here has them, else by a quick, rougher measure."""
    kept = next(kept_profiles(), None)
    if kept is not None:
        known = {name: rate.bytes_per_s for name, rate in kept.links.items()}
        return {"source": f"calibrated {kept.date} ({kept.dtype})", **known}
    rates: dict[str, Any] = {"source": "measured now, in about a second"}
    source = torch.ones(_COPIED // 8, dtype=torch.int64)
    target = torch.empty_like(source)
    target.copy_(source)  # the first touch of memory is slow
    started = time.perf_counter()
    target.copy_(source)
    rates["cpu->cpu"] = _COPIED / (time.perf_counter() - started)
    try:
        with Disk(folder, _UNIT, _FILE) as disk:
            for name, make in (("cpu->disk", disk.fresh_writes), ("disk->cpu", lambda: disk.reads(disk.unit))):
                link, started = make(), time.perf_counter()
                link.queue(disk.blocks)
                disk.settle()
                rates[name] = disk.blocks * disk.unit / (time.perf_counter() - started)
    except H2OFlexGenError as error:
        rates["why_no_disk"] = str(error)
    return rates


def _folders(offload: Path) -> dict[str, Any]:
    """Where things are kept, and how much: None for a folder that is not there."""
    hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub"
    places = {"offload": offload, "cache": cached(), "hub": expanded(hub)}
    return {name: {"path": str(path), "bytes": _size(path)} for name, path in places.items()}


def _size(folder: Path) -> int | None:
    """Bytes on the disk below `folder`, links as links; files that cannot be read count as 0."""
    if not folder.is_dir():
        return None
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total
