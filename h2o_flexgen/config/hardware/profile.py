"""A machine as the cost model sees it, and where such profiles are: shipped, in files, calibrated here. No torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from h2o_flexgen.config.checks import KeptAsJson, number, whole
from h2o_flexgen.config.flags import called, option
from h2o_flexgen.config.hardware.rates import ComputeRates, LinkRate
from h2o_flexgen.config.model.known import configs_folder
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import computed_dtype, dtype_bytes
from h2o_flexgen.config.offload import TIERS
from h2o_flexgen.errors import UsageError
from h2o_flexgen.folders import ask_for, cached
from h2o_flexgen.registry import suggestion

log = logging.getLogger(__name__)

METHOD = 6
"""Counted up whenever something is measured otherwise: older profiles then count no more."""


@dataclass(frozen=True)
class HardwareProfile(KeptAsJson):
    """One machine as the cost model sees it.

    dtype      what the compute rates were measured in
    links      by name: "disk->cpu", "cpu->disk", and with a GPU "cpu->gpu", "gpu->cpu"; a transfer from disk to the GPU
               crosses both
    compute    by device: "cpu", "gpu"
    slowdown   slowdown[a][b], at least 1: how many times as long `a` takes while `b` is busy all the time, both either
               "compute" or the name of a link. Pairs left out do not disturb each other; factors of several b multiply
    sources    where each figure comes from: "measured", or a data sheet
    memory     bytes per tier that the machine has, where known
    """

    name: str
    date: str
    dtype: str
    links: Mapping[str, LinkRate]
    compute: Mapping[str, ComputeRates]
    slowdown: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    host: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dtype_bytes(self.dtype)
        for name in ("memory", "host", "sources"):
            if not isinstance(getattr(self, name), Mapping):
                raise UsageError(f"{name} is {getattr(self, name)!r}", "needed values by name")
        for tier, nbytes in self.memory.items():
            if tier not in TIERS:
                raise UsageError(f"memory names {tier}", f"needed names among {', '.join(TIERS)}")
            whole(nbytes, f"the memory of {tier}", 0)
        known = {"compute", *self.links}
        for slowed, factors in self.slowdown.items():
            for beside, factor in factors.items():
                if unknown := {slowed, beside} - known:
                    raise UsageError(
                        f"slowdown names {', '.join(sorted(unknown))}", f"needed names among {', '.join(sorted(known))}"
                    )
                number(factor, f"the slowdown of {slowed} by {beside}", 1, needed="needed a number, at least 1")

    def link(self, name: str) -> LinkRate:
        """The rate of link `name`; UsageError where the profile does not have it."""
        if name not in self.links:
            raise UsageError(f"the hardware profile {self.name} has no link {name}", f"found {', '.join(self.links)}")
        return self.links[name]

    def rates(self, device: str) -> ComputeRates:
        """The rates of a compute device, "cpu" or "gpu"; UsageError where the profile does not have it."""
        if device not in self.compute:
            raise UsageError(
                f"the hardware profile {self.name} has no rates of the {device}", f"found {', '.join(self.compute)}"
            )
        return self.compute[device]

    def dtype_of(self, spec: ModelSpec, wanted: str, tier: str) -> str:
        """The dtype that `run` keeps `spec` in where `tier` computes: `wanted`, or unless it says so, one of as many
        bytes as its own choice, that of these rates if it is one."""
        dtype = computed_dtype(wanted, spec.dtype, tier == "gpu")
        alike = wanted == "auto" and dtype_bytes(dtype) == dtype_bytes(self.dtype)
        return self.dtype if alike else dtype

    def to_json(self) -> dict[str, Any]:
        plain = super().to_json()
        for rates in plain["compute"].values():
            for name in ("packed", "experts", "prompt_tick_s"):
                if not rates[name]:  # programs that do not know of it read the rest
                    del rates[name]
        return plain

    @classmethod
    def load(cls, path: str | Path) -> HardwareProfile:
        """The profile in a JSON file; UsageError naming the file where it cannot be used."""
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
            raise UsageError(f"{path} is not a hardware profile: {error}", "needed what calibrate writes") from error


def profile_names() -> tuple[str, ...]:
    """The shipped profiles: machines to plan for without having them."""
    folder = configs_folder("hardware")
    return tuple(sorted(path.stem for path in folder.glob("*.json"))) if folder else ()


def kept_file(key: str) -> Path:
    """Where the profile called `key` is kept, among those that were measured by the same method."""
    return cached("hardware") / f"{METHOD}-{key}.json"


def load_kept(path: Path) -> HardwareProfile | None:
    """The profile in a file of the cache folder; None where there is none, and with a warning where it is damaged."""
    if not path.is_file():
        return None
    try:
        return HardwareProfile.load(path)
    except UsageError as error:
        log.warning("%s cannot be used: %s", path, error)
        return None


def find_profile(name: str) -> HardwareProfile:
    """The profile called `name`: a shipped one (t4-16gb or t4), or a JSON file. UsageError with what there is."""
    ask_for(name)
    if Path(name).is_file():
        return HardwareProfile.load(name)
    folder, wanted = configs_folder("hardware"), name.lower()
    found = [each for each in profile_names() if wanted in (each, each.partition("-")[0])]
    if folder is not None and len(found) == 1:
        return HardwareProfile.load(folder / f"{found[0]}.json")
    raise UsageError(
        f"--hardware {name}: neither a profile nor a file",
        f"needed one of {', '.join(profile_names())}, or a JSON file that calibrate wrote",
        suggestion(name, profile_names()),
    )


def kept_profiles() -> Iterator[HardwareProfile]:
    """All that was calibrated here, the newest first."""
    files = sorted(cached("hardware").glob(f"{METHOD}-*.json"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    return (profile for path in reversed(files) if (profile := load_kept(path)) is not None)


def kept_profile(spec: ModelSpec, dtype: str, device: str) -> HardwareProfile:
    """The nearest of what was calibrated here: of the device that `run` takes, then of its dtype, then at the shapes of
    `spec`, then the newest. UsageError where there is nothing.

    dtype, device: as EngineConfig has them, "auto" included.
    """

    def nearness(profile: HardwareProfile) -> tuple[int, bool, bool]:
        alike = profile.dtype_of(spec, dtype, "cpu") == profile.dtype
        return _gpu(profile) if device != "cpu" else 0, alike, _measured(profile, spec)

    found = list(kept_profiles())
    if not found:
        raise UsageError(
            "no --hardware is given, and this machine was not calibrated yet",
            f"needed a profile: {called('calibrate')} measures this machine",
            f"or --hardware with one of {', '.join(profile_names())}, or a file",
        )
    return max(found, key=nearness)


def misfits(profile: HardwareProfile, spec: ModelSpec, dtype: str) -> list[str]:
    """Why rates may not be those of `spec` in `dtype`, in sentences for the user.

    Where no shapes were measured, as in the shipped profiles, the rates are for none and for all.
    """
    found = []
    if profile.dtype != dtype:
        found.append(f"the rates of {profile.name} are for {profile.dtype}, and this is {dtype}")
    if any(rates.shapes for rates in profile.compute.values()) and not _measured(profile, spec):
        better = f"{called('calibrate')} --model {spec.name} measures those"
        found.append(f"the rates of {profile.name} were not measured at the shapes of {spec.name}; {better}")
    unmeasured = {str(bits) for shares in spec.packed_shares.values() for bits in shares}
    if any(unmeasured - set(rates.packed) for rates in profile.compute.values()):
        found.append(f"the rates of {profile.name} do not say how long products of packed weights take: it is assumed")
    return found


def _gpu(profile: HardwareProfile) -> int:
    """1 for a profile of a GPU, 0 for one without, -1 for one of a GPU that was emulated, whose size was a flag."""
    if "gpu" not in profile.compute:
        return 0
    return 1 if "gpu" in profile.memory else -1


def _measured(profile: HardwareProfile, spec: ModelSpec) -> bool:
    """Whether all products of `spec` were measured, on every device."""
    wanted = set(spec.all_products)
    return all(
        wanted <= {(shape.out_features, shape.in_features) for shape in rates.shapes}
        for rates in profile.compute.values()
    )


@dataclass(frozen=True)
class PlanningConfig:
    """How a program gets to know how fast the machine is.

    hardware   a shipped profile's name, or a file; None: the rates calibrated on this machine
    calibrate  True: calibrate it now, if that was never done; False: never; None: only where weights or caches move
    """

    hardware: str | None = option(
        None,
        help="plan on the rates of another machine (t4, a100, h200), or of a file that calibrate wrote",
        metavar="NAME|FILE",
        unset="this machine, as calibrated",
    )
    calibrate: bool | None = option(
        None,
        help="measure this machine first, for about 45 s, unless that was done before; without rates plans go by rule "
        "and predict no time",
        unset="where weights or caches must move",
    )
