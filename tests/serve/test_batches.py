"""The life of a batch by the `openai` package: results are those of `batch`, whatever happens on the way."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from h2o_flexgen import LLM
from h2o_flexgen.batch import main as batch
from h2o_flexgen.cli.serve import service as module
from h2o_flexgen.cli.serve.desk import Desk, Entry
from tests.jobs.files import request, results, timeless, write
from tests.programs import Child, write_talker
from tests.seeds import moved
from tests.serve.conftest import KEY, Serve, Service, finished, until_asked

DOCUMENT = Path(__file__).parents[2] / "docs/serve.md"
CHAT = "/v1/chat/completions"


def requests(folder: Path, count: int, lengths: Sequence[int]) -> Path:
    """Mixed ones: completions and conversations, greedy, drawn, stopped, of several samples, faulty."""
    source, lines = random.Random(moved(5)), []
    for number in range(count):
        text = "".join(source.choices("abc defg.", k=source.randrange(1, 40)))
        body: dict[str, Any] = {"max_tokens": source.choice(lengths)}
        body |= source.choice([{"temperature": 0}, {}, {"seed": 3}, {"n": 2}, {"stop": ["a", "b"]}, {"promt": "x"}])
        chat = number % 3 == 1
        body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        line = request(f"r{number}", body, **({"url": CHAT} if chat else {}))
        lines.append(line[: len(line) // 2] if number % 17 == 16 else line)
    return write(folder / "in.jsonl", *lines)


def wanted(folder: Path, talker: Path, file: Path, *flags: object) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """What `batch` writes: answers, and errors."""
    out, errors = folder / "wanted.jsonl", folder / "errors.jsonl"
    arguments = ("-i", file, "-o", out, "--error-file", "errors.jsonl", "--model", talker, "--no-json", *flags)
    with Child(folder, *arguments, program=batch, before=lambda: os.chdir(folder)) as child:
        assert child.wait(300).code == 3
    return timeless(results(out, "id")), timeless(results(errors, "id"))


def got(client: openai.OpenAI, folder: Path, ended: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """What a batch made: answers, and errors, each line once."""
    found = []
    for name in (ended.output_file_id, ended.error_file_id):
        path = folder / "got.jsonl"
        path.write_bytes(b"" if name is None else client.files.content(name).read())
        found.append(timeless(results(path, "id")))
    return found[0], found[1]


@pytest.mark.parametrize(
    ("count", "rows", "lengths"), [(80, 4, (2, 9, 30)), pytest.param(1000, 32, (2, 6, 12), marks=pytest.mark.slow)]
)
def test_the_life_of_a_batch(
    tmp_path: Path, talker: Path, serve: Serve, count: int, rows: int, lengths: tuple[int, ...]
) -> None:
    """Uploaded, made, killed in the middle, gone on with, listed, read, deleted; nothing is lost or there twice."""
    file, flags = requests(tmp_path, count, lengths), ("--hh-ratio", 0.5, "--gpu-batch-size", rows)
    with serve(*flags) as service:
        client = service.client
        uploaded = client.files.create(file=file.open("rb"), purpose="batch")
        assert (uploaded.filename, uploaded.bytes, uploaded.purpose) == ("in.jsonl", file.stat().st_size, "batch")
        made = client.batches.create(
            input_file_id=uploaded.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"night": "1"},
        )
        assert (made.status, made.metadata, made.expires_at) == ("validating", {"night": "1"}, made.created_at + 86400)
        with pytest.raises(openai.ConflictError):
            client.files.delete(uploaded.id)
        until_asked(lambda: (client.batches.retrieve(made.id).request_counts or made).completed > count // 4, 120)
        service.kill(signal.SIGKILL)
        assert service.wait().code == 128 + signal.SIGKILL
    with serve(*flags) as service:
        client = service.client
        ended = finished(client, made.id, 300)
        answers, errors = wanted(tmp_path, talker, file, *flags)
        assert got(client, tmp_path, ended) == (answers, errors)
        counts = ended.request_counts
        assert (ended.status, counts.total, counts.completed, counts.failed) == (
            "completed",
            count,
            len(answers),
            len(errors),
        )
        assert ended.in_progress_at <= ended.finalizing_at <= ended.completed_at
        names = [each.id for each in client.files.list()]
        assert names[2:] == [uploaded.id]
        assert {ended.output_file_id, ended.error_file_id} == set(names[:2])
        assert client.files.retrieve(ended.output_file_id).purpose == "batch_output"
        assert client.files.delete(uploaded.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(uploaded.id)
        service.kill(signal.SIGTERM)
        assert service.wait().code == 0


def test_a_batch_of_other_flags_waits(tmp_path: Path, serve: Serve) -> None:
    """Nothing of it is lost: a service as it was begun with goes on, another says what differs, and serves others."""
    lines = [request(f"r{i}", {"prompt": "ab" * i, "max_tokens": 60}) for i in range(1, 9)]
    file = write(tmp_path / "in.jsonl", *lines)
    slow = ("--gpu-batch-size", 1, "--num-gpu-batches", 1)
    with serve(*slow) as service:
        client = service.client
        uploaded = client.files.create(file=file.open("rb"), purpose="batch")
        made = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="1h")
        until_asked(lambda: client.batches.retrieve(made.id).request_counts.completed > 1)
    with serve(*slow, "--seed", 1) as service:
        client = service.client
        other = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="1h")
        assert finished(client, other.id).status == "completed"
        waits = client.batches.retrieve(made.id)
        assert waits.status == "in_progress"
        assert "seed 0, and now it is 1" in waits.errors.data[0].message
        assert str(tmp_path) not in waits.errors.data[0].message
    with serve(*slow) as service:
        ended = finished(service.client, made.id)
        assert (ended.status, ended.request_counts.completed, ended.errors) == ("completed", 8, None)


def test_batches_that_are_cancelled_or_expire(tmp_path: Path, serve: Serve) -> None:
    """What is finished stays, what is not has an error line; one that waits ends at once."""
    lines = [request(f"r{i}", {"prompt": "abc", "max_tokens": 100, "ignore_eos": True}) for i in range(400)]
    file = write(tmp_path / "in.jsonl", *lines)
    with serve("--gpu-batch-size", 1, "--num-gpu-batches", 1) as service:
        client = service.client
        uploaded = client.files.create(file=file.open("rb"), purpose="batch")

        def make(window: str) -> Any:
            return client.batches.create(
                input_file_id=uploaded.id, endpoint="/v1/completions", completion_window=window
            )

        first, waits = make("1d"), make("1s")
        until_asked(lambda: client.batches.retrieve(first.id).request_counts.completed > 1)
        assert client.batches.cancel(first.id).status == "cancelling"
        ended = finished(client, first.id)
        assert ended.cancelled_at >= ended.cancelling_at
        assert ended.request_counts.completed > 1
        check(client, ended, "batch_cancelled")
        with pytest.raises(openai.ConflictError, match="Cannot cancel a batch with status 'cancelled'"):
            client.batches.cancel(first.id)
        ended = finished(client, waits.id)
        assert ended.status == "expired"
        if ended.in_progress_at is not None:
            check(client, ended, "batch_expired")
        runs, queued = make("1d"), make("1d")
        assert client.batches.cancel(queued.id).status == "cancelled"
        assert [each.id for each in client.batches.list(limit=2)] == [b.id for b in (queued, runs, waits, first)]
        assert client.batches.list(limit=2, after=waits.id).data[0].id == first.id


def test_a_batch_that_waits_says_when(tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins when those before it end, one of the same file takes as long as the one that runs; what is cancelled or
    cannot be read says nothing."""
    monkeypatch.setattr(module, "_TOLD_EVERY", 0.1)
    lines = [request(f"r{i}", {"prompt": "abc", "max_tokens": 30 + i % 9, "ignore_eos": True}) for i in range(4000)]
    file = write(tmp_path / "in.jsonl", *lines)
    with serve("--gpu-batch-size", 8, "--num-gpu-batches", 1) as service:
        client = service.client
        uploaded = client.files.create(file=file.open("rb"), purpose="batch")
        given: Any = {"input_file_id": uploaded.id, "endpoint": "/v1/completions", "completion_window": "1d"}
        runs, second, third = [client.batches.create(**given).id for _ in range(3)]
        until_asked(lambda: client.batches.retrieve(third).forecast)
        before, behind, last = [client.batches.retrieve(name).forecast for name in (runs, second, third)]
        asked = urllib.request.Request(service.url, headers={"Authorization": f"Bearer {KEY}"})
        page = urllib.request.urlopen(asked).read().decode()
        assert re.search(r"begins in [0-9.]+ to [0-9.]+ (s|min), done in [0-9.]+ to [0-9.]+ (s|min)<", page)
        assert before["left"]["high"] < behind["left"]["low"] + behind["left"]["high"]
        assert behind["starts"]["low"] < behind["starts"]["high"] < behind["left"]["high"] < last["left"]["high"]
        assert last["starts"]["middle"] == pytest.approx(behind["left"]["middle"], rel=0.3)
        whole = behind["left"]["middle"] - behind["starts"]["middle"]
        assert last["left"]["middle"] - last["starts"]["middle"] == pytest.approx(whole, rel=0.1)
        assert client.batches.cancel(second).forecast is None
        client.batches.cancel(runs)
        assert finished(client, runs).forecast is None
        until_asked(lambda: "starts" not in (client.batches.retrieve(third).forecast or {}))
        assert client.batches.retrieve(third).forecast["left"]["low"] > 0, "what was told while it waited"
        client.batches.cancel(third)


def check(client: openai.OpenAI, ended: Any, code: str) -> None:
    """Every line once: an answer, or why there is none."""
    answers, errors = (lines_of(client, name) if name else [] for name in (ended.output_file_id, ended.error_file_id))
    assert len(answers) == ended.request_counts.completed
    assert {each["custom_id"] for each in (*answers, *errors)} == {f"r{i}" for i in range(400)}
    assert len(answers) + len(errors) == ended.request_counts.total == 400
    assert {(each["response"], each["error"]["code"]) for each in errors} == {(None, code)}


def test_the_python_of_the_documents(
    tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    write(tmp_path / "requests.jsonl", request("r", {"prompt": "abc", "max_tokens": 2}))
    monkeypatch.chdir(tmp_path)
    exec(code.replace("http://127.0.0.1:8000", service.url).replace('"none"', repr(KEY)).replace("(1)", "(0.05)"), {})
    assert json.loads(capsys.readouterr().out)["custom_id"] == "r"


def test_two_batches_and_conversations_at_once(tmp_path: Path, serve: Serve) -> None:
    file = write(tmp_path / "in.jsonl", *(request(f"r{i}", {"prompt": "ab" * i, "max_tokens": 9}) for i in range(1, 9)))
    with serve() as service:
        client = service.client
        uploaded = client.files.create(file=file.open("rb"), purpose="batch")
        every = [
            client.batches.create(input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h")
            for _ in range(2)
        ]
        said: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
        settings: Any = {"model": "model", "messages": said, "max_tokens": 12, "temperature": 0}
        whole = client.chat.completions.create(**settings)
        pieces = list(client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
        ended = [finished(client, each.id) for each in every]
        assert [each.request_counts.completed for each in ended] == [8, 8]
        assert every[0].id < every[1].id or ended[0].completed_at <= ended[1].completed_at
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert text == whole.choices[0].message.content != ""
        assert pieces[-1].usage == whole.usage
        assert len(pieces) > 5, "it comes in pieces"
        assert pieces[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_conversation_joins_a_batch_that_runs(tmp_path: Path, serve: Serve) -> None:
    """It is answered long before the batch is done, as it is by itself; and so is one that fits in no block of it."""
    lines = [request(f"r{i}", {"prompt": "abc", "max_tokens": 20 + i % 9, "ignore_eos": True}) for i in range(1000)]
    file = write(tmp_path / "in.jsonl", *lines)
    with serve("--gpu-batch-size", 2, "--num-gpu-batches", 1) as service:
        client = service.client
        short: Any = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        long: Any = {"messages": [{"role": "user", "content": "Hello " * 9}], "max_tokens": 40}
        usual: Any = {"model": "model", "temperature": 0}
        alone = [client.chat.completions.create(**usual, **each).choices for each in (short, long)]
        uploaded = client.files.create(file=file.open("rb"), purpose="batch")
        made = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h")
        until_asked(lambda: client.batches.retrieve(made.id).request_counts.completed > 1)
        assert [client.chat.completions.create(**usual, **each).choices for each in (short, long)] == alone
        with pytest.raises(openai.BadRequestError, match="context"):
            client.completions.create(model="model", prompt="a" * 200)
        first = next(iter(client.chat.completions.create(**usual, **short, stream=True)))
        assert first.choices[0].delta.role == "assistant"
        counts = client.batches.retrieve(made.id).request_counts
        assert counts.completed < 900
        assert counts.failed == 0


def test_batches_of_the_model_that_is_loaded_come_first(tmp_path: Path) -> None:
    """A file's model is what its first lines name; half of its time having gone by, a batch is as all others."""
    desk = Desk(tmp_path / "data", {"one": "one", "/models/one": "one", "two": "two"})

    def made(*lines: str) -> Entry:
        part = write(desk.new_upload(), *lines)
        given = {"input_file_id": desk.add_file(part, "a", "batch")["id"], "completion_window": "1h"}
        return desk.batch(desk.create_batch({**given, "endpoint": CHAT})["id"])

    two, unnamed, named = made("x", request("r", {"model": "two"})), made("{}"), made(request("r", {"model": "three"}))
    typed = made(request("r", {"model": "/models/one"}))
    assert [each["model"] for each in (two, unnamed, named, typed)] == ["two", "one", "one", "one"]
    assert desk.next_batch() is desk.next_batch("two") is desk.next_batch("") is two
    assert desk.next_batch("one") is unnamed
    two["created_at"] -= 4000
    assert desk.next_batch("one") is two
    desk.hold(two, "why")
    for each in (unnamed, named, typed):
        assert desk.next_batch("two") is each
        desk.update(each, status="completed")
    assert desk.next_batch("two") is None
    desk.close()


def test_two_models(tmp_path: Path, talker: Path, serve: Serve) -> None:
    """Each answers what names it, as it does by itself, and says how long it took; one that is gone keeps nobody from
    the other."""
    other = write_talker(tmp_path / "other", num_hidden_layers=2)
    said: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9, "temperature": 0}
    lines = {
        name: [request(f"r{i}", {**said, "model": name, "max_tokens": i}, url=CHAT) for i in range(1, 10)]
        for name in ("model", "other")
    }
    lines["other"].append(request("r", {**said, "model": "model"}, url=CHAT))
    files = {name: write(tmp_path / f"{name}.jsonl", *each) for name, each in lines.items()}
    flags = "--more-models", other, "--queue", "model", "--sample", 4, "--served-model-name", "also"
    with serve(*flags) as service:
        client, texts = service.client, dict[str, list[str]]()
        assert [each.id for each in client.models.list()] == ["model", "other", "also"]
        assert client.models.retrieve("also").id == "also"
        uploaded = {name: client.files.create(file=file.open("rb"), purpose="batch") for name, file in files.items()}

        def make(name: str) -> Any:
            given: Any = {"endpoint": CHAT, "completion_window": "24h"}
            return client.batches.create(input_file_id=uploaded[name].id, **given)

        made = {name: make(name) for name in ("other", "model")}
        for name, each in made.items():
            chat = client.chat.completions.create(**{**said, "model": name})
            ended = finished(client, each.id)
            assert (ended.status, ended.model, ended.request_counts.completed) == ("completed", name, 9)
            assert ended.forecast["expected"]["requests"] == 9, "without the one that is refused"
            assert ended.forecast["first"]["low"] <= ended.forecast["first"]["high"]
            assert ended.forecast["measured"] > 0
            answers = sorted(lines_of(client, ended.output_file_id), key=lambda answer: answer["custom_id"])
            texts[name] = [each["response"]["body"]["choices"][0]["message"]["content"] for each in answers]
            assert texts[name][-1] == chat.choices[0].message.content
        (error,) = lines_of(client, client.batches.retrieve(made["other"].id).error_file_id)
        assert error["error"]["code"] == "model_not_found"
        assert texts["model"] != texts["other"]
        with LLM(str(other), dtype="float32") as llm:
            assert llm.chat([said["messages"]], max_new_tokens=9)[0].text == texts["other"][-1]
        client.chat.completions.create(**{**said, "model": str(talker)})
        shutil.rmtree(other)
        waits = make("other")
        until_asked(lambda: client.batches.retrieve(waits.id).errors)
        said_of_it = client.batches.retrieve(waits.id).errors.data[0].message
        assert "its model cannot be used: its files" in said_of_it
        with pytest.raises(openai.InternalServerError) as raised:
            client.chat.completions.create(**{**said, "model": "other"})
        assert raised.value.status_code == 503
        assert "model other cannot be used: its files" in raised.value.message
        assert str(tmp_path) not in raised.value.message + said_of_it
        assert service.said.count(f"\nother: {str(other)!r} is not there") == 2, "who serves reads all of it"
        assert finished(client, make("model").id).status == "completed"
    with serve() as service:
        until_asked(lambda: "service of other" in service.client.batches.retrieve(waits.id).errors.data[0].message)
        assert service.client.batches.cancel(waits.id).status in ("cancelling", "cancelled")


def lines_of(client: openai.OpenAI, name: Any) -> list[Any]:
    return [json.loads(line) for line in client.files.content(name).text.splitlines()]
