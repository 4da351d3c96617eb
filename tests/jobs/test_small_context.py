"""Requests that do not say how many tokens they want get what their prompt leaves of the context."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen import LLM, EvictionConfig, SamplingParams
from h2o_flexgen.engine.requests.reader import Request
from tests.jobs.files import request, results, write
from tests.programs import Ran, tokenizer, write_talker
from tests.tiny import make_model, save

Batch = Callable[..., Ran]
CHAT = "/v1/chat/completions"
CONTEXT = 128
LEFT = 5
TEXT = "a" * (CONTEXT - LEFT - 1)  # </s> before it
SAID = "a" * (CONTEXT - LEFT - len("[user][assistant]"))


@pytest.fixture
def talker(tmp_path: Path) -> Path:
    """Its answers end nowhere: no token is an end that it would choose."""
    model = write_talker(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": 1, "pad_token_id": 1}))
    return model


def test_openai_bodies(tmp_path: Path, talker: Path, batch: Batch) -> None:
    talk = {"messages": [{"role": "user", "content": SAID}], "temperature": 0}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("chat", talk),
        ("completion", {"prompt": TEXT, "temperature": 0}),
        ("several", {"prompt": [TEXT, "b"], "temperature": 0}),
        ("least", {"prompt": TEXT, "temperature": 0, "min_tokens": 9}),
        ("said", {"prompt": TEXT, "temperature": 0, "max_tokens": LEFT + 1}),
        ("full", {"prompt": TEXT + "a" * LEFT, "temperature": 0}),
    ]
    lines = [request(name, body, url=CHAT if body is talk else "/v1/completions") for name, body in bodies]
    file = write(tmp_path / "in.jsonl", *lines)
    ran = batch("-i", file, "-o", tmp_path / "out.jsonl", "--model", talker)
    assert ran.code == 3, ran.err
    found = {name: line["response"] for name, line in results(tmp_path / "out.jsonl").items()}
    for name, count in (("chat", LEFT), ("completion", LEFT), ("several", LEFT + 16), ("least", LEFT)):
        assert found[name]["status_code"] == 200, found[name]
        assert {each["finish_reason"] for each in found[name]["body"]["choices"]} == {"length"}
        assert found[name]["body"]["usage"]["completion_tokens"] == count
    for name in ("said", "full"):
        assert found[name]["body"]["error"]["code"] == "context_length_exceeded"
    ran = batch("-i", file, "-o", tmp_path / "typed.jsonl", "--model", talker, "--gen-len", LEFT + 1)
    typed = {name: line["response"]["status_code"] for name, line in results(tmp_path / "typed.jsonl").items()}
    assert typed == dict.fromkeys(found, 400), "what was typed is kept"


@pytest.mark.parametrize(("kind", "contexts"), [("jsonl", 1), ("jsonl", 20), ("text", 1), ("parquet", 1)])
def test_plain_prompts(tmp_path: Path, talker: Path, batch: Batch, kind: str, contexts: int) -> None:
    flags: tuple[object, ...] = ("--model", talker, "--format", kind, "--chat")
    file = tmp_path / f"in.{kind}"
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        import pyarrow.parquet as parquet

        parquet.write_table(pyarrow.table({"prompt": [SAID, "b", "a" * CONTEXT * contexts]}), file)
    else:
        prompts = [SAID, "b", "a" * CONTEXT * contexts]
        write(file, *(prompts if kind == "text" else [json.dumps({"prompt": each}) for each in prompts]))
    ran = batch("-i", file, "-o", tmp_path / "out.jsonl", *flags)
    assert ran.code == 3, ran.err
    first, short, long = (line for _, line in sorted(results(tmp_path / "out.jsonl", "line").items()))
    assert (len(first["token_ids"]), first["finish_reason"]) == (LEFT, "length")
    assert (len(short["token_ids"]), short["finish_reason"]) == (SamplingParams().max_new_tokens, "length")
    assert long["error"]["code"] == "context_length_exceeded"
    assert batch("-i", file, "-o", tmp_path / "typed.jsonl", *flags, "--gen-len", LEFT + 1).code == 3
    assert "error" in results(tmp_path / "typed.jsonl", "line")[first["line"]]


def test_lines_of_messages_and_of_ids(tmp_path: Path, talker: Path, batch: Batch) -> None:
    lines = [
        {"messages": [{"role": "user", "content": SAID}]},
        {"prompt": TEXT},
        {"prompt": [9] * (CONTEXT - LEFT)},
        {"prompt": [9] * CONTEXT},
    ]
    file = write(tmp_path / "in.jsonl", *map(json.dumps, lines))
    assert batch("-i", file, "-o", tmp_path / "out.jsonl", "--model", talker, "--hh-ratio", 0.5).code == 3
    *found, last = (line for _, line in sorted(results(tmp_path / "out.jsonl", "line").items()))
    assert [(len(each["token_ids"]), each["finish_reason"]) for each in found] == [(LEFT, "length")] * 3
    assert last["error"]["code"] == "context_length_exceeded"


def test_with_rolling_positions_nothing_is_left_out(tmp_path: Path) -> None:
    save(make_model("llama"), tmp_path)
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    params = SamplingParams(max_new_tokens=LEFT + 4, min_new_tokens=LEFT + 1)
    with LLM(str(tmp_path)) as llm:
        asked = Request([9] * (llm.model.spec.max_positions - LEFT), params, 0, fits=True)
        (row,) = llm.read(asked)
        assert (row.max_new_tokens, row.params.min_new_tokens) == (LEFT, LEFT)
    with LLM(str(tmp_path), eviction=EvictionConfig("h2o", budget=16, rolling_positions=True)) as llm:
        assert llm.read(asked)[0].max_new_tokens == LEFT + 4
        assert len(llm.generate([SAID * 10], max_new_tokens=1)[0].prompt_ids) > 10 * len(SAID)
