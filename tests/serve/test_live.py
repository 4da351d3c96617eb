"""What a stream has told by the time its answer ends, token by token and without a model: the text of the whole answer,
for the price of a tail."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from h2o_flexgen.cli.serve import live
from h2o_flexgen.cli.serve.live import Growing, LiveEvent, LiveRequest, LiveRequests, _Listener
from h2o_flexgen.config.eviction import Budget
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.requests.sequence import RequestOutput, Sequence
from h2o_flexgen.engine.requests.tokenizer import TextCodec, find_stop, text_of
from h2o_flexgen.jobs.openai import CHAT, COMPLETIONS, OpenAIFormat
from h2o_flexgen.jobs.source import Record
from tests.engine import tokenizer_folders as folders
from tests.programs import until
from tests.seeds import python_random

SAID = ["世界🦊世界", "🦊" * 9, " \n ", "e\u0301", "don't", "x , y . z", "<s>", "</s>", "<|user|>"]
THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
MOST = 150
"""Tokens that may be decoded at once: far fewer than prompts and answers have here."""


def opened(path: Path, name: str, **settings: Any) -> TextCodec:
    folder = folders.FOLDERS[name](path / "model")
    if settings:
        file = folder / "tokenizer_config.json"
        told = json.loads(file.read_text()) if file.exists() else {"tokenizer_class": "PreTrainedTokenizerFast"}
        file.write_text(json.dumps(told | settings))
    codec = TextCodec.open(folder)
    assert codec is not None
    return codec


def ids_of(codec: TextCodec, seed: int, count: int) -> list[int]:
    source, ids = python_random(seed), list[int]()
    while len(ids) < count:
        ids += codec.encode_bare(source.choice([*folders.CORPUS, *SAID]))
    return ids[:count]


def row_of(prompt: list[int], params: Any) -> Sequence:
    budget = Budget(total=9, heavy=4, recent=5, sinks=0, full=False)
    return Sequence(
        index=0, sample=0, row_id=0, prompt_ids=prompt, params=params, budget=budget, eos=frozenset(), token_ids=[]
    )


@pytest.mark.parametrize("name", folders.FOLDERS)
def test_a_text_that_grows_is_that_of_all_its_tokens(tmp_path: Path, name: str) -> None:
    codec = opened(tmp_path, name)
    for seed, start in ((1, 1), (2, 2), (3, 77), (4, 300)):
        ids, longest = ids_of(codec, seed, start + 420), 0

        def decode(part: list[int]) -> str:
            nonlocal longest
            longest = max(longest, len(part))
            return codec.decode(part)

        growing, row = Growing(decode, start), row_of(ids[:start], SamplingParams())
        for end in range(start + 1, len(ids) + 1):
            row.token_ids = ids[start:end]
            assert growing(ids[:end]) == text_of(codec, row)
        assert longest < MOST


CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    (COMPLETIONS, {}, []),
    (COMPLETIONS, {"stop": ["🦊🦊"]}, []),
    (COMPLETIONS, {"stop": ["the", "🦊"], "min_tokens": 40}, []),
    (CHAT, {}, []),
    (CHAT, {"stop": ["🦊🦊"]}, []),
    (CHAT, {}, ["</think>"]),
    (CHAT, {"stop": ["🦊🦊"], "min_tokens": 200}, ["</think>"]),
]


@pytest.mark.parametrize("name", ["plain-bytes", "plain-metaspace", "plain-gemma", "llama"])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_stream_tells_the_whole_answer(tmp_path: Path, name: str, case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stops, and with thoughts whose marks no text shows."""
    url, fields, special = CASES[case]
    more = {"chat_template": THINKS if special else folders.TEMPLATE, "additional_special_tokens": special}
    codec = opened(tmp_path, name, **({} if url == COMPLETIONS else more))
    text = " ".join(folders.CORPUS) * 3
    body = {"max_tokens": 999, **fields} | (
        {"prompt": text} if url == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    )
    line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
    form, record = OpenAIFormat("m", codec, (), 0, {}, 0, "j"), Record(1, json.dumps(line).encode())
    asked = form.asked(record)
    prompt: Any = asked.prompts[0]
    prompt = codec.encode(prompt) if isinstance(prompt, str) else list(prompt.content)
    row, told = row_of(prompt, asked.params), list[LiveEvent]()
    opening: Any = SimpleNamespace(asked=asked, rows=[[row]])
    request = LiveRequest(url, body, True, told.append, record=record)
    request.form, request.open = form, opening
    new = ids_of(codec, 5, 400)
    if special:
        new[200:200] = codec.encode_bare(special[0])
    lengths, whole_text = list[int](), codec.decode

    def decode(part: list[int]) -> str:
        lengths.append(len(part))
        return whole_text(part)

    monkeypatch.setattr(codec, "decode", decode)
    listener = _Listener(codec, request, row, 0)
    for token in new:
        row.token_ids.append(token)
        listener(token)
        row.stop_string = find_stop(codec.decode, row)
        if row.stop_string is not None:
            break
    assert (row.stop_string is not None) == ("stop" in fields)
    if "min_tokens" not in fields:
        assert sum(length > MOST for length in lengths) <= 4, "when the stop has been found"
    output = RequestOutput(0, 0, prompt, row.token_ids, text_of(codec, row), "stop")
    (choice,) = form.answer(record, asked, [[output]])["response"]["body"]["choices"]
    whole = choice.get("message") or {"text": choice["text"]}
    assert whole.get("reasoning") is None if not special else whole["reasoning"]
    for part in whole.keys() - {"role"}:
        said = "".join(event.pieces.get(part, "") for event in told)
        assert (whole[part] or "").startswith(said)
        assert len(whole[part] or "") - len(said) < 9
    assert len(told) > len(row.token_ids) // 3


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
def test_nobody_waits_for_the_tokens_of_a_long_request(talker: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs once it has them, as it would have at once, and its faults are told."""
    monkeypatch.setattr(live, "_LONG", 180)
    told, going = list[LiveEvent](), threading.Event()

    def request(text: str, **fields: Any) -> LiveRequest:
        asked = {"prompt": text} if url == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
        return LiveRequest(url, {**asked, "max_tokens": 3, **fields}, False, told.append)

    with Engine(str(talker), dtype="float32") as llm:
        assert llm.model.codec is not None
        encode, requests, rows = llm.model.codec.encode, LiveRequests({"model": "model"}), list[Sequence]()
        for name in ("encode", "encode_bare"):
            monkeypatch.setattr(
                llm.model.codec, name, lambda text: (len(text) < 100 or going.wait(20)) and encode(text)
            )
        requests.use("model", llm, OpenAIFormat("model", llm.model.codec, (), 0, {}, 0, "j"))
        for each in (request("a" * 102), request("a" * 102, n=0), request("a" * 9000), request("b")):
            requests.put(each)
        assert len(requests.take(9)) == 1
        assert told == []
        going.set()
        until(lambda: rows.extend(requests.take(9)) or len(told) == 2, 60)
    assert [row.prompt_tokens >= 102 for row in rows] == [True]
    assert [(event.status, (event.body or {})["error"]["code"]) for event in told] == [
        (400, "invalid_request"),
        (400, "context_length_exceeded"),
    ]
