"""Where hardware profiles are: shipped ones by name, files, and what was calibrated on this machine. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from h2o_flexgen.config.hardware import HardwareProfile
from h2o_flexgen.config.known import configs_folder
from h2o_flexgen.errors import UsageError
from h2o_flexgen.registry import suggestion

_CALIBRATE = "python -m h2o_flexgen.calibrate measures this machine"


def profile_names() -> tuple[str, ...]:
    """The shipped profiles: machines to plan for without having them."""
    folder = configs_folder("hardware")
    return tuple(sorted(path.stem for path in folder.glob("*.json"))) if folder else ()


def cache_folder() -> Path:
    """Where calibrated profiles are kept: $XDG_CACHE_HOME or ~/.cache, then h2o_flexgen/hardware."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "h2o_flexgen" / "hardware"


def find_profile(name: str | None) -> HardwareProfile:
    """The profile called `name`: a shipped one (t4-16gb or t4), or a JSON file; None: the newest calibrated here.

    UsageError where there is none, with what there is.
    """
    if name is None:
        return _calibrated()
    if Path(name).is_file():
        return HardwareProfile.load(name)
    folder, wanted = configs_folder("hardware"), name.lower()
    found = [each for each in profile_names() if wanted in (each, each.partition("-")[0])]
    if folder is not None and len(found) == 1:
        return HardwareProfile.load(folder / f"{found[0]}.json")
    raise UsageError(
        f"--hardware {name}: neither a profile nor a file",
        f"needed one of {', '.join(profile_names())}, or a JSON file that h2o_flexgen.calibrate wrote",
        suggestion(name, profile_names()),
    )


def _calibrated() -> HardwareProfile:
    files = list(cache_folder().glob("*.json"))
    if not files:
        raise UsageError(
            "no --hardware is given, and this machine was not calibrated yet",
            f"needed a profile: {_CALIBRATE}",
            f"or --hardware with one of {', '.join(profile_names())}, or a file",
        )
    return HardwareProfile.load(max(files, key=lambda path: (path.stat().st_mtime_ns, path.name)))
