"""The comparison itself: order, records, ratios, failures; with adapters that only pretend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.baselines.process import run_process
from h2o_flexgen.baselines.settings import NAMES, SYSTEMS, BenchSettings, find_model
from h2o_flexgen.baselines.summary import ratio_of, ratio_spread, spread
from h2o_flexgen.bench import main
from h2o_flexgen.errors import ModelError, UsageError

SMALL = ["--batch-size", "2", "--prompt-len", "8", "--gen-len", "4", "--threads", "1"]


def _bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, dict[str, Any], str]:
    code = main([*SMALL, *arguments])
    out, err = capsys.readouterr()
    table, _, last = out.rstrip("\n").rpartition("\n")
    return code, table, json.loads(last), err


def test_systems_take_turns_and_leave_records(pretend, capsys, tmp_path: Path) -> None:
    pretend("quick", {"speed": 4.0}, own=True)
    pretend("slow")
    folder = tmp_path / "records"
    arguments = ["--systems", "quick,slow", "--reference", "slow", "-r", "2", "--output-dir", str(folder)]
    code, table, summary, err = _bench(capsys, *arguments)
    assert code == 0
    order = [line.partition(":")[0] for line in err.splitlines() if "/2:" in line]
    assert order == ["quick 1/2", "slow 1/2", "quick 2/2", "slow 2/2"]
    assert {path.name for path in folder.iterdir()} == {
        *(f"run-{number:02d}-{name}.json" for number in (1, 2) for name in ("quick", "slow")),
        "summary.json",
        "table.md",
        "table.csv",
    }
    record = json.loads((folder / "run-02-quick.json").read_text())
    assert (record["prefill_s"], record["decode_s"], record["repetition"]) == (0.25, 0.5, 2)
    assert record["decode_throughput"] == 2 * 3 / 0.5
    assert record["gen_throughput"] == 2 * 4 / 0.75
    assert record["peak_rss_bytes"] > 1 << 20
    assert record["sequences"] == 2
    assert record["settings"]["batch_sizes"] == [2]
    assert "peers" not in record["settings"]  # a path of this machine
    assert record["host"]["cores"] >= 1
    assert "token_ids" not in record  # those of random weights mean nothing
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert (folder / "table.md").read_text().strip() == table.strip()
    assert summary["ratios"]["quick/slow"]["decode_throughput"] == {"median": 4, "min": 4, "max": 4}
    assert summary["ratios"]["quick/slow"]["pairs"] == 2
    assert "| quick / slow | 4.00x (4.00-4.00) | 4.00x (4.00-4.00) | 4.00x (4.00-4.00) | 2 |" in table
    assert "quick: pretends (fake 1)." in table


def test_a_system_that_fails_is_listed_with_its_reason(pretend, capsys, tmp_path: Path) -> None:
    pretend("good")
    pretend("broken", {"fail": "ImportError: no | module named peer"})
    pretend("lazy", {"short": 1})
    arguments = ["--systems", "broken,good,lazy,deepspeed", "-r", "2", "--output-dir", str(tmp_path / "r")]
    arguments += ["--peers", str(tmp_path / "nowhere")]
    code, table, summary, err = _bench(capsys, *arguments)
    assert code == 0  # peers may fail; our own systems may not
    assert list(summary["systems"]) == ["good"]
    assert summary["failed"]["broken"] == "exit code 4: ImportError: no | module named peer"
    assert "generated [3] tokens" in summary["failed"]["lazy"]
    assert summary["failed"]["deepspeed"] == "not installed: scripts/peer_env.sh deepspeed"
    assert "| deepspeed | did not run: not installed: scripts/peer_env.sh deepspeed |" in table
    assert err.count("broken 1/2: ") == 1
    assert "| broken | did not run: exit code 4: ImportError: no / module named peer |" in table
    assert "Traceback" in json.loads((tmp_path / "r" / "failed-b2-broken.json").read_text())["stderr"]


def test_batches_that_are_known(pretend, capsys, tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        pretend(name)
    folder = str(tmp_path / "records")
    arguments = ["--systems", "one,two,three", "--batch-of", "three=5, two=4", "--output-dir", folder, "-r", "1"]
    code, table, summary, _ = _bench(capsys, *arguments)
    assert code == 0
    assert summary["batches"] == {"one": 2, "two": 4, "three": 5}
    assert "each at its own batch" in table
    assert (tmp_path / "records" / "table.csv").read_text().splitlines()[1].startswith("given,one,2,")


def test_weights_in_fewer_bits_are_our_own(pretend, capsys, tmp_path: Path) -> None:
    pretend("ours", own=True)
    pretend("theirs")
    own = ["--weight-bits", "4", "--model-impl", "transformers"]
    arguments = ["--systems", "ours,theirs", "-r", "1", *own, "--output-dir", str(tmp_path)]
    _, table, summary, _ = _bench(capsys, *arguments)
    assert "bfloat16 (our weights in 4 bits) (ours by --model-impl transformers), batch 2" in table
    assert summary["settings"]["weight_bits"] == 4
    records = [json.loads((tmp_path / f"run-01-{name}.json").read_text()) for name in ("ours", "theirs")]
    assert [record["detail"]["weight_bits"] for record in records] == [4, 16]
    assert records[0]["detail"]["model_impl"] == "transformers"


def test_our_own_failure_is_an_exit_code(pretend, capsys, tmp_path: Path) -> None:
    pretend("ours", {"fail": "boom"}, own=True)
    code, table, summary, _ = _bench(capsys, "--systems", "ours", "-r", "1", "--output-dir", str(tmp_path))
    assert (code, summary["systems"]) == (1, {})
    assert "boom" in table


def test_a_run_that_takes_too_long_is_ended(pretend, capsys, tmp_path: Path) -> None:
    pretend("asleep", {"sleep": 60})
    arguments = ["--systems", "asleep", "-r", "1", "--timeout", "0.2", "--output-dir", str(tmp_path)]
    assert "gave up after" in _bench(capsys, *arguments)[2]["failed"]["asleep"]


def test_same_text_is_counted_for_checkpoints(pretend, capsys, tmp_path: Path) -> None:
    pretend("one")
    pretend("two", {"speed": 2.0})
    arguments = ["--model", "demo", "--weights", "checkpoint", "--systems", "one,two", "-r", "1"]
    _, table, summary, _ = _bench(capsys, *arguments, "--output-dir", str(tmp_path))
    assert summary["same_text"]["one"] == {"same": 2, "sequences": 2}
    assert "2 of 2 |" in table
    assert len(json.loads((tmp_path / "run-01-one.json").read_text())["token_ids"]) == 2


def test_nothing_is_overwritten(pretend, capsys, tmp_path: Path) -> None:
    pretend("one")
    (tmp_path / "old.json").touch()
    assert main([*SMALL, "--systems", "one", "--output-dir", str(tmp_path)]) == 2
    assert "is not empty, and does not hold a comparison" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"systems": ("h2o", "transformer")}, "did you mean 'transformers'"),
        ({"systems": ()}, "names no system"),
        ({"systems": ("h2o", "h2o")}, "twice"),
        ({"systems": ("h2o",), "reference": "full"}, "--reference is 'full'"),
        ({"batch_sizes": (4, 0)}, "--batch-size is 0"),
        ({"batch_of": {"h2o": 0}}, "--batch-of is 0"),
        ({"batch_of": {"accelerate": 8}}, "a system of --batch-of is 'accelerate'"),
        ({"batch_of": {"h2o": 8}, "batch_sizes": ()}, "--batch-of beside several sizes"),
        ({"search_time": 0.0}, "--search-time"),
        ({"dtype": "int8"}, "--dtype"),
        ({"weight_bits": 5}, "--weight-bits is 5"),
        ({"model_impl": "vllm"}, "--model-impl is 'vllm'"),
        ({"repetitions": 0}, "--repetitions is 0"),
        ({"hh_ratio": 1.5}, "--hh-ratio"),
        ({"timeout": float("nan")}, "--timeout"),
        ({"search_tokens": 0}, "--search-tokens"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BenchSettings(**settings)


def test_help_names_the_systems(capsys) -> None:
    assert main(["--help"]) == 0
    assert f"systems to run, with commas: {', '.join(NAMES)}" in " ".join(capsys.readouterr().out.split())
    assert {*NAMES} - {"llamacpp"} == {name for name in SYSTEMS.names() if not name.startswith("llamacpp-")}
    assert "static" in SYSTEMS
    assert "static" not in BenchSettings().systems


def test_models() -> None:
    assert find_model(BenchSettings(model="facebook/opt-1.3b")).config["hidden_size"] == 2048
    assert find_model(BenchSettings(model="demo", weights="checkpoint")).folder is not None
    assert BenchSettings(model="demo").weights == "checkpoint"
    assert BenchSettings(model="opt-125m").weights == "dummy"
    with pytest.raises(ModelError, match="opt-125m"):
        find_model(BenchSettings(model="opt-125"))
    with pytest.raises(ModelError, match="known by its sizes alone"):
        find_model(BenchSettings(model="opt-125m", weights="checkpoint"))
    with pytest.raises(UsageError, match="2048"):
        find_model(BenchSettings(prompt_len=2000, gen_len=49))


def test_spread_and_turned_ratios() -> None:
    assert spread([3.0, None, 1.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert spread([None]) is None
    summary = {"ratios": {"a/b": {"x": {"median": 2.0, "min": 1.0, "max": 4.0}, "y": None}}}
    assert ratio_of(summary, "b", "a", "x") == {"median": 0.5, "min": 0.25, "max": 1.0}
    assert ratio_of(summary, "b", "a", "y") is None
    assert ratio_of(summary, "a", "a", "x") is None


def test_a_ratio_turned_is_that_of_the_turned_pair() -> None:
    """With two repetitions the mean of 4 and 1/16 would turn into half, and that of 1/4 and 16 into eight."""
    ratios = [4.0, 1 / 16]
    summary = {"ratios": {"a/b": {"x": ratio_spread(ratios)}}}
    assert ratio_of(summary, "b", "a", "x") == ratio_spread([1 / ratio for ratio in ratios])
    assert ratio_spread([3.0, None, 1.0, 7.0]) == {"median": 3.0, "min": 1.0, "max": 7.0}
    assert ratio_spread([None]) is None


def test_a_process_of_an_unknown_module_has_a_reason() -> None:
    finished = run_process("h2o_flexgen.nowhere", [], threads=1, timeout=30)
    assert finished.exit_code == 1
    assert "No module named h2o_flexgen.nowhere" in finished.reason
