"""`LLM` plans exactly as `run` does: searched where this machine's rates are known, else by rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_flexgen import LLM
from h2o_flexgen.calibration.stored import keep_profile, profile_key
from h2o_flexgen.cli.prompts import random_prompts
from h2o_flexgen.config.reports.record import RunRecord
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.limits import devices
from h2o_flexgen.errors import UsageError
from h2o_flexgen.planning import planner
from tests.cost.machines import profile
from tests.programs import Run, write_model

RATES = profile(name="a made-up machine", dtype="float32")
COUNT, PROMPT, NEW = 8, 20, 4
TIGHT = "103MiB"
"""Less than the model and a block beside the 100 MiB of the process."""


@pytest.fixture(autouse=True)
def _steady_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What this process holds is 100 MiB, and nothing was ever calibrated, nor will be."""
    for measured in ("rss", "before_placement"):
        monkeypatch.setattr(devices, measured, lambda: 100 << 20)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(planner, "calibrate_here", lambda *_: pytest.fail("it was calibrated"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3.2 MiB of weights."""
    sizes = {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 512, "num_hidden_layers": 4}
    return write_model(tmp_path_factory.mktemp("larger") / "model", **sizes)


def keep_rates(model: Path) -> None:
    """As if `calibrate` had been here."""
    with Engine(str(model)) as engine:
        key = profile_key(engine.model.spec, engine.model.dtype, engine.device, offload_dir=engine.offload_folder)
    assert keep_profile(RATES, key) is not None


def by_api(kind: type[Engine], model: Path, **settings: Any) -> RunRecord:
    """The record of the prompts that `run` makes up."""
    with kind(str(model), cpu_mem=TIGHT, **settings) as llm:
        prompts = random_prompts(COUNT, PROMPT, llm.model.spec.vocab_size, 0)
        llm.generate(prompts, max_new_tokens=NEW, ignore_eos=True)
        assert llm.last_record is not None
        return llm.last_record


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ((), {}),
        (("--gbs", 3, "--weights-placement", "cpu=0.2,disk=0.8"),
         {"policy": {"gpu_batch_size": 3, "weights": {"cpu": 0.2, "disk": 0.8}}}),
    ],
    ids=["free", "in part"],
)  # fmt: skip
def test_a_cached_profile_gives_what_run_gives(model: Path, run: Run, flags: Any, settings: dict[str, Any]) -> None:
    keep_rates(model)
    work = ("--prompt-len", PROMPT, "--num-prompts", COUNT, "--gen-len", NEW, "--cpu-mem", TIGHT)
    ran = run("--model", model, *work, *flags, "--json").record
    called = json.loads(by_api(LLM, model, **settings).to_line())
    for key in ("policy", "predicted", "least_bytes_moved", "bytes_moved", "eviction"):
        assert called[key] == ran[key], key
    assert called["policy"]["chosen"] == "search"
    assert called["predicted"]["hardware"] == "a made-up machine"
    for phase, entry in called["roofline"].items():
        assert entry["bound"]["seconds"] == pytest.approx(ran["roofline"][phase]["bound"]["seconds"])


def test_without_rates_it_goes_by_rule(model: Path) -> None:
    record = by_api(LLM, model)
    assert (record.policy["chosen"], record.predicted) == ("rule", None)
    assert record.policy == by_api(Engine, model).policy


def test_an_engine_has_no_opinion(model: Path) -> None:
    keep_rates(model)
    assert by_api(Engine, model).predicted is None


def test_a_plan_says_what_is_expected(model: Path) -> None:
    keep_rates(model)
    with LLM(str(model), cpu_mem=TIGHT) as llm:
        plan = llm.plan(Workload(PROMPT, NEW, COUNT))
        assert plan.searched
        assert plan.predicted is not None
        assert plan.request.profile == RATES
    given = {"gpu_batch_size": 4, "num_gpu_batches": 2, "weights": {"disk": 1.0}, "cache": {"cpu": 1.0}}
    whole = {**given, "hidden": {"cpu": 1.0}, "cpu_cache_compute": False, "lookahead": 1}
    with LLM(str(model), policy=whole, hardware=profile(name="another", dtype="float32")) as llm:
        plan = llm.plan(Workload(PROMPT, NEW, COUNT))
        assert not plan.searched
        assert plan.predicted["hardware"] == "another"


def test_torch_s_own_names_will_do(model: Path) -> None:
    with LLM(model, dtype=torch.float32, device=torch.device("cpu")) as llm:
        assert (llm.model.dtype, llm.device.type, llm.config.dtype) == ("float32", "cpu", "float32")
    with pytest.raises(UsageError, match="dtype is 'float64'"):
        LLM(model, dtype=torch.float64)
