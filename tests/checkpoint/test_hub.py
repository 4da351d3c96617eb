from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from h2o_flexgen.checkpoint import download, hub
from h2o_flexgen.checkpoint.hub import resolve_model
from h2o_flexgen.checkpoint.shards import wanted_files
from h2o_flexgen.errors import ModelError, StorageError
from tests.checkpoint.models import CONFIG, INDEX, make_spec, weights, write_config, write_shards, write_single

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)


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


def not_found(*arguments: Any, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model(*arguments, **options)
    assert caught.value.exit_code == 4
    return str(caught.value)


def test_a_folder_is_taken_as_it_is(tmp_path: Path, no_sockets: list[object]) -> None:
    write_config(tmp_path, auto_map={"AutoModel": "evil.Model"})
    (tmp_path / "tokenizer.json").write_text("{}")
    for name in (str(tmp_path), ".", f"../{tmp_path.name}", tmp_path.name if tmp_path.parent == Path.cwd() else "./"):
        found = resolve_model(name)
        assert (found.origin, found.folder, found.tokenizer_folder) == ("folder", Path(name), Path(name))
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


def test_a_hub_that_refuses_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    start = time.monotonic()
    message = not_found("opt-125m")
    assert time.monotonic() - start < 4
    assert "hub: 127.0.0.1 cannot be reached" in message
    assert "refused" in message


def test_a_hub_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()

    def wait(*_: object, **__: object) -> None:
        done.wait()
        raise OSError("too late")

    monkeypatch.setattr(socket, "create_connection", wait)
    monkeypatch.setattr(download, "_PROBE_S", 0.1)
    assert "no answer within 0.1 s" in not_found("opt-125m")
    done.set()


def test_a_proxy_is_what_has_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def connect(where: object, **_: object) -> None:
        asked.append(where)
        raise OSError("no route")

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.example")
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    not_found("opt-125m")
    assert asked == [("proxy.example", 3128)]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        ([INDEX, "model-00001-of-00001.safetensors", "x/model-00001-of-00001.safetensors", "consolidated.safetensors"],
         [INDEX, "model-00001-of-00001.safetensors"]),
        (["pytorch_model.bin", "tf_model.h5"], ["pytorch_model.bin"]),
        (["pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin", "flax_model.msgpack"],
         ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"]),
        (["tf_model.h5"], []),
    ],
)  # fmt: skip
def test_which_files_are_fetched(names: list[str], wanted: list[str]) -> None:
    assert list(wanted_files(names)) == wanted


class _Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download needs: one model, whose files lie in `folder`."""

    folder: Path
    fetched: list[str]

    def _send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        names = sorted(path.name for path in self.folder.iterdir())
        path = self.path.partition("?")[0]
        if not path.startswith(("/api/models/me/mine", "/me/mine/")):
            self._send(b'{"error": "Repository not found"}', 404, X_Error_Code="RepoNotFound")
        elif "/tree/" in path:
            sizes = {name: (self.folder / name).stat().st_size for name in names}
            tree = [{"type": "file", "path": name, "size": sizes[name], "oid": name} for name in names]
            self._send(json.dumps(tree).encode(), Content_Type="application/json")
        elif path.startswith("/api/"):
            info = {"id": "me/mine", "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            self._send(json.dumps(info).encode(), Content_Type="application/json")
        else:
            name = path.rpartition("/")[2]
            if self.command == "GET":
                self.fetched.append(name)
            data = (self.folder / name).read_bytes()
            self._send(data, ETag=f'"{name}"', X_Repo_Commit=COMMIT)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def fake_hub(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    folder = tmp_path / "served"
    folder.mkdir()
    write_config(folder)
    for name in ("tokenizer.json", "README.md", "model.py"):
        (folder / name).write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"old")
    write_shards(folder, weights(make_spec()))
    handler = type("Hub", (_Hub,), {"folder": folder, "fetched": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_download_takes_what_is_needed_and_is_found_again(
    tmp_path: Path, fake_hub: ThreadingHTTPServer, request: pytest.FixtureRequest
) -> None:
    script = (
        "import sys; from h2o_flexgen.checkpoint.hub import resolve_model\n"
        "from h2o_flexgen.errors import ModelError\n"
        "found = resolve_model('me/mine'); print(found.origin, found.folder, found.tokenizer_folder)\n"
        "found = resolve_model('me/mine', offline=True); print(found.origin)\n"
        "try: resolve_model('me/other')\n"
        "except ModelError as error: print(str(error).replace(chr(10), ' '))\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    environment |= {
        "HF_HOME": str(tmp_path / "home"),
        "HF_ENDPOINT": f"http://127.0.0.1:{fake_hub.server_port}",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, cwd=request.config.rootpath
    )
    assert run.returncode == 0, run.stderr
    first, second, third = run.stdout.splitlines()
    folder = tmp_path / "home" / "hub" / "models--me--mine" / "snapshots" / COMMIT
    assert first == f"hub {folder} {folder}"
    assert second == "cache"
    assert "there is no model me/other" in third
    names = {path.name for path in (tmp_path / "served").iterdir()} - {"README.md", "model.py", "pytorch_model.bin"}
    assert {path.name for path in folder.iterdir()} == names


def test_a_full_disk_is_a_storage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download, "_probe", lambda _: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", full)
    with pytest.raises(StorageError, match="No space left") as caught:
        resolve_model("me/mine")
    assert caught.value.exit_code == 6


def test_the_demo_is_in_the_package(no_sockets: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "data" / "demo").mkdir(parents=True)
    write_config(tmp_path / "data" / "demo", vocab_size=5)
    monkeypatch.setattr(hub.resources, "files", lambda package: tmp_path if package == "h2o_flexgen" else None)
    found = resolve_model("demo")
    assert (found.origin, found.config["vocab_size"]) == ("demo", 5)
    assert found.folder == tmp_path / "data" / "demo"
