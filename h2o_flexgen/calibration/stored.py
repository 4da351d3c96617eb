"""Profiles of this machine that were measured before: one file for each thing that what was measured depends on."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch

from h2o_flexgen.config.hardware.profile import HardwareProfile, kept_file, load_kept
from h2o_flexgen.config.model.modules import ModuleSpec
from h2o_flexgen.config.model.packing import groupwise
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.reports.record import host_facts
from h2o_flexgen.engine.execution.cuda_graphs import recorder
from h2o_flexgen.folders import whole_file
from h2o_flexgen.kernels.native import why_not
from h2o_flexgen.kernels.native.tiers import wanted
from h2o_flexgen.kernels.triton_available import serves
from h2o_flexgen.units import GIB

log = logging.getLogger(__name__)


def machine_facts(device: torch.device) -> dict[str, Any]:
    """`host_facts`, the GPU that is computed on, what computes there and on the CPU, and by how many threads."""
    facts = {**host_facts(), "torch": torch.__version__, "threads": torch.get_num_threads()}
    facts["kernels"] = why_not() or ("native" if (tier := wanted()) is None else f"native, {tier.name}")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory}
        facts |= {"triton": serves(device), "graphs": recorder(device) is not None}
    return facts


def profile_key(
    spec: ModelSpec, dtype: str, device: torch.device, *, emulated: bool = False, offload_dir: str | Path = "."
) -> str:
    """The key of a profile, as a file name: machine, kernels, disk, dtype, and the model's shapes."""
    facts = machine_facts(device)
    memory = [round(facts.get(name, 0) / GIB) for name in ("memory_bytes", "gpu_memory_bytes")]
    arch = spec.arch
    shapes = (spec.hidden_size, spec.ffn_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size)
    kinds = (arch.gated_mlp, arch.activation, arch.norm, arch.mlp_bias, arch.parallel, arch.qk_norm, arch.post_norms)
    machine = [facts.get(name) for name in ("cpu", "cores", "threads", "gpu", "torch", "kernels", "triton", "graphs")]
    place = os.path.realpath(offload_dir)  # which need not be there yet: where its file system is mounted
    while not os.path.ismount(place) and place != os.path.dirname(place):
        place = os.path.dirname(place)
    everything: list[object] = [machine, memory, place, dtype, emulated, *shapes, spec.embed_dim, *kinds]
    if packed := sorted({str(packing) for _, packing in spec.packings} - {str(groupwise(bits, 64)) for bits in (8, 4)}):
        everything.append(packed)  # others than those that are measured for every model
    if isinstance(spec, ModuleSpec):
        everything.append(["modules", spec.packed_kind])
    digest = hashlib.sha256(json.dumps(everything).encode()).hexdigest()[:16]
    return f"{'gpu' if device.type == 'cuda' or emulated else 'cpu'}-{dtype}-{spec.hidden_size}-{digest}"


def cached_profile(
    spec: ModelSpec, dtype: str, device: torch.device, *, emulated: bool = False, offload_dir: str | Path = "."
) -> HardwareProfile | None:
    """The profile that `calibrate` made on this machine for these shapes; None where it has not, or it is damaged."""
    return load_kept(kept_file(profile_key(spec, dtype, device, emulated=emulated, offload_dir=offload_dir)))


def keep_profile(profile: HardwareProfile, key: str) -> Path | None:
    """Writes `profile` where `cached_profile` looks; None, with a warning, where that cannot be written."""
    path = kept_file(key)
    try:
        with whole_file(path) as temporary:
            temporary.write_text(profile_text(profile), encoding="utf-8")
    except OSError as error:
        log.warning("the profile cannot be kept in %s: %s", path.parent, error.strerror)
        return None
    return path


def profile_text(profile: HardwareProfile) -> str:
    return json.dumps(profile.to_json(), indent=1, allow_nan=False) + "\n"
