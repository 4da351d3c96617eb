"""The page: whole HTML that loads nothing, escapes what it is given, and says what is missing."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.errors import UsageError
from h2o_flexgen.pages.page import Chapter, Passage, Table, hashed, render
from h2o_flexgen.pages.reading import Material, read
from h2o_flexgen.pages.whole import page_of, write_page
from h2o_flexgen.report import main
from h2o_flexgen.schedule.timeline import Level, Row, Timeline
from h2o_flexgen.search import main as search
from tests.pages.test_reading import OFFLOADED, RESULTS, ROOT, RUN

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!-- ' \" &"
VOID = {"meta", "img", "br", "input", "link", "hr"}


class Reader(HTMLParser):
    """Collects elements, and the text of scripts and styles; fails where tags do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": [], "": []}
        self._open: list[str] = []
        self.feed(text)
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts[self._open[-1] if self._open and self._open[-1] in self.texts else ""].append(data)


def evil_material(tmp_path: Path) -> Material:
    """Every text of every record is markup."""
    run = {**RUN, "model": EVIL, "dtype": EVIL, "eviction": {"name": EVIL}, "warnings": [EVIL], "host": {"cpu": EVIL}}
    (tmp_path / "run.json").write_text(json.dumps(run))
    rows = (Row(f"{EVIL} step 0", 0.0, 1.0, "compute"), Row(EVIL, 2.0, 3.0, f"cpu->{EVIL}"), Row(EVIL, 4, 5, "compute"))
    Timeline(rows, (Level(0.0, EVIL, 3),)).write_chrome_trace(tmp_path / "trace.json", EVIL)
    return read([tmp_path])


def data_of(reader: Reader) -> Any:
    return json.loads(reader.texts["script"][0])


def test_markup_in_records_stays_text(tmp_path: Path) -> None:
    text = page_of(evil_material(tmp_path), EVIL)
    reader = Reader(text)
    tags = [tag for tag, _ in reader.elements]
    assert "img" not in tags
    assert tags.count("script") == 3
    assert EVIL in "".join(reader.texts[""])
    assert EVIL in json.dumps(data_of(reader), ensure_ascii=False).replace('\\"', '"')


def test_the_policy_allows_what_is_in_the_page_and_nothing_else() -> None:
    reader = Reader(page_of(read([OFFLOADED, ROOT / "docs/demo/quality.json"])))
    policy = next(attrs["content"] for tag, attrs in reader.elements if "http-equiv" in attrs) or ""
    rules = {rule.split()[0]: rule.split()[1:] for rule in policy.split(";")}
    assert rules["default-src"] == ["'none'"]
    assert rules["script-src"] == [hashed(text) for text in reader.texts["script"][1:]]
    assert rules["style-src"] == [hashed(text) for text in reader.texts["style"]]
    named = [attrs for _, attrs in reader.elements if {"src", "style", "onclick"} & attrs.keys()]
    assert not named
    assert all((attrs.get("href") or "#").startswith("#") for _, attrs in reader.elements)


def test_every_figure_has_a_place_and_words(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    reader = Reader(page_of(read([tmp_path, RESULTS / "2026-11-21-ragged"])))
    figures = data_of(reader)
    places = {attrs["data-figure"]: attrs for _, attrs in reader.elements if "data-figure" in attrs}
    assert places.keys() == figures.keys()
    assert all(attrs["aria-label"] for attrs in places.values())
    named = {attrs["id"] for _, attrs in reader.elements if "id" in attrs}
    assert {attrs["aria-labelledby"] for _, attrs in reader.elements if "aria-labelledby" in attrs} <= named


def test_what_is_missing_is_said() -> None:
    material = Material()
    material.add("run.json", RUN)
    said = "".join(Reader(page_of(material)).texts[""])
    assert "Schedule: a trace (run --trace FILE" in said
    assert "predicted in 1 of 1 records" in said
    assert "The report of this run is not shown: RunRecord lacks the keys" in said


def test_a_page_begins_with_the_run_and_ends_with_its_sources() -> None:
    material = Material()
    material.add("run.json", RUN)
    sections = [attrs["id"] for tag, attrs in Reader(page_of(material)).elements if tag == "section"]
    assert (sections[0], sections[-1]) == ("overview", "sources")


def test_a_column_is_aligned_one_way() -> None:
    """Values of the overview were left or right by their lengths."""
    table = Table("The run", ["", ""], [["model", "a long text " * 5], ["load", "2 s"]])
    page = render("t", [Chapter("overview", "Overview", [], [Passage("", [], [], [table])])])
    cells = [attrs.get("class") for tag, attrs in Reader(page).elements if tag in ("th", "td")]
    assert cells == [None, "long"] * 3


PROMPT = {
    "tokens": ["a", "b", "c", "d"],
    "prompt": 3,
    "budget": {"heavy": 1, "recent": 1, "sinks": 0, "total": 2},
    "scores": [[[1, 2, 3]], [[1, 2, 3]]],
    "kept": [[[1, 2]], [[1, 2]]],
    "returns": [[[[0, 2], [1, 1]]], []],
}
PROMPTS = {"heavy_hitters": 1, "eviction": {}, "windows": [None, 2], "bits": [4, 3], "newest": 1, "sequences": [PROMPT]}


def test_recorded_prompts_say_what_came_back_and_what_is_kept_in_how_many_bits() -> None:
    material = Material()
    material.add("scores", PROMPTS)
    said = "".join(Reader(page_of(material)).texts[""])
    assert "Kept keys have 4 bits, values 3; the newest 1 tokens have twice as many." in said
    assert "underlined ones came back before the run ended" in said
    assert re.search(r"times, over all caches\s*12\.01\.03\s", said)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bits": 4}, "scores: bits is 4 and newest 1. needed two numbers and one"),
        ({"sequences": [{**PROMPT, "returns": [[], [[[4, 1]]]]}]}, "recorded prompt 0 is not whole.* not of 4 tokens"),
        ({"sequences": [{**PROMPT, "returns": [[[], []], []]}]}, "recorded prompt 0 is not whole.* other layers and"),
        ({"sequences": [{**PROMPT, "returns": [[]]}]}, "recorded prompt 0 is not whole"),
        ({"sequences": [{**PROMPT, "returns": 3}]}, "recorded prompt 0 is not whole"),
        ({"sequences": [{**PROMPT, "scores": [[[float("inf")]]]}]}, "recorded prompt 0 is not whole.*a score is inf"),
    ],
)
def test_recorded_prompts_that_are_not_whole(changed: dict[str, Any], message: str) -> None:
    material = Material()
    material.add("scores", {**PROMPTS, **changed})
    with pytest.raises(UsageError, match=message):
        page_of(material)


def test_figures_of_committed_records() -> None:
    figures = [f for f in data_of(Reader(page_of(read([OFFLOADED])))).values() if f["kind"] == "bars"]
    summary = json.loads((OFFLOADED / "summary.json").read_text())["systems"]
    for name, system in (("h2o 20 %", "h2o"), ("accelerate", "accelerate")):
        bars = [bar for figure in figures for bar in figure["bars"] if bar["name"] == name]
        median = summary[system]["decode_throughput"]["median"]
        (bar,) = [bar for bar in bars if bar["median"] == pytest.approx(median)]
        spread = {key: bar[key] for key in ("median", "low", "high")}
        expected = summary[system]["decode_throughput"]
        assert spread == pytest.approx(
            dict(zip(spread, (expected[key] for key in ("median", "min", "max")), strict=True))
        )
        assert bar["count"] == 5


def test_evaluations_and_summaries_of_committed_records() -> None:
    """Figures are those of the files: suites with their intervals, streams, medians of a summary."""
    lab, close = RESULTS / "2026-11-23-eviction-lab/real", RESULTS / "2026-11-25-eviction-lab/real-close"
    for folder, policy, count in ((lab, "ceiling, global", 5), (close, "roco, far", 2)):
        reader = Reader(page_of(read([folder])))
        prose = next(f for f in data_of(reader).values() if f["y"]["name"] == "perplexity")
        (line,) = [line for line in prose["lines"] if line["name"] == policy]
        rows = [json.loads(row) for row in (folder / "records.jsonl").read_text().splitlines()]
        own = {
            row["budget"]: row["value"]
            for row in rows
            if (row["policy"], row["task"]) == (policy, "prose") and row["metric"] == "perplexity"
        }
        assert (dict(line["points"]), len(own)) == (own, count)
        assert (prose["x"]["log"], prose["y"]["log"]) == (2, 2), "ten has two ticks where values are of one order"
        assert f"{own[0.2]:.3g}" in "".join(reader.texts[""])
    stream = json.loads((ROOT / "docs/stream/stream.json").read_text())
    (figure,) = data_of(Reader(page_of(read([ROOT / "docs/stream/stream.json"])))).values()
    assert [[y for _, y in line["points"]] for line in figure["lines"]] == [row["perplexity"] for row in stream["rows"]]
    path = OFFLOADED / "summary.json"
    systems = json.loads(path.read_text())["systems"]
    bars = data_of(Reader(page_of(read([path]))))
    decode = [{bar["name"]: bar["median"] for bar in figure["bars"]} for figure in bars.values()]
    assert {name: one["decode_throughput"]["median"] for name, one in systems.items()} in decode


def test_plans_that_a_search_chose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    shape = ["--gbs", "8", "--num-gpu-batches", "1", "--prompt-len", "32", "--gen-len", "8", "-o", str(plan)]
    assert search(["--model", "opt-125m", "--hardware", "t4-16gb", *shape]) == 0
    said = "".join(Reader(page_of(read([plan]))).texts[""])
    assert "Every figure here is predicted" in said
    assert "8 sequences" in said
    assert main([str(plan), "-o", str(tmp_path / "absent" / "page.html")]) != 0
    assert len(re.findall("error:", capsys.readouterr().err)) == 1


def test_a_model_whose_path_is_no_text(tmp_path: Path) -> None:
    """As os.fsdecode gives names with other bytes than UTF-8's."""
    material = Material()
    material.add("this run", RUN | {"model": "mod\udce8l"})
    assert write_page(material, tmp_path / "page.html") == (tmp_path / "page.html").stat().st_size
    assert "mod?l" in (tmp_path / "page.html").read_text()


def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    page = tmp_path / "page.html"
    assert main([str(tmp_path / "run.json"), "-o", str(page)]) == 0
    said, last = capsys.readouterr().out.splitlines()
    assert said.startswith(f"{page}: ")
    assert json.loads(last)["read"] == {str(tmp_path / "run.json"): "run"}
    assert page.read_text().startswith("<!doctype html>")
    assert main([str(tmp_path / "run.json"), "-o", str(page)]) == 2
    assert "exists" in capsys.readouterr().err
    (tmp_path / "run.json").write_text("{}")
    assert main([str(tmp_path / "run.json"), "-o", str(page), "--overwrite"]) == 2
    assert len(re.findall("error:", capsys.readouterr().err)) == 1
