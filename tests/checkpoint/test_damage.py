"""Checkpoints that are broken: one ModelError says everything that is wrong, before any weight memory is taken."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.models import INDEX, SINGLE, make_spec, weights, write_shards, write_single
from tests.checkpoint.refusals import TOKENS, refused
from tests.seeds import python_random

pytestmark = pytest.mark.usefixtures("no_weight_memory")


def test_everything_wrong_is_listed_at_once(tmp_path: Path) -> None:
    tensors = weights(make_spec())
    tensors["surplus"] = torch.zeros(3)
    del tensors["model.decoder.layers.0.fc1.weight"]
    tensors["model.decoder.layers.1.fc1.bias"] = torch.zeros(63).half()
    tensors["model.decoder.layers.1.fc2.bias"] = torch.zeros(32, dtype=torch.int8)
    paths = write_shards(tmp_path, tensors, 3)
    os.truncate(paths[1], paths[1].stat().st_size - 10)
    message = refused(tmp_path)
    for part in (
        f"{paths[1].name} is truncated: expected {paths[1].stat().st_size + 10} bytes, found {paths[1].stat().st_size}",
        "tensor 'surplus' of model-00003-of-00003.safetensors is not part of this model",
        "tensor 'model.decoder.layers.0.fc1.weight' (layers.0.mlp.up.weight) is missing",
        "'model.decoder.layers.1.fc1.bias': expected shape (64,) from config.json, found (63,)",
        "'model.decoder.layers.1.fc2.bias': expected dtype float16, bfloat16, float32, found int8",
        "5 problems",
        "download again",
    ):
        assert part in message


def test_a_long_list_is_cut(tmp_path: Path) -> None:
    write_single(tmp_path, {f"surplus{number}": torch.zeros(1) for number in range(200)})
    message = refused(tmp_path)
    assert "more" in message
    assert len(message.splitlines()) <= 22, "with what was needed and the advice in lines of their own: one screen"


def test_another_models_checkpoint(tmp_path: Path) -> None:
    write_single(tmp_path, weights(make_spec()))
    message = refused(tmp_path, hidden_size=64, word_embed_proj_dim=64, num_hidden_layers=3)
    assert "expected shape (96, 64) from config.json, found (96, 32)" in message
    message = refused(tmp_path, num_hidden_layers=3)
    assert "one problem" in message
    assert "layer 2 is missing: config.json has num_hidden_layers 3" in message
    assert "layers 2 to 39 are missing" in refused(tmp_path, num_hidden_layers=40)


def test_missing_shards_are_named_and_excuse_their_tensors(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, weights(make_spec()), 3)
    paths[0].unlink()
    paths[2].unlink()
    message = refused(tmp_path)
    assert paths[0].name in message
    assert paths[2].name in message
    assert "2 problems" in message


def test_a_link_to_a_blob_that_is_gone(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, weights(make_spec()))
    paths[0].unlink()
    paths[0].symlink_to(tmp_path / "nowhere")
    assert f"{paths[0].name} cannot be opened: No such file" in refused(tmp_path)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    tensors = weights(make_spec())
    paths = write_shards(tmp_path, tensors)
    first = {name: tensors[name] for name in sorted(tensors)[:3]}
    held = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    second = {name: tensors[name] for name in tensors if held[name] == paths[1].name}
    save_file(second | {TOKENS: first.get(TOKENS, tensors[TOKENS])}, paths[1])
    assert f"tensor {TOKENS!r} is in {paths[0].name} and in {paths[1].name}" in refused(tmp_path)


def test_one_weight_under_two_names(tmp_path: Path) -> None:
    tensors = weights(make_spec())
    write_single(tmp_path, tensors | {TOKENS.removeprefix("model."): tensors[TOKENS].clone()})
    assert "are both embed.tokens" in refused(tmp_path)


def test_an_index_that_contradicts_its_shards(tmp_path: Path) -> None:
    write_shards(tmp_path, weights(make_spec()))
    index = json.loads((tmp_path / INDEX).read_text())
    names = sorted(index["weight_map"])
    index["weight_map"][names[0]] = index["weight_map"][names[-1]]
    index["weight_map"].pop(names[1])
    (tmp_path / INDEX).write_text(json.dumps(index))
    message = refused(tmp_path)
    assert f"tensor {names[0]!r} is not in model-00002-of-00002.safetensors, where the index has it" in message
    assert f"tensor {names[1]!r} of model-00001-of-00002.safetensors is not in the index" in message


@pytest.mark.parametrize(
    "text", [b"", b'{"weight_map": {"a"', b"[1]", b"{}", b'{"weight_map": {}}', b'{"weight_map": {"a": 3}}', b"\xff{}"]
)
def test_a_torn_index(tmp_path: Path, text: bytes) -> None:
    write_shards(tmp_path, weights(make_spec()))
    (tmp_path / INDEX).write_bytes(text)
    assert INDEX in refused(tmp_path)


HOSTILE = ["../a.safetensors", "/etc/passwd", "a/b.safetensors", "..", "C:x.safetensors", "a\\b.safetensors", "a\0"]


@pytest.mark.parametrize("name", [*HOSTILE, ".", "", "\ud800.safetensors", "other.bin", "x" * 300 + ".safetensors"])
def test_shard_names_that_look_like_paths(tmp_path: Path, name: str) -> None:
    write_shards(tmp_path, weights(make_spec()))
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["unused"] = name
    (tmp_path / INDEX).write_text(json.dumps(index))
    message = refused(tmp_path)
    assert repr(name) in message or name in message
    assert message.isprintable() or "\n" in message


@pytest.mark.parametrize("name", HOSTILE)
def test_tensor_names_that_look_like_paths(tmp_path: Path, name: str) -> None:
    write_single(tmp_path, weights(make_spec()) | {name: torch.zeros(1)})
    assert f"tensor {name!r} has" in refused(tmp_path)
    (tmp_path / SINGLE).unlink()
    torch.save(weights(make_spec()) | {name: torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert f"tensor {name!r} has" in refused(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    write_shards(tmp_path, weights(make_spec()))
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"][name] = "model-00001-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert f"tensor name {name!r} has" in refused(tmp_path)


FOREIGN = {
    "is empty": b"",
    "is a Git LFS pointer, not the file it stands for: expected 1300000 bytes, found {}": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1300000\n"
    ),
    "is a web page of {} bytes": b"<!DOCTYPE html><html><body>Sign in</body>",
    "is a web page of {} bytes, not": b"\n  <HTML>\n</HTML>",
    "is an error message of a download of {} bytes": b"Entry not found",
}


@pytest.mark.parametrize("name", [SINGLE, "pytorch_model.bin"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_files_saved_instead_of_weights(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_bytes(FOREIGN[kind])
    message = refused(tmp_path)
    assert f"{name} {kind.format(len(FOREIGN[kind]))}" in message
    assert "one problem" in message
    assert "download again" in message


@pytest.mark.parametrize("name", [SINGLE, "pytorch_model.bin"])
def test_every_truncation_is_noticed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write_single(tmp_path, weights(make_spec())) if name == SINGLE else torch.save(weights(make_spec()), path)
    data = path.read_bytes()
    for size in [*python_random(1).sample(range(len(data)), 60), len(data) - 1]:
        path.write_bytes(data[:size])
        message = refused(tmp_path)
        assert name in message
        assert str(size) in message


def test_no_weights_at_all(tmp_path: Path) -> None:
    assert "the weights are missing" in refused(tmp_path)
    assert "cannot be listed" in refused(tmp_path / "nowhere")
    write_single(tmp_path, weights(make_spec())).rename(tmp_path / "model-00001-of-00002.safetensors")
    assert f"{SINGLE} and {INDEX} are missing, although there is model-00001" in refused(tmp_path)


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_things_that_are_not_files(tmp_path: Path, kind: str) -> None:
    (tmp_path / SINGLE).mkdir() if kind == "folder" else os.mkfifo(tmp_path / SINGLE)
    assert f"{SINGLE} cannot be opened" in refused(tmp_path)
