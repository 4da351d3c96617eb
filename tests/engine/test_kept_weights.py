"""What is measured and packed once, and found again in the offload folder by later runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.checkpoint import quantising
from h2o_flexgen.engine.engine import Engine
from tests.tiny import prompts_of

PLACES: dict[str, dict[str, Any]] = {"cpu": {}, "gpu": {"emulate_gpu": "1GiB", "policy": {"weights": {"gpu": 1.0}}}}


def answers(folder: str, offload: Path, **settings: Any) -> list[list[int]]:
    settings = {"dtype": "float32", "weight_bits": 4, "weight_group": 32, "offload_dir": str(offload), **settings}
    with Engine(folder, **settings) as llm:
        outputs = llm.generate(prompts_of([9, 4]), max_new_tokens=5, ignore_eos=True)
        moved = llm.last_record.bytes_moved
    assert not moved.get("disk->cpu")
    return [output.token_ids for output in outputs]


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("this was done before")


def damage(folder: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)


@pytest.mark.parametrize("place", PLACES)
def test_packed_weights_in_memory_are_kept_where_a_folder_is_named(
    place: str, checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint("llama")[1]
    first = answers(folder, tmp_path, **PLACES[place])
    with monkeypatch.context() as patch:
        patch.setattr(quantising, "pack", never)
        patch.setattr(quantising, "importance", never)
        assert answers(folder, tmp_path, **PLACES[place]) == first
    damage(tmp_path, "packed-*/unit-0003.bin")
    assert answers(folder, tmp_path, **PLACES[place]) == first
    assert "packed again" in caplog.text


def test_without_a_folder_nothing_but_the_measurement_is_kept(checkpoint, tmp_path: Path, monkeypatch) -> None:
    folder = checkpoint("llama")[1]
    monkeypatch.setenv("H2O_FLEXGEN_OFFLOAD_DIR", str(tmp_path))
    first = answers(folder, tmp_path, offload_dir=None)
    assert [path.name for path in tmp_path.glob("packed-*/*") if path.name != "lock"] == ["importance.pt"]
    monkeypatch.setattr(quantising, "importance", never)
    assert answers(folder, tmp_path, offload_dir=None) == first


def test_a_measurement_that_is_damaged_is_made_again(checkpoint, tmp_path: Path, monkeypatch, caplog) -> None:
    folder = checkpoint("llama")[1]
    monkeypatch.setenv("H2O_FLEXGEN_OFFLOAD_DIR", str(tmp_path))
    first = answers(folder, tmp_path, offload_dir=None)
    (kept,) = tmp_path.glob("packed-*/importance.pt")
    kept.write_bytes(kept.read_bytes()[:-100])
    assert answers(folder, tmp_path, offload_dir=None) == first
    assert "measured again" in caplog.text


@pytest.mark.parametrize("settings", [{"weight_importance": False}, {"weight_bits": 8}, {"weights": "dummy"}])
def test_nothing_is_measured_where_that_serves_nothing(settings: dict[str, Any], checkpoint, monkeypatch) -> None:
    monkeypatch.setattr(quantising, "importance", never)
    with Engine(checkpoint("llama")[1], **{"weight_bits": 4, **settings}) as llm:
        llm.generate([[5, 6]], max_new_tokens=1)
