"""`from h2o_flexgen import LLM` works, and costs nothing until it is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import h2o_flexgen
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.prompt import Prompt, Span
from h2o_flexgen.config.reports.record import RunRecord, package_version
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.requests.sequence import RequestOutput
from h2o_flexgen.planning.llm import LLM


def test_the_names_are_the_things() -> None:
    things = (LLM, SamplingParams, OffloadPolicy, EvictionConfig, Prompt, RequestOutput, RunRecord, Span)
    for thing in things:
        assert getattr(h2o_flexgen, thing.__name__) is thing
    assert h2o_flexgen.__version__ == package_version()
    assert set(h2o_flexgen.__all__) == {thing.__name__ for thing in things} | {"__version__"}
    assert set(h2o_flexgen.__all__) <= set(dir(h2o_flexgen))


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="'h2o_flexgen' has no attribute 'LLMM'"):
        h2o_flexgen.LLMM  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Policy'"):
        from h2o_flexgen import Policy  # noqa: F401


def test_what_needs_no_torch_loads_none() -> None:
    code = (
        "import sys, h2o_flexgen\nfrom h2o_flexgen import EvictionConfig, OffloadPolicy, RunRecord, SamplingParams\n"
        "dir(h2o_flexgen), h2o_flexgen.__version__\nassert 'torch' not in sys.modules, 'torch'\n"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
