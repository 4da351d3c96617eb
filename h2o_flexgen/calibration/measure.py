"""Everything a HardwareProfile holds, measured on this machine within a time limit."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from h2o_flexgen.calibration import compute, links
from h2o_flexgen.calibration.attention import decode_curves, prefill_curves
from h2o_flexgen.calibration.bench import Bench
from h2o_flexgen.calibration.compute import packed_factors, usual_packings
from h2o_flexgen.calibration.stored import keep_profile, machine_facts, profile_key
from h2o_flexgen.calibration.ticks import prompt_ticks, recorded_ticks, unexplained_ticks
from h2o_flexgen.calibration.timing import WIDE, Repeats, Spreads, TimeBudget, Timer
from h2o_flexgen.config.checks import number
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.config.hardware.rates import UNIT_KINDS, ComputeRates, LinkRate
from h2o_flexgen.config.model.modules import ModuleSpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.reports.record import utc_now
from h2o_flexgen.cores import CoreCount, sharing_warning
from h2o_flexgen.engine.limits.devices import cgroup_limit
from h2o_flexgen.folders import last_part
from h2o_flexgen.kernels.decode import available
from h2o_flexgen.kernels.native import library, why_not
from h2o_flexgen.kernels.prompt import by_triton
from h2o_flexgen.kernels.triton_available import serves
from h2o_flexgen.units import MIB, format_bytes, format_rate

log = logging.getLogger(__name__)

Progress = Callable[[str, float, float], None]
"""(what is measured now, seconds spent, seconds in all)"""

COMPUTE_PARTS = {
    "products": 12.0,
    "packed products": 4.0,
    "memory": 1.0,
    "elementwise": 1.5,
    "attention of decode steps": 7.0,
    "attention of prompts": 4.0,
    "sampling": 1.0,
    "ticks": 5.0,
}
"""Weights of what is measured on each compute device."""
RECORDED, _RECORDED_WEIGHT = "recorded steps", 2.0
EXPERTS, _EXPERTS_WEIGHT = "experts", 6.0
PROMPTS, _PROMPTS_WEIGHT = "ticks of prompts", 4.0
DISK_PARTS = {"disk writes": 5.0, "disk reads": 4.0, "disk rewrites": 2.0}
_COPIES = {"cpu->gpu": "copies to the GPU", "gpu->cpu": "copies from the GPU"}
_COPIES_WEIGHT, _PAGEABLE_WEIGHT = 1.5, 0.5
CONTENTION = "contention"
_CONTENTION_WEIGHT = 1.0  # for each resource alone and each two of them
_BESIDE = 16 * MIB  # bytes of transfers that contend
_HOST = 256 * MIB
_BUSY = 0.5  # load average
_REPEATED = 2 / 3  # of the seconds: the most that measuring again may take beside them


@dataclass(frozen=True)
class Calibration:
    """The model and the places that are measured. Of packed weights in `spec` it is how long products with them take,
    all else is measured in the dtype. `emulated`: a gpu tier in host memory; `file_bytes`: of the file read at most.

    dtype: a word of config.model.tensors. budget_s: seconds in all, about; measuring everything once may take longer.
    Beside that, two thirds of it at most go to measuring again what something disturbed.
    """

    spec: ModelSpec
    dtype: str
    device: torch.device
    offload_dir: str | Path
    budget_s: float = 45.0
    emulated: bool = False
    file_bytes: int = links.FILE
    arena_bytes: int | None = None
    cpu_mem: int | None = None
    """Bytes of host memory that the process may use in all; None: as much as the machine has free."""

    def __post_init__(self) -> None:
        number(self.budget_s, "--budget-s", 0, above=True, needed="needed a number of seconds above 0")

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The compute devices; beside a GPU the CPU computes the attention of caches that live there."""
        cpu = torch.device("cpu")
        return (cpu,) if self.device.type == "cpu" else (self.device, cpu)

    @property
    def has_gpu(self) -> bool:
        return self.emulated or self.device.type == "cuda"

    @property
    def unit_bytes(self) -> int:
        """The largest unit of a layer, as it is moved."""
        groups = replace(self.spec, packings=()).weight_groups
        sizes = [group.buffer_bytes(self.dtype) for group in groups if group.key.startswith("layers.")]
        return max(sizes)

    @property
    def key(self) -> str:
        """Of the profile among those that are kept."""
        return profile_key(self.spec, self.dtype, self.device, emulated=self.emulated, offload_dir=self.offload_dir)


def calibrate(calibration: Calibration, on_progress: Progress | None = None) -> HardwareProfile:
    """Measures this machine, keeps the profile for `cached_profile`, and returns it.

    Threads, memory and files are given back in any case. StorageError where the offload folder cannot be used; the
    errors of `memory` where there is too little. Logs a warning where the machine is busy or figures vary much.
    """
    if (busy := os.getloadavg()[0]) > _BUSY:
        log.warning("the machine is busy (load average %.1f): these figures will be too low", busy)
    library()
    run = CalibrationRun(calibration, on_progress)
    profile = run.profile()
    for figure, spread in run.spreads.typical.items():
        if spread > WIDE:
            log.warning("%s: the quartiles of what was measured are %.0f %% apart", figure, 100 * spread)
    if (said := sharing_warning(profile.host["shared"])) is not None:
        log.warning("%s", said)
    keep_profile(profile, calibration.key)
    return profile


class CalibrationRun:
    """One calibration under way."""

    def __init__(self, calibration: Calibration, on_progress: Progress | None) -> None:
        self._c, self._on_progress = calibration, on_progress or (lambda what, spent, total: None)
        self._repeats = Repeats(_REPEATED * calibration.budget_s)
        self._budget = TimeBudget(calibration.budget_s, _weights(calibration), self._repeats.clock)
        self._timer = Timer(repeats=self._repeats)
        self.spreads, self._cores = Spreads(), CoreCount()
        self._memory = {"cpu": min(psutil.virtual_memory().total, cgroup_limit() or 1 << 62)}
        self._compute: dict[str, ComputeRates] = {}
        self._links: dict[str, LinkRate] = {}

    def profile(self) -> HardwareProfile:
        main, *others = self._c.devices
        self._cores.start()
        with self._bench(main) as bench:
            self._compute[bench.name] = self._rates(bench)
            for device in others:
                with self._bench(device) as other:
                    self._compute[other.name] = self._rates(other)
            if self._c.emulated:
                self._compute["gpu"] = self._compute["cpu"]
            return self._made(self._all_links(bench))

    def _made(self, slowdown: links.Factors) -> HardwareProfile:
        c, facts = self._c, machine_facts(self._c.device)
        if c.device.type == "cuda":
            self._memory["gpu"] = facts["gpu_memory_bytes"]
        emulated = " with an emulated GPU" if c.emulated else ""
        load, again = round(os.getloadavg()[0], 2), self._repeats
        took = {"calibrated_s": round(self._budget.elapsed + again.spent, 1), "repeated_s": round(again.spent, 1)}
        self._cores.stop()
        return HardwareProfile(
            name=f"{facts.get('gpu', facts['cpu'])}{emulated}, {last_part(c.spec.name)}",
            date=utc_now(),
            dtype=c.dtype,
            links=self._links,
            compute=self._compute,
            slowdown=slowdown,
            memory=self._memory,
            host={**facts, "load_average": load, "shared": self._cores.shared, **took},
            sources={**self.spreads.sources(), "slowdown": f"measured; factors below {links.NOTICED} are left out"},
        )

    def _bench(self, device: torch.device) -> Bench:
        spec = replace(self._c.spec, packings=())
        return Bench(spec, self._c.dtype, device, self._c.arena_bytes, self.spreads, self._repeats, self._c.cpu_mem)

    def _start(self, part: str) -> float:
        self._on_progress(part, self._budget.elapsed, self._budget.seconds)
        return self._budget.take(part)

    def _compile(self, bench: Bench) -> None:
        """Has Triton's kernels compiled and tuned, which happens when each is first used: every curve is taken once, in
        no time. Compiling is not part of the budget, of which it would leave little; it is bounded by `triton_tune`."""
        if serves(bench.device):
            self._on_progress("compiling kernels", self._budget.elapsed, self._budget.seconds)
            with self._repeats.untimed():
                decode_curves(bench, 0.0)
                prefill_curves(bench, 0.0)

    def _rates(self, bench: Bench) -> ComputeRates:
        spec = bench.spec
        self._compile(bench)

        def seconds(part: str) -> float:
            return self._start(f"{bench.name}: {part}")

        shapes = compute.product_shapes(bench, seconds("products"))
        packed = packed_factors(bench, usual_packings(self._c.spec), seconds("packed products"))
        experts = compute.expert_curves(bench, self._c.spec, seconds(EXPERTS)) if spec.arch.experts else {}
        memory = compute.fastest_read(bench, shapes, seconds("memory"))
        share = seconds("elementwise")
        elementwise = compute.elementwise_rate(bench, share * 0.6)
        fresh = compute.fresh_rate(bench, share * 0.4) if bench.name == "cpu" else None
        decode = decode_curves(bench, seconds("attention of decode steps"))
        prefill = prefill_curves(bench, seconds("attention of prompts"))
        sample = compute.sample_seconds(bench, seconds("sampling"), elementwise)
        rates = ComputeRates(
            gemm_flops=compute.general_rate(shapes, spec.layer_products),
            memory_bytes_per_s=memory,
            decode_attention=decode,
            prefill_attention=prefill,
            elementwise_bytes_per_s=elementwise,
            tick_s=dict.fromkeys(UNIT_KINDS, 0.0),
            sample_s=sample,
            shapes=shapes,
            fresh_bytes_per_s=fresh,
            reads_all_slots=bench.name == "cpu" and not available(bench.dtype, spec.head_dim, bench.device),
            fused_products=_fuses(bench),
            torch_attention=bench.name == "gpu" and not by_triton(bench.device, spec.head_dim),
            packed=packed,
            experts=experts,
        )
        recorded = recorded_ticks(bench, rates, seconds(RECORDED)) if bench.name == "gpu" else None
        own = self._c.spec if isinstance(self._c.spec, ModuleSpec) else None
        prompts = {} if own is None else prompt_ticks(bench, rates, seconds(PROMPTS), own)
        ticks = unexplained_ticks(bench, rates, seconds("ticks"), own)
        return replace(rates, tick_s=ticks, prompt_tick_s=prompts, graph_tick_s=recorded)

    def _all_links(self, bench: Bench) -> links.Factors:
        """Measures every link, and then all of them beside each other, and beside products."""
        c = self._c
        with ExitStack() as stack:
            disk = stack.enter_context(links.Disk(c.offload_dir, c.unit_bytes, c.file_bytes))
            self._memory["disk"] = disk.free_bytes
            self._disk(disk)
            size = min(disk.unit, _BESIDE)
            beside = [disk.reads(size), disk.rewrites(size)]
            if c.has_gpu:
                copies = stack.enter_context(links.HostGpu(c.device, c.unit_bytes, c.arena_bytes or _HOST))
                self._copies(copies)
                beside += [copies.link(name, min(copies.unit, _BESIDE)) for name in _COPIES]
            if c.device.type == "cuda":  # for comparison only: the engine's host memory beside a GPU is page-locked
                with links.HostGpu(c.device, c.unit_bytes, c.arena_bytes or _HOST, pinned=False) as pageable:
                    for name, part in _COPIES.items():
                        link = pageable.link(name, pageable.unit)
                        sample = links.queued_sample(self._timer, link, self._start(f"pageable {part}"))
                        rate = format_rate(pageable.unit / sample.seconds)
                        self.spreads.said[name] += f" (pageable memory {rate})"
            with torch.inference_mode():
                call = compute.contending_product(bench)
                call()
                contest = links.Contest({link.name: link for link in beside}, lambda: bench.timer.once(call))
                return contest.slowdown(self._start(CONTENTION))

    def _disk(self, disk: links.Disk) -> None:
        small = min(links.SMALL, disk.unit)
        fresh = links.queued_sample(self._timer, disk.fresh_writes(), self._start("disk writes"), disk.blocks)
        disk.settle()
        if not disk.direct:
            log.warning("the file system of %s knows no O_DIRECT: its page cache is measured, too", self._c.offload_dir)
        way = "O_DIRECT" if disk.direct else "buffered"
        text = f"{format_bytes(disk.unit)} at a time from a file of {format_bytes(disk.written)}, {way}"
        self._link("disk reads", disk.reads(disk.unit), disk.reads(small), text, disk.written // disk.unit)
        self._link("disk rewrites", disk.rewrites(disk.unit), disk.rewrites(small), "")
        # The first write of a preallocated region is not like later ones: caches are written once and again.
        rate = self._links["cpu->disk"]
        mean = (fresh.seconds + rate.seconds(disk.unit)) / 2
        first, later = (format_rate(disk.unit / each) for each in (fresh.seconds, rate.seconds(disk.unit)))
        said = f"{way}, with checksums, between first writes ({first}) and later ones ({later})"
        self.spreads.said["cpu->disk"] = said
        self._links["cpu->disk"] = LinkRate(disk.unit / max(mean - rate.latency_s, mean / 2), rate.latency_s)

    def _copies(self, copies: links.HostGpu) -> None:
        how = "within host memory" if self._c.emulated else "page-locked"
        for name, part in _COPIES.items():
            self._link(part, copies.link(name, copies.unit), copies.link(name, min(links.SMALL, copies.unit)), how)

    def _link(self, part: str, large: links.Link, small: links.Link, said: str, most: int | None = None) -> None:
        """Measures one link by transfers of two sizes; `most`: of the large ones."""
        self.spreads.said[large.name] = said
        seconds = self._start(part)
        unit = self.spreads.note(large.name, links.queued_sample(self._timer, large, seconds * 0.8, most))
        little = links.queued_sample(self._timer, small, seconds * 0.2)
        self._links[large.name] = links.link_rate((large.nbytes, unit.seconds), (small.nbytes, little.seconds))


def _fuses(bench: Bench) -> bool:
    """Whether the products of a layer add to the residual, and do ReLU if it has that, themselves."""
    if bench.name == "gpu":
        return not (bench.spec.arch.output_bias or bench.spec.arch.mlp_bias)
    return why_not() is None and bench.dtype is torch.bfloat16


def _weights(calibration: Calibration) -> dict[str, float]:
    """Of all parts, in the order in which they are measured."""
    weights: dict[str, float] = {}
    for device in calibration.devices:
        name = "gpu" if device.type == "cuda" else "cpu"
        parts = COMPUTE_PARTS | ({RECORDED: _RECORDED_WEIGHT} if name == "gpu" else {})
        parts |= {EXPERTS: _EXPERTS_WEIGHT} if calibration.spec.arch.experts else {}
        parts |= {PROMPTS: _PROMPTS_WEIGHT} if isinstance(calibration.spec, ModuleSpec) else {}
        weights |= {f"{name}: {part}": weight for part, weight in parts.items()}
    weights |= DISK_PARTS
    if calibration.has_gpu:
        weights |= dict.fromkeys(_COPIES.values(), _COPIES_WEIGHT)
    if calibration.device.type == "cuda":
        weights |= {f"pageable {part}": _PAGEABLE_WEIGHT for part in _COPIES.values()}
    resources = 5 if calibration.has_gpu else 3
    return weights | {CONTENTION: _CONTENTION_WEIGHT * (resources + resources * (resources - 1) // 2)}
