"""Adapter of this package: `python -m h2o_flexgen.baselines.own FOLDER [prepare]`.

`options` are the fields of EvictionConfig. Plans are those of `run`, or for work whose plan is "rule" the engine's own.
With `prepare` nothing is run: where the plan of the work needs the machine's rates and they are not known, they are
measured now. Later measurements then never contain a calibration.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

import torch

from h2o_flexgen.baselines.work import WARMUP_NEW, WARMUP_PROMPT, AdapterWork, Outcome, disk_bytes, run
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.config.reports.record import package_version
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.limits.plan import Plan
from h2o_flexgen.errors import required
from h2o_flexgen.planning.llm import LLM
from h2o_flexgen.planning.planner import calibrate_here
from h2o_flexgen.schedule.request import PlanRequest

log = logging.getLogger(__name__)

_OF_ENGINE = ("weights", "dtype", "weight_bits", "model_impl", "device", "seed", "gpu_mem")
SPARED, LEAST_SPARED = 1 / 16, 128 << 20
"""Of a cap, and in bytes at least, what the engine does not plan with: a control group also counts pages of files."""


def measure(folder: str) -> Outcome:
    work = AdapterWork.read(Path(folder))
    with engine_of(work) as llm:
        llm.generate([prompt[:WARMUP_PROMPT] for prompt in work.prompts], max_new_tokens=WARMUP_NEW, ignore_eos=True)
        load_s = llm.last_record.load_s if llm.last_record else 0.0
        planner, planned = llm.planner, list[float]()

        def timed(request: PlanRequest) -> Plan:
            begun = time.perf_counter()
            try:
                return planner(request)
            finally:
                planned.append(time.perf_counter() - begun)

        llm.planner = timed
        read, started = disk_bytes(), time.perf_counter()
        outputs = llm.generate(work.prompts, max_new_tokens=work.gen_len, ignore_eos=True)
        total_s, read = time.perf_counter() - started, disk_bytes() - read
        record = required(llm.last_record, "the run left no record")
    return Outcome(
        prefill_s=record.prefill_s,
        decode_s=record.decode_s,
        # A second plan may place the weights anew: that is loading, and planning is no generation either.
        total_s=total_s - record.load_s - sum(planned),
        load_s=load_s + record.load_s,
        token_ids=[output.token_ids for output in outputs],
        versions={"h2o_flexgen": package_version(), "torch": torch.__version__},
        detail={**record.to_json(), "plan_s": sum(planned)},
        disk_read_bytes=read,
        bytes_moved=record.bytes_moved,
        shared=record.shared,
    )


def prepare(folder: str) -> None:
    """Calibrates this machine where `run` would, unless that was done before."""
    work = AdapterWork.read(Path(folder))
    if work.plan == "rule":
        return
    with engine_of(work) as llm:
        if isinstance(llm, LLM):
            llm.planning.calibrate = lambda: _calibrated(llm)
        llm.plan(Workload(max(len(prompt) for prompt in work.prompts), work.gen_len, len(work.prompts)))


def _calibrated(llm: LLM) -> HardwareProfile | None:
    profile = calibrate_here(llm.config, quiet=True)
    if profile is None:
        log.warning("calibrating failed, so the plan goes by rule and nothing is predicted")
    return profile


def engine_of(work: AdapterWork) -> Engine:
    """The engine for `work`; unless everything is to be planned, its prompts are one GPU batch."""
    policy = {} if work.plan == "all" else {"gpu_batch_size": len(work.prompts), "num_gpu_batches": 1}
    return (Engine if work.plan == "rule" else LLM)(
        work.folder or work.model,
        eviction=EvictionConfig(**work.options),
        policy=policy,
        cpu_mem=None if work.cpu_mem is None else within(work.cpu_mem),
        **{name: getattr(work, name) for name in _OF_ENGINE},
        offload_dir=str(Path(work.scratch) / "offload"),
    )


def within(cap: int) -> int:
    """Bytes of host memory that the engine is given under a cap on the whole process."""
    return int(cap - max(cap * SPARED, LEAST_SPARED))


if __name__ == "__main__":
    sys.exit(run(measure, prepare))
