"""Downloads from the hub: whether it answers, which files are fetched, and where they are found again."""

from __future__ import annotations

import json
import os
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from h2o_flexgen.checkpoint import hub
from h2o_flexgen.checkpoint.hub import resolve_model
from h2o_flexgen.checkpoint.shards import wanted_files
from h2o_flexgen.errors import StorageError
from tests.checkpoint.models import INDEX, make_spec, weights, write_config, write_shards
from tests.checkpoint.resolving import COMMIT, not_found

pytestmark = pytest.mark.usefixtures("own_cache")


def test_a_hub_that_refuses_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    message = not_found("opt-125m")
    assert "hub: 127.0.0.1 cannot be reached" in message
    assert "refused" in message
    assert "no answer" not in message  # as after waiting


def test_a_hub_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()

    def wait(*_: object, **__: object) -> None:
        done.wait()
        raise OSError("too late")

    monkeypatch.setattr(socket, "create_connection", wait)
    monkeypatch.setattr(hub, "_PROBE_S", 0.1)
    assert "no answer within 0.1 s" in not_found("opt-125m")
    done.set()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Where a connection is wanted on the way to the hub; there is none."""
    places: list[object] = []

    def connect(where: object, **_: object) -> None:
        places.append(where)
        raise OSError("no route")

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.example")
    return places


def test_a_proxy_is_what_has_to_answer(asked: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    not_found("opt-125m")
    assert asked == [("proxy.example", 3128)]


def test_a_proxy_for_everything_has_to_answer(asked: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"all": "http://proxy.example:3128"})
    monkeypatch.setattr(urllib.request, "proxy_bypass", lambda host: False)
    not_found("opt-125m")
    assert asked == [("proxy.example", 3128)]


@pytest.mark.parametrize(
    ("names", "first"),
    [
        (["model.safetensors", "pytorch_model.bin"], "model.safetensors"),
        ([INDEX, "model.safetensors", "value_head.safetensors"], "model.safetensors"),
        ([INDEX, "model-00001-of-000001.safetensors", "x/model.safetensors", "consolidated.safetensors"], INDEX),
        (["pytorch_model.bin", "tf_model.h5", "model.fp16.safetensors"], "pytorch_model.bin"),
        (["pytorch_model.bin.index.json", "part-a.bin", "flax_model.msgpack"], "pytorch_model.bin.index.json"),
        (["gptq_model-4bit-128g.safetensors", "training_args.bin", "optimizer.pt"], "gptq_model-4bit-128g.safetensors"),
        (["model-00001-of-00002.safetensors"], None),
        (["adapter_model.safetensors", "adapter_config.json"], None),
        (["tf_model.h5", "original/model.safetensors"], None),
    ],
)
def test_which_file_is_fetched_first(names: list[str], first: str | None) -> None:
    assert wanted_files(names) == first


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
            name = urllib.parse.unquote(path.rpartition("/")[2])
            if self.command == "GET":
                self.fetched.append(name)
            data = (self.folder / name).read_bytes()
            self._send(data, ETag=f'"{name}"', X_Repo_Commit=COMMIT)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Quiet."""


def _rename_shards(folder: Path) -> None:
    """Shards as R1-Distill's repositories call them, and one of a name of its own."""
    text = (folder / INDEX).read_text()
    for old, new in (
        ("model-00001-of-00002", "model-00001-of-000002"),
        ("model-00002-of-00002", "second[half]"),
    ):
        (folder / f"{old}.safetensors").rename(folder / f"{new}.safetensors")
        text = text.replace(old, new)
    (folder / INDEX).write_text(text)


@pytest.fixture
def fake_hub(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    folder = tmp_path / "served"
    folder.mkdir()
    write_config(folder)
    for name in ("tokenizer.json", "README.md", "model.py"):
        (folder / name).write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"old")
    write_shards(folder, weights(make_spec()))
    _rename_shards(folder)
    (folder / "value_head.safetensors").write_bytes(b"another")
    handler = type("Hub", (_Hub,), {"folder": folder, "fetched": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_a_download_takes_what_is_needed_and_is_found_again(
    tmp_path: Path, fake_hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(variable)
    endpoint = f"http://127.0.0.1:{fake_hub.server_port}"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    huggingface_hub.close_session()  # the next one is made of these settings
    try:
        found, again = resolve_model("me/mine"), resolve_model("me/mine", offline=True)
        assert "the hub has no model me/other" in not_found("me/other")
    finally:
        huggingface_hub.close_session()
    folder = tmp_path / "cache" / "models--me--mine" / "snapshots" / COMMIT
    assert (found.origin, found.folder, found.tokenizer_folder) == ("hub", folder, folder)
    assert (again.origin, again.folder) == ("cache", folder)
    left = {"README.md", "model.py", "pytorch_model.bin", "value_head.safetensors"}
    names = {path.name for path in (tmp_path / "served").iterdir()} - left
    assert {path.name for path in folder.iterdir()} == names


def test_a_full_disk_is_a_storage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub, "_probe", lambda _: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", full)
    with pytest.raises(StorageError, match="No space left") as caught:
        resolve_model("me/mine")
    assert caught.value.exit_code == 6
