"""Clients that go in the middle, send far too much, or ask for tools and reasoning: what they and others get."""

from __future__ import annotations

import asyncio
import json
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from h2o_flexgen.cli.serve.live import LiveEvent, LiveRequests
from h2o_flexgen.cli.serve.web import _stream
from h2o_flexgen.jobs.openai import COMPLETIONS
from tests.jobs.files import request, write
from tests.jobs.test_tools import HERMES, TOOLS
from tests.programs import write_talker
from tests.serve.conftest import KEY, Service, finished
from tests.serve.test_requests import TALK, form, peak

CHAT = "/v1/chat/completions"
CONTEXT, MOST, NEW = 2048, 1900, 120
TEMPLATE = (
    HERMES.replace("{{ sep }}", " ")
    + "{% if reasoning_effort is defined %}[effort {{ reasoning_effort }}]{% endif %}"
    + "{% if add_generation_prompt %}<think>{{ '' if enable_thinking | default(true) else '</think>' }}{% endif %}"
)
PLAIN = {str(special): -100 for special in range(4)}
"""Only characters are generated, so that texts say all about tokens, and nothing ends before its limit."""


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a long context, whose template knows tools, an effort and a switch of thinking."""
    folder = write_talker(tmp_path_factory.mktemp("thinker") / "model", max_position_embeddings=CONTEXT)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a service notes of each single sequence that ends: whether its request is long, and its number of tokens."""
    return write(tmp_path_factory.mktemp("lengths") / "lengths")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, thinker: Path, lengths: Path) -> Iterator[Service]:
    def noting() -> None:
        end = LiveRequests.finished

        def finished(self: LiveRequests, row: Any, output: Any) -> bool:
            ours = end(self, row, output)
            if ours:
                with lengths.open("a") as file:
                    file.write(f"{'long' if row.params.ignore_eos else 'short'},{len(output.token_ids)}\n")
            return ours

        LiveRequests.finished = finished  # type: ignore[method-assign]

    flags = ("--model", thinker, "--max-file", "1MiB", "--gpu-batch-size", 2, "--num-gpu-batches", 1)
    with Service(tmp_path_factory.mktemp("served"), *flags, before=noting) as service:
        yield service


def leave(client: openai.OpenAI, url: str, body: dict[str, Any]) -> None:
    """Takes pieces of a stream until there is text, so that its sequence has begun, and closes."""
    stream = client.chat.completions.create(**body, stream=True)
    pieces = iter(stream)
    assert next(pieces).choices[0].delta.role == "assistant"
    next(pieces)
    stream.close()


def reset(client: openai.OpenAI, url: str, body: dict[str, Any]) -> None:
    """The same by a connection that breaks."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    given = json.dumps({**body.pop("extra_body"), **body, "stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {KEY}\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(f"{head}Content-Length: {len(given)}\r\n\r\n".encode() + given)
        came = b""
        while came.count(b"data: ") < 2:
            came += connection.recv(1 << 16)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("go", [leave, reset])
def test_who_hangs_up_within_a_stream_is_given_up(
    service: Service, lengths: Path, go: Callable[[openai.OpenAI, str, dict[str, Any]], None]
) -> None:
    """Its sequence ends long before its limit, alone and beside a batch; the batch and others have their answers."""
    client = service.client
    short: Any = {"model": "model", "messages": TALK, "max_tokens": 5, "temperature": 0, "logit_bias": PLAIN}
    long = {**short, "max_tokens": MOST, "extra_body": {"ignore_eos": True}}
    wanted = client.chat.completions.create(**short).choices
    lines = [request(f"r{i}", {"prompt": "abc", "max_tokens": 9, "ignore_eos": True}) for i in range(20)]
    file = client.files.create(file=("a.jsonl", "\n".join(lines).encode()), purpose="batch")
    for beside in (False, True):
        before = len(lengths.read_text().split())
        if beside:
            made = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="1h")
        go(client, service.url, dict(long))
        assert client.chat.completions.create(**short).choices == wanted
        if beside:
            ended = finished(client, made.id)
            assert (ended.status, ended.request_counts.completed) == ("completed", 20)
        # The block of two may answer the second while the first is still under way.
        while not (given_up := [each for each in lengths.read_text().split()[before:] if each.startswith("long,")]):
            assert client.chat.completions.create(**short).choices == wanted
        assert len(given_up) == 1
        assert int(given_up[0].removeprefix("long,")) < MOST


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_waits_while_the_service_is_stopped_is_told(tmp_path: Path, thinker: Path, number: signal.Signals) -> None:
    """A whole answer and one that has begun to stream."""
    body: Any = {"model": "model", "messages": TALK, "max_tokens": MOST, "logit_bias": PLAIN}
    body["extra_body"] = {"ignore_eos": True}
    with Service(tmp_path, "--model", thinker) as service, ThreadPoolExecutor() as pool:
        client = service.client
        stream = iter(client.chat.completions.create(stream=True, **body))
        next(stream)
        whole = pool.submit(client.chat.completions.create, **body)
        time.sleep(0.2)
        service.kill(number)
        with pytest.raises(openai.APIError, match="the service is being stopped"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match=r"503.*the service is being stopped"):
            whole.result()
        assert service.wait().code == 0


def answer_to(url: str, data: bytes) -> bytes:
    """What comes back of bytes that the service may not read to their end."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    came = b""
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        with suppress(ConnectionError):
            connection.sendall(data)
        with suppress(ConnectionError):
            while piece := connection.recv(1 << 16):
                came += piece
    return came


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX: " + b"a" * (1 << 20),
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + b"a" * (1 << 20) + b"\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"X: aaaaaaaaaaa\r\n" * (1 << 16) + b"\r\n",
        b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * (1 << 20) + b"\r\n\r\n",
        b"\0" * (1 << 20),
    ],
    ids=["endless", "a key", "many", "a path", "a length", "no HTTP"],
)
def test_huge_headers_are_refused(service: Service, head: bytes) -> None:
    came = answer_to(service.url, head)
    assert came == b"" or 400 <= int(came.split()[1]) < 500, came[:200]
    assert service.client.models.list().data[0].id == "model"


@pytest.mark.parametrize("told", [True, False], ids=["told its length", "in chunks"])
def test_a_file_over_the_limit_takes_no_memory(service: Service, told: bool) -> None:
    """Its client sends 512 MiB, or as much as is listened to, before it reads the answer."""
    begin, kind = form("big.jsonl", b"")
    begin, piece = begin[: -len(b"\r\n--b--\r\n")], b"x" * (1 << 20)
    host, _, port = service.url.removeprefix("http://").rpartition(":")
    head = f"POST /v1/files HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {KEY}\r\nContent-Type: {kind}\r\n"
    head += f"Content-Length: {1 << 31}\r\n\r\n" if told else "Transfer-Encoding: chunked\r\n\r\n"
    before = peak(service.pid)
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        with suppress(ConnectionError):
            connection.sendall(head.encode())
            for data in (begin, *[piece] * 512):
                connection.sendall(data if told else b"%x\r\n%b\r\n" % (len(data), data))
                if select.select([connection], [], [], 0)[0]:
                    break
        came = connection.recv(1 << 16)
    assert came.startswith(b"HTTP/1.1 413"), came
    assert peak(service.pid) - before < 24 << 20
    assert not list((Path(service.data) / "files").glob(".upload-*"))
    assert service.client.models.list().data[0].id == "model"


def test_text_that_turned_out_otherwise_is_not_sent_twice() -> None:
    """As of bytes that became no character, behind some that were one."""
    asked: Any = SimpleNamespace(url=COMPLETIONS, head={}, gone=False)
    choice = {"index": 0, "text": "ab\ufffd\ufffdc", "logprobs": None, "finish_reason": "length"}

    async def pieces() -> list[str]:
        events = asyncio.Queue[LiveEvent]()
        events.put_nowait(LiveEvent(status=200, body={"choices": [choice]}))
        return [each async for each in _stream(asked, LiveEvent(0, {"text": "abé"}), events, usage=False)]

    with ThreadPoolExecutor(1) as pool:  # in this thread the browser's loop may run
        lines = pool.submit(lambda: asyncio.run(pieces())).result()
    said = [json.loads(each.removeprefix("data: ")) for each in lines[:-1]]
    assert "".join(each["choices"][0]["text"] for each in said) == "abé\ufffd\ufffdc"


def said_by(stream: Any) -> tuple[dict[str, Any], str, Any]:
    """The message that the deltas of a stream make, why it ended, and its usage."""
    message, why, usage = dict[str, Any](), "", None
    for piece in stream:
        usage = piece.usage or usage
        for choice in piece.choices:
            why = choice.finish_reason or why
            for name, value in choice.delta.to_dict().items():
                if name != "tool_calls":
                    message[name] = message.get(name, "") + value
            for delta in choice.delta.tool_calls or ():
                calls = message.setdefault("tool_calls", [])
                assert delta.index <= len(calls), "in order"
                calls += [{"id": "", "type": "function", "name": "", "arguments": ""}] * (delta.index == len(calls))
                calls[delta.index]["id"] += delta.id or ""
                calls[delta.index]["name"] += delta.function.name or ""
                calls[delta.index]["arguments"] += delta.function.arguments or ""
    return message, why, usage


def told(message: Any) -> dict[str, Any]:
    """A whole message in the same form, with ids of calls that differ from request to request left out."""
    kept = {name: value for name, value in message.to_dict().items() if value not in (None, "")}
    calls = [{"type": each.type, **each.function.to_dict()} for each in message.tool_calls or ()]
    return {**kept, "tool_calls": calls} if calls else kept


FORCED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", [FORCED, "required", "auto"], ids=["named", "required", "auto"])
@pytest.mark.parametrize("most", [0, 4])
def test_calls_in_a_stream_are_those_of_the_whole_reply(service: Service, choice: Any, most: int) -> None:
    client = service.client
    asked: Any = {"model": "model", "messages": TALK, "tools": TOOLS, "tool_choice": choice, "temperature": 0}
    asked |= {"max_tokens": 300, "extra_body": {"max_reasoning_tokens": most}}
    whole = client.chat.completions.create(**asked)
    (reply,) = whole.choices
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    message, why, usage = said_by(stream)
    ids = [call.pop("id") for call in message.get("tool_calls", ())]
    assert len(set(ids)) == len(ids)
    assert all(each.startswith("call_") for each in ids)
    assert {name: value for name, value in message.items() if value != ""} == told(reply.message)
    assert (why, usage) == (reply.finish_reason, whole.usage)
    assert bool(ids) == (choice != "auto")
    if choice == FORCED:
        (call,) = message["tool_calls"]
        assert (call["name"], why) == ("weather", "tool_calls")
        assert json.loads(call["arguments"]).keys() == {"city", "days"}


VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "an effort": {"reasoning_effort": "high"},
    "a limit": {"max_reasoning_tokens": 5},
    "a limit of vLLM": {"thinking_token_budget": 7, "reasoning_effort": "low"},
    "no thoughts": {"max_reasoning_tokens": 0},
    "off": {"enable_thinking": False},
    "off for the template": {"chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "none"}},
    "tools": {"tools": TOOLS, "tool_choice": "none", "max_reasoning_tokens": 3},
    "a call": {"tools": TOOLS, "tool_choice": FORCED, "enable_thinking": False, "max_tokens": 300},
}
OF_TEMPLATE = ("tools", "reasoning_effort", "enable_thinking")
NATIVE = ("tools", "tool_choice", "reasoning_effort", "max_tokens")
"""Fields that the `openai` client has arguments for."""


@pytest.fixture(scope="module")
def of_batch(service: Service) -> dict[str, Any]:
    """What a batch's file of VARIANTS is answered, by name."""
    client = service.client
    lines = [request(name, {**asked(), **fields}, url=CHAT) for name, fields in VARIANTS.items()]
    file = client.files.create(file=("a.jsonl", "\n".join(lines).encode()), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="1h")
    ended = finished(client, made.id)
    assert (ended.status, ended.error_file_id) == ("completed", None)
    answers = map(json.loads, client.files.content(ended.output_file_id).text.splitlines())
    return {each["custom_id"]: each["response"]["body"] for each in answers}


def asked() -> dict[str, Any]:
    return {"model": "model", "messages": TALK, "max_tokens": NEW, "temperature": 0, "logit_bias": PLAIN}


@pytest.mark.parametrize("name", VARIANTS)
def test_tools_and_reasoning_reach_the_template(
    service: Service, thinker: Path, of_batch: dict[str, Any], name: str
) -> None:
    """A chat's text is that of a completion of what transformers makes of the same template and fields; thoughts stand
    apart, are counted, and end with the tag that is fed at their limit."""
    client, fields = service.client, VARIANTS[name]
    given = {each: value for each, value in fields.items() if each in NATIVE}
    more = {each: value for each, value in fields.items() if each not in NATIVE}
    reply = client.chat.completions.create(**{**asked(), **given}, extra_body=more)
    (choice,) = reply.choices
    words = AutoTokenizer.from_pretrained(thinker)
    arguments = {each: value for each, value in fields.items() if each in OF_TEMPLATE}
    arguments |= fields.get("chat_template_kwargs", {})
    text = words.apply_chat_template(TALK, add_generation_prompt=True, tokenize=False, **arguments)
    prompt = words.encode(text, add_special_tokens=False)
    assert reply.usage.prompt_tokens == len(prompt)

    def completed(ids: list[int], most: int) -> str:
        made = client.completions.create(model="model", prompt=ids, max_tokens=most, temperature=0, logit_bias=PLAIN)
        return made.choices[0].text

    limit = fields.get("max_reasoning_tokens", fields.get("thinking_token_budget"))
    thinks, end = text.endswith("<think>"), "</think>"
    message, counted = choice.message.to_dict(), reply.usage.completion_tokens_details
    if limit is not None:
        thought = completed(prompt, limit) if limit else ""
        rest = completed([*prompt, *words.encode(thought + end, add_special_tokens=False)], NEW - limit - len(end))
        expected = {"content": rest, "reasoning": thought.strip()}
    elif thinks:
        expected = {"content": None, "reasoning": completed(prompt, NEW).strip()}
    elif name != "a call":
        expected = {"content": completed(prompt, NEW)}
    else:
        expected = {"content": None}
        assert [each.function.name for each in choice.message.tool_calls] == ["weather"]
    expected |= {"reasoning_content": expected["reasoning"]} if thinks else {}
    assert {each: value for each, value in message.items() if each not in ("role", "tool_calls")} == expected
    assert (counted is not None) == thinks
    if counted is not None:
        assert counted.reasoning_tokens == (NEW if limit is None else limit + len(end))
    assert name == "a call" or reply.usage.completion_tokens == NEW
    same = of_batch[name]
    assert same["usage"] == reply.usage.to_dict()
    message = {**same["choices"][0], "message": openai_message(same)}
    assert told(message["message"]) == told(choice.message)
    assert message["finish_reason"] == choice.finish_reason


def openai_message(body: dict[str, Any]) -> Any:
    """The message of an answer in a file, as the `openai` package has it."""
    return openai.types.chat.ChatCompletion.model_validate(body).choices[0].message
