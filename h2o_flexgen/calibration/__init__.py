"""Measures this machine into a HardwareProfile, on the code paths that the engine takes."""

from h2o_flexgen.calibration.measure import Calibration, calibrate
from h2o_flexgen.calibration.stored import cached_profile, keep_profile

__all__ = ["Calibration", "cached_profile", "calibrate", "keep_profile"]
