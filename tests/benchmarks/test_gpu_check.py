"""scripts/gpu_check.sh without a GPU: a reduced dry run, warm-ups, records, and what a section may not break."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import check, cost, decode, kernels, paper
from benchmarks.gpu.check import ARCHIVE, cache_folder, pack, unpack
from benchmarks.gpu.paper import Ran, cell_facts
from benchmarks.gpu.peers import OWN_PROBE, PROBE, Cell, flexgen_sizes, one_of, sizes
from benchmarks.gpu.section import FEWEST, WARM_UP, Section, Steps, run, serve, tiny_model, warm_up
from benchmarks.gpu.tables import BEGIN, END, NOTHING, WHOLE, latest, read, readme_block, tables, with_block
from benchmarks.gpu.tests import summary
from h2o_flexgen import LLM, EvictionConfig, OffloadPolicy
from h2o_flexgen.baselines.process import Finished, RunFailed
from h2o_flexgen.schedule.tasks import FIRST_REPLAYED

ROOT = Path(__file__).parents[2]
GPU = {"name": "NVIDIA H200", "memory_bytes": 150 * 10**9, "cuda": "13.0"}
HOST = {"cpu": "a CPU", "cores": 16, "memory_bytes": 128 << 30, "gpu": GPU}


def record(section: str, name: str, **facts: Any) -> dict[str, Any]:
    """A record as a section on a GPU machine keeps it."""
    made = {"section": section, "name": name, "dry_run": False, "date": "2026-11-22T10:00:00+00:00", "commit": "abc"}
    return {**made, "hardware": HOST, "versions": {"torch": "2.11.0"}, "command": "scripts/gpu_check.sh", **facts}


def cell_record(name: str, **facts: Any) -> dict[str, Any]:
    """A cell of the paper's table, measured in full unless `facts` say otherwise."""
    made: dict[str, Any] = {"model": "opt-6.7b", "system": "h2o", "prompt_len": 512, "gen_len": 32, "sequences": 64}
    made |= {"generated": 32, "fewer_sequences": False, "gpu_mem": "16GiB", "measured_tokens_per_s": 123.4}
    made |= {"short_tokens_per_s": None, "projected_tokens_per_s": None, **facts}
    return record("paper", name, **made)


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


def test_measured_short_and_projected_have_columns_of_their_own(tmp_path: Path) -> None:
    short = {"measured_tokens_per_s": None, "short_tokens_per_s": 77.0, "projected_tokens_per_s": 99.0, "generated": 4}
    folder = write(tmp_path / "x-gpu-y", cell_record("a"), cell_record("b", system="flexgen", **short))
    rows = [line.split("|")[1:-1] for line in tables(folder).splitlines() if line.startswith("| opt")]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert cells[0][4:7] == ["123.4", "", ""]
    assert cells[1][4:7] == ["", "77 (4 new)", "99"]


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
    good, bad, better = cell_record("a"), {**cell_record("a"), "failed": "no"}, cell_record("a", sequences=65)
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


class System:
    """A system of which every sequence takes 1 s to begin and every token 0.1 s, `most` sequences at a time."""

    def __init__(self, most: int = 1000) -> None:
        self.most, self.asked = most, list[tuple[int, int]]()

    def __call__(self, size: int, generated: int, seconds: float) -> Ran:
        self.asked.append((size, generated))
        if size > self.most:
            raise RunFailed("exit code 1: CUDA out of memory")
        return Ran(1.0, 0.1 * (generated - 1), 5.0, size, generated, {})


def cell(gen_len: int, system: str = "flexgen") -> Cell:
    return Cell("opt-6.7b", gen_len, system)


def soon(seconds: float) -> float:
    return time.monotonic() + seconds


def test_a_cell_that_fits_its_time_is_measured_in_full() -> None:
    steps = System()
    facts = cell_facts(cell(32), [8], steps, soon(1000))
    assert steps.asked == [(8, PROBE), (8, 32)]
    assert facts["measured_tokens_per_s"] == pytest.approx(8 * 32 / (1.0 + 3.1))
    assert facts["short_tokens_per_s"] is facts["projected_tokens_per_s"] is None


def test_one_that_does_not_is_cut_and_says_so() -> None:
    facts = cell_facts(cell(1024), [8], System(), soon(60))
    generated = facts["generated"]
    assert PROBE < generated < 1024
    assert facts["measured_tokens_per_s"] is None
    assert facts["short_tokens_per_s"] == pytest.approx(8 * generated / (1.0 + 0.1 * (generated - 1)))
    assert facts["projected_tokens_per_s"] == pytest.approx(8 * 1024 / (1.0 + 102.3))


def test_our_first_run_is_long_enough_to_drop_its_first_steps() -> None:
    """Of 12 new tokens 11 are decoded; what is projected and what fits follow from the last of these steps."""

    class Ours(System):
        def __call__(self, size: int, generated: int, seconds: float) -> Ran:
            ran = super().__call__(size, generated, seconds)
            return replace(ran, decode_s=ran.decode_s + 50.0, steady_s=0.1)

    assert OWN_PROBE - 1 - FIRST_REPLAYED >= FEWEST
    steps = Ours()
    facts = cell_facts(cell(32, "h2o"), [8], steps, soon(1000))
    assert steps.asked == [(8, OWN_PROBE), (8, 32)]
    assert facts["measured_tokens_per_s"] == pytest.approx(8 * 32 / (1.0 + 53.1)), "what was measured stays whole"
    facts = cell_facts(cell(1024, "h2o"), [8], Ours(), soon(100))
    assert OWN_PROBE < facts["generated"] < 1024
    assert facts["projected_tokens_per_s"] == pytest.approx(8 * 1024 / (1.0 + 102.3))
    assert cell(8, "h2o").probe == 8


def test_sequences_that_do_not_fit_are_halved_and_that_counts_as_cut() -> None:
    facts = cell_facts(cell(32), [64], System(most=16), soon(1000))
    assert (facts["sequences"], facts["fewer_sequences"], facts["measured_tokens_per_s"]) == (16, True, None)


def test_the_faster_of_two_batches_is_taken() -> None:
    facts = cell_facts(cell(32), [2, 96], System(), soon(1000))
    assert facts["sequences"] == 96
    assert [tried.partition(":")[0] for tried in facts["tried"]] == ["2", "96"]


def test_what_never_works_has_the_reason() -> None:
    with pytest.raises(RunFailed, match="out of memory"):
        cell_facts(cell(32), [64], System(most=0), soon(1000))


@pytest.mark.parametrize("row", [10**8, 10**9])
def test_flexgen_s_batches_fit(row: int) -> None:
    weights, gpu, host = 13 * 10**9, 17 * 10**9, 110 * 10**9
    for size in flexgen_sizes(weights, row, row // 4, gpu, host):
        assert size > 0
        assert weights + size * row < host
    with pytest.raises(RunFailed, match="no cache"):
        flexgen_sizes(weights, row, 0, 8 * 10**9, weights)


def test_a_peer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="not installed"):
        sizes(cell(32), str(tmp_path))
    with pytest.raises(RunFailed, match="libaio is missing"):
        one_of({"systems": {}, "failed": {"deepspeed": "libaio\nis missing"}}, "deepspeed", 8, 4)


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

    seconds, asked, compiling = list[float](), list[tuple[Any, ...]](), triton_tune.compiling
    kernel = SimpleNamespace(compile=lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(triton_tune, "compiling", lambda most: compiling(seconds.append(most) or most))
    monkeypatch.setattr(kernels, "decode_cache", lambda shape, *how: (kernel, how[:2]))
    kernels.compile_decode(Section("kernels", tmp_path, soon(100.0), dry_run=True, only=("with scores",)))
    assert seconds == [pytest.approx(40.0, abs=0.5)]
    assert asked == [(0, (packed, True), 0.25) for packed in (False, True)]


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


@pytest.mark.parametrize("section", ["decode", "paper", "cost"])
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
    elif section == "paper":
        shares = {kind: {"gpu": 1.0} for kind in ("weights", "cache", "hidden")}
        policy = OffloadPolicy(gpu_batch_size=2, num_gpu_batches=1, **shares).to_json()
        facts = {**asdict(Cell(model, 32, "h2o", 32, "8MiB", emulated=True)), "policy": policy, "host": 0}
        found = paper.one({**facts, "generated": 12, "budget": 13})
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
        assert found["steady_step_s" if section == "decode" else "steady_s"] > 0


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
