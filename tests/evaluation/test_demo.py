"""The program `demo`: two caches side by side, readable in a terminal of 100 columns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.reports.quality import AnswerPair
from h2o_flexgen.demo import main
from h2o_flexgen.evaluation.quality import side_by_side
from h2o_flexgen.evaluation.settings import read_cases
from h2o_flexgen.reporting.tables import answers_text, figures_table
from tests.evaluation.conftest import write_tokenizer
from tests.tiny import make_opt, save


def test_ratio_one_is_the_full_cache(tiny: str, files: tuple[str, str]) -> None:
    cases = [(case.prompt, case.answer) for case in read_cases(files[0])]
    result = side_by_side(cases, EvictionConfig(name="h2o"), 4, tiny, {"dtype": "float32"})
    assert [pair.equal for pair in result.pairs] == [True] * 4
    assert all(pair.full_right and pair.evicted_right for pair in result.pairs)
    assert "4 of 4" in figures_table(result)
    assert answers_text(result).count("(the same)") == 4


def test_an_evicted_cache_is_smaller_and_may_be_wrong(tiny: str, files: tuple[str, str]) -> None:
    cases = [(case.prompt, case.answer) for case in read_cases(files[0])]
    stages: list[str] = []
    result = side_by_side(cases, EvictionConfig(name="local", ratio=0.05), 4, tiny, {"dtype": "float32"}, stages.append)
    assert stages == ["full cache", "local at 5%"]
    assert result.evicted.kv_bytes < result.full.kv_bytes / 5
    assert all(pair.full_right for pair in result.pairs)
    assert not all(pair.evicted_right for pair in result.pairs)
    assert "[wrong: " in answers_text(result)
    data = json.loads(json.dumps(result.to_json()))
    assert data["prompts"] == 4
    assert data["equal"] == sum(pair["equal"] for pair in data["pairs"])
    assert data["evicted"]["eviction"]["name"] == "local"


def test_the_program_fits_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(make_opt(max_position_embeddings=1100, num_hidden_layers=1), tmp_path / "tiny")
    write_tokenizer(folder)
    monkeypatch.chdir(tmp_path)
    assert main(["--model", "tiny", "--gen-len", "5", "--dtype", "float32"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    data = json.loads(lines[-1])
    assert data["prompts"] == 11
    assert data["full"]["eviction"]["name"] == "full"
    assert data["evicted"]["eviction"]["name"] == "h2o"
    assert data["ratio"] == 0.2
    assert max(map(len, lines[:-1])) <= 100
    assert "\x1b" not in out + err
    assert sum(line.startswith("    full cache") for line in lines) == 11


def test_a_budget_in_tokens_is_called_so(tiny: str, files: tuple[str, str]) -> None:
    cases = [(case.prompt, case.answer) for case in read_cases(files[0])]
    stages: list[str] = []
    result = side_by_side(cases, EvictionConfig(name="h2o", budget=6), 4, tiny, {"dtype": "float32"}, stages.append)
    assert stages == ["full cache", "h2o at 6 tokens"]
    assert "h2o 6 " in figures_table(result)
    assert "%" not in figures_table(result) + answers_text(result)
    assert (result.to_json()["ratio"], result.to_json()["budget"]) == (None, 6)


def test_a_share_of_bytes_is_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("h2o_flexgen.demo._questions", lambda: [])
    folder = save(make_opt(), tmp_path / "tiny")
    write_tokenizer(folder)
    assert main(["--model", str(folder), "--gen-len", "3", "--dtype", "float32", "--kv-bytes", "0.2"]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out.splitlines()[-1])
    assert (data["ratio"], data["budget"], data["bytes"]) == (None, None, 0.2)
    assert "h2o 20 % of bytes" in out
    assert "h2o at 20% of the bytes" in err


def test_the_full_cache_goes_beside_itself(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h2o_flexgen.demo._questions", lambda: [])
    assert main(["--gen-len", "3", "--eviction", "full"]) == 0
    data = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (data["ratio"], data["equal"]) == (1.0, data["prompts"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--gen-len", "0"], "at least 1"),
        (["--gen-len", "many"], "at least 1"),
        (["--hh-ratio", "0"], "--hh-ratio"),
        (["--nvme-mem", "5B"], "--nvme-mem is 5B"),
        (["--seed", "-1"], "--seed is -1"),
        (["--hh-ratio", "0.2", "--kv-budget", "9"], "needed one of them"),
    ],
)
def test_flags_that_make_no_sense(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert words in capsys.readouterr().err


def test_a_context_too_short_for_its_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "demo-stream", "--gen-len", "1"]) == 2
    said = capsys.readouterr().err
    assert "the context of the model is 256 tokens\n  lower --gen-len, or name a --model with a longer one" in said


def test_pairs_compare_texts() -> None:
    assert AnswerPair("p", "a", "a").equal
    assert not AnswerPair("p", "a", "b").equal
