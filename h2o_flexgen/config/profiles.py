"""Where hardware profiles are: shipped ones by name, files, and what was calibrated on this machine. No torch."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from h2o_flexgen.config.flags import called
from h2o_flexgen.config.hardware import HardwareProfile
from h2o_flexgen.config.known import configs_folder
from h2o_flexgen.config.model import ModelSpec
from h2o_flexgen.config.products import all_products
from h2o_flexgen.errors import UsageError
from h2o_flexgen.registry import suggestion

log = logging.getLogger(__name__)

METHOD = 6
"""Counted up whenever something is measured otherwise: older profiles then count no more."""


def profile_names() -> tuple[str, ...]:
    """The shipped profiles: machines to plan for without having them."""
    folder = configs_folder("hardware")
    return tuple(sorted(path.stem for path in folder.glob("*.json"))) if folder else ()


def cache_folder() -> Path:
    """Where calibrated profiles are kept: $XDG_CACHE_HOME or ~/.cache, then h2o_flexgen/hardware."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "h2o_flexgen" / "hardware"


def kept_file(key: str) -> Path:
    """Where the profile called `key` is kept, among those that were measured by the same method."""
    return cache_folder() / f"{METHOD}-{key}.json"


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


def kept_profile(spec: ModelSpec, dtype: str, device: str) -> HardwareProfile:
    """The nearest of what was calibrated here: of the device that `run` takes, then of `dtype`, then at the shapes of
    `spec`, then the newest. UsageError where there is nothing.

    dtype, device: as EngineConfig has them, "auto" included.
    """

    def nearness(profile: HardwareProfile) -> tuple[int, bool, bool]:
        return _gpu(profile) if device != "cpu" else 0, dtype in ("auto", profile.dtype), _measured(profile, spec)

    files = sorted(cache_folder().glob(f"{METHOD}-*.json"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    found = [profile for path in reversed(files) if (profile := load_kept(path)) is not None]
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
    return found


def _gpu(profile: HardwareProfile) -> int:
    """1 for a profile of a GPU, 0 for one without, -1 for one of a GPU that was emulated, whose size was a flag."""
    if "gpu" not in profile.compute:
        return 0
    return 1 if "gpu" in profile.memory else -1


def _measured(profile: HardwareProfile, spec: ModelSpec) -> bool:
    """Whether all products of `spec` were measured, on every device."""
    wanted = set(all_products(spec))
    return all(
        wanted <= {(shape.out_features, shape.in_features) for shape in rates.shapes}
        for rates in profile.compute.values()
    )
