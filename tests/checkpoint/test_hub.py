"""Where a model is found by its name without a download: folders, the cache, built-in sizes, the demo."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from h2o_flexgen.checkpoint.hub import resolve_model
from h2o_flexgen.config.model import known
from tests.checkpoint.models import CONFIG, make_spec, weights, write_config, write_shards, write_single
from tests.checkpoint.resolving import COMMIT, not_found

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Every attempt to use the network is noted and fails."""
    opened: list[object] = []

    def refuse(*arguments: object, **_: object) -> None:
        opened.append(arguments)
        raise OSError("no sockets here")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    yield opened
    assert not opened


def snapshot(tmp_path: Path, repo: str, revision: str = "main") -> Path:
    """The empty snapshot folder of a cached `repo`."""
    base = tmp_path / "cache" / f"models--{repo.replace('/', '--')}"
    (base / "refs").mkdir(parents=True, exist_ok=True)
    (base / "refs" / revision).write_text(COMMIT)
    folder = base / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    return folder


def test_a_folder_is_taken_as_it_is(tmp_path: Path, no_sockets: list[object]) -> None:
    write_config(tmp_path, auto_map={"AutoModel": "evil.Model"})
    (tmp_path / "tokenizer.json").write_text("{}")
    for name in (str(tmp_path), ".", f"../{tmp_path.name}", tmp_path.name if tmp_path.parent == Path.cwd() else "./"):
        found = resolve_model(name)
        assert (found.origin, found.folder, found.tokenizer_folder) == (
            "folder",
            Path(name).absolute(),
            Path(name).absolute(),
        )
        assert found.config == CONFIG  # without auto_map
        assert found.name == name


def test_a_relative_folder_comes_before_the_hub(tmp_path: Path, no_sockets: list[object]) -> None:
    (tmp_path / "facebook" / "opt-125m").mkdir(parents=True)
    write_config(tmp_path / "facebook" / "opt-125m")
    found = resolve_model("facebook/opt-125m")
    assert found.origin == "folder"
    assert found.tokenizer_folder is None


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "../x/y/z", "a/b/c", "", "back\\slash", "~/nothing"])
def test_a_path_that_is_not_there_is_no_name(name: str, no_sockets: list[object]) -> None:
    assert "needed the folder" in not_found(name)


def test_a_file_is_no_model(tmp_path: Path, no_sockets: list[object]) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "is a file" in not_found(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (None, "No such file"),
        (b"[]", "is not a JSON object"),
        *((text, "torn or not JSON") for text in (b"", b'{"a": ', b"\xff\xfe{}", b"[" * 100_000, b"<html>")),
    ],
)
def test_an_unusable_config(tmp_path: Path, text: bytes | None, fault: str, no_sockets: list[object]) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text)
    message = not_found(str(tmp_path))
    assert fault in message
    assert str(tmp_path / "config.json") in message


def test_a_config_that_is_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert "not a regular file" in not_found(str(tmp_path))


@pytest.mark.parametrize("place", ["opt-125m", "facebook/opt-125m", "."])
def test_a_folder_of_models(tmp_path: Path, place: str, no_sockets: list[object]) -> None:
    root = tmp_path / "root"
    (root / place).mkdir(parents=True)
    write_config(root / place)
    found = resolve_model("facebook/opt-125m", path=root)
    assert (found.origin, found.folder) == ("folder", root / place)


def test_with_a_folder_of_models_the_network_is_not_asked(tmp_path: Path, no_sockets: list[object]) -> None:
    (tmp_path / "root").mkdir()
    message = not_found("opt-125m", path=tmp_path / "root")
    assert str(tmp_path / "root" / "opt-125m") in message
    assert str(tmp_path / "cache" / "models--facebook--opt-125m") in message


@pytest.mark.parametrize("name", ["opt-125m", "facebook/opt-125m", "OPT-125M"])
@pytest.mark.parametrize("offline", [None, True])
def test_the_cache_needs_no_network(tmp_path: Path, name: str, offline: bool | None, no_sockets: list[object]) -> None:
    folder = snapshot(tmp_path, "facebook/opt-125m")
    write_config(folder)
    write_shards(folder, weights(make_spec()))
    found = resolve_model(name, offline=offline)
    assert (found.origin, found.folder, found.name) == ("cache", folder, name)
    assert any(str(tmp_path / "cache") in place for place in found.searched)


def test_a_revision_of_the_cache(tmp_path: Path, no_sockets: list[object]) -> None:
    folder = snapshot(tmp_path, "me/mine", "v2")
    write_config(folder)
    write_single(folder, weights(make_spec()))
    assert resolve_model("me/mine", revision="v2").folder == folder
    assert resolve_model("me/mine", revision=COMMIT).folder == folder
    not_found("me/mine", revision="v3", offline=True)


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", None])
def test_offline_opens_no_socket_and_says_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None, no_sockets: list[object]
) -> None:
    if variable:
        monkeypatch.setenv(variable, "1")
    message = not_found("opt-125m", offline=None if variable else True)
    for part in (
        "opt-125m (facebook/opt-125m) was not found",
        "folder opt-125m",
        str(tmp_path / "cache" / "models--facebook--opt-125m"),
        "offline",
        "--model /path/to/folder",
        "--weights dummy",
    ):
        assert part in message


def test_an_unfinished_download_is_no_checkpoint(tmp_path: Path, no_sockets: list[object]) -> None:
    folder = snapshot(tmp_path, "facebook/opt-125m")
    write_config(folder)
    assert f"{folder} holds no weights" in not_found("opt-125m", offline=True)
    paths = write_shards(folder, weights(make_spec()), 3)
    paths[1].unlink()
    assert f"{folder} lacks {paths[1].name}" in not_found("opt-125m", offline=True)
    assert resolve_model("opt-125m", need_weights=False).origin == "cache"


@pytest.mark.parametrize("name", ["opt-30b", "facebook/opt-30b"])
def test_sizes_of_known_models_are_built_in(name: str, no_sockets: list[object]) -> None:
    found = resolve_model(name, need_weights=False)
    assert (found.origin, found.folder, found.tokenizer_folder) == ("builtin", None, None)
    assert found.config["hidden_size"] == 7168


def test_an_unknown_name_without_weights(no_sockets: list[object]) -> None:
    message = not_found("opt-31b", need_weights=False, offline=True)
    assert "did you mean 'opt-30b'?" in message
    assert "--weights dummy" not in message


@pytest.mark.parametrize("name", ["nul\0", "a b", "x" * 200, "me/-mine-", "a--b"])
def test_names_that_no_model_can_have(name: str, no_sockets: list[object]) -> None:
    assert "cannot be the name of a model" in not_found(name)


def test_the_demo_is_in_the_package(no_sockets: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "data" / "demo").mkdir(parents=True)
    write_config(tmp_path / "data" / "demo", vocab_size=5)
    monkeypatch.setattr(known.resources, "files", lambda package: tmp_path if package == "h2o_flexgen" else None)
    found = resolve_model("demo")
    assert (found.origin, found.config["vocab_size"]) == ("demo", 5)
    assert found.folder == tmp_path / "data" / "demo"


def test_a_folder_of_models_beside_a_shipped_one_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert resolve_model("demo", path=tmp_path).origin == "demo"
    assert "--path has no effect on demo" in caplog.text
