"""`LLM`: the engine with the planner that `run` and `bench` use."""

from __future__ import annotations

from typing import Any

from h2o_flexgen.calibration.stored import cached_profile
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.planning.planner import SearchPlanner


class LLM(Engine):
    """An offline engine that plans for itself. A context manager: `close` stops its threads and removes its files.

    `settings` are the fields of EngineConfig by name. Plans are searched on the rates of `hardware`, or on those that
    `h2o_flexgen.calibrate` measured on this machine; where neither is there they go by the engine's rule. It never
    calibrates by itself. Everything else is as Engine has it.
    """

    def __init__(self, model: str = "demo", *, hardware: HardwareProfile | None = None, **settings: Any) -> None:
        super().__init__(model, **settings)
        self._hardware = hardware
        self.planner = self.planning = SearchPlanner(self._rates)

    def _rates(self) -> HardwareProfile | None:
        if self._hardware is not None:
            return self._hardware
        spec, dtype, emulated = self.model.spec, self.model.dtype, self.config.emulate_gpu is not None
        return cached_profile(spec, dtype, self.device, emulated=emulated, offload_dir=self.offload_folder)
