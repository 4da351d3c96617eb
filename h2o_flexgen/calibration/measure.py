"""Everything a HardwareProfile holds, measured on this machine within a time limit."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from h2o_flexgen.calibration.attention import decode_curves, prefill_curves
from h2o_flexgen.calibration.bench import Bench, Spreads
from h2o_flexgen.calibration.contention import NOTICED, Contest, Factors
from h2o_flexgen.calibration.elementwise import elementwise_rate, fresh_rate
from h2o_flexgen.calibration.links import FILE, SMALL, Disk, HostGpu, Link, measured_rate, queued_sample
from h2o_flexgen.calibration.products import fastest_read, general_rate, product_call, product_shapes
from h2o_flexgen.calibration.recorded import recorded_ticks
from h2o_flexgen.calibration.sampling import sample_seconds
from h2o_flexgen.calibration.stored import keep_profile, machine_facts, profile_key
from h2o_flexgen.calibration.ticks import unexplained_ticks
from h2o_flexgen.calibration.timing import WIDE, Repeats, TimeBudget, Timer
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.config.hardware.rates import UNIT_KINDS, ComputeRates, LinkRate
from h2o_flexgen.config.model.products import products
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.reports.record import utc_now
from h2o_flexgen.cores import CoreCount, sharing_warning
from h2o_flexgen.engine.limits.devices import cgroup_limit
from h2o_flexgen.errors import UsageError
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
    "memory": 1.0,
    "elementwise": 1.5,
    "attention of decode steps": 7.0,
    "attention of prompts": 4.0,
    "sampling": 1.0,
    "ticks": 5.0,
}
"""Weights of what is measured on each compute device."""
RECORDED, _RECORDED_WEIGHT = "recorded steps", 2.0
DISK_PARTS = {"disk writes": 5.0, "disk reads": 4.0, "disk rewrites": 2.0}
COPY_PARTS = {"copies to the GPU": 1.5, "copies from the GPU": 1.5}
CONTENTION = "contention"
_CONTENTION_WEIGHT = 1.0  # for each resource alone and each two of them
_ROWS_BESIDE = 64  # of the product that contends with the links
_BESIDE = 16 * MIB  # bytes of transfers there
_HOST = 256 * MIB
_BUSY = 0.5  # load average
_REPEATED = 2 / 3  # of the seconds: what measuring again may take beside them


@dataclass(frozen=True)
class Calibration:
    """What is measured, and where. `emulated`: a gpu tier in host memory; `file_bytes`: of the file read at most.

    dtype: a word of config.model.tensors. budget_s: seconds in all, about; measuring everything once may take longer.
    Beside that, two thirds of it at most go to measuring again what something disturbed.
    """

    spec: ModelSpec
    dtype: str
    device: torch.device
    offload_dir: str | Path
    budget_s: float = 45.0
    emulated: bool = False
    file_bytes: int = FILE
    arena_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.budget_s < float("inf"):
            raise UsageError(f"--budget-s is {self.budget_s}", "needed a number of seconds above 0")

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The compute devices; beside a GPU the CPU computes the attention of caches that live there."""
        cpu = torch.device("cpu")
        return (cpu,) if self.device.type == "cpu" else (self.device, cpu)

    @property
    def has_gpu(self) -> bool:
        """Whether there is a gpu tier, emulated or not."""
        return self.emulated or self.device.type == "cuda"

    @property
    def unit_bytes(self) -> int:
        """The largest unit of a layer, as it is moved."""
        sizes = [group.buffer_bytes(self.dtype) for group in self.spec.weight_groups if group.key.startswith("layers.")]
        return max(sizes)

    @property
    def key(self) -> str:
        """Of the profile among those that are kept."""
        return profile_key(self.spec, self.dtype, self.device, emulated=self.emulated, offload_dir=self.offload_dir)


def calibrate(calibration: Calibration, on_progress: Progress = lambda what, spent, total: None) -> HardwareProfile:
    """Measures this machine, keeps the profile for `cached_profile`, and returns it.

    Threads, memory and files are given back in any case. StorageError where the offload folder cannot be used; what
    memory raises where there is none. Logs a warning where the machine is busy or figures vary much.
    """
    if (busy := os.getloadavg()[0]) > _BUSY:
        log.warning("the machine is busy (load average %.1f): these figures will be too low", busy)
    library()
    run = _Run(calibration, on_progress)
    profile = run.profile()
    for figure, spread in run.spreads.typical.items():
        if spread > WIDE:
            log.warning("%s: the quartiles of what was measured are %.0f %% apart", figure, 100 * spread)
    if (said := sharing_warning(profile.host["shared"])) is not None:
        log.warning("%s", said)
    keep_profile(profile, calibration.key)
    return profile


class _Run:
    """One calibration under way."""

    def __init__(self, calibration: Calibration, on_progress: Progress) -> None:
        self._c, self._on_progress = calibration, on_progress
        self._repeats = Repeats(_REPEATED * calibration.budget_s)
        self._budget = TimeBudget(calibration.budget_s, _weights(calibration), self._repeats.clock)
        self._timer = Timer(repeats=self._repeats)
        self.spreads, self._cores = Spreads(), CoreCount()
        self._memory = {"cpu": min(psutil.virtual_memory().total, cgroup_limit() or 1 << 62)}
        self._compute: dict[str, ComputeRates] = {}
        self._links: dict[str, LinkRate] = {}

    def profile(self) -> HardwareProfile:
        """All of it."""
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

    def _made(self, slowdown: Factors) -> HardwareProfile:
        c, facts = self._c, machine_facts(self._c.device)
        if c.device.type == "cuda":
            self._memory["gpu"] = facts["gpu_memory_bytes"]
        emulated = " with an emulated GPU" if c.emulated else ""
        load, again = round(os.getloadavg()[0], 2), self._repeats
        took = {"calibrated_s": round(self._budget.elapsed + again.spent, 1), "repeated_s": round(again.spent, 1)}
        self._cores.stop()
        return HardwareProfile(
            name=f"{facts.get('gpu', facts['cpu'])}{emulated}, {c.spec.name}",
            date=utc_now(),
            dtype=c.dtype,
            links=self._links,
            compute=self._compute,
            slowdown=slowdown,
            memory=self._memory,
            host={**facts, "load_average": load, "shared": self._cores.shared, **took},
            sources={**self.spreads.sources(), "slowdown": f"measured; factors below {NOTICED} are left out"},
        )

    @contextmanager
    def _bench(self, device: torch.device) -> Iterator[Bench]:
        with Bench(self._c.spec, self._c.dtype, device, self._c.arena_bytes) as bench:
            bench.spreads, bench.timer.repeats = self.spreads, self._repeats
            yield bench

    def _start(self, part: str) -> float:
        self._on_progress(part, self._budget.elapsed, self._budget.seconds)
        return self._budget.take(part)

    # ---- compute

    def _compile(self, bench: Bench) -> None:
        """Has Triton's kernels compiled and tuned, which happens when each is first used: every curve is taken once, in
        no time. Compiling is no part of the budget, of which it would leave little; it is bounded by `triton_tune`."""
        if serves(bench.device):
            self._on_progress("compiling kernels", self._budget.elapsed, self._budget.seconds)
            with self._repeats.untimed():
                decode_curves(bench, 0.0)
                prefill_curves(bench, 0.0)

    def _rates(self, bench: Bench) -> ComputeRates:
        spec = bench.spec
        self._compile(bench)

        def seconds(part: str) -> float:
            return self._start(_on(bench.name, part))

        shapes = product_shapes(bench, seconds("products"))
        memory = fastest_read(bench, shapes, seconds("memory"))
        share = seconds("elementwise")
        elementwise = elementwise_rate(bench, share * 0.6)
        fresh = fresh_rate(bench, share * 0.4) if bench.name == "cpu" else None
        decode = decode_curves(bench, seconds("attention of decode steps"))
        prefill = prefill_curves(bench, seconds("attention of prompts"))
        sample = sample_seconds(bench, seconds("sampling"), elementwise)
        rates = ComputeRates(
            gemm_flops=general_rate(shapes, (*products(spec, "attn"), *products(spec, "mlp"))),
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
        )
        recorded = recorded_ticks(bench, rates, seconds(RECORDED)) if bench.name == "gpu" else None
        return replace(rates, tick_s=unexplained_ticks(bench, rates, seconds("ticks")), graph_tick_s=recorded)

    # ---- links

    def _all_links(self, bench: Bench) -> Factors:
        """Measures every link, and then all of them beside each other."""
        c = self._c
        with ExitStack() as stack:
            disk = stack.enter_context(Disk(c.offload_dir, c.unit_bytes, c.file_bytes))
            self._memory["disk"] = disk.free_bytes
            self._disk(disk)
            beside = {link.name: link for link in self._beside(disk)}
            if c.has_gpu:
                copies = stack.enter_context(HostGpu(c.device, c.unit_bytes, c.arena_bytes or _HOST))
                beside |= {link.name: link for link in self._copies(copies)}
                if c.device.type == "cuda":
                    self._pageable()
            return self._contention(bench, beside)

    def _disk(self, disk: Disk) -> None:
        small = min(SMALL, disk.unit)
        fresh = queued_sample(self._timer, disk.fresh_writes(), self._start("disk writes"), disk.blocks)
        disk.settle()
        if not disk.direct:
            log.warning("the file system of %s knows no O_DIRECT: its page cache is measured, too", self._c.offload_dir)
        way = "O_DIRECT" if disk.direct else "buffered"
        share = self._start("disk reads")
        text = f"{format_bytes(disk.unit)} at a time from a file of {format_bytes(disk.written)}, {way}"
        self.spreads.said["disk->cpu"] = text
        self._links["disk->cpu"] = measured_rate(
            self._timer, disk.reads(disk.unit), disk.reads(small), share, self.spreads, disk.written // disk.unit
        )
        share = self._start("disk rewrites")
        rate = measured_rate(self._timer, disk.rewrites(disk.unit), disk.rewrites(small), share, self.spreads)
        # The first write of a preallocated region is not like later ones: caches are written once and again.
        mean = (fresh.seconds + rate.seconds(disk.unit)) / 2
        first, later = (format_rate(disk.unit / each) for each in (fresh.seconds, rate.seconds(disk.unit)))
        said = f"{way}, with checksums, between first writes ({first}) and later ones ({later})"
        self.spreads.said["cpu->disk"] = said
        self._links["cpu->disk"] = LinkRate(disk.unit / max(mean - rate.latency_s, mean / 2), rate.latency_s)

    def _beside(self, disk: Disk) -> tuple[Link, Link]:
        size = min(disk.unit, _BESIDE)
        return disk.reads(size), disk.rewrites(size)

    def _copies(self, copies: HostGpu) -> tuple[Link, Link]:
        small = min(SMALL, copies.unit)
        for make, part in ((copies.inward, "copies to the GPU"), (copies.outward, "copies from the GPU")):
            large = make(copies.unit)
            how = "within host memory" if self._c.emulated else "page-locked"
            self.spreads.said[large.name] = how
            self._links[large.name] = measured_rate(self._timer, large, make(small), self._start(part), self.spreads)
        size = min(copies.unit, _BESIDE)
        return copies.inward(size), copies.outward(size)

    def _pageable(self) -> None:
        """For comparison only: the engine's host memory beside a GPU is page-locked."""
        c = self._c
        with HostGpu(c.device, c.unit_bytes, c.arena_bytes or _HOST, pinned=False) as copies:
            for link, part in ((copies.inward(copies.unit), "to"), (copies.outward(copies.unit), "from")):
                sample = queued_sample(self._timer, link, self._start(f"pageable copies {part} the GPU"))
                self.spreads.said[link.name] += f" (pageable memory {format_rate(link.nbytes / sample.seconds)})"

    def _contention(self, bench: Bench, links: dict[str, Link]) -> Factors:
        product = max(products(bench.spec, "mlp"), key=lambda each: each.out_features * each.in_features)
        parts = -(-product.out_features * product.in_features * bench.itemsize // len(bench.arena))
        product = product._replace(out_features=-(-product.out_features // parts))
        with torch.inference_mode():
            call = product_call(bench, product, _ROWS_BESIDE, biased=False)
            call()
            return Contest(links, lambda: bench.timer.once(call)).slowdown(self._start(CONTENTION))


def _fuses(bench: Bench) -> bool:
    """Whether the products of a layer add to the residual, and do ReLU if it has that, themselves."""
    if bench.name == "gpu":
        return not (bench.spec.arch.output_bias or bench.spec.arch.mlp_bias)
    return why_not() is None and bench.dtype is torch.bfloat16


def _on(device: str, part: str) -> str:
    return f"{device}: {part}"


def _weights(calibration: Calibration) -> dict[str, float]:
    """Of all parts, in the order in which they are measured."""
    weights: dict[str, float] = {}
    for device in calibration.devices:
        name = "gpu" if device.type == "cuda" else "cpu"
        weights |= {_on(name, part): weight for part, weight in COMPUTE_PARTS.items()}
        weights |= {_on(name, RECORDED): _RECORDED_WEIGHT} if name == "gpu" else {}
    weights |= DISK_PARTS
    resources = 3
    if calibration.has_gpu:
        weights |= COPY_PARTS
        resources = 5
    if calibration.device.type == "cuda":
        weights |= {"pageable copies to the GPU": 0.5, "pageable copies from the GPU": 0.5}
    return weights | {CONTENTION: _CONTENTION_WEIGHT * (resources + resources * (resources - 1) // 2)}
