"""A GGUF file as a model: found as a file, or in a folder that holds nothing else of a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from h2o_flexgen.checkpoint.hub import resolve_model
from h2o_flexgen.cli.search_arguments import _spec
from h2o_flexgen.errors import ModelError
from tests.checkpoint.gguf_files import Kind, in_kind, tiny_model, write_gguf
from tests.tiny import save


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    return write_gguf(folder / "tiny.gguf", tiny_model("qwen2"), in_kind(Kind.Q8_0))


def test_the_file_or_its_folder_is_the_model(file: Path) -> None:
    for name in (str(file), str(file.parent)):
        found = resolve_model(name, offline=True)
        assert (found.origin, found.folder, found.tokenizer_folder) == ("folder", file.parent, None)
        assert found.gguf is not None
        assert found.gguf.path == str(file)
        spec = found.spec()
        assert spec.arch.family == "qwen2"
        assert dict(spec.packings)["embed.tokens"].levels == "int8"
        assert _spec(name).packings == spec.packings


def test_a_name_may_be_that_of_a_file_in_the_folder_of_models(file: Path, tmp_path: Path) -> None:
    assert resolve_model("tiny.gguf", path=file.parent, offline=True).gguf is not None
    assert resolve_model("folder", path=tmp_path, offline=True).gguf is not None


def test_a_config_beside_the_file_makes_the_folder_another_model(file: Path) -> None:
    save(tiny_model("llama"), file.parent)
    assert resolve_model(str(file.parent), offline=True).gguf is None
    assert resolve_model(str(file), offline=True).gguf is not None


def test_a_folder_of_several_must_be_chosen_from(file: Path) -> None:
    (file.parent / "other.gguf").write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match=r"holds 2 GGUF models: other\.gguf, tiny\.gguf"):
        resolve_model(str(file.parent), offline=True)


def test_parts_of_a_split_model_are_one(file: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        (file.parent / f"m-{number:05d}-of-00002.gguf").write_bytes(file.read_bytes())
    file.unlink()
    with pytest.raises(ModelError, match=r"m-00002-of-00002\.gguf is part 0 of its model"):
        resolve_model(str(file.parent), offline=True)


def test_a_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is not there\. needed the folder"):
        resolve_model(str(tmp_path / "x.gguf"), offline=True)
