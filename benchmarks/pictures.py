"""Pictures for the documentation: pages of real runs in a headless Chromium.

    scripts/pictures.sh

Pages are of the small real model that scripts/real_model.sh fetches, and of a run from disk. Needs playwright, and the
system's Chromium.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from argparse import ArgumentParser
from pathlib import Path

from PIL import Image

from h2o_flexgen.__main__ import main as program
from h2o_flexgen.folders import cached

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/pictures"
MODEL = cached("models", "gemma-3-270m-q4_k_m.gguf")
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


def main() -> int:
    """Draws all of them; returns the exit code of the first program that failed, 0 where all succeeded."""
    ArgumentParser(description=__doc__).parse_args()
    if not MODEL.is_file():
        sys.exit(f"{MODEL} is not there: scripts/real_model.sh fetches it")
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        real, offloaded = (Path(temporary) / f"{name}.html" for name in ("real", "offloaded"))
        out = ["--output", f"{temporary}/out.jsonl", "--overwrite", "--no-json"]
        words = ["--prompt", PROMPT, "--hh-ratio", "0.2", "--gen-len", "12", "--quiet"]
        code = program(["run", "--model", str(MODEL), "--report", str(real), *words, *out])
        code = code or program(["run", *OFFLOADED.split(), "--report", str(offloaded), *out])
        if not code:
            _photograph({"#tokens": (real, "heavy-hitters"), "#schedule": (offloaded, "schedule")})
    return code


def _photograph(places: dict[str, tuple[Path, str]]) -> None:
    """Saves each element (page, name of the picture) in light colours, as a PNG of 64 colours."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 900}, color_scheme="light")
        for place, (source, name) in places.items():
            path = FOLDER / f"{name}-light.png"
            page.goto(source.as_uri())
            page.locator(place).screenshot(path=path)
            Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)
        browser.close()


if __name__ == "__main__":
    sys.exit(main())
