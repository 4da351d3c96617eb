"""`LLM`: the engine with the planner that `run` and `bench` use."""

from __future__ import annotations

from os import PathLike
from typing import Any

from h2o_flexgen.calibration.stored import cached_profile
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.planning.planner import SearchPlanner


class LLM(Engine):
    """An `Engine` that plans by search, on the rates of `hardware` or on those that `h2o_flexgen.calibrate` measured on
    this machine; without rates it plans by the engine's rule. It never calibrates by itself.

    `settings` are the fields of EngineConfig by name.
    """

    def __init__(
        self, model: str | PathLike[str] = "demo", *, hardware: HardwareProfile | None = None, **settings: Any
    ) -> None:
        super().__init__(model, **settings)
        self._hardware = hardware
        self.planner = self.planning = SearchPlanner(self._rates)

    def _rates(self) -> HardwareProfile | None:
        if self._hardware is not None:
            return self._hardware
        spec, dtype, emulated = self.model.spec, self.model.dtype, self.config.emulate_gpu is not None
        return cached_profile(spec, dtype, self.device, emulated=emulated, offload_dir=self.offload_folder)
