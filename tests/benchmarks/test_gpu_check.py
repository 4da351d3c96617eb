"""scripts/gpu_check.sh without a GPU: a reduced dry run, warm-ups, records, and what a section may not break."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import check, cost, decode, kernels, paper
from benchmarks.gpu.check import ARCHIVE, cache_folder, pack, unpack
from benchmarks.gpu.section import WARM_UP, Section, Steps, run, serve, tiny_model, warm_up
from benchmarks.gpu.tables import BEGIN, END, NOTHING, WHOLE, latest, read, readme_block, tables, with_block
from benchmarks.gpu.tests import summary
from h2o_flexgen import LLM, EvictionConfig
from h2o_flexgen.baselines.process import Finished, RunFailed
from h2o_flexgen.baselines.settings import BenchSettings
from h2o_flexgen.cli.parser import Parser
from h2o_flexgen.config.flags import add_arguments, from_namespace
from h2o_flexgen.schedule.tasks import FIRST_REPLAYED

ROOT = Path(__file__).parents[2]
GPU = {"name": "NVIDIA H200", "memory_bytes": 150 * 10**9, "cuda": "13.0"}
HOST = {"cpu": "a CPU", "cores": 16, "memory_bytes": 128 << 30, "gpu": GPU}


def record(section: str, name: str, **facts: Any) -> dict[str, Any]:
    """A record as a section on a GPU machine keeps it."""
    made = {"section": section, "name": name, "dry_run": False, "date": "2026-11-22T10:00:00+00:00", "commit": "abc"}
    return {**made, "hardware": HOST, "versions": {"torch": "2.11.0"}, "command": "scripts/gpu_check.sh", **facts}


def cell_record(name: str, **facts: Any) -> dict[str, Any]:
    """A comparison of the paper's table."""
    return record("paper", name, **{"table": "| opt-6.7b, 512+32 | 123.4 |", **facts})


def write(folder: Path, *records: dict[str, Any]) -> Path:
    """Records in a folder of results."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in records:
        with (folder / f"{one['section']}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(one) + "\n")
    return folder


def test_the_readme_has_what_the_records_give() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text == with_block(text, readme_block(ROOT / "results")), "scripts/gpu_check.sh --readme"


def test_without_records_the_readme_says_so(tmp_path: Path) -> None:
    assert readme_block(tmp_path) == NOTHING
    assert "measured yet" in NOTHING


def test_dry_runs_and_machines_without_a_gpu_never_get_there(tmp_path: Path) -> None:
    dry, bare = {**cell_record("a"), "dry_run": True}, {**cell_record("b"), "hardware": {**HOST, "gpu": None}}
    write(tmp_path / "2026-11-22-gpu-x", dry, bare, {**cell_record("c"), "failed": "why not"})
    assert readme_block(tmp_path) == NOTHING
    write(tmp_path / "2026-11-22-gpu-x", cell_record("d"))
    assert readme_block(tmp_path).count("| opt-6.7b, 512+32") == 1


def test_tables_of_every_section(tmp_path: Path) -> None:
    kernel = {"seconds": 1e-4, "bytes": 10**9, "bytes_per_s": 3.4e12, "share_of_bandwidth": 0.81, "cuda_graph": True}
    step = {"ran": "256 of 2,048", "step_s": 0.01, "bound_step_s": 0.008, "decode_tokens_per_s": 2e3, "prefill_s": 2.0}
    folder = write(
        tmp_path / "2026-11-22-gpu-x",
        record("kernels", "bandwidth", copy_bytes_per_s=4.2e12, read_bytes_per_s=4.0e12),
        record("kernels", "decode, a", kernel="decode", **kernel),
        record("decode", "opt-6.7b, 24", **step),
        record("cost", "a", predicted_tokens_per_s=110.0, measured_tokens_per_s=100.0, error=0.1),
        record("tests", "pytest -m gpu", outcomes={"passed": 7, "failed": 1}, seconds=60.0, failures=["FAILED x - y"]),
        record("tests", WHOLE, failed="exit code 1: oh"),
    )
    text = tables(folder)
    for part in ("81%", "4.20 TB/s", "10.00", "80%", "+10%", "7 passed, 1 failed", "FAILED x - y", "oh", "NVIDIA H200"):
        assert part in text, part
    assert "Dry run" not in text
    assert "oh" not in readme_block(tmp_path)


def test_a_failure_does_not_hide_what_was_measured_before() -> None:
    good, bad, better = cell_record("a"), {**cell_record("a"), "failed": "no"}, cell_record("a", table="| b |")
    assert latest([good, bad]) == [good]
    assert latest([bad, good, better, bad]) == [better]
    assert latest([bad]) == [bad]


def test_that_a_section_crashed_is_told_until_it_is_run_again() -> None:
    crashed, good = {**cell_record(WHOLE), "failed": "exit code 1"}, cell_record("a")
    assert latest([good, crashed]) == [good, crashed]
    assert latest([crashed, good]) == [good]


def test_the_marks_must_be_there() -> None:
    assert with_block(f"a {BEGIN} old {END} b", "new") == f"a {BEGIN}\nnew\n{END} b"
    with pytest.raises(ValueError, match="needed"):
        with_block("no marks", "new")


def soon(seconds: float) -> float:
    return time.monotonic() + seconds


def test_a_comparison_of_the_paper_is_one_of_bench(tmp_path: Path, monkeypatch) -> None:
    """Flags that bench takes, and its table without the last line, which is JSON; a failure is kept with its reason."""
    asked = list[list[str]]()

    def bench(command: list[str], seconds: float) -> Finished:
        asked.append(command)
        code = int("opt-30b" in command)
        return Finished(code, '| a |\n| b |\n{"x": 1}\n', "out of memory", 1.0, 0, False)

    monkeypatch.setattr(paper, "run", bench)
    paper.measure(Section("paper", tmp_path, soon(60), peers="peers"))
    kept = read(tmp_path, "paper")
    assert [one["name"] for one in kept[::5]] == ["opt-6.7b, 512+512", "opt-30b, 512+1024"]
    assert kept[0]["table"] == "| a |\n| b |"
    assert "out of memory" in kept[5]["failed"]
    parser = Parser(prog="bench")
    add_arguments(parser, BenchSettings)
    for command in asked:
        flags, rest = parser.parse_known_args(command[3:])
        settings = from_namespace(BenchSettings, flags)
        assert (settings.gpu_mem, settings.peers, settings.searches) == (16 << 30, "peers", True)
        assert rest[0] == "--output-dir"


def test_outcomes_of_pytest() -> None:
    """As it says them with and without worker processes."""
    lines = ["tests/a.py::b PASSED [ 50%]", "[gw0] [ 60%] PASSED tests/a.py::c[1] ", "tests/a.py::d SKIPPED (no) [1%]"]
    lines += ["[gw1] [ 70%] FAILED tests/a.py::e ", "FAILED tests/a.py::e - AssertionError: 1", "1 failed, 2 passed"]
    counts, failures = summary(lines)
    assert counts == {"passed": 2, "skipped": 1, "failed": 1}
    assert failures == ["FAILED tests/a.py::e - AssertionError: 1"]


def test_programs_that_fail_or_hang() -> None:
    python = sys.executable
    assert run([python, "-c", "print('x'); print('{\"a\": 1}')"], 60).json() == {"a": 1}
    with pytest.raises(RunFailed, match="exit code 3: oh no"):
        run([python, "-c", "import sys; print('oh no', file=sys.stderr); sys.exit(3)"], 60).checked()
    with pytest.raises(RunFailed, match="gave up after 1 s"):
        run([python, "-c", "import time; time.sleep(600)"], 1).checked()
    with pytest.raises(RunFailed, match="no JSON"):
        run([python, "-c", "pass"], 60).json()
    with pytest.raises(RunFailed, match="no time is left"):
        run([python, "-c", "pass"], 0)


@pytest.mark.parametrize(
    ("code", "why"),
    [("raise SystemExit('broken')", "exit code 1: broken"), ("import time; time.sleep(600)", "not finished")],
)
def test_a_section_that_crashes_or_hangs_is_recorded(code: str, why: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(check, "module_command", lambda *_: [sys.executable, "-c", code])
    monkeypatch.setattr(check, "ENDING_S", 0.5)
    monkeypatch.setattr(sys, "argv", ["check.py", "--dry-run", "--commit", "abc"])
    assert not check._run("kernels", 2.0, tmp_path / "out", check._arguments())
    (kept,) = read(tmp_path / "out", "kernels")
    assert why in kept["failed"]
    assert (kept["dry_run"], kept["commit"]) == (True, "abc")


def test_what_is_measured_is_not_measured_again(tmp_path: Path) -> None:
    section = Section("paper", write(tmp_path, cell_record("a"), {**cell_record("b"), "failed": "no"}), 0.0)
    assert [section.wanted(name) for name in "abc"] == [False, True, True]
    assert Section("paper", tmp_path, 0.0, again=True).wanted("a")
    assert [Section("paper", tmp_path, 0.0, only=("b", "d")).wanted(name) for name in "bcd"] == [True, False, True]


def test_a_gpu_without_triton_s_kernels_is_not_measured(tmp_path: Path, monkeypatch, capsys) -> None:
    why = "Triton cannot run the kernel quantise here: RuntimeError: no C compiler"
    monkeypatch.setattr(check, "_run", lambda *_: pytest.fail("a section ran"))
    monkeypatch.setattr(check, "run", lambda *_: Finished(1, "", why, 1.0, 0, False))
    monkeypatch.setattr(sys, "argv", ["check.py", "--sections", "decode", "--output", str(tmp_path)])
    assert check.main() == 1
    assert why in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nor_is_a_machine_without_a_gpu(monkeypatch) -> None:
    def here(command: list[str], seconds: float) -> Finished:
        """As a process would end, for the cost of none."""
        with pytest.raises(SystemExit) as ended:
            exec(command[2], {})
        return Finished(int(ended.value.code is not None), "", str(ended.value.code), seconds, 0, False)

    monkeypatch.setattr(check, "run", here)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET is set" in str(check._without_triton(240))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "torch finds no CUDA device" in str(check._without_triton(240))
    monkeypatch.setenv("H2O_FLEXGEN_TRITON", "0")
    assert "H2O_FLEXGEN_TRITON is 0" in str(check._without_triton(240))


def test_compiled_kernels_are_carried_to_another_folder(tmp_path: Path, capsys) -> None:
    """Triton finds the files of a kernel by absolute paths, which have to be those of the folder they came to."""
    here, there, output = tmp_path / "here", tmp_path / "there", tmp_path / "output"
    (here / "KEY" / "tmp.pid_1_x").mkdir(parents=True)
    output.mkdir()
    files = {"k.cubin": "code", "k.json": "{}", "__grp__k.json": ""}
    files["__grp__k.json"] = json.dumps(
        {"child_paths": {name: str(here / "KEY" / name) for name in ("k.cubin", "k.json")}}
    )
    for name, text in files.items():
        (here / "KEY" / name).write_text(text)
    (here / "KEY" / "tmp.pid_1_x" / "half").write_text("being written")
    pack(here, output)
    unpack(output, there)
    assert sorted(path.name for path in there.rglob("*") if path.is_file()) == sorted(files)
    children = json.loads((there / "KEY" / "__grp__k.json").read_text())["child_paths"]
    assert children == {name: str(there / "KEY" / name) for name in ("k.cubin", "k.json")}
    assert [path.name for path in output.iterdir()] == [ARCHIVE]
    pack(tmp_path / "nothing", tmp_path)
    assert not (tmp_path / ARCHIVE).exists()
    (output / ARCHIVE).write_bytes(b"torn")
    unpack(output, there)
    assert "of no use" in capsys.readouterr().err


def test_where_kernels_are_compiled_to(monkeypatch) -> None:
    monkeypatch.setenv("TRITON_STORE_BINARY_ONLY", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    assert cache_folder() == Path("/somewhere")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    assert cache_folder() == Path(os.environ["XDG_CACHE_HOME"]) / "h2o_flexgen/gpu-check/triton"
    assert os.environ["TRITON_CACHE_DIR"] == str(cache_folder()), "programs that are started inherit it"


def test_a_section_compiles_ahead_for_a_part_of_its_time(tmp_path: Path, monkeypatch) -> None:
    """All kinds that are wanted, each once; after its share of the seconds nothing is begun (`test_triton_tune`)."""
    pytest.importorskip("triton")
    from h2o_flexgen.kernels import triton_tune
    from h2o_flexgen.kernels.types import Logits

    seconds, asked, compiling = list[float](), list[tuple[Any, ...]](), triton_tune.compiling
    kernel = SimpleNamespace(compile=lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(triton_tune, "compiling", lambda most: compiling(seconds.append(most) or most))
    monkeypatch.setattr(kernels, "decode_cache", lambda shape, *how: (kernel, how[:2]))
    kernels.compile_decode(Section("kernels", tmp_path, soon(100.0), dry_run=True, only=("with scores",)))
    assert seconds == [pytest.approx(40.0, abs=0.5)]
    assert asked == [(0, (packed, True), Logits(0.25)) for packed in (False, True)]


class Machine:
    """An engine that takes a second for a prompt and so many for each decode step, and notes what it was asked."""

    def __init__(self, *steps: float) -> None:
        self.steps, self.now, self.asked = steps, 0.0, list[tuple[int, int, int]]()
        self.on_progress: Any = lambda what, done, total: None

    def generate(self, prompts: list[list[int]], max_new_tokens: int, ignore_eos: bool) -> None:
        assert ignore_eos
        self.on_progress("loading weights", 1, 2)
        begun = len(prompts), len(prompts[0]), max_new_tokens, 0
        for step in range(max_new_tokens):
            self.on_progress("generating", step * len(prompts), max_new_tokens * len(prompts))
            self.now += self.steps[step]
            begun = *begun[:3], step + 1
        self.asked.append(begun)


def test_a_warm_up_is_the_work_left_after_its_first_tokens() -> None:
    machine = Machine(*[1.0] * 300)
    told = machine.on_progress
    warm_up(machine, [[1] * 2048] * 24, 256)
    assert machine.asked == [], "it was left"
    assert machine.now == WARM_UP >= FIRST_REPLAYED + 1
    assert machine.on_progress is told
    warm_up(machine, [[1] * 2048] * 24, 5)
    assert machine.asked == [(24, 2048, 5, 5)], "less than that is done as a whole"


def test_first_steps_do_not_count() -> None:
    machine = Machine(9.0, *[5.0] * (FIRST_REPLAYED - 1), 1.0, 2.0, 3.0, 7.0)
    machine.on_progress = steps = Steps(lambda: machine.now)
    machine.generate([[1]] * 3, FIRST_REPLAYED + 4, ignore_eos=True)
    assert steps.steady_s == 2.0, "the last one's end is not seen"
    machine.on_progress = few = Steps(lambda: machine.now)
    machine.generate([[1]] * 3, FIRST_REPLAYED + 3, ignore_eos=True)
    assert few.steady_s is None


def test_a_real_engine_is_warmed_up_with_real_lengths(tmp_path: Path) -> None:
    """Plan, prompts and budget are those of the run; the engine can go on afterwards, on the weights it has."""
    seen = []
    with LLM(
        tiny_model(tmp_path), weights="dummy", emulate_gpu="64MiB", eviction=EvictionConfig("h2o", ratio=0.2)
    ) as llm:
        prompts = [[row + i for i in range(4, 44)] for row in range(3)]
        llm.on_plan = lambda plan: seen.append((plan.request.workload, plan.policy, plan.placement))
        load_s = warm_up(llm, prompts, 20)
        outputs = llm.generate(prompts, max_new_tokens=20, ignore_eos=True)
        assert [len(output.token_ids) for output in outputs] == [20] * 3
        assert llm.last_record.load_s == 0.0 < load_s
    first, second = seen
    assert first == second
    assert (first[0].prompt_len, first[0].gen_len, first[0].num_sequences) == (40, 20, 3)


@pytest.mark.parametrize("section", ["decode", "cost"])
def test_sections_warm_up_with_what_they_run(section: str, tmp_path: Path, monkeypatch) -> None:
    """The same prompts, as many new tokens: what their children ask of an engine, first to warm up and then to time."""
    asked, model = list[tuple[int, int, int]](), tiny_model(tmp_path)
    generate = LLM.generate

    def noted(llm: LLM, prompts: Any, **settings: Any) -> Any:
        asked.append((len(prompts), len(prompts[0]), settings["max_new_tokens"]))
        return generate(llm, prompts, **settings)

    monkeypatch.setattr(LLM, "generate", noted)
    if section == "decode":
        work = decode.Work(model, 2, 32, 32, 12, 13, True)
        found = decode.one(vars(work))
    else:
        setting = cost.PredictedSetting(model, "", 2, 32, 12, 0.2, "64MiB")
        profile = ROOT / "configs/hardware/t4-16gb.json"
        found = cost.one({"setting": asdict(setting), "profile": str(profile)})
    assert asked == [(2, 32, 12)] * 2
    found = json.loads(json.dumps(found))
    if section == "cost":
        assert found["predicted"]["gen_throughput"] > 0 < found["gen_throughput"]
        assert (found["load_s"], found["generated_tokens"]) == (0.0, 24)
    else:
        assert found["load_s"] > 0
        assert found["steady_step_s"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # in Triton's interpreter
def test_a_reduced_dry_run(tmp_path: Path, monkeypatch, capsys) -> None:
    """A part of two sections, one of them from the command to the tables. The work alone has a process of its own."""

    def here(command: list[str], seconds: float, loud: bool) -> Finished:
        monkeypatch.setattr(sys, "argv", command[2:])
        return Finished(serve(decode.measure, decode.one), "", "", seconds, 0, False)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    only = ("H2O", "with scores")
    kernels.measure(Section("kernels", tmp_path, soon(240), dry_run=True, only=only))
    words = ["check.py", "--dry-run", "--sections", "decode", "--only", ",".join(only), "--budget-s", "240"]
    monkeypatch.setattr(sys, "argv", [*words, "--output", str(tmp_path)])
    monkeypatch.setattr(check, "run", here)
    assert check.main() == 0
    said = capsys.readouterr().out
    steps, kernel_times = read(tmp_path, "decode"), read(tmp_path, "kernels")
    assert [kept["name"] for kept in steps] == ["tiny-opt, 2 x 32+32, H2O 20%"]
    for kept in (*steps, *kernel_times):
        assert kept["dry_run"]
        assert {"hardware", "versions", "date", "commit", "command"} <= kept.keys()
    assert not [kept for kept in steps if "failed" in kept], steps
    assert all(kept["step_s"] > 0 and kept["projected"] is False for kept in steps)
    assert kernel_times[0]["name"] == "bandwidth"
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert text.startswith("**Dry run")
    assert text.strip() in said
