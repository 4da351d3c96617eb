"""The program around a calibration: flags, table and JSON, files, messages and exit codes."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from h2o_flexgen import calibrate
from h2o_flexgen.calibration import links, measure
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.errors import MemoryRefused
from h2o_flexgen.units import MIB
from tests import programs
from tests.programs import Child, Ran, left_in, on_a_terminal, until

Calibrate = Callable[..., Ran]


@pytest.fixture(autouse=True)
def _tiny_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("H2O_FLEXGEN_OFFLOAD_DIR", str(tmp_path / "offload"))
    whole = measure.Calibration.__init__

    def small(self: measure.Calibration, *args: object, **settings: object) -> None:
        whole(self, *args, **{"file_bytes": 2 * MIB, "arena_bytes": 2 * MIB, **settings})  # type: ignore[arg-type]

    monkeypatch.setattr(measure.Calibration, "__init__", small)


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str]) -> Calibrate:
    def call(*arguments: object) -> Ran:
        capsys.readouterr()
        code = calibrate.main([str(argument) for argument in arguments])
        return Ran(code, *capsys.readouterr())

    return call


def test_a_table_and_the_profile(model: Path, program: Calibrate, tmp_path: Path) -> None:
    ran = program("--model", model, "--budget-s", 0.01, "--output", tmp_path / "here.json")
    assert ran.code == 0, ran.err
    profile = HardwareProfile.from_json(ran.record)
    assert "TFLOP/s by rows" in ran.out
    assert profile.dtype == "float32"  # as the model is stored
    assert HardwareProfile.load(tmp_path / "here.json") == profile
    (kept,) = (tmp_path / "cache/h2o_flexgen/hardware").iterdir()
    assert HardwareProfile.load(kept) == profile
    assert "measuring cpu: products" in ran.err
    assert ran.err.splitlines()[-1].startswith(f"kept in {kept}: ")
    assert left_in(tmp_path / "offload") == []


@pytest.mark.slow
def test_flags(model: Path, program: Calibrate, tmp_path: Path) -> None:
    ran = program(
        "--model", model, "--budget-s", 0.01, "--dtype", "bfloat16", "--emulate-gpu", "1GiB", "--quiet",
        "--offload-dir", tmp_path / "other",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "measuring" not in ran.err
    assert ran.record["dtype"] == "bfloat16"
    assert set(ran.record["compute"]) == {"cpu", "gpu"}
    assert (tmp_path / "other").is_dir()
    assert not (tmp_path / "offload").exists()


def test_models_that_are_known_by_their_shape_need_no_weights(
    program: Calibrate, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[measure.Calibration] = []

    def none(calibration: measure.Calibration, on_progress: object) -> HardwareProfile:
        seen.append(calibration)
        raise KeyboardInterrupt

    monkeypatch.setattr("h2o_flexgen.calibration.calibrate", none)
    assert program("--model", "opt-30b", "--budget-s", 7).code == 130
    (calibration,) = seen
    assert (calibration.spec.hidden_size, calibration.budget_s, calibration.emulated) == (7168, 7.0, False)


@pytest.mark.parametrize(
    ("error", "of_gpu"),
    [
        (MemoryError(), False),
        (MemoryRefused("the system refused", change="--gpu-batch-size"), False),
        (RuntimeError("CUDA out of memory"), True),
        (MemoryRefused("the GPU refused 1 GiB"), True),
    ],
)
def test_out_of_memory_names_flags_that_are_there(
    program: Calibrate, monkeypatch: pytest.MonkeyPatch, error: Exception, of_gpu: bool
) -> None:
    def refuse(*_: object) -> HardwareProfile:
        raise error

    monkeypatch.setattr("h2o_flexgen.calibration.calibrate", refuse)
    ran, advice = program("--model", "opt-125m"), "free some" if of_gpu else "free some, or lower --cpu-mem"
    assert (ran.code, advice in ran.err, "batch" in ran.err) == (5, True, False), ran.err
    assert ("--cpu-mem" in ran.err) is not of_gpu


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--budget-s", "0"], 2, "--budget-s is 0.0"),
        (["--budget-s", "nan"], 2, "--budget-s is nan"),
        (["--device", "tpu"], 2, "device is 'tpu'"),
        (["--dtype", "int8"], 2, "dtype is 'int8'"),
        (["--output", "/nowhere/at/all"], 2, "--output /nowhere/at/all"),
        (["--model", "/nowhere/at/all"], 4, "/nowhere/at/all"),
        (["--offload-dir", "/dev/null/x"], 2, "/dev/null/x"),
    ],
)
def test_mistakes_are_one_message(arguments: list[str], code: int, words: str, program: Calibrate) -> None:
    ran = program("--budget-s", "0.01", *arguments)
    assert ran.code == code, ran.err
    assert words in ran.err
    assert "Traceback" not in ran.err
    assert "measuring" not in ran.err, "found out first"
    assert ran.out == ""


def test_flags_from_the_environment(program: Calibrate, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `run` has them, whose machine this is."""
    monkeypatch.setenv("H2O_FLEXGEN_DTYPE", "int7")
    ran = program("--budget-s", "0.01")
    assert (ran.code, ran.out) == (2, "")
    assert "from the environment: H2O_FLEXGEN_DTYPE=int7" in ran.err


def test_unknown_flags_are_explained(program: Calibrate, capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate.main(["--budget", "3"]) == 2
    assert "did you mean '--budget-s'?" in capsys.readouterr().err
    assert calibrate.main(["--hh-ratio", "0.2"]) == 2


def test_nothing_is_overwritten_unasked(model: Path, program: Calibrate, tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    path.write_text("precious")
    ran = program("--model", model, "--output", path)
    assert ran.code == 2
    assert path.read_text() == "precious"
    assert program("--model", model, "--budget-s", 0.01, "--output", path, "--overwrite").code == 0
    assert HardwareProfile.load(path)


def test_a_disk_without_room(model: Path, program: Calibrate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.OffloadDir, "free_bytes", lambda self: 1 * MIB)
    ran = program("--model", model, "--budget-s", 0.01)
    assert ran.code == 6
    assert "--offload-dir" in ran.err


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_nothing_behind(
    number: int, code: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "main", calibrate.main)
    monkeypatch.setattr(measure, "COMPUTE_PARTS", {part: 1e-9 for part in measure.COMPUTE_PARTS})
    offload = tmp_path / "offload"
    with Child(tmp_path, "--model", model, "--budget-s", 60) as child:
        until(lambda: offload.is_dir() and list(offload.glob("run-*/region-*")))
        child.kill(number)
        ran = child.wait()
    assert ran.code == code, ran.err
    assert left_in(offload) == []
    kept = {path.name for path in (tmp_path / "cache").glob("*/*")}
    assert kept <= {"native"}, "no profile; kernels are built once, and stay"


@pytest.mark.slow
@pytest.mark.parametrize("columns", [0, 100])
def test_a_bar_on_a_terminal(tmp_path: Path, model: Path, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "main", calibrate.main)
    code, seen = on_a_terminal(tmp_path, columns, "--model", model, "--budget-s", 0.01)
    assert code == 0, seen
    assert "disk reads: 100%|" in seen
    assert "measuring" not in seen


def test_the_json_is_the_last_line_and_finite(model: Path, program: Calibrate) -> None:
    ran = program("--model", model, "--budget-s", 0.01)
    json.loads(ran.out.splitlines()[-1], parse_constant=lambda word: pytest.fail(word))
