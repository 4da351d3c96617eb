"""Our own rows of a comparison run by the plan that `run` would make, and never calibrate while they are measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.baselines import own
from h2o_flexgen.baselines.own import LEAST_SPARED
from h2o_flexgen.baselines.settings import SYSTEMS, BenchSettings
from h2o_flexgen.baselines.work import AdapterWork, Outcome
from h2o_flexgen.calibration.stored import keep_profile, profile_key
from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.config.model.modules import ModuleSpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.engine.limits import devices
from h2o_flexgen.planning.llm import LLM
from tests.cost.machines import profile
from tests.programs import write_model

RATES = profile(name="a made-up machine", dtype="float32")
IMPLS = ("native", "transformers")
TIGHT = (103 << 20) + LEAST_SPARED
"""Less than the model and a block beside the 100 MiB of the process."""


@pytest.fixture(autouse=True)
def _steady_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What this process holds is 100 MiB, and nothing was ever calibrated."""
    for measured in ("rss", "before_placement"):
        monkeypatch.setattr(devices, measured, lambda: 100 << 20)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def calibrations(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Calls of `calibrate_here`, which give RATES without measuring."""
    calls: list[EngineConfig] = []

    def measure(config: EngineConfig, quiet: bool) -> Any:
        calls.append(config)
        return RATES

    monkeypatch.setattr(own, "calibrate_here", measure)
    return calls


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3.2 MiB of weights."""
    sizes = {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 512, "num_hidden_layers": 4}
    return write_model(tmp_path_factory.mktemp("larger") / "model", **sizes)


@pytest.fixture
def work(model: Path, tmp_path: Path):
    """`work(plan, cpu_mem)`: a folder with eight prompts of twenty tokens."""

    def make(plan: str, cpu_mem: int | None = TIGHT, weight_bits: int = 16, impl: str = "auto") -> str:
        folder = tmp_path / f"work-{plan}-{cpu_mem}-{impl}"
        prompts = [[2, *range(4 + row, 23 + row)] for row in range(8)]
        options = {"name": "h2o", "ratio": 0.5}
        settings: dict[str, Any] = {"folder": str(model), "weights": "checkpoint", "dtype": "float32", "device": "cpu"}
        AdapterWork(
            model=str(model), threads=1, seed=0, gen_len=4, prompts=prompts, options=options, cpu_mem=cpu_mem,
            scratch=str(tmp_path / "scratch"), plan=plan, weight_bits=weight_bits, model_impl=impl,
            **settings,
        ).write(folder, {})  # fmt: skip
        return str(folder)

    return make


def _keep_rates(model: Path, tmp_path: Path) -> None:
    with LLM(str(model), offload_dir=str(tmp_path / "scratch" / "offload")) as llm:
        key = profile_key(llm.model.spec, "float32", llm.device, offload_dir=llm.offload_folder)
    assert keep_profile(RATES, key) is not None


def _outcome(folder: str) -> Outcome:
    return Outcome.from_line(own.measure(folder).to_line())


def test_every_plan_gives_the_same_tokens_and_says_how_it_was_chosen(
    work, model: Path, tmp_path: Path, calibrations
) -> None:
    _keep_rates(model, tmp_path)
    found = {plan: _outcome(work(plan)) for plan in ("rule", "placement", "all")}
    policies = {plan: outcome.detail["policy"] for plan, outcome in found.items()}
    assert {plan: policy["chosen"] for plan, policy in policies.items()} == {
        "rule": "rule", "placement": "search", "all": "search",
    }  # fmt: skip
    assert (policies["placement"]["gpu_batch_size"], policies["placement"]["num_gpu_batches"]) == (8, 1)
    assert found["rule"].detail["predicted"] is None
    for plan in ("placement", "all"):
        detail = found[plan].detail
        assert detail["predicted"]["hardware"] == "a made-up machine"
        assert detail["predicted"]["generated_tokens"] == 8 * 4, "of the work, not of the warm-up"
        assert detail["least_bytes_moved"]
        assert detail["roofline"]["decode"]["bound"]["seconds"] > 0
        assert detail["plan_s"] > 0
        assert found[plan].token_ids == found["rule"].token_ids
        assert found[plan].total_s >= found[plan].prefill_s + found[plan].decode_s
    assert calibrations == []


def test_what_is_measured_never_calibrates(work, calibrations) -> None:
    assert _outcome(work("placement")).detail["policy"]["chosen"] == "rule"
    assert calibrations == []


def test_preparing_calibrates_where_run_would(work, calibrations) -> None:
    for plan, cpu_mem, times in (("rule", TIGHT, 0), ("all", None, 0), ("all", TIGHT, 1), ("placement", TIGHT, 2)):
        own.prepare(work(plan, cpu_mem))
        assert len(calibrations) == times


def test_weights_are_packed_where_that_is_asked(work) -> None:
    detail = _outcome(work("rule", None, weight_bits=4)).detail
    assert detail["quantization"]["weights"]["bits"] == 4


def test_modules_of_transformers_run_where_that_is_asked(work) -> None:
    native, modules = (own.engine_of(AdapterWork.read(Path(work("rule", None, impl=impl)))) for impl in IMPLS)
    with native, modules:
        assert [type(each.model.spec) for each in (native, modules)] == [ModelSpec, ModuleSpec]


def test_bench_asks_for_it() -> None:
    assert SYSTEMS.get("h2o").adapter == SYSTEMS.get("full").adapter == own.__name__
    assert BenchSettings(batch_sizes=(8,)).plan == "placement"
    assert BenchSettings(batch_sizes=(8, 16)).plan == BenchSettings(batch_sizes=()).plan == "all"
    assert BenchSettings(batch_sizes=(), search=False).plan == "rule"
