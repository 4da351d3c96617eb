"""`LLM(..., allow_compress=True)` keeps its weights in the bits that the search chooses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen import LLM
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.config.hardware.rates import Curve
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.engine.limits import devices
from h2o_flexgen.errors import UsageError
from h2o_flexgen.units import GIB, MIB
from tests.cost.machines import KINDS, profile, rates
from tests.programs import Run, write_model


def rates_of(**factors: float) -> HardwareProfile:
    """Products and links are what takes time; packed weights take so many times as long."""
    packed = {name[-1]: Curve(((1, factor),)) for name, factor in factors.items()}
    return profile(rates(packed=packed, tick_s=dict.fromkeys(KINDS, 1e-5)), name="a made-up machine", dtype="float32")


PROMPTS = [[5, 6, 7, 8], [9]]
CALL: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True}
SLOW, QUICK = rates_of(bits4=3.0, bits8=1.5), rates_of(bits4=0.5, bits8=0.9)
CHOSEN: dict[int, dict[str, Any]] = {
    16: {"hardware": SLOW},
    8: {"hardware": SLOW, "cpu_mem": "102.4MiB"},
    4: {"hardware": QUICK, "cpu_mem": "102.4MiB"},
}
"""Where so many bits are fastest: the process has 100 MiB."""


@pytest.fixture(autouse=True)
def _steady_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What this process holds is 100 MiB, and nothing was ever calibrated."""
    for measured in ("rss", "before_placement"):
        monkeypatch.setattr(devices, measured, lambda: 100 << 20)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3.2 MiB of weights in float32."""
    sizes = {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 512, "num_hidden_layers": 4}
    return write_model(tmp_path_factory.mktemp("larger") / "model", **sizes)


def settings(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"dtype": "float32", "offload_dir": str(tmp_path), **more}


@pytest.mark.parametrize("bits", CHOSEN)
def test_the_weights_are_kept_as_chosen(model: Path, bits: int, tmp_path: Path) -> None:
    """And the tokens are those of the same bits when they are given; a later call keeps them."""
    same = settings(tmp_path, **CHOSEN[bits])
    with LLM(str(model), weight_bits=bits, **same) as given:
        expected = [output.token_ids for output in given.generate(PROMPTS, **CALL)]
        wanted = given.last_record
    with LLM(str(model), allow_compress=True, **same) as llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, **CALL)] == expected
        record = llm.last_record
        assert record.quantization == wanted.quantization
        assert record.bytes_moved == wanted.bytes_moved
        said = record.predicted["bits"]
        assert said["chosen"] == bits
        assert set(said["gen_throughput"]) == {"16", "8", "4"}
        assert said["gen_throughput"][str(bits)] == pytest.approx(wanted.predicted["gen_throughput"])
        llm.generate([[5] * 20] * 8, **CALL)
        assert llm.last_record.quantization == wanted.quantization
        assert "bits" not in llm.last_record.predicted


def test_a_plan_alone_changes_nothing(model: Path, tmp_path: Path) -> None:
    with LLM(str(model), allow_compress=True, **settings(tmp_path, **CHOSEN[4])) as llm:
        plan = llm.plan(Workload(4, 6, 2))
        assert plan.request.spec.packed_kind == {"bits": 4, "group": 64}
        assert llm.model.spec.packed_kind is None
        whole: dict[str, Any] = {"weights": {"cpu": 1.0}, "cache": {"cpu": 1.0}, "hidden": {"cpu": 1.0}}
    fixed = {"gpu_batch_size": 2, "num_gpu_batches": 1, "cpu_cache_compute": False, "lookahead": 1, **whole}
    with LLM(str(model), allow_compress=True, policy=fixed, **settings(tmp_path, **CHOSEN[8])) as llm:
        assert llm.plan(Workload(4, 6, 2)).request.spec.packed_kind == {"bits": 8, "group": 64}


def test_without_rates_nothing_is_chosen(model: Path, tmp_path: Path) -> None:
    with LLM(str(model), allow_compress=True, **settings(tmp_path, cpu_mem="102.4MiB")) as llm:
        llm.generate(PROMPTS, **CALL)
        assert llm.last_record.quantization is None
        assert llm.last_record.policy["chosen"] == "rule"


def test_run_says_what_it_chose(model: Path, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(QUICK.to_json()))
    flags = ("--prompt-len", 4, "--num-prompts", 2, "--gen-len", 6, "--cpu-mem", "102.4MiB", "--allow-compress")
    ran = run("--model", model, *flags, "--hardware", file)
    assert ran.code == 0
    assert "\nbits        4 of 16 bits " in ran.err
    assert ran.record["quantization"]["weights"]["bits"] == 4
    by_rule = run("--model", model, *flags, "--no-calibrate")
    assert "bits        as they are: --allow-compress chooses where this machine's rates are known" in by_rule.err


def test_bits_that_are_given_are_not_chosen() -> None:
    with pytest.raises(UsageError, match="needed one of them"):
        LLM("demo", weight_bits=8, allow_compress=True)


@pytest.mark.parametrize("bits", [16, 4])
def test_reports_follow_the_packed_size(model: Path, run: Run, bits: int, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    flags = ("--prompt-len", 4, "--num-prompts", 2, "--gen-len", 6, "--dtype", "float32", "--log-file", log)
    ran = run("--model", model, *flags, "--weight-bits", bits, "--no-calibrate")
    with LLM(str(model), weight_bits=bits, dtype="float32") as llm:
        spec = llm.model.spec
    read = sum(
        tensor.nbytes("float32")
        for group in spec.weight_groups
        for tensor in group.tensors
        if len(tensor.shape) == 2 and group.key != "embed"
    )
    decode = ran.record["roofline"]["decode"]
    assert decode["resources"]["memory reads"]["bytes"]["weights"] == 5 * read
    assert f"model size: {spec.weight_bytes('float32') / GIB:.3f} GB" in log.read_text()
    assert spec.weight_bytes("float32") < (1 if bits == 4 else 4) * MIB
