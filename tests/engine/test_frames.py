"""How deep a reader has to go: the frames between a program's `main` and the first kernel of a prompt."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen import run
from h2o_flexgen.models import decoder

ROOT = Path(__file__).parents[2]

MOST = 11


def test_eleven_frames_from_main_to_the_first_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """And docs/how-it-works.md names them."""
    stacks: list[list[traceback.FrameSummary]] = []
    linear = decoder.linear

    def seen(*args: Any, **options: Any) -> Any:
        stacks.append(traceback.extract_stack()[:-1])
        return linear(*args, **options)

    monkeypatch.setattr(decoder.Decoder.__init__, "__defaults__", (seen,))
    run.main(["--prompt", "Hi", "--gen-len", "2", "--quiet", "--no-calibrate", "--no-json"])
    names = [frame.name for frame in stacks[0] if "h2o_flexgen" in Path(frame.filename).parts]
    way = names[names.index("main") :]
    assert len(way) <= MOST, way
    section = (ROOT / "docs/how-it-works.md").read_text(encoding="utf-8").partition("## A prompt's way")[2]
    table = [line.split("|")[1] for line in section.partition("## ")[0].splitlines() if line.startswith("| `")]
    told = [name.strip(" `").rpartition(".")[2] for cell in table for name in cell.split(",")]
    assert told == way
