"""Adapter of this package for `bench`, planned as `run` plans: `python -m h2o_flexgen.cli.adapter FOLDER [prepare]`.

With `prepare` nothing is run: where the plan of the work needs the machine's rates and they are not known, they are
measured now. What is measured afterwards then never contains a calibration.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from h2o_flexgen.baselines import own
from h2o_flexgen.baselines.work import AdapterWork, Outcome, run
from h2o_flexgen.cli.planning import Planning
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.engine.llm import LLM


def measure(folder: str) -> Outcome:
    """Runs the work in `folder` by the plan that it asks for."""
    searches = AdapterWork.read(Path(folder)).plan != "rule"
    return own.measure(folder, partial(_attach, calibrate=False) if searches else own.by_rule)


def prepare(folder: str) -> None:
    """Calibrates this machine where `run` would, unless that was done before."""
    work = AdapterWork.read(Path(folder))
    if work.plan == "rule":
        return
    with own.engine_of(work) as llm:
        _attach(llm, calibrate=None)
        llm.plan(Workload(max(len(prompt) for prompt in work.prompts), work.gen_len, len(work.prompts)))


def _attach(llm: LLM, calibrate: bool | None) -> own.Complete:
    planning = Planning(llm, None, calibrate, quiet=True)
    llm.planner, llm.on_plan = planning, planning.announce
    return planning.completed


if __name__ == "__main__":
    sys.exit(run(measure, prepare))
