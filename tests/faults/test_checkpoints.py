"""FAULTS rows 11 to 13, 15 to 17 and 27 through the program: unusable checkpoints, models that are not there."""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from h2o_flexgen.engine import engine
from tests.programs import CONFIG, Run, tensors

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


Refused = Callable[..., None]


@pytest.fixture
def refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Runs on a folder that must be refused, before memory is taken for its weights, with all of `words`."""
    monkeypatch.setattr(engine, "load", lambda *_: pytest.fail("weights were loaded"))

    def call(model: Path, *words: str) -> None:
        ran = run("--model", model, "--prompt", "abc")
        assert (ran.code, ran.out) == (4, ""), ran.err
        assert ran.err.startswith("error: ")
        for word in words:
            assert word in ran.err

    return call


def in_shards(model: Path) -> None:
    """The checkpoint of `model` in two shards."""
    weights = load_file(model / WEIGHTS)
    (model / WEIGHTS).unlink()
    names, weight_map = sorted(weights), {}
    for number in (1, 2):
        part = {name: weights[name] for name in names[number - 1 :: 2]}
        shard = f"model-{number:05d}-of-00002.safetensors"
        save_file(part, model / shard)
        weight_map |= dict.fromkeys(part, shard)
    (model / INDEX).write_text(json.dumps({"weight_map": weight_map}))


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 123456789\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda data: data[:-1000], ("is truncated: expected ", "bytes, found ")),
        (lambda data: data[:50], ("is truncated: expected at least ", "found 50")),
        (lambda data: b"", ("is empty",)),
        (lambda data: LFS, ("Git LFS pointer", "123456789")),
        (lambda data: b"<!DOCTYPE html><html><body>404</body></html>", ("is a web page of 44 bytes",)),
    ],
    ids=["truncated", "header-truncated", "empty", "lfs", "html"],
)
def test_row_11_a_download_that_went_wrong(
    own_model: Path, refused: Refused, content: Callable[[bytes], bytes], words: tuple[str, ...]
) -> None:
    path = own_model / WEIGHTS
    path.write_bytes(content(path.read_bytes()))
    refused(own_model, WEIGHTS, str(own_model), "download", *words)


def test_row_11_a_torn_tokenizer(own_model: Path, refused: Refused) -> None:
    path = own_model / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:500])
    refused(own_model, f"the tokenizer in {own_model} cannot be read")


def test_row_12_shards_that_are_missing_and_tensors_too_many_are_listed_at_once(
    own_model: Path, refused: Refused
) -> None:
    in_shards(own_model)
    weights = load_file(own_model / "model-00001-of-00002.safetensors")
    save_file(
        weights | {"model.decoder.surprise.weight": torch.zeros(3)}, own_model / "model-00001-of-00002.safetensors"
    )
    (own_model / "model-00002-of-00002.safetensors").unlink()
    refused(own_model, "model-00002-of-00002.safetensors is missing", "model.decoder.surprise.weight")


def test_row_12_a_tensor_in_two_shards(own_model: Path, refused: Refused) -> None:
    in_shards(own_model)
    first, second = (own_model / f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    twice = next(iter(load_file(first)))
    save_file(load_file(second) | {twice: load_file(first)[twice]}, second)
    refused(own_model, twice, first.name, second.name)


def test_row_12_tensors_that_are_missing(own_model: Path, refused: Refused) -> None:
    weights = load_file(own_model / WEIGHTS)
    gone = ["model.decoder.layers.0.fc1.weight", "model.decoder.layers.2.self_attn.q_proj.bias"]
    save_file({name: tensor for name, tensor in weights.items() if name not in gone}, own_model / WEIGHTS)
    refused(own_model, *gone)


def test_row_13_shapes_and_dtypes_that_config_json_does_not_promise(own_model: Path, refused: Refused) -> None:
    weights = load_file(own_model / WEIGHTS)
    weights["model.decoder.layers.1.fc1.weight"] = torch.zeros(32, 56)
    weights["model.decoder.layers.1.fc1.bias"] = torch.zeros(56, dtype=torch.int64)
    save_file(weights, own_model / WEIGHTS)
    refused(own_model, "layers.1.fc1.weight", "56, 32", "32, 56", "layers.1.fc1.bias", "int64")


def test_row_13_another_models_config(own_model: Path, refused: Refused) -> None:
    config = CONFIG | {"num_hidden_layers": 4, "hidden_size": 64, "word_embed_proj_dim": 64}
    (own_model / "config.json").write_text(json.dumps(config))
    refused(own_model, "embed_tokens.weight", "99, 64", "99, 32")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (b"", "is torn or not JSON"),
        (b'{"model_type": "opt", ', "is torn or not JSON"),
        (b"[]", "is not a JSON object"),
        (b'{"model_type": "gpt-17"}', "gpt-17"),
        (b'{"vocab_size": 7}', "model_type"),
        (b'{"model_type": "mistral3", "text_config": {"model_type": [null]}}', "mistral3"),
        (json.dumps(CONFIG | {"hidden_size": -32}).encode(), "hidden_size"),
        (json.dumps(CONFIG | {"hidden_size": "32"}).encode(), "hidden_size"),
        (json.dumps(CONFIG | {"num_attention_heads": 5}).encode(), "head"),
        (json.dumps(CONFIG | {"activation_function": "sin"}).encode(), "sin"),
        (None, "config.json"),
    ],
)
def test_row_13_a_config_that_cannot_be_used(
    own_model: Path, refused: Refused, config: bytes | None, words: str
) -> None:
    path = own_model / "config.json"
    path.unlink()
    if config is not None:
        path.write_bytes(config)
    refused(own_model, words)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "C:x.safetensors", ".."]
)
def test_row_15_shard_names_that_are_paths(tmp_path: Path, own_model: Path, refused: Refused, name: str) -> None:
    save_file(tensors(), tmp_path / "outside.safetensors")
    in_shards(own_model)
    index = json.loads((own_model / INDEX).read_text())
    index["weight_map"]["model.decoder.embed_tokens.weight"] = name
    (own_model / INDEX).write_text(json.dumps(index))
    refused(own_model, repr(name), INDEX)


def test_row_15_tensor_names_that_are_paths(own_model: Path, refused: Refused) -> None:
    save_file(tensors() | {"../../evil": torch.zeros(2)}, own_model / WEIGHTS)
    refused(own_model, "'../../evil'")


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.canary}",)


@pytest.mark.parametrize("kind", ["zip", "legacy", "bare"])
def test_row_16_code_in_a_pickle_is_refused_and_never_runs(
    tmp_path: Path, own_model: Path, refused: Refused, kind: str
) -> None:
    canary = tmp_path / "canary"
    (own_model / WEIGHTS).unlink()
    path = own_model / "pytorch_model.bin"
    if kind == "bare":
        path.write_bytes(pickle.dumps(Payload(canary)))
    else:
        torch.save({**tensors(), "payload": Payload(canary)}, path, _use_new_zipfile_serialization=kind == "zip")
    refused(own_model, "pytorch_model.bin")
    assert not canary.exists()


@pytest.mark.parametrize("flags", [(), ("--trust-remote-code",)])
def test_row_17_code_that_a_config_names_is_never_run(
    tmp_path: Path, own_model: Path, run: Run, flags: tuple[str, ...]
) -> None:
    canary = tmp_path / "canary"
    for name in ("modeling_evil.py", "tokenization_evil.py"):
        (own_model / name).write_text(f"open({str(canary)!r}, 'w')")
    auto_map = {"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Evil"}
    (own_model / "config.json").write_text(json.dumps(CONFIG | {"auto_map": auto_map}))
    (own_model / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", None]}})
    )
    ran = run("--model", own_model, "--prompt", "abc", "-n", 2, *flags)
    assert ran.code == 0
    assert "names code of its own (auto_map), which is never run" in ran.err
    assert not canary.exists()
    assert not any("evil" in name for name in sys.modules)


@pytest.mark.parametrize("offline", ["flag", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_row_27_offline_opens_no_socket_and_says_where_it_looked(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, offline: str
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    if offline != "flag":
        monkeypatch.setenv(offline, "1")
    monkeypatch.setattr(socket, "socket", lambda *_, **__: pytest.fail("a socket was opened"))
    ran = run("--model", "facebook/opt-30b", *(("--offline",) if offline == "flag" else ()))
    assert (ran.code, ran.out) == (4, "")
    assert "models--facebook--opt-30b" in ran.err
    assert "the run is offline" in ran.err
    assert "Traceback" not in ran.err


def test_row_27_no_network_and_no_checkpoint(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence that the project serves, on a machine that has neither: one message, and two ways on."""
    for name in os.environ:
        if "OFFLINE" in name or "proxy" in name.lower():
            monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # what the tests were imported with
    ran = run("--model", "opt-30b", "--hh-ratio", 0.2)
    assert (ran.code, ran.out) == (4, ""), ran.err
    for words in (
        "the model opt-30b (facebook/opt-30b) was not found",
        "--model /path/to/folder",
        "--weights dummy",
        f"cache {tmp_path / 'hub' / 'models--facebook--opt-30b'}",
        "hub: hub.invalid cannot be reached",
    ):
        assert words in ran.err
    assert "Traceback" not in ran.err
