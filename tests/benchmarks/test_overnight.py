"""benchmarks.overnight without its 3.9 GB: both commands, rates of a part of the steps, the table, and records."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import overnight, records
from h2o_flexgen.cli.arguments import parse_arguments

POINT = {"model": "olmoe-1b-7b", "cap": "1.5GiB", "prompt": 32, "new": 32, "flags": "--hh-ratio 0.2 --cache-bits 4"}
POINT |= {"steps": 31, "micro": 512, "file": "/data/olmoe/x.gguf", "peers": "/data/peers"}


def test_our_command_is_one_of_run() -> None:
    command = overnight.ours({**POINT, "sequences": 1024})
    assert command[:3] == [sys.executable, "-m", "h2o_flexgen.run"]
    parsed = parse_arguments(command[3:], {})
    assert (parsed.engine.model, parsed.engine.offload_dir) == ("/data/olmoe/x.gguf", "/data/olmoe/offload")
    assert (parsed.prompt_len, parsed.sampling.max_new_tokens, parsed.num_prompts) == (32, 32, 1024)
    assert parsed.engine.eviction.ratio == 0.2


@pytest.mark.parametrize(("sequences", "kind"), [(1, "f16"), (24, "f16"), (25, "q4_0"), (256, "q4_0")])
def test_their_cache_is_of_16_bits_within_an_eighth_of_the_cap(sequences: int, kind: str) -> None:
    """16 layers x 16 heads of 128: 128 KiB a token, so that 192 MiB hold 1,536 of them, which 24 x 64 are."""
    words = overnight.theirs({**POINT, "sequences": sequences})
    values = dict(pairwise(words))
    assert values["-c"] == str(64 * sequences)
    assert values["-ctk"] == values["-ctv"] == kind
    assert (values["-npl"], values["-ntg"], values["-m"]) == (str(sequences), "31", "/data/olmoe/x.gguf")


def _answer(command: list[str], seconds: float) -> dict[str, Any]:
    """What the last line of stdout would be."""
    if "h2o_flexgen.run" not in command:
        return {"t_pp": seconds, "t_tg": seconds}
    moved = {"bytes_moved": {"disk->cpu": 3 << 30}}
    bound = {"bound": {"resource": "arithmetic"}, "achieved": 0.8}
    record: dict[str, Any] = dict.fromkeys(overnight._KEPT) | moved
    record |= {"predicted": {"bytes_moved": {"disk->cpu": 2 << 30}}, "roofline": {"decode": bound}}
    return {**record, "prefill_s": seconds, "decode_s": seconds, "model": "/data/olmoe/x.gguf"}


def test_records_and_their_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Sides in turn, llama.cpp up to its most sequences, no path of this machine; a second call measures nothing."""
    asked: list[list[str]] = []

    def run(command: list[str], **settings: Any) -> Any:
        asked.append(command)
        Path(command[command.index("--report") + 1]).write_text('{"peak_bytes": 1073741824}')
        return SimpleNamespace(json=lambda: _answer(command, 2.0 if "1024" in command else 4.0))

    monkeypatch.setattr(records, "run_command", run)
    monkeypatch.setattr(overnight, "SCRATCH", tmp_path / "scratch")
    monkeypatch.setattr(overnight, "made", lambda model, folder: folder / "x.gguf")
    flags = ["--caps", "1.5GiB", "--sequences", "1,1024", "--steps", "8", "--output", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["overnight", *flags, "--files", str(tmp_path), "--peers", str(tmp_path)])
    assert overnight.main() == overnight.main() == 0
    assert ["h2o_flexgen.run" in command for command in asked] == [True, False, True]
    text = (tmp_path / "out/records.jsonl").read_text()
    assert str(tmp_path) not in text
    assert str(records.ROOT) not in text
    alone, theirs, most = map(json.loads, text.splitlines())
    assert (alone["timed"], theirs["timed"], most["sequences"]) == (31, 8, 1024)
    assert overnight.rates(theirs) == (32 / 4, 31 / (4 * 31 / 8), 32 / (4 + 4 * 31 / 8))
    said = capsys.readouterr().out
    assert "| 1.5GiB | 1 | llama.cpp | 8 | 2 | 1.64 |  |  | 1 GiB | 1 |" in said
    row = "| 1.5GiB | 1024 | h2o_flexgen | 1.64e+04 | 1.59e+04 | 8.19e+03 | 3 GiB, +50.0% | decode: arithmetic 80% |"
    assert f"{row} 1 GiB | 1 |" in said
    assert "1.5GiB: 1,024 sequences 4.99e+03 times llama.cpp alone, and 4.99e+03 times its best batch (1)" in said
