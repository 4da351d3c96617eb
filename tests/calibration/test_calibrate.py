"""A whole calibration of tiny shapes in next to no time: what is there, not how fast it is."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from h2o_flexgen import cores
from h2o_flexgen.calibrate import profile_table
from h2o_flexgen.calibration import Calibration, cached_profile, calibrate, links, stored
from h2o_flexgen.calibration import measure as measuring
from h2o_flexgen.calibration.stored import keep_profile, profile_key
from h2o_flexgen.calibration.timing import Repeats, Sample, TimeBudget, Timer
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.config.hardware.rates import ComputeRates, Curve
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.cores import CoreTimes
from h2o_flexgen.cost.simulate import predict
from h2o_flexgen.errors import StorageError, UsageError
from h2o_flexgen.kernels.native import why_not
from h2o_flexgen.memory.copies import CopyEngine
from h2o_flexgen.models.families import spec_from_config
from h2o_flexgen.units import MIB
from tests.cost.machines import model_of
from tests.programs import left_in
from tests.tiny import config_of

CPU = torch.device("cpu")


def spec_of(row: str, **changes: Any) -> ModelSpec:
    return spec_from_config(config_of(row, **changes).to_dict(), row)


def tiny(folder: Path, row: str = "opt", **changes: Any) -> Calibration:
    sizes = {"budget_s": 0.01, "file_bytes": 2 * MIB, "arena_bytes": 2 * MIB}
    return Calibration(spec_of(row), "float32", CPU, folder, **{**sizes, **changes})


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("offload") / "here"


class Measured(NamedTuple):
    """A whole calibration, the folder that profiles were kept in, what it said of its progress, and what it shared."""

    profile: HardwareProfile
    cache: Path
    progress: list[tuple[str, float, float]]
    repeats: set[Repeats]


@pytest.fixture(scope="module")
def measured(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    cache = tmp_path_factory.mktemp("cache")
    shared, seen = set[Repeats](), list[tuple[str, float, float]]()
    steadiest, measure = Repeats.steadiest, Timer.measure

    def noted(timer: Timer, *args: Any, **settings: Any) -> Sample:
        shared.add(timer.repeats)
        return measure(timer, *args, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setattr(Timer, "measure", noted)
        patch.setattr(Repeats, "steadiest", lambda self, *how: (shared.add(self), steadiest(self, *how))[1])
        calibration = tiny(folder, emulated=True)
        named = dataclasses.replace(calibration.spec, name="/home/somebody/opt.gguf")
        profile = calibrate(dataclasses.replace(calibration, spec=named), lambda *now: seen.append(now))
    return Measured(profile, cache, seen, shared)


@pytest.fixture
def profile(measured: Measured) -> HardwareProfile:
    return measured.profile


@pytest.fixture
def rates_known(profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates of devices are taken from `profile`, so that links alone are measured."""
    monkeypatch.setattr(measuring.CalibrationRun, "_rates", lambda run, bench: profile.compute["cpu"])


def check_rates(rates: ComputeRates, spec: ModelSpec) -> None:
    """Every figure is there and positive; Curve itself holds that sizes ascend."""
    assert rates.memory_bytes_per_s > 0
    assert rates.elementwise_bytes_per_s > 0
    assert rates.sample_s > 0
    assert set(rates.tick_s) == {"embed", "attn", "mlp", "head"}
    assert min(y for curve in rates.tick_s.values() for _, y in curve.points) > 0
    measured = {(shape.out_features, shape.in_features) for shape in rates.shapes}
    assert measured == set(spec.all_products)
    for shape in rates.shapes:
        assert shape.seconds.points[0][0] == 1
        assert len(shape.seconds.points) >= 3
    assert set(rates.packed) == {"4", "8"}
    assert min(y for curve in rates.packed.values() for _, y in curve.points) > 0
    curves = (*rates.decode_attention.values(), *rates.prefill_attention.values(), rates.gemm_flops)
    assert all(isinstance(curve, Curve) for curve in curves)


def test_everything_is_measured(profile: HardwareProfile) -> None:
    spec = spec_of("opt")
    assert set(profile.links) == {"disk->cpu", "cpu->disk", "cpu->gpu", "gpu->cpu"}
    assert all(rate.bytes_per_s > 0 and rate.latency_s >= 0 for rate in profile.links.values())
    assert set(profile.compute) == {"cpu", "gpu"}
    for rates in profile.compute.values():
        check_rates(rates, spec)
    assert profile.dtype == "float32"
    assert profile.memory["cpu"] > 0
    assert profile.memory["disk"] > 0
    assert {"cpu", "cores", "threads", "torch", "load_average", "calibrated_s", "repeated_s"} <= set(profile.host)
    assert all(source.startswith("measured") for source in profile.sources.values())
    assert set(profile.links) < set(profile.sources)
    assert profile.name.endswith(" with an emulated GPU, opt.gguf")  # no folder of a machine, as records have it


def test_slowdowns_are_of_resources_that_there_are(profile: HardwareProfile) -> None:
    resources = {"compute", *profile.links}
    assert set(profile.slowdown) <= resources
    for slowed, factors in profile.slowdown.items():
        assert set(factors) <= resources - {slowed}
        assert min(factors.values()) > 1


def test_json_there_and_back(profile: HardwareProfile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile.to_json(), allow_nan=False))
    assert HardwareProfile.load(path) == profile


def test_nothing_is_left_behind(profile: HardwareProfile, folder: Path) -> None:
    assert left_in(folder) == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("h2o-")] == []


def test_a_plan_can_be_priced_with_it(profile: HardwareProfile) -> None:
    policy = OffloadPolicy(2, 2, weights={"disk": 1.0}, cache={"cpu": 1.0}, hidden={"disk": 1.0})
    for tier in ("cpu", "gpu"):
        assert predict(model_of(policy, spec=spec_of("opt"), machine=profile, tier=tier)).gen_throughput


def test_a_table_names_every_figure(profile: HardwareProfile) -> None:
    table = profile_table(profile)
    for words in (
        "96 x 32",
        "TFLOP/s by rows",
        "packed weights, times as long",
        "decode step",
        "prompts",
        "elementwise",
        "by 1, 8, 32 rows: embed",
        *profile.links,
    ):
        assert words in table
    assert "gpu: products" not in table  # an emulated GPU is the CPU
    assert max(map(len, table.splitlines())) < 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "dtype", "changes"),
    [
        ("opt-projected", "float32", {}),
        ("qwen3", "float16", {}),
        ("gemma3", "float32", {}),
        ("gpt-neox", "bfloat16", {"vocab_size": 40_000}),  # 2.5 MB, more than the arena: measured in part
    ],
)
def test_other_architectures_and_dtypes(row: str, dtype: str, changes: dict[str, int], tmp_path: Path) -> None:
    """Torch reads caches whole; the native kernel, which takes no float16, does not."""
    spec = dataclasses.replace(spec_of(row), **changes)
    profile = calibrate(dataclasses.replace(tiny(tmp_path / "offload"), spec=spec, dtype=dtype))
    assert set(profile.compute) == {"cpu"}
    assert set(profile.links) == {"disk->cpu", "cpu->disk"}
    check_rates(profile.compute["cpu"], spec)
    assert profile.compute["cpu"].reads_all_slots is (dtype == "float16" or why_not() is not None)


@pytest.mark.parametrize(("row", "fuses"), [("opt", False), ("llama-gqa", True), ("qwen3", True), ("gpt-neox", False)])
def test_which_products_a_gpu_adds_to_the_residual(row: str, fuses: bool) -> None:
    """Those without a bias, of which cuBLAS takes one or the other."""
    assert measuring._fuses(SimpleNamespace(name="gpu", spec=spec_of(row))) is fuses


def test_progress_names_each_part_once(measured: Measured, tmp_path: Path) -> None:
    """And all that is measured shares the time to measure anything again."""
    seen = measured.progress
    parts = [what for what, _, _ in seen]
    assert len(parts) == len(set(parts)) == len(measuring._weights(tiny(tmp_path, emulated=True)))
    assert [spent for _, spent, _ in seen] == sorted(spent for _, spent, _ in seen)
    assert {total for _, _, total in seen} == {0.01}
    assert len(measured.repeats) == 1


@pytest.mark.usefixtures("rates_known")
def test_others_on_the_cores_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    moments = iter([CoreTimes(0.0, 0.0, 0.0, 0.0), CoreTimes(10.0, 9.0, 14.0, 6.0)])
    monkeypatch.setattr(cores, "core_times", lambda: next(moments))
    with caplog.at_level(logging.WARNING):
        profile = calibrate(tiny(tmp_path / "offload"))
    assert profile.host["shared"] == {"seconds": 10, "cores": 2, "own": 0.9, "others": 0.5, "idle": 0.6}
    warning = "others used 0.50 of the 2 cores while this used 0.90: its speeds are not those of this machine alone"
    assert warning in caplog.text
    assert profile_table(profile).endswith(f"warning: {warning}")
    alone = dataclasses.replace(profile, host={**profile.host, "shared": None})
    assert "warning" not in profile_table(alone)


class TestKept:
    """Profiles that were measured before."""

    def test_what_was_calibrated_is_found(
        self, measured: Measured, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        facts: dict[str, Any] = {"offload_dir": tiny(folder).offload_dir, "emulated": True}
        assert cached_profile(spec_of("opt"), "float32", CPU, **facts) is None
        monkeypatch.setenv("XDG_CACHE_HOME", str(measured.cache))
        assert cached_profile(spec_of("opt"), "float32", CPU, **facts) == measured.profile
        assert cached_profile(spec_of("opt"), "bfloat16", CPU, **facts) is None
        assert cached_profile(spec_of("opt"), "float32", CPU, **{**facts, "emulated": False}) is None
        assert [path.suffix for path in (measured.cache / "h2o_flexgen/hardware").iterdir()] == [".json"]

    @pytest.mark.parametrize(
        "changed", ["hidden_size", "ffn_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "gated_mlp"]
    )
    def test_other_shapes_have_another_key(self, changed: str) -> None:
        spec = spec_of("llama-gqa")
        if changed == "gated_mlp":
            other = dataclasses.replace(spec, arch=dataclasses.replace(spec.arch, gated_mlp=False))
        else:
            other = dataclasses.replace(spec, **{changed: 2 * getattr(spec, changed)})
        assert profile_key(spec, "float32", CPU) != profile_key(other, "float32", CPU)

    def test_the_same_shapes_have_the_same_key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = spec_of("llama-gqa")
        longer = dataclasses.replace(spec, name="other", num_layers=99, max_positions=4096)
        assert profile_key(spec, "float32", CPU) == profile_key(longer, "float32", CPU)
        before = profile_key(spec, "float32", CPU)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
        assert profile_key(spec, "float32", CPU) != before

    def test_packings_that_are_always_measured_have_the_same_key(self) -> None:
        spec = spec_of("llama-gqa")
        keys = {profile_key(spec if bits == 16 else spec.with_bits(bits, 64), "float32", CPU) for bits in (16, 8, 4)}
        assert len(keys) == 1
        assert profile_key(spec.with_bits(4, 32), "float32", CPU) not in keys

    def test_other_kernels_have_another_key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu, keys = SimpleNamespace(name="a GPU", total_memory=1 << 34), set[tuple[str, str]]()
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        for why, triton, makes in ((None, True, True), ("off", True, True), (None, False, True), (None, True, None)):
            monkeypatch.setattr(stored, "why_not", lambda why=why: why)
            monkeypatch.setattr(stored, "serves", lambda device, triton=triton: triton)
            monkeypatch.setattr(stored, "recorder", lambda device, makes=makes: makes)
            keys |= {(kind, profile_key(spec_of("opt"), "bfloat16", torch.device(kind))) for kind in ("cpu", "cuda")}
        assert Counter(kind for kind, _ in keys) == {"cpu": 2, "cuda": 4}

    def test_a_damaged_file_counts_as_none(
        self, profile: HardwareProfile, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        spec = spec_of("opt")
        path = keep_profile(profile, profile_key(spec, "float32", CPU))
        assert path is not None
        for text in ("", "{", "{}", "[1]", path.read_text().replace('"links"', '"lincs"')):
            path.write_text(text)
            caplog.clear()
            assert cached_profile(spec, "float32", CPU) is None
            assert f"{path} cannot be used" in caplog.text

    def test_a_cache_that_cannot_be_written_is_no_failure(
        self, profile: HardwareProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
        assert keep_profile(profile, "key") is None
        assert "cannot be kept" in caplog.text


@pytest.mark.usefixtures("rates_known")
class TestTrouble:
    """Disks that are full or fail, machines that are busy."""

    def test_a_disk_that_is_too_small(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from h2o_flexgen.memory.rundir import OffloadDir

        monkeypatch.setattr(OffloadDir, "free_bytes", lambda self: 3 * MIB)
        with pytest.raises(StorageError, match="3 MiB free") as caught:
            calibrate(tiny(tmp_path / "offload"))
        assert "--offload-dir" in str(caught.value)
        assert left_in(tmp_path / "offload") == []

    @pytest.mark.parametrize("error", [StorageError("the disk failed"), KeyboardInterrupt()])
    @pytest.mark.parametrize("method", ["write", "read_extents"])
    def test_files_and_threads_go_whatever_happens(
        self, method: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done = []

        def failing(self: CopyEngine, *args: Any, **settings: Any) -> Any:
            done.append(None)
            if len(done) > 3:
                raise error
            return whole(self, *args, **settings)

        whole = getattr(CopyEngine, method)
        monkeypatch.setattr(CopyEngine, method, failing)
        with pytest.raises(type(error)):
            calibrate(tiny(tmp_path / "offload"))
        assert left_in(tmp_path / "offload") == []
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("h2o-")] == []

    def test_a_link_that_fails_beside_others(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def failing(*_: object) -> None:
            raise StorageError("the disk failed")

        monkeypatch.setattr(links, "_feed", failing)
        with pytest.raises(StorageError, match="the disk failed"):
            calibrate(tiny(tmp_path / "offload"))

    def test_a_busy_machine_is_told_of(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(os, "getloadavg", lambda: (7.3, 0.0, 0.0))
        with caplog.at_level(logging.WARNING):
            calibrate(tiny(tmp_path / "offload"))
        assert "the machine is busy (load average 7.3)" in caplog.text

    @pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
    def test_impossible_budgets(self, seconds: float, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="--budget-s"):
            tiny(tmp_path, budget_s=seconds)


@pytest.mark.parametrize("compiled", [True, False])
def test_compiling_kernels_is_no_part_of_the_budget(compiled: bool, tmp_path: Path, monkeypatch) -> None:
    """Where kernels are compiled at their first use, the curves that use them are taken once before, in no time."""
    now, told, asked = [50.0], list[str](), list[tuple[str, float]]()

    def curves(name: str, seconds: float) -> None:
        asked.append((name, seconds))
        now[0] += 60.0

    monkeypatch.setattr(measuring, "serves", lambda device: compiled)
    monkeypatch.setattr(measuring, "decode_curves", lambda bench, seconds: curves("decode", seconds))
    monkeypatch.setattr(measuring, "prefill_curves", lambda bench, seconds: curves("prefill", seconds))
    run = measuring.CalibrationRun(tiny(tmp_path), lambda what, spent, total: told.append(what))
    run._repeats = Repeats(0.0, lambda: now[0])
    run._budget = TimeBudget(10.0, {"products": 1.0}, run._repeats.clock)
    run._compile(SimpleNamespace(device=CPU))
    assert asked == [("decode", 0.0), ("prefill", 0.0)] * compiled
    assert told == ["compiling kernels"] * compiled
    assert run._budget.elapsed == 0.0
