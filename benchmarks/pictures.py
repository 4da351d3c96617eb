"""Pictures for the documentation: pages of real runs in a headless Chromium, and the two drawings.

    scripts/pictures.sh

Pages are of the small real model that scripts/real_model.sh fetches, and of committed records. Needs playwright, and a
Chromium of the system's.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.drawings import draw_rooms, draw_schedule
from h2o_flexgen.__main__ import main as program

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/pictures"
MODEL = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "h2o_flexgen/models/gemma-3-270m-q4_k_m.gguf"
"""Where scripts/real_model.sh puts it."""
PROMPT = (
    "The treaty was signed in Geneva on the fourth of March by Ambassador Ingrid Solheim, who had spent eleven years "
    "persuading both governments to meet. The delegates arrived late, because snow had closed the mountain road, and "
    "the hotel served soup until midnight. Nobody slept much. In the morning the ministers read the text aloud, argued "
    "about two commas and a map, and finally asked for a pen. The photographers waited outside in the cold. When it "
    "was over, the oldest minister thanked the waiters, the drivers and the translators, and said that the person to "
    "whom everybody owed the treaty was Ambassador"
)
OFFLOADED = (
    "--model opt-125m --weights dummy --dtype bfloat16 --calibrate --weights-placement disk=1 --gpu-batch-size 8 "
    "--num-gpu-batches 2 --num-prompts 16 --prompt-len 64 --gen-len 6 --hh-ratio 0.2 --quiet"
)
"""A run whose schedule has something to show: all weights come from disk."""
RECORDS = (ROOT / "results/2026-11-22-opt-1.3b", ROOT / "docs/demo/quality.json")


def main() -> int:
    """Draws all of them; returns the exit code of the first program that failed, 0 where none did."""
    ArgumentParser(description=__doc__).parse_args()
    if not MODEL.is_file():
        sys.exit(f"{MODEL} is not there: scripts/real_model.sh fetches it")
    FOLDER.mkdir(exist_ok=True)
    draw_rooms(FOLDER / "rooms.svg")
    draw_schedule(FOLDER / "schedule.svg")
    with tempfile.TemporaryDirectory() as temporary:
        real, offloaded, records = (Path(temporary) / f"{name}.html" for name in ("real", "offloaded", "records"))
        out = ["--output", f"{temporary}/out.jsonl", "--overwrite", "--no-json"]
        words = ["--prompt", PROMPT, "--hh-ratio", "0.2", "--gen-len", "12", "--quiet"]
        code = program(["run", "--model", str(MODEL), "--report", str(real), *words, *out])
        code = code or program(["run", *OFFLOADED.split(), "--report", str(offloaded), *out])
        code = code or program(["report", *map(str, RECORDS), "-o", str(records), "--no-json"])
        if not code:
            _photograph(real, offloaded, records)
    return code


def _photograph(real: Path, offloaded: Path, records: Path) -> None:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme, width in (("light", 1000), ("dark", 1000), ("light", 390)):
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            name = "narrow" if width < 500 else scheme
            page.goto(real.as_uri())
            _save(page, "#tokens", f"heavy-hitters-{name}.png")
            page.goto(offloaded.as_uri())
            _save(page, "#schedule", f"schedule-{name}.png")
            _save(page, "#memory", f"memory-{name}.png")
            page.goto(records.as_uri())
            _save(page, "#throughput .figures >> nth=0", f"throughput-{name}.png")
            _save(page, "#quality .figures >> nth=0", f"quality-{name}.png")
        browser.close()


def _save(page: Any, place: str, name: str) -> None:
    """An element of a page as a PNG of 64 colours."""
    path = FOLDER / name
    page.locator(place).screenshot(path=path)
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
