"""Suites: files, records, resuming, intervals, and what the tasks ask."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from h2o_flexgen.cache.eviction.ceiling import CEILING
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.reports.quality import SuiteRecord, interval
from h2o_flexgen.errors import StorageError, UsageError
from h2o_flexgen.evaluate import main
from h2o_flexgen.evaluation.suites.runner import RECORDS, Suite, SuitePolicy, run_suite
from h2o_flexgen.evaluation.suites.tasks import SuiteTask, ceiling, make
from h2o_flexgen.planning.llm import LLM
from h2o_flexgen.reporting.plots import plot_suite
from h2o_flexgen.reporting.tables import suite_table

ROOT = Path(__file__).parents[2]


def suite_file(folder: Path, model: str, files: tuple[str, str], **changes: Any) -> Path:
    recall = [json.loads(line) for line in Path(files[0]).read_text().splitlines() if line]
    for case in recall:
        case["question_at"] = len(case["prompt"]) // 2
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, recall)))
    data = {
        "name": "tiny",
        "models": [model],
        "engine": {"dtype": "float32"},
        "budgets": [1.0, 0.2],
        "policies": ["h2o", {"name": "random", "recent": 2}, "ceiling"],
        "tasks": {
            "prose": {"kind": "perplexity", "text": files[1], "context": 48, "continuation": 12, "cases": 3},
            "questions": {"kind": "recall", "questions": "questions.jsonl", "cases": 4},
            "agreement": {"kind": "agreement", "text": files[1], "context": 48, "continuation": 6, "cases": 2},
        },
    }
    file = folder / "suite.json"
    file.write_text(json.dumps({**data, **changes}))
    return file


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "configs/eval").glob("*.json")))
def test_shipped_suites_can_be_read(name: str) -> None:
    suite = Suite.read(ROOT / "configs/eval" / name)
    assert all(Path(task.text).exists() for task in suite.tasks.values() if task.text)
    assert len(list(suite.cells())) > 2


@pytest.mark.slow
def test_a_suite_is_measured_once(tiny: str, files: tuple[str, str], tmp_path: Path) -> None:
    suite = Suite.read(suite_file(tmp_path, tiny, files))
    heard: list[SuiteRecord] = []
    records = run_suite(suite, tmp_path / "out", on_record=heard.append)
    assert records == heard
    labels = ["full", "h2o", "random, recent 2", "ceiling"]
    assert list(dict.fromkeys(record.policy for record in records)) == labels
    assert {record.task for record in records if record.policy == "ceiling"} == {"prose", "questions"}
    of = {(record.policy, record.metric): record for record in records}
    full, h2o = of["full", "perplexity"], of["h2o", "perplexity"]
    difference = sum(own - its for own, its in zip(h2o.values, full.values, strict=True)) / full.n
    assert of["h2o", "perplexity beside full"].value == pytest.approx(math.expm1(difference), abs=1e-5)
    assert (of["full", "agreement"].value, of["full", "tokens until it differs"].value) == (1, 6)
    assert all(record.low <= record.value <= record.high for record in records)
    # A second run measures nothing; a torn record costs the cell that it belongs to.
    assert run_suite(suite, tmp_path / "out", on_record=lambda _: pytest.fail("measured again")) == records
    file = tmp_path / "out" / RECORDS
    file.write_text(file.read_text()[:-20])
    again: list[SuiteRecord] = []
    assert len(run_suite(suite, tmp_path / "out", on_record=again.append)) == len(records)
    assert {(record.policy, record.task) for record in again} <= {("ceiling", "prose"), ("ceiling", "questions")}
    assert "random, recent 2" in suite_table(records)
    plot_suite(records, tmp_path / "suite.png")
    assert (tmp_path / "suite.png").read_bytes().startswith(b"\x89PNG")


def test_the_program_measures_a_suite_once(
    tiny: str, files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = {"prose": {"kind": "perplexity", "text": files[1], "context": 48, "continuation": 12, "cases": 2}}
    few = {"policies": ["h2o", {"name": "h2o", "recent": 90}], "budgets": [0.2], "tasks": tasks}
    file, folder, plot = suite_file(tmp_path, tiny, files, **few), tmp_path / "out", tmp_path / "suite.png"
    asked = ["--suite", str(file), "--output-dir", str(folder), "--plot", str(plot), "--json"]
    assert main(asked) == 0
    first = capsys.readouterr()
    assert "recent 90 at 0.2: --recent is 90, the budget has 12 tokens" in first.err, (
        "a cell that cannot be is left out"
    )
    assert "h2o at 20 %: perplexity" in first.err
    *table, line = first.out.splitlines()
    assert [row.split("|")[1].strip() for row in table if row.startswith("| ")][:3] == ["policy", "-" * 6, "full"]
    records = json.loads(line)["records"]
    assert [row["policy"] for row in records if row["metric"] == "perplexity"] == ["full", "h2o"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main(asked) == 2, "the picture is there"
    assert "exists" in capsys.readouterr().err
    assert main([*asked, "--overwrite"]) == 0
    again = capsys.readouterr()
    assert again.out == first.out
    assert "h2o at 20 %" not in again.err


@pytest.mark.parametrize(
    ("text", "said"), [("{", "is not JSON"), (None, "needed a readable file"), ("[" * 100_000, "is not JSON")]
)
def test_a_file_that_is_no_suite(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "suite.json"
    if text is not None:
        file.write_text(text)
    assert main(["--suite", str(file), "--output-dir", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_records_that_cannot_be_kept(tiny: str, files: tuple[str, str], tmp_path: Path) -> None:
    suite = Suite.read(suite_file(tmp_path, tiny, files))
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot use"):
        run_suite(suite, tmp_path / "file")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / RECORDS).write_text("{}\n")
    with pytest.raises(UsageError, match="line 1"):
        run_suite(suite, tmp_path / "out")


def test_a_folder_of_another_suite(tiny: str, files: tuple[str, str], tmp_path: Path) -> None:
    record = {"suite": "other", "model": "m", "policy": "h2o", "budget": 0.2, "task": "t", "metric": "recall"}
    record |= {"kind": "share", "value": 1, "low": 1, "high": 1, "n": 1, "values": [1], "cell": "c", "seconds": 1}
    (tmp_path / RECORDS).write_text(json.dumps(record) + "\n")
    with pytest.raises(UsageError, match="holds records of the suite 'other'"):
        run_suite(Suite.read(suite_file(tmp_path, tiny, files)), tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies": ["h3o"]}, "did you mean 'h2o'"),
        ({"policies": [{"name": "h2o", "budget": 5}]}, "has a budget"),
        ({"budgets": []}, "are empty"),
        ({"budgets": [1.5]}, "budgets is 1.5"),
        ({"tasks": {"a": {"kind": "recal", "cases": 1}}}, "did you mean 'recall'"),
        ({"tasks": {"a": {"kind": "keys", "cases": 1}}}, "keys without lengths"),
        ({"tasks": {"a": {"kind": "keys", "cases": 1, "lengths": [9], "told": 0}}}, "told is 0"),
        ({"tasks": {"a": {"kind": "keys", "cases": 1, "lengths": [9], "answers": "word"}}}, "needed .number. or"),
        ({"modles": ["demo"]}, "did you mean .models."),
        ({"models": 5}, "is not a suite"),
        ({"models": "demo"}, "is not a suite: models is 'demo', not a list"),
        ({"engine": {"model": "demo"}}, "suite.json: engine has the key 'model'. the suite's models say that"),
        ({"engine": {"eviction": {"name": "h2o"}}}, "engine has the key 'eviction'"),
        ({"engine": {"dtype": 5}}, "suite.json: dtype is 5"),
    ],
)
def test_what_a_file_must_not_say(
    changes: dict[str, Any], message: str, tiny: str, files: tuple[str, str], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        Suite.read(suite_file(tmp_path, tiny, files, **changes))


def test_flags_that_a_suite_has_no_use_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--suite", "configs/eval/demo.json", "--ratios", "0.2", "--output-dir", "x"]) == 2
    assert main(["--suite", "configs/eval/demo.json"]) == 2
    assert main(["--output-dir", "x"]) == 2
    err = capsys.readouterr().err
    assert "leave these out" in err
    assert "--suite without --output-dir" in err


@pytest.mark.parametrize(
    ("count", "quantile"), [(2, 12.706), (3, 4.303), (4, 3.182), (6, 2.571), (8, 2.365), (21, 2.086), (121, 1.980)]
)
def test_intervals(count: int, quantile: float) -> None:
    values = [(place * place * 0.37) % 1.1 for place in range(count)]
    found = interval("mean", values)
    half = quantile * stdev(values) / math.sqrt(count)  # quantiles from printed tables
    assert found == pytest.approx((fmean(values), found.value - half, found.value + half), rel=0.005, abs=0.005)
    assert interval("perplexity", values) == pytest.approx([math.exp(end) for end in found])
    assert interval("increase", values) == pytest.approx([math.expm1(end) for end in found])
    right = count // 3
    share = interval("share", [1.0] * right + [0.0] * (count - right))
    for end in share[1:]:  # where the share is 1.96 standard deviations off
        assert abs(share.value - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / count), abs=1e-6)


def test_passages_hold_their_facts_where_they_should() -> None:
    task = SuiteTask(kind="keys", cases=1, keys=3, lengths=(300,), depths=(0.25,))
    with LLM("demo") as llm:
        case = make(task, llm).cases[0]
        decode = llm.model.codec.decode  # type: ignore[union-attr]
        passage, question = decode(case.context), decode(case.continuation)
    answer = question.split()[-1]
    assert 260 <= len(case.context) <= 330
    assert passage.count("the code of the") == 3
    assert 0.15 < passage.index(answer) / len(passage) < 0.35
    assert decode(case.continuation[-case.answer :]).strip() == answer
    name = question.split("code of the ")[1].split("?")[0]
    assert f"the code of the {name} is {answer}" in passage


def test_words_are_told_several_times_and_asked_for_by_the_first() -> None:
    task = SuiteTask(kind="keys", cases=1, lengths=(200,), depths=(0.5,), told=3, answers="words")
    with LLM("demo") as llm:
        case = make(task, llm).cases[0]
        decode = llm.model.codec.decode  # type: ignore[union-attr]
        passage, question = decode(case.context), decode(case.continuation).strip()
    answer = decode(case.continuation[-case.answer :]).strip()
    assert question.startswith("The code words of the")
    assert len(answer.split(", ")) == 4
    assert question.endswith(f", {answer}")
    assert passage.count(f"{question}.") == 3


def test_instructions_open_a_passage_and_are_asked_for_in_turn() -> None:
    """Of a whitelist everything is kept; of a window of recent tokens, nothing."""
    task = SuiteTask(kind="instructions", cases=1, keys=2, lengths=(150,))
    kept = {}
    for name, spans in (("h2o", "whitelist"), ("local", None)):
        with LLM("demo", eviction=EvictionConfig(name, ratio=0.5, spans=spans)) as llm:
            measured = make(task, llm)
            kept[name] = {figures.metric: figures for figures in measured.run(llm, None, {})}
            decode = llm.model.codec.decode
    assert [len(case.spans) for case in measured.cases] == [2, 2]
    for number, case in enumerate(measured.cases):
        texts = [decode(case.context[span.start : span.stop]).strip() for span in case.spans]
        assert all(text.startswith("Remember: the code of the") for text in texts)
        assert texts[number].rstrip(".")[-4:] == decode(case.continuation[-case.answer :]).strip()
        assert case.spans[number].name == "asked"
    assert [kept["h2o"][f"kept of instruction {i}"].values for i in (1, 2)] == [(1.0,), (1.0,)]
    assert [kept["local"][f"kept of instruction {i}"].values for i in (1, 2)] == [(0.0,), (0.0,)]
    assert kept["h2o"]["followed"].kind == "share"
    assert min(kept["h2o"]["nats per token asked for"].values) > 0


def test_a_sum_is_worked_out_where_its_lines_are_kept() -> None:
    """A window that holds a line works lines out, and has lost what the first ones came to."""
    task, found = SuiteTask(kind="reasoning", cases=2), {}
    for name, ratio in (("full", 1.0), (CEILING, 0.5), ("local", 0.5)):
        with ceiling() as foresight, LLM("demo-sums", eviction=EvictionConfig(name, ratio=ratio)) as llm:
            measured = make(task, llm)
            figures = measured.run(llm, foresight if name == CEILING else None, {})
            found[name] = {each.metric: each.values for each in figures}
            decode = llm.model.codec.decode
    case = measured.cases[0]
    assert decode(case.context).endswith(" ;")
    assert decode(case.continuation[-case.answer :]).startswith("0 A= ")
    right = {"answers": (1, 1), "right tokens of the working": (1, 1), "right tokens of the answer": (1, 1)}
    assert found["full"] == found[CEILING] == right
    assert found["local"]["answers"] == (0, 0)
    assert max(found["local"]["right tokens of the answer"]) < 0.9


def test_policies_of_a_suite() -> None:
    policy = SuitePolicy.from_json({"name": "auto", "recent": 8, "budgets": [0.5, 0.2]})
    assert policy.label == "auto, recent 8"
    assert policy.budgets == (0.2, 0.5)
    assert policy.at(0.2) == EvictionConfig("h2o", ratio=0.2, recent=8, budget_split="far")
    by_bytes = SuitePolicy.from_json({"name": "h2o", "bytes": True})
    assert by_bytes.label == "h2o, bytes"
    assert by_bytes.at(0.2) == EvictionConfig("h2o", bytes=0.2)
    far = SuitePolicy.from_json({"name": "h2o", "far_layers": [[7, 2], 0]})
    assert len({far, far}) == 1
    assert far.at(0.2) == EvictionConfig("h2o", ratio=0.2, far_layers=(0, (7, 2)))
    with pytest.raises(UsageError, match="needed true: budgets are then shares of bytes"):
        SuitePolicy.from_json({"name": "h2o", "bytes": 0.2})
