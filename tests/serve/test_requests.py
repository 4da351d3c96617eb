"""What the service answers to who asks wrongly, and to what it should not do: by the `openai` package, and by hand."""

from __future__ import annotations

import base64
import json
import resource
import socket
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from h2o_flexgen.cli.serve import arguments as flags
from h2o_flexgen.cli.serve import uploads
from h2o_flexgen.serve import main
from tests.jobs.files import request
from tests.programs import until
from tests.serve.conftest import KEY, Serve, Service, finished

TALK: Any = [{"role": "user", "content": "Hello"}]
EVIL: Any = {
    "type": "json_schema",
    "json_schema": {"schema": {"type": "string", "pattern": "^(a|a)*b{1,1000}$"}},
}
"""A schema that fails only when it is compiled, by xgrammar 0.2.8: 0.2.9 compiles it."""
COMPILES = version("xgrammar") != "0.2.8"


def by_hand(url: str, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """One request without a library's habits: status, headers, body."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    given = {"Host": f"{host}:{port}", "Authorization": f"Bearer {KEY}", "Content-Length": str(len(body)), **headers}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name.replace('_', '-')}: {text}" for name, text in given.items())]
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode() + body)
        came = b""
        while piece := connection.recv(1 << 16):
            came += piece
    head, _, body = came.partition(b"\r\n\r\n")
    status, *rest = head.decode().split("\r\n")
    return int(status.split()[1]), dict(line.lower().split(": ", 1) for line in rest), body


def peak(pid: int) -> int:
    """Bytes of memory that a process has had at most."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def form(filename: str, content: bytes, purpose: str = "batch", **more: str) -> tuple[bytes, str]:
    """A form with a file, and its type."""
    parts = [f'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'.encode()]
    parts += [f'--b\r\nContent-Disposition: form-data; name="{n}"\r\n\r\n{v}\r\n'.encode() for n, v in more.items()]
    head = f'--b\r\nContent-Disposition: form-data; name="file"; filename="{filename}"\r\n\r\n'.encode()
    return b"".join([*parts, head, content, b"\r\n--b--\r\n"]), "multipart/form-data; boundary=b"


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "said"),
    [
        ("GET", "/v1/models", b"", {"Authorization": "Bearer sk-another"}, 401, "Incorrect API key"),
        ("GET", "/v1/models", b"", {"Authorization": ""}, 401, "You didn't provide an API key"),
        ("GET", "/v1/models", b"", {"Authorization": "Bearer \xfc"}, 401, "Incorrect API key"),
        ("GET", "/", b"", {"Authorization": "Basic AAAA"}, 401, "API key"),
        ("POST", "/v1/batches", b"{}", {"Authorization": f"Basic {base64.b64encode(b'x:' + KEY.encode()).decode()}"},
         401, "API key"),
        ("GET", "/v1/models", b"", {"Origin": "http://example.org"}, 403, "other sites"),
        ("GET", "/v1/models", b"", {"Origin": "http://[::1"}, 403, "other sites"),
        ("GET", "/v1/models", b"", {"Origin": "http://a]b"}, 403, "other sites"),
        ("GET", "/v1/models/other", b"", {}, 404, "does not exist"),
        ("GET", "/v1/nothing", b"", {}, 404, "nothing at this address"),
        ("PUT", "/v1/files", b"", {}, 405, "PUT is not for this address"),
        ("GET", "/v1/files/file-0", b"", {}, 404, "No such File object: file-0"),
        ("GET", "/v1/files/..%2Flock/content", b"", {}, 404, ""),
        ("GET", "/v1/files/%2e%2e/content", b"", {}, 404, ""),
        ("GET", "/v1/files/../../lock/content", b"", {}, 404, ""),
        ("DELETE", "/v1/files/..%2F..%2Fetc%2Fpasswd", b"", {}, 404, ""),
        ("GET", "/v1/batches/batch_0", b"", {}, 404, "No batch found with id 'batch_0'"),
        ("POST", "/v1/batches/..%2Flock/cancel", b"", {}, 404, ""),
        ("GET", "/v1/files?limit=0", b"", {}, 400, "limit must be"),
        ("GET", "/v1/files?order=up", b"", {}, 400, "order must be"),
        ("GET", "/v1/batches?after=batch_0", b"", {}, 404, "batch_0"),
        ("POST", "/v1/batches", b"{", {}, 400, "the body is not JSON"),
        ("POST", "/v1/batches", b"[]", {}, 400, "not a JSON object"),
        ("POST", "/v1/batches", b'{"input_file": 1}', {}, 400, "Unknown parameter: 'input_file'"),
        ("POST", "/v1/batches", b'{"endpoint": "/v1/embeddings"}', {}, 400, "endpoint must be one of"),
        ("POST", "/v1/batches", b'{"endpoint": "/v1/completions", "completion_window": "-1h"}', {}, 400, "a time like"),
        ("POST", "/v1/batches", b'{"endpoint": "/v1/completions", "completion_window": "1h", "metadata": {"a": 1}}', {},
         400, "metadata must be"),
        ("POST", "/v1/batches", b'{"endpoint": "/v1/completions", "completion_window": "1h", "input_file_id": "x"}', {},
         404, "No such File object: x"),
        ("POST", "/v1/files", b"abc", {}, 400, "multipart/form-data"),
        ("POST", "/v1/files", form("a", b"", "fine-tune")[0], {"Content-Type": form("", b"")[1]}, 400, "purpose must"),
        ("POST", "/v1/files", form("a", b"x" * 1200000)[0], {"Content-Type": form("", b"")[1]}, 413, "1,048,576 bytes"),
        ("POST", "/v1/files", form("a", b"x" * 2200000)[0], {"Content-Type": form("", b"")[1]}, 413, "1,048,576 bytes"),
        ("POST", "/v1/files", form("a", b"x")[0][:-9], {"Content-Type": form("", b"")[1]}, 400, "in the middle"),
        ("POST", "/v1/files", b"--c\r\nx", {"Content-Type": form("", b"")[1]}, 400, "the body is not a form"),
        ("POST", "/v1/files", b"--c", {"Content-Type": form("", b"")[1] + "b" * 999}, 400, "the body is not a form"),
        ("POST", "/v1/chat/completions", b"[]", {}, 400, "not a JSON object"),
        ("POST", "/v1/chat/completions", b'{"model": "other", "messages": 1}', {}, 404, "model is 'other'"),
        ("POST", "/v1/chat/completions", b'{"messages": []}', {}, 400, "needed a list of messages"),
        ("POST", "/v1/chat/completions", b'{"stream": 3, "messages": []}', {}, 400, "stream must be"),
        ("POST", "/v1/chat/completions", b'{"stream": 1, "messages": []}', {}, 400, "stream must be"),
        ("POST", "/v1/completions", b'{"stream_options": false, "prompt": "a"}', {}, 400, "stream_options must be"),
        ("POST", "/v1/completions", b'{"stream_options": {"usage": true}, "prompt": "a"}', {}, 400, "include_usage"),
        ("POST", "/v1/completions", b'{"stream_options": {"include_usage": 1}, "prompt": "a"}', {}, 400, "true or"),
        ("POST", "/v1/completions", b'{"prompt": "a", "temprature": 0}', {}, 400, "'temprature' of the body is not"),
        ("POST", "/v1/completions", b" " * (17 << 20), {}, 413, "16,777,216 bytes"),
    ],
)  # fmt: skip
def test_mistakes_have_a_status_and_say_what_is_wrong(
    service: Service, method: str, path: str, body: bytes, headers: dict[str, str], status: int, said: str
) -> None:
    found, _, answer = by_hand(service.url, method, path, body, **headers)
    assert found == status, answer
    error = json.loads(answer)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert said in error["message"]
    assert not list((Path(service.data) / "files").glob(".upload-*"))


def test_files_are_listed_in_pages_and_die_in_time(service: Service, tmp_path: Path) -> None:
    """A name is only shown, whatever it says; and a file of this purpose of another name is taken too."""
    client = service.client
    evil = "../../<script>alert(1)</script>\u202e.jsonl"
    names = [client.files.create(file=(evil, b"{}\n"), purpose="batch") for _ in range(5)]
    assert {each.filename for each in names} == {"script>\u202e.jsonl"}
    listed = [each.id for each in client.files.list(limit=2, purpose="batch")]
    assert listed[:5] == [each.id for each in reversed(names)]
    assert next(iter(client.files.list(order="asc", after=names[0].id))).id == names[1].id
    short = client.files.create(
        file=("a", b"{}\n"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 1}
    )
    assert short.expires_at == short.created_at + 1
    assert client.files.content(names[0].id).read() == b"{}\n"
    until(lambda: short.id not in [each.id for each in client.files.list()], 5)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(short.id)
    for each in names:
        assert client.files.delete(each.id).deleted
    assert not set((Path(service.data) / "files").iterdir()) & {Path(service.data) / "files" / n.id for n in names}


def test_files_that_are_no_batch_fail_as_a_whole(service: Service) -> None:
    client = service.client
    bad = ((b"\n\n", "empty_file"), (b"a prompt\nanother\n", "invalid_json_line"), (b"\0" * 999, "invalid_json_line"))
    for content, code in bad:
        uploaded = client.files.create(file=("a.jsonl", content), purpose="batch")
        made = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h")
        ended = finished(client, made.id)
        assert (ended.status, ended.output_file_id, ended.error_file_id) == ("failed", None, None)
        assert ended.failed_at >= made.created_at
        assert ended.errors.data[0].code == code


def test_models_and_single_requests(service: Service, talker: Path) -> None:
    """In pieces and whole, with thoughts apart, log-probabilities, several samples; the name as typed is known too."""
    client = service.client
    assert [each.id for each in client.models.list()] == ["model"]
    assert client.models.retrieve(str(talker)).id == str(talker)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=TALK)
    usual: dict[str, Any] = {"model": str(talker), "messages": TALK, "max_tokens": 9, "seed": 4}
    for settings in (
        {"n": 2},
        {"n": 2, "temperature": 0},
        {"stop": ["a", "e", "x", " "]},
        {"stop": ["a", "e", "x", " "], "extra_body": {"min_tokens": 6}},
        {"extra_body": {"enable_thinking": True}},
        {"logprobs": True, "top_logprobs": 1},
        {"logprobs": True, "n": 2, "temperature": 0, "stop": ["a", "e", "x", " "], "extra_body": {"min_tokens": 6}},
        {"logprobs": True, "n": 2, "extra_body": {"enable_thinking": True}},
    ):
        whole: Any = client.chat.completions.create(**usual, **settings)
        pieces: Any = list(client.chat.completions.create(**usual, **settings, stream=True))
        more: dict[str, Any] = settings.get("extra_body", {})
        assert whole.usage.completion_tokens > more.get("min_tokens", 0)
        for choice in whole.choices:
            mine = [p.choices[0] for p in pieces if p.choices[0].index == choice.index]
            assert "".join(each.delta.content or "" for each in mine) == (choice.message.content or "")
            thought = "".join(getattr(each.delta, "reasoning_content", None) or "" for each in mine)
            assert thought == (getattr(choice.message, "reasoning_content", None) or "")
            assert bool(thought) == ("enable_thinking" in more)
            assert mine[-1].finish_reason == choice.finish_reason
            told = [each.logprobs.content for each in mine if each.logprobs]
            assert [token for each in told for token in each] == (choice.logprobs.content if choice.logprobs else [])
            assert not told or len(told) > 2, "as they come"
        assert len({(piece.id, piece.system_fingerprint) for piece in pieces}) == 1
    several: Any = {"model": "model", "prompt": ["ab", "cd"], "max_tokens": 5, "temperature": 0}
    pieces = list(client.completions.create(**several, stream=True))
    counted = list(client.completions.create(**several, stream=True, stream_options={"include_usage": True}))
    assert [piece.to_dict()["usage"] for piece in counted[:-1]] == [None] * len(pieces)
    assert counted[-1].usage.completion_tokens == 10
    for choice in client.completions.create(**several).choices:
        assert "".join(p.choices[0].text for p in pieces if p.choices[0].index == choice.index) == choice.text
    for given in ({"logprobs": 2}, {"logprobs": 0, "n": 2}, {"echo": True}, {"echo": True, "stop": ["a", "e"]}):
        settings = {"model": "model", "prompt": "ab", "max_tokens": 9, "seed": 5, **given}
        pieces = list(client.completions.create(**settings, stream=True))
        for choice in client.completions.create(**settings).choices:
            mine = [p.choices[0] for p in pieces if p.choices[0].index == choice.index]
            assert "".join(each.text for each in mine) == choice.text
            assert len([each for each in mine if each.text]) > 2, "as they come"
            told = [each.logprobs.to_dict() for each in mine if each.logprobs]
            whole = choice.logprobs.to_dict() if choice.logprobs else {}
            for name, values in whole.items():
                assert values == (values and [value for each in told for value in each[name]])
    first = client.chat.completions.create(model="model", messages=TALK, max_tokens=20)
    second = client.chat.completions.create(model="model", messages=TALK, max_tokens=20)
    assert first.choices[0].message.content != second.choices[0].message.content, "no seed: drawn anew"


def test_no_answer_tells_where_the_model_is(service: Service, talker: Path) -> None:
    """Answers and errors have its id, of single requests and of batches."""
    bodies: list[tuple[dict[str, Any], int, str]] = [
        ({"model": "gpt-4"}, 404, "runs model "),
        ({"model": "model", "reasoning_effort": "low"}, 400, "template of model "),
        ({"model": "model", "tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "template of model "),
        ({"max_tokens": 10**6}, 400, "context of model "),
        ({"max_tokens": 10**6}, 400, '"param":"messages"'),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, 400,
         '"param":"response_format"'),
        ({"response_format": EVIL, "max_reasoning_tokens": 0}, 400,
         '"its response_format cannot be followed: Check failed'),
        ({"response_format": EVIL, "max_reasoning_tokens": 0, "stream": True}, 400,
         '"param":"response_format"'),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
          "max_reasoning_tokens": 0}, 400,
         '"param":"response_format"'),
        ({"max_tokens": 1}, 200, '"model":"model"'),
    ]  # fmt: skip
    bodies = [each for each in bodies if not (COMPILES and each[0].get("response_format") is EVIL)]
    for body, status, said in bodies:
        given = json.dumps({"messages": TALK, **body}).encode()
        found, _, answer = by_hand(service.url, "POST", "/v1/chat/completions", given)
        assert (found, said in answer.decode()) == (status, True), answer
        assert str(talker.parent) not in answer.decode()
    client, lines = service.client, []
    for number, (body, _, _) in enumerate(bodies):
        entry = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions"}
        lines.append(json.dumps({**entry, "body": {"messages": TALK, **body}}))
    uploaded = client.files.create(file=("a.jsonl", "\n".join(lines).encode()), purpose="batch")
    made = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h")
    ended = finished(client, made.id)
    assert (ended.request_counts.completed, ended.request_counts.failed) == (1, len(bodies) - 1)
    for name in (ended.output_file_id, ended.error_file_id):
        assert str(talker.parent) not in client.files.content(name).text


def test_a_client_that_goes_is_not_waited_for(service: Service) -> None:
    client = service.client
    before = psutil.Process(service.pid).cpu_times().user
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(
            model="model", prompt="a", max_tokens=100, timeout=0.001, extra_body={"ignore_eos": True}
        )
    assert client.completions.create(model="model", prompt="a", max_tokens=1).usage.total_tokens > 1
    assert psutil.Process(service.pid).cpu_times().user - before < 20


def test_slow_clients_hold_nobody_up(serve: Serve) -> None:
    """One that sends a byte now and then is waited for, one that sends none is not."""

    def impatient() -> None:
        uploads.PATIENCE = 1.5

    body, kind = form("a.jsonl", b"{}\n")
    with serve(before=impatient) as service:
        host, _, port = service.url.removeprefix("http://").rpartition(":")
        head = f"POST /v1/files HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {KEY}\r\n"
        head += f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        with (
            socket.create_connection((host, int(port)), timeout=30) as slow,
            socket.create_connection((host, int(port)), timeout=30) as silent,
        ):
            silent.sendall(head.encode() + body[:20])
            slow.sendall(head.encode() + body[:-5])
            for byte in body[-5:]:
                assert service.client.models.list().data[0].id == "model"
                slow.sendall(bytes([byte]))
                time.sleep(0.05)
            assert slow.recv(20).startswith(b"HTTP/1.1 200")
            assert silent.recv(20).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("mib", [40, pytest.param(2048, marks=pytest.mark.slow)])
def test_large_files_take_no_memory(serve: Serve, mib: int) -> None:
    """Uploaded and read again, while somebody asks for something else."""
    line = (request("r", {"prompt": "abc", "max_tokens": 1}) + " " * (1 << 20))[: (1 << 20) - 1].encode() + b"\n"
    head, kind = form("big.jsonl", b"\n" * 0)
    head, tail = head[: -len(b"\r\n--b--\r\n")], b"\r\n--b--\r\n"
    with serve("--max-file", "3GiB") as service:
        host, _, port = service.url.removeprefix("http://").rpartition(":")
        before = peak(service.pid)
        with socket.create_connection((host, int(port)), timeout=60) as sending:
            length = len(head) + mib * len(line) + len(tail)
            asked = f"POST /v1/files HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {KEY}\r\n"
            asked += f"Content-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
            sending.sendall(asked.encode() + head)
            for _ in range(mib):
                sending.sendall(line)
            sending.sendall(tail)
            answer = b""
            while piece := sending.recv(1 << 16):
                answer += piece
        file = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert file["bytes"] == mib << 20
        count = 0
        with service.client.files.with_streaming_response.content(file["id"]) as content:
            for piece in content.iter_bytes(1 << 20):
                count += len(piece)
        assert count == mib << 20
        assert peak(service.pid) - before < 24 << 20
        assert service.client.files.delete(file["id"]).deleted


def test_a_disk_that_is_full(serve: Serve) -> None:
    """A file may not grow beyond a limit: 507, and nothing is left of it; a batch waits, and others are served."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))

    lines = [request(f"r{i}", {"prompt": "a", "max_tokens": 1}) for i in range(40)]
    with serve(before=limit) as service:
        with pytest.raises(openai.InternalServerError) as raised:
            service.client.files.create(file=("a", b"x" * 400_000), purpose="batch")
        assert raised.value.status_code == 507
        assert service.client.files.list().data == []
        assert not list((Path(service.data) / "files").iterdir())
        client = service.client
        contents = ("\n".join(part).encode() for part in (lines, lines[:3]))
        many, few = (client.files.create(file=("a", each), purpose="batch") for each in contents)
        waits, runs = (
            client.batches.create(input_file_id=each.id, endpoint="/v1/completions", completion_window="24h")
            for each in (many, few)
        )
        assert finished(client, runs.id).status == "completed"
        found = client.batches.retrieve(waits.id)
        assert (found.status, found.errors.data[0].code) == ("in_progress", "waiting")
        assert "cannot write" in found.errors.data[0].message
        assert str(service.data) not in found.errors.data[0].message
        assert found.request_counts.completed > 3


def test_what_cannot_be_served(
    tmp_path: Path, talker: Path, service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One message each, and an exit code: a library that is missing, a port or a folder in use, no key for others."""
    port = service.url.rpartition(":")[2]
    usual = ["--model", str(talker), "--data-dir", str(tmp_path / "data")]
    for given, code, words in (
        ([*usual, "--host", "0.0.0.0"], 2, "set H2O_FLEXGEN_API_KEY"),
        ([*usual, "--host", "no.such.host.invalid"], 2, "--host no.such.host.invalid"),
        ([*usual, "--port", port], 2, "cannot listen on 127.0.0.1"),
        ([*usual, "--port", "70000"], 2, "--port"),
        ([*usual, "--port", "0", "--model", "./nowhere"], 4, "nowhere"),
        (["--model", str(talker), "--port", "0", "--data-dir", str(service.data)], 7, "served by another process"),
        (["--model", str(talker), "--port", "0", "--data-dir", "/dev/null/x"], 6, "--data-dir /dev/null/x"),
    ):
        assert main(given) == code, given
        assert words in capsys.readouterr().err
    monkeypatch.setattr(flags, "NEEDED", ("starlette", "no_such_module"))
    assert main(usual) == 2
    err = capsys.readouterr().err
    assert "no_such_module" in err
    assert "pip install 'h2o_flexgen[serve]'" in err
    monkeypatch.setenv("H2O_FLEXGEN_API_KEY", "k\xe9y")
    assert main(usual) == 2
    assert "k\xe9y" not in capsys.readouterr().err, "a key is not shown"


def test_without_a_key_only_own_names_are_answered(serve: Serve) -> None:
    """A page of another site may have a name that leads here."""
    with serve(key=None) as service:
        assert service.client.models.list().data[0].id == "model"
        status, _, _ = by_hand(service.url, "GET", "/v1/models", Host="evil.example:8000")
        assert status == 403
        port = service.url.rpartition(":")[2]
        assert by_hand(service.url, "GET", "/health", Host=f"localhost:{port}")[0] == 200


# The page


@pytest.fixture
def hostile(service: Service) -> Iterator[str]:
    client = service.client
    names = [
        client.files.create(file=(f"<img src=x onerror=alert({i})>.jsonl", content), purpose="batch")
        for i, content in enumerate((b"<script>\n", request("r", {"prompt": "a", "max_tokens": 1}).encode()))
    ]
    for each in names:
        made = client.batches.create(input_file_id=each.id, endpoint="/v1/completions", completion_window="24h")
        finished(client, made.id)
    yield service.url
    for each in names:
        client.files.delete(each.id)


def test_the_page_is_escaped_and_locked(hostile: str) -> None:
    basic = base64.b64encode(f"any:{KEY}".encode()).decode()
    status, headers, body = by_hand(hostile, "GET", "/", Authorization=f"Basic {basic}")
    text = body.decode()
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "<img" not in text
    assert "<script" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;.jsonl" in text
    assert "1 of 1" in text
    assert by_hand(hostile, "GET", "/", Authorization="")[1]["www-authenticate"].startswith("basic realm=")
    assert by_hand(hostile, "GET", "/health", Authorization="")[0] == 200


@pytest.mark.slow
def test_a_browser_opens_the_page(hostile: str, browser: Any, tmp_path: Path) -> None:
    """It asks for the key, loads nothing, logs nothing, and results are there to be had."""
    seen: list[str] = []
    context = browser.new_context(http_credentials={"username": "me", "password": KEY}, accept_downloads=True)
    page = context.new_page()
    page.on("console", lambda message: seen.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.on("request", lambda asked: None if asked.url == f"{hostile}/" else seen.append(asked.url))
    page.goto(f"{hostile}/")
    assert page.locator("h1").inner_text() == "model"
    for width in (360, 1100):
        page.set_viewport_size({"width": width, "height": 700})
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "nobody scrolls sideways"
        assert page.locator(".scroll").evaluate("each => each.scrollWidth - each.clientWidth") <= 0
    row = page.locator("tr", has_text="completed").first
    assert "1 of 1" in row.inner_text()
    with page.expect_download() as download:
        row.get_by_role("link", name="output").click()
    assert json.loads(Path(download.value.path()).read_text())["custom_id"] == "r"
    context.close()
    assert [each for each in seen if "/content" not in each] == []
