"""FAULTS rows 24, 25 and 30 through the program: plans that cannot be, memory that is not there, real shares."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.config.workload import Workload
from h2o_flexgen.engine import engine
from h2o_flexgen.engine.limits import devices
from h2o_flexgen.planning.llm import LLM
from tests.programs import Run, write_model
from tests.tiny import prompts_of

WORK = ("--prompt-len", 20, "--num-prompts", 8, "--gen-len", 4)


@pytest.fixture(autouse=True)
def _steady_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process holds is 100 MiB, whatever other tests made it hold."""
    for measured in ("rss", "before_placement"):
        monkeypatch.setattr(devices, measured, lambda: 100 << 20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3.2 MiB of weights: caps are kept to pages, and told in MiB."""
    sizes = {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 512, "num_hidden_layers": 4}
    return write_model(tmp_path_factory.mktemp("larger") / "model", **sizes)


def no_loading(*_: object) -> Any:
    raise AssertionError("weights were loaded before the plan was known to fit")


def test_row_24_memory_is_planned_within_the_control_groups_limit(
    model: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("--model", model, *WORK).record["policy"]["weights"] == {"cpu": 1.0}
    monkeypatch.setattr(devices, "cgroup_limit", lambda: int((103 << 20) / 0.9))
    squeezed = run("--model", model, *WORK).record
    assert squeezed["policy"]["weights"]["disk"] > 0
    monkeypatch.setattr(devices, "cgroup_limit", lambda: 50 << 20)
    ran = run("--model", model, *WORK)
    assert ran.code == 5
    assert "on the cpu tier, and its cap is 45 MiB" in ran.err


def test_row_24_memory_that_comes_free_serves_the_next_call(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights stay where the first call put them, and the tiers are kept to the caps of each call."""
    few, many = (prompts_of([5] * 2), 3), (prompts_of([100] * 32), 20)

    def tokens(engine: LLM, prompts: list[list[int]], new: int) -> list[list[int]]:
        return [output.token_ids for output in engine.generate(prompts, max_new_tokens=new, ignore_eos=True)]

    with LLM(str(model)) as fresh:
        least = fresh.plan(Workload(5, 3, 2)).footprint.total("cpu")
        expected = tokens(fresh, *many)
    with LLM(str(model)) as engine:
        monkeypatch.setattr(devices, "cgroup_limit", lambda: int(least / 0.9) + 2)
        first = tokens(engine, *few)
        loaded = engine._loaded
        assert loaded is not None
        monkeypatch.setattr(devices, "cgroup_limit", lambda: 1 << 30)
        assert tokens(engine, *many) == expected
        monkeypatch.setattr(devices, "cgroup_limit", lambda: int(least / 0.9) + 2)
        assert tokens(engine, *few) == first
        assert engine._loaded is loaded, "nothing was loaded anew"
        assert engine.last_plan is not None
        request = engine.last_plan.request
        assert loaded.stages[0].tiers.cpu.capacity == (request.caps.cpu or 0) - request.baseline


@pytest.mark.parametrize(
    ("percent", "words"),
    [
        ("60 50 100 0 100 0", "weights 60 + 50 = 110"),
        ("100 0 90 20 100 0", "cache 90 + 20 = 110"),
        ("100 0 100 0 1 100", "hidden 1 + 100 = 101"),
        ("-5 50 100 0 100 0", "one of them is -5"),
        ("50 50 100 0 100", "expected 6 arguments"),
        ("50.5 0 100 0 100 0", "invalid int value: '50.5'"),
    ],
)
def test_row_25_percents_that_make_no_sense(run: Run, percent: str, words: str) -> None:
    ran = run("--percent", *percent.split(), "--prompt", "abc")
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err


@pytest.mark.parametrize("shares", ["cpu=0.5,disk=0.6", "cpu=-1,disk=2", "cpu=nan", "cpu=0.5"])
def test_row_25_shares_that_make_no_sense(run: Run, shares: str) -> None:
    ran = run("--weights-placement", shares, "--prompt", "abc")
    assert (ran.code, ran.out) == (2, "")
    assert "--weights-placement" in ran.err


@pytest.mark.parametrize(
    ("caps", "tier", "flag"),
    [
        (("--cpu-mem", "102MiB", "--weights-placement", "cpu", "--gbs", 8, "--num-gb", 1), "cpu", "--cpu-mem"),
        (("--cpu-mem", "90MiB"), "cpu", "--cpu-mem"),
        (("--emulate-gpu", "1MiB", "--gbs", 2, "--num-gb", 1), "gpu", "--emulate-gpu"),
        (("--nvme-mem", "1MiB", "--weights-placement", "disk"), "disk", "--nvme-mem"),
    ],
)
def test_row_25_a_plan_that_does_not_fit_names_the_smallest_cap_that_works(
    model: Path, run: Run, monkeypatch: pytest.MonkeyPatch, caps: tuple[object, ...], tier: str, flag: str
) -> None:
    more = ("--hidden-placement", "cpu", "--cache-placement", "cpu") if tier == "cpu" and len(caps) > 2 else ()
    with monkeypatch.context() as patch:
        patch.setattr(engine, "load", no_loading)
        ran = run("--model", model, *WORK, *caps, *more)
    assert (ran.code, ran.out) == (5, "")
    assert re.search(rf"error: the plan needs \S+ [KMG]iB on the {tier} tier, and its cap is ", ran.err), ran.err
    assert f"{tier:4}  in all" in ran.err
    advice = re.search(rf"give {flag} (\S+) or more", ran.err)
    assert advice is not None, ran.err
    assert run("--model", model, *WORK, *caps, *more, flag, advice.group(1)).code == 0


def test_a_folder_that_cannot_be_written_is_named_and_no_cap(model: Path, run: Run) -> None:
    packed = ("--weights-placement", "disk", "--dtype", "bfloat16", "--offload-dir", "/proc/x")
    ran = run("--model", model, *WORK, *packed)
    assert (ran.code, ran.out) == (5, "")
    assert "nothing can be written to /proc" in ran.err
    assert "name another folder with --offload-dir" in ran.err
    assert "give --nvme-mem" not in ran.err


def test_row_30_what_is_printed_is_where_things_are(model: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, int] = {}
    original = LLM._runner

    def look(self: LLM, loaded: Any, *rest: Any) -> Any:
        for home in loaded.stages[0].weights._locations.values():
            held = home.buffer.nbytes if home.buffer is not None else home.layout.nbytes
            seen[home.tier] = seen.get(home.tier, 0) + held
        return original(self, loaded, *rest)

    monkeypatch.setattr(LLM, "_runner", look)
    shares = ("--weights-placement", "gpu=0.3,cpu=0.3,disk=0.4", "--cache-placement", "gpu=0.5,disk=0.5")
    ran = run("--model", model, *WORK, *shares, "--gbs", 2, "--num-gb", 2, "--emulate-gpu", "8MiB")
    policy = ran.record["policy"]
    assert set(policy["weights"]) == set(seen) == {"gpu", "cpu", "disk"}
    for tier, share in policy["weights"].items():
        assert share == pytest.approx(seen[tier] / sum(seen.values()), abs=0.03)
        assert f"{share:.0%} {tier}" in ran.err
    assert policy["cache"] == {"gpu": 0.5, "disk": 0.5}
    assert ran.record["bytes_moved"]["cpu->disk"] > 0


def test_row_30_a_share_that_came_to_nothing_is_told(model: Path, run: Run) -> None:
    ran = run("--model", model, *WORK, "--weights-placement", "cpu=0.995,disk=0.005")
    assert ran.code == 0
    assert ran.record["policy"]["weights"] == {"cpu": 1.0}
    message = "0.5% of weights was asked for on disk, and none of it is there: units are placed whole"
    assert ran.record["warnings"] == [message]
    assert message in ran.err


def test_row_30_gpu_shares_without_a_gpu_are_told(model: Path, run: Run) -> None:
    """FlexGen's own default line runs here, and says what it means here."""
    ran = run("--model", model, *WORK, "--percent", 100, 0, 100, 0, 100, 0, "--hh-ratio", 0.2, "--gpu-mem", 8)
    assert ran.code == 0
    assert "note: this machine has no GPU, so the gpu shares count as cpu" in ran.err
    assert "note: this machine has no GPU, so --gpu-mem has no effect" in ran.err
    assert ran.record["policy"]["weights"] == {"cpu": 1.0}
    ran = run("--model", model, *WORK, "--device", "cuda")
    assert ran.code == 2
    assert "device is 'cuda', and torch " in ran.err  # finds no CUDA device, or is built without CUDA


def test_a_folder_of_models_and_the_shipped_one(tmp_path: Path, run: Run) -> None:
    ran = run("--path", tmp_path, "--prompt", "abc", "-n", 1)
    assert ran.code == 0
    assert ran.err.count("warning: --path has no effect on demo, which is shipped; name another with --model") == 1
