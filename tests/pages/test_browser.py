"""The page in a headless Chromium: it loads nothing, logs nothing, zooms, reacts, and assistive software can read it.

Skipped without playwright and Debian's chromium: `apt-get install chromium` and `pip install playwright`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.pages.reading import Material, read
from h2o_flexgen.pages.whole import write_page
from h2o_flexgen.schedule.timeline import Level, Row, Timeline
from tests.pages.test_page import EVIL, evil_material
from tests.pages.test_reading import OFFLOADED, ROOT

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.slow

Open = Callable[[Path], Any]
SCORES = {
    "heavy_hitters": 1,
    "model": EVIL,
    "eviction": {"name": "h2o"},
    "windows": [None, 5],
    "bits": [4, 3],
    "newest": 2,
    "sequences": [
        {
            "tokens": [EVIL, *(f" word{number}" for number in range(8)), " answer"],
            "prompt": 9,
            "budget": {"heavy": 2, "recent": 2, "sinks": 0, "total": 4},
            "scores": [[[5, 0, 3, 0, 4, 4, 0, 0, 0]], [[9, 0, 0, 1, 0, 2, 7, 0, 0]]],
            "kept": [[[0, 4, 7, 8]], [[5, 6, 7, 8]]],
            "returns": [[[[4, 1], [2, 3]]], []],
        }
    ],
}


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens a file; fails at the end if anything was logged, or asked of anyone else."""
    seen: list[str] = []
    context = browser.new_context(viewport={"width": 1100, "height": 800})

    def go(path: Path) -> Any:
        page = context.new_page()
        page.on("console", lambda message: seen.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: seen.append(str(error)))
        page.on(
            "request", lambda asked: None if asked.url in (path.as_uri(), "about:blank") else seen.append(asked.url)
        )
        page.goto(path.as_uri())
        return page

    yield go
    context.close()
    assert seen == []


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every section, part of it of hostile texts."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "records").mkdir()
    material = evil_material(folder / "records")
    for path in (OFFLOADED, ROOT / "docs/demo/quality.json"):
        more = read([path])
        material.runs += more.runs
        material.qualities += more.qualities
    material.add("scores", json.loads(json.dumps(SCORES)))
    write_page(material, folder / "page.html")
    return folder / "page.html"


def wait_for(page: Any, text: str) -> None:
    """Of a timeline's status. The page's policy lets nothing be evaluated in it again and again."""
    playwright.expect(page.locator(".status").filter(has_text="Shown").first).to_contain_text(text, timeout=30_000)


def struck(page: Any) -> list[int]:
    """Positions of tokens that are shown as evicted."""
    found: list[int] = page.evaluate(
        "[...document.querySelectorAll('.words span')].flatMap("
        "(span, at) => span.className.includes('gone') && !span.hidden ? [at] : [])"
    )
    return found


def test_hostile_text_stays_text_and_nothing_is_loaded(everything: Path, open_page: Open) -> None:
    page = open_page(everything)
    assert page.locator(".words span").first.text_content() == EVIL
    assert page.locator("img").count() == 0
    assert page.evaluate("document.querySelectorAll('canvas').length") >= 10


def test_the_timeline_zooms_by_button_and_key(everything: Path, open_page: Open) -> None:
    page = open_page(everything)
    status = page.locator(".status").filter(has_text="Shown").first
    assert status.text_content().startswith("Shown: 0 us to 5 s; 3 tasks")
    page.get_by_role("button", name="Zoom in").click()
    wait_for(page, "Shown: 1.25 s to 3.75 s")
    place = page.locator("[role=application]")
    place.focus()
    place.press("ArrowRight")
    wait_for(page, "Shown: 2.08 s to 4.58 s")
    place.press("0")
    wait_for(page, "Shown: 0 us to 5 s")


def test_a_trace_is_saved_for_perfetto(everything: Path, open_page: Open) -> None:
    page = open_page(everything)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save for Perfetto").click()
    events = json.loads(Path(download.value.path()).read_text())["traceEvents"]
    assert [(event["ts"], event["dur"]) for event in events if event["ph"] == "X"] == [
        (0, 1_000_000),
        (4_000_000, 1_000_000),
        (2_000_000, 1_000_000),
    ]


def test_tokens_react_to_layer_budget_and_keys(everything: Path, open_page: Open) -> None:
    page = open_page(everything)
    layer, slider = page.get_by_role("combobox", name="Layer"), page.get_by_role("slider", name="Budget")
    layer.select_option("0")
    assert struck(page) == [1, 2, 3, 5, 6]  # of the equal scores of 4 and 5 the first stays
    slider.fill("6")
    assert struck(page) == [1, 2, 3]  # three recent ones, and three of the others
    slider.fill("9")
    assert struck(page) == []
    layer.select_option("1")
    slider.fill("3")  # a window of 5: what has left it for the next query goes first
    assert struck(page) == [0, 1, 2, 3, 4, 5]
    slider.fill("4")  # as many as the window shows: no choice
    assert struck(page) == [0, 1, 2, 3, 4]
    page.get_by_label("as the run ended").check()
    assert struck(page) == [0, 1, 2, 3, 4, 9]
    words = page.locator(".words")
    words.focus()
    words.press("ArrowRight")
    words.press("ArrowRight")
    assert page.locator(".tokens .status").text_content().startswith("\u201c word0\u201d, position 1: score 0,")


def test_what_came_back_is_shown_as_the_run_ended(everything: Path, open_page: Open) -> None:
    page = open_page(everything)
    page.get_by_role("combobox", name="Layer").select_option("0")
    back = page.locator(".words span.back")
    assert back.count() == 0
    page.get_by_label("as the run ended").check()
    assert back.all_text_contents() == [" word1", " word3"]
    assert struck(page) == [1, 2, 3, 5, 6, 9]
    said = page.locator(".tokens .status")
    assert said.text_content() == "4 of 10 tokens stay, 2 came back."
    page.locator(".words span").nth(2).click()
    assert said.text_content().endswith("; evicted; came back 3 times.")
    page.locator(".words span").nth(4).click()
    assert said.text_content().endswith("; kept, key in 4 bits, value in 3; came back once.")
    page.locator(".words span").nth(8).click()
    assert said.text_content().endswith("; kept, key in 8 bits, value in 6.")
    assert page.locator(".words span.finer").all_text_contents() == [" word6", " word7"]


def test_the_theme_can_be_changed(everything: Path, open_page: Open) -> None:
    page = open_page(everything)
    colour = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(colour)
    page.get_by_role("button", name="Dark or light").click()
    assert page.evaluate(colour) != before
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_assistive_software_finds_nothing_serious(everything: Path, open_page: Open, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = open_page(everything)
    page.emulate_media(color_scheme=scheme)
    found = axe.Axe().run(page).response["violations"]
    assert [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in ("serious", "critical")] == []


def test_a_phone_needs_no_scrolling_sideways(everything: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 700})
    page.goto(everything.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_hundred_thousand_events_and_two_hundred_records_open_at_once(tmp_path: Path, open_page: Open) -> None:
    """In 3 s, and 50 MB; a machine that is busy may take a few times as long."""
    count = 100_000
    rows = tuple(
        Row(f"layers.{at % 48}.mlp step {at // 48}", at * 1e-3, (at + 0.9) * 1e-3, ("compute", "disk->cpu")[at % 2])
        for at in range(count)
    )
    levels = tuple(Level(at * 1e-3, "cpu", at) for at in range(0, count, 10))
    Timeline(rows, levels, {"cpu": count}).write_chrome_trace(tmp_path / "trace.json")
    runs = [json.dumps(json.loads(path.read_text())) for path in sorted(OFFLOADED.glob("run-*.json"))]
    (tmp_path / "runs.jsonl").write_text("\n".join(20 * runs))
    assert write_page(read([tmp_path]), tmp_path / "page.html") < 50e6
    begun = time.monotonic()
    page = open_page(tmp_path / "page.html")
    wait_for(page, "100,000 tasks as")
    assert time.monotonic() - begun < 20
    assert page.evaluate("performance.timing.loadEventEnd - performance.timing.navigationStart") > 0


def test_an_empty_page_opens(tmp_path: Path, open_page: Open) -> None:
    write_page(Material(), tmp_path / "page.html")
    assert open_page(tmp_path / "page.html").locator("h1").text_content() == "h2o_flexgen: what was measured"
