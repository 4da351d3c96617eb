"""A GGUF file as a model: found as a file, or in a folder that holds nothing else of a model."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
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


def test_other_weights_beside_the_file_make_the_folder_another_model(file: Path) -> None:
    save(tiny_model("llama"), file.parent)
    assert resolve_model(str(file.parent), offline=True).gguf is None
    assert resolve_model(str(file), offline=True).gguf is not None


def test_a_config_of_one_key_beside_the_file_is_not_asked(file: Path) -> None:
    (file.parent / "config.json").write_text('{"model_type": "qwen2"}')
    assert resolve_model(str(file.parent), offline=True).gguf is not None
    assert _spec(str(file.parent)).arch.family == "qwen2"


def test_capitals_and_what_else_lies_beside_the_file(file: Path) -> None:
    """A tool's .bin is no model's weights."""
    (file.parent / "imatrix.bin").write_bytes(b"1")
    file = file.rename(file.parent / "TINY.GGUF")
    for name in (str(file), str(file.parent)):
        assert resolve_model(name, offline=True).gguf is not None
        assert _spec(name).arch.family == "qwen2"


def side_file(path: Path, architecture: str, kind: str | None, tensors: bool = True) -> Path:
    """A GGUF file that is no model."""
    writer = gguf.GGUFWriter(str(path), architecture)
    if kind:
        writer.add_type(kind)
    if tensors:
        writer.add_tensor("v.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


SIDE = {
    "mmproj-tiny-f16.gguf": ("clip", "mmproj", True, "reads pictures or sound"),
    "tiny.mmproj.gguf": ("clip", None, True, "reads pictures or sound"),
    "vision.gguf": ("clip", None, True, "reads pictures or sound"),
    "tiny.imatrix.gguf": ("imatrix", "imatrix", True, "how much weights matter"),
    "style.gguf": ("qwen2", "adapter", True, r"an adapter \(LoRA\), which is not read: merge it"),
    "ggml-vocab-qwen2.gguf": ("qwen2", None, False, "a vocabulary without weights"),
    "words.gguf": ("qwen2", None, False, "a vocabulary without weights"),
}


@pytest.mark.parametrize("name", SIDE)
def test_the_language_model_is_found_among_files_that_belong_to_it(name: str, file: Path, tmp_path: Path) -> None:
    architecture, kind, tensors, said = SIDE[name]
    side = side_file(file.parent / name, architecture, kind, tensors)
    found = resolve_model(str(file.parent), offline=True).gguf
    assert found is not None
    assert found.path == str(file)
    with pytest.raises(ModelError, match=said):
        resolve_model(str(side), offline=True)
    file.unlink()
    with pytest.raises(ModelError, match=said):
        resolve_model(str(file.parent), offline=True)


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
