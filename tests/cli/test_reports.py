"""The report, FlexGen's log and the record: the figures of this run, readable by people and by scripts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen import cores
from h2o_flexgen.config.reports.quality import SideBySide
from h2o_flexgen.config.reports.record import RunRecord
from h2o_flexgen.cores import CoreTimes
from h2o_flexgen.planning.llm import LLM
from h2o_flexgen.reporting.run_report import run_report
from h2o_flexgen.reporting.tables import COLUMNS, warnings_text
from tests.programs import Run

RECORD = RunRecord(
    model="opt-30b",
    dtype="float16",
    device="cuda",
    weights="checkpoint",
    eviction={
        "name": "h2o", "budget": [110, 120], "heavy": [55, 60], "recent": [55, 60], "sinks": 0,
        "share_of_prompt": [0.2141, 0.2142], "share_of_sequence": 0.2,
    },
    policy={
        "gpu_batch_size": 64, "num_gpu_batches": 1,
        "weights": {"gpu": 0.2, "cpu": 0.8}, "cache": {"cpu": 1.0}, "hidden": {"gpu": 1.0, "cpu": 0.0},
    },
    prompt_len=512,
    gen_len=32,
    sequences=64,
    prompt_tokens=32768,
    generated_tokens=2048,
    load_s=61.0,
    prefill_s=40.0,
    decode_s=360.0,
    total_s=402.0,
    bytes_moved={"cpu->gpu": 10**12, "gpu->cpu": 0},
    bandwidth={"cpu->gpu": 12.5e9, "gpu->cpu": None},
    flops=2 * 10**15,
    peak_bytes={"gpu": 15 << 30, "cpu": 60 << 30, "disk": None, "rss": 61 << 30},
    kv_bytes=3 << 30,
    bound={"phase": "decode", "resource": "cpu->gpu", "seconds": 350.0},
    warnings=["something to know"],
)  # fmt: skip


def test_heads_that_look_far_are_told() -> None:
    for far, told in (([[3, 1], [5, 0]], "; more in 2 heads"), ([4], "; more in 1 layer"), ([], "60 recent")):
        record = dataclasses.replace(RECORD, eviction={**RECORD.eviction, "far_layers": far})
        assert run_report(record).splitlines()[1].endswith(told)


def test_the_report_line_by_line() -> None:
    assert run_report(RECORD).splitlines() == [
        "model       opt-30b, float16 on cuda, checkpoint weights",
        "eviction    h2o keeps 110 to 120 tokens per head (20% of the sequence, 21% of the prompt): "
        "55 to 60 heavy, 55 to 60 recent",
        "block       1 GPU batch of 64 sequences",
        "placement   weights 20% gpu, 80% cpu; cache 100% cpu; hidden 100% gpu",
        "work        64 sequences, 32,768 prompt tokens, 2,048 generated",
        "load        61 s",
        "prefill     40 s, 819 tokens/s",
        "decode      6 min 00 s, 5.51 tokens/s",
        "throughput  5.12 tokens/s generated over prefill and decode; 87 tokens/s with the prompts",
        "predicted   nothing: this machine is not calibrated; --calibrate measures it, once, in about 45 s",
        "KV cache    3 GiB per block",
        "compute     2 PFLOP, 5 TFLOP/s",
        "moved       cpu->gpu: 931 GiB at 12.5 GB/s while busy",
        "moved       gpu->cpu: 0 B",
        "bound       cpu->gpu, busy for 5 min 50 s of 6 min 40 s",
        "peak memory gpu tier 15 GiB, cpu tier 60 GiB, process 61 GiB",
        "warning     something to know",
    ]


def test_what_was_predicted_beside_what_was_measured() -> None:
    predicted = {
        "prefill_s": 50.0, "decode_s": 270.0, "gen_throughput": 6.4, "prompt_tokens": 32768, "generated_tokens": 2048,
    }  # fmt: skip
    moved = {"cpu->gpu": 10**12, "gpu->cpu": 5 << 30, "disk->cpu": 0}
    least = {"cpu->gpu": 8 * 10**11}
    record = dataclasses.replace(RECORD, predicted=predicted, bytes_moved=moved, least_bytes_moved=least)
    lines = run_report(record).splitlines()
    assert "predicted   6.4 tokens/s generated: prefill 50 s, decode 4 min 30 s; measured is 20% less" in lines
    assert "moved       cpu->gpu: 931 GiB at 12.5 GB/s while busy, 1.25 times the least" in lines
    assert "moved       gpu->cpu: 5 GiB, none of which the caps call for" in lines
    assert "moved       disk->cpu: 0 B" in lines
    other = dataclasses.replace(record, predicted={**predicted, "gen_throughput": 4.0, "generated_tokens": 4096})
    assert (
        "predicted   4 tokens/s generated: prefill 50 s, decode 4 min 30 s, of 32,768 prompt tokens and 4,096 new "
        "ones; measured is 28% more"
    ) in run_report(other).splitlines()
    assert RunRecord.from_json(json.loads(record.to_line())) == record


def test_what_is_all_in_one_place_is_said_at_once() -> None:
    policy = RECORD.policy | {kind: {"cpu": 1.0, "disk": 0.0} for kind in ("weights", "cache", "hidden")}
    lines = run_report(dataclasses.replace(RECORD, policy=policy)).splitlines()
    assert "placement   weights, cache and hidden states all on cpu" in lines


def test_on_several_gpus_nothing_is_predicted_and_calibrating_would_not_help() -> None:
    report = run_report(dataclasses.replace(RECORD, policy={**RECORD.policy, "num_gpus": 2}))
    assert "predicted   nothing: planned by rule, the cost model knows one GPU" in report.splitlines()
    assert "calibrate" not in report


def test_a_phase_without_rates_has_no_roofline_and_one_with_them_two_lines() -> None:
    resources = {
        "memory reads": {"bytes": {"weights": 20 * 10**9, "cache": 5 * 10**9}, "rate": 5e10, "of": "m", "seconds": 0.5},
        "arithmetic": {"flops": {"products": 10**12, "attention": 0}, "rate": 4e12, "of": "m", "seconds": 0.25},
        "disk->cpu": {"bytes": {"weights": 10**9}, "rate": None, "of": None, "seconds": None},
    }
    bound = {"resource": "memory reads", "seconds": 1.0}
    decode = {
        "steps": 31, "measured_s": 1.25, "resources": resources, "bound": bound, "achieved": 0.8,
        "kernels_s": {"products": 0.75, "attention": 0.25},
    }  # fmt: skip
    free = {name: each | {"rate": None, "of": None, "seconds": None} for name, each in resources.items()}
    prefill = {**decode, "resources": free, "bound": None, "achieved": None, "kernels_s": None}
    lines = run_report(dataclasses.replace(RECORD, roofline={"prefill": prefill, "decode": decode})).splitlines()
    assert [line[12:] for line in lines if line.startswith("roofline")] == [
        "decode: 1.25 s, bound 1 s by memory reads (25 GB at 25 GB/s), 80%",
        "        kernels as calibrated: products 750 ms, attention 250 ms; at best rates: "
        "memory reads 500 ms at 50 GB/s, arithmetic 250 ms at 4 TFLOP/s, disk->cpu 1 GB",
    ]


def test_the_report_of_dummy_weights_says_so_first() -> None:
    report = run_report(dataclasses.replace(RECORD, weights="dummy", eviction={**RECORD.eviction, "name": "full"}))
    assert "random weights: speed only, text would mean nothing" in report.splitlines()[0]
    assert "eviction    none: the full cache" in report


def test_flexgens_log_is_what_its_scripts_parse(tmp_path: Path, model: Path, run: Run) -> None:
    log = tmp_path / "flexgen.log"
    arguments = ("--model", model, "--prompt-len", 9, "--num-prompts", 4, "-n", 5, "--log-file", log)
    record = run(*arguments).record
    lines = log.read_text().splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "model size", "peak gpu mem", "prefill latency", "decode latency", "total latency",
    ]  # fmt: skip
    for line, seconds, rate in (
        (lines[2], record["prefill_s"], record["prefill_throughput"]),
        (lines[3], record["decode_s"], record["decode_throughput"]),
        (lines[4], record["prefill_s"] + record["decode_s"], record["gen_throughput"]),
    ):
        latency, throughput = line.split("\t")
        assert latency.endswith(f": {seconds:.3f} s")
        assert throughput.endswith(f": {rate:.3f} token/s")
    assert lines[1].endswith("projected: False")
    run(*arguments)
    assert len(log.read_text().splitlines()) == 10, "FlexGen appends"
    assert not run(*arguments, "--no-log", "--log-file", tmp_path / "none").code
    assert not (tmp_path / "none").exists()


def test_flexgens_automatic_log_name(tmp_path: Path, model: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("--model", model, "--prompt-len", 9, "--num-prompts", 4, "-n", 5, "--log-file", "auto").code == 0
    assert [path.name for path in tmp_path.glob("*.log")] == ["fo-model-gbs-4-ngbs-1-prompt-9-gen-5.log"]


def test_a_trace_is_a_chrome_trace(tmp_path: Path, model: Path, run: Run) -> None:
    trace = tmp_path / "trace.json"
    placed = ("--weights-placement", "disk", "--offload-dir", tmp_path / "offload")
    assert run("--model", model, "--prompt-len", 9, "-n", 3, "--trace", trace, *placed).code == 0
    events = json.loads(trace.read_text())["traceEvents"]
    threads = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    assert {"compute", "disk->cpu"} <= threads


def test_the_record_is_of_the_last_call_alone(tmp_path: Path, model: Path) -> None:
    """One engine, three calls: seconds and bytes are not those of all calls together."""
    policy = {"weights": {"disk": 1.0}}
    records: list[dict[str, Any]] = []
    with LLM(str(model), policy=policy, offload_dir=str(tmp_path / "offload")) as llm:
        for new_tokens in (40, 2, 2):
            llm.generate([[2, 9, 8, 7]], max_new_tokens=new_tokens, ignore_eos=True)
            assert llm.last_record is not None
            records.append(llm.last_record.to_json())
    first, second, third = records
    assert second["bytes_moved"] == third["bytes_moved"]
    assert second["bytes_moved"]["disk->cpu"] * 10 < first["bytes_moved"]["disk->cpu"]
    for record in records:
        assert record["bound"]["busy"]["compute"] <= record["prefill_s"] + record["decode_s"]
        busy = record["bytes_moved"]["disk->cpu"] / record["bandwidth"]["disk->cpu"]
        assert busy == pytest.approx(record["bound"]["busy"]["disk->cpu"])
    assert third["bound"]["busy"]["disk->cpu"] < first["bound"]["busy"]["disk->cpu"]


def test_who_had_the_cores(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from the first prompt to the last token, and warned of where others had much."""
    moments = iter([CoreTimes(5.0, 1.0, 7.0, 3.0), CoreTimes(15.0, 12.0, 23.0, 7.0)])
    monkeypatch.setattr(cores, "core_times", lambda: next(moments))
    with LLM(str(model)) as llm:
        llm.generate([[2, 9, 8, 7]], max_new_tokens=2)
    record = llm.last_record
    assert record is not None
    assert record.shared == {"seconds": 10, "cores": 2, "own": 1.1, "others": 0.5, "idle": 0.4}
    warning = "others used 0.50 of the 2 cores while this used 1.10: its speeds are not those of this machine alone"
    assert record.warnings == [warning]
    assert f"warning     {warning}" in run_report(record)
    result = SideBySide(full=record, evicted=RECORD, ratio=0.2, budget=None, pairs=())
    assert " ".join(warnings_text(result).split()).startswith(f"warning, full cache: {warning} warning, h2o 20 %: some")
    assert max(map(len, warnings_text(result).splitlines())) <= COLUMNS


def test_a_trace_replaces_no_file_unasked(tmp_path: Path, model: Path, run: Run) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text("somebody's")
    arguments = ("--model", model, "--prompt-len", 9, "-n", 3, "--trace", trace)
    ran = run(*arguments)
    assert (ran.code, trace.read_text()) == (2, "somebody's")
    assert f"--trace {trace} exists" in ran.err
    assert "add --overwrite" in ran.err
    assert run(*arguments, "--overwrite").code == 0
    assert json.loads(trace.read_text())["traceEvents"]
