"""Records of every kind are known by what is in them; what is malformed is one clear error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from h2o_flexgen.errors import UsageError
from h2o_flexgen.pages.reading import Material, read

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
OFFLOADED = RESULTS / "2026-11-22-offload-peers/16+128"
"""Runs of a comparison, one file each."""
RUN = {
    "eviction": {"name": "h2o"},
    "prefill_s": 1.0,
    "decode_s": 2.0,
    "prompt_tokens": 64,
    "generated_tokens": 16,
    "sequences": 4,
}
"""The least that a run has."""


def test_every_committed_record_of_a_kind_that_pages_show_is_read() -> None:
    material = read([OFFLOADED, RESULTS / "2026-11-21-ragged", ROOT / "docs/stream"])
    assert len(material.runs) == 10 + 30
    assert {run.system for run in material.runs} == {"h2o", "full", "accelerate"}
    assert all((run.record is None) == (run.system == "accelerate") for run in material.runs)
    assert material.streams
    summary = read([OFFLOADED / "summary.json"])
    assert list(summary.summaries[0].data["systems"]) == ["h2o", "accelerate"]
    suites = read([RESULTS / "2026-11-23-eviction-lab" / "real"]).suites
    assert {each.data["suite"] for each in suites} == {"real"}
    quality = read([ROOT / "docs/demo/quality.json"]).qualities[0].data
    assert quality.model == "demo"
    left = read([ROOT / "docs/demo"]).files
    assert "left out" in left[str(ROOT / "docs/demo/training.json")]


def test_output_of_a_program_piped_into_a_file_is_lines(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text("\n".join([json.dumps(RUN), "", json.dumps(RUN)]))
    assert len(read([path]).runs) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        (json.dumps(RUN) + "\n{", "line 2: not JSON"),
        ('{"eviction": {}, "decode_s": NaN}', "NaN is not a JSON number"),
        ("[]", "it is a list"),
        ("3", "it is a int"),
        ('{"model": 1}', "it has the keys model"),
        ("{}", "it is an object without keys"),
        (json.dumps({**RUN, "prefill_s": "1"}), "prefill_s is '1'"),
        (json.dumps({**RUN, "prefill_s": -1}), "prefill_s is -1"),
        (json.dumps({**RUN, "sequences": True}), "sequences is True"),
        (json.dumps({**RUN, "predicted": []}), r"predicted is \[\]"),
        (json.dumps({key: value for key, value in RUN.items() if key != "sequences"}), "the record has no sequences"),
        ('{"rows": [{}], "recall_file": "a"}', "not a whole QualityReport"),
        ('{"rows": 1, "streams": "a"}', "not a whole StreamReport"),
        ('{"traceEvents": 1}', "traceEvents is not a list"),
        ('{"traceEvents": [{"ph": "X", "ts": 0}]}', "event 0"),
        ('{"bench": 2, "systems": {"h2o": 1}}', r"systems\.h2o is 1"),
        ('{"full": 1, "evicted": 2}', "full is 1"),
        ('{"suite": "s", "metric": "recall"}', "model is None"),
    ],
)
def test_what_is_malformed_is_one_error_that_names_the_file(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=said) as error:
        read([path])
    assert str(path) in error.value.found


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read([tmp_path / "none.json"])
    with pytest.raises(UsageError, match=r"no \.json or \.jsonl"):
        read([tmp_path])
    (tmp_path / "picture.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not text"):
        read([tmp_path / "picture.json"])


def test_a_damaged_record_in_a_folder_is_an_error_and_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({**RUN, "decode_s": "x"}))
    with pytest.raises(UsageError, match="decode_s is 'x'"):
        read([tmp_path])


def test_an_object_of_no_kind() -> None:
    with pytest.raises(UsageError, match="not a record that this page can show"):
        Material().add("here", {"a": 1})
