"""Lines of batch files that cannot be served, and what is said of each."""

from __future__ import annotations

from typing import Any

from h2o_flexgen.jobs.source import LONGEST_LINE
from tests.jobs.files import request

CONTEXT = 50
BODY: dict[str, Any] = {"prompt": "abc"}


def a(name: str | None = "a", **body: Any) -> str:
    return request(name, {"model": "model", **BODY, **body})


def chat(content: Any) -> str:
    return request("a", {"messages": [{"role": "user", "content": content}]}, url="/v1/chat/completions")


def form_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


REFUSED: list[tuple[str | bytes, int, str, str | None]] = [
    ("{", 400, "invalid_json_line", None),
    ("[]", 400, "invalid_json_line", None),
    ("null", 400, "invalid_json_line", None),
    (b'{"custom_id": "\xff"}', 400, "invalid_json_line", None),
    ('{"custom_id": "\\ud800"}', 400, "invalid_json_line", None),
    ('{"custom_id": "a", "body": NaN}', 400, "invalid_json_line", None),
    ('{"custom_id": "a", "body": 1e999}', 400, "invalid_json_line", None),
    ('{"custom_id": "a", "body": 1' + "0" * 5000 + "}", 400, "invalid_json_line", None),
    ('{"custom_id": "a", "body": ' + "[" * 100_000, 400, "invalid_json_line", None),
    (b'"' + b"x" * (LONGEST_LINE + 10) + b'"', 400, "invalid_json_line", None),
    (a(None), 400, "missing_custom_id", "custom_id"),
    (a(""), 400, "missing_custom_id", "custom_id"),
    (request("a", BODY, method="GET"), 400, "invalid_method", "method"),
    (request("a", BODY, url="/v1/embeddings"), 404, "invalid_url", "url"),
    (request("a", BODY, url=["x"]), 404, "invalid_url", "url"),
    (request("a", BODY, body="x"), 400, "invalid_request", "body"),
    (a(model="other"), 404, "model_not_found", "model"),
    (a(model=3), 400, "invalid_request", "model"),
    (a(promt="x"), 400, "unsupported_field", "promt"),
    (a(tools=[{"type": "function"}]), 400, "unsupported_field", "tools"),
    (a(response_format={"type": "xml"}), 400, "invalid_request", "response_format"),
    (a(response_format=form_of({"not": {}})), 400, "invalid_request", "response_format"),
    (a(repetition_penalty=0), 400, "invalid_request", "repetition_penalty"),
    (a(repetition_penalty=10**400), 400, "invalid_request", "repetition_penalty"),
    (a(spans=[{"start": 3, "end": 3, "name": "a"}]), 400, "invalid_request", "spans"),
    (a(spans=[{"start": 3, "end": 3, "name": "a" * 999}]), 400, "invalid_request", "spans"),
    (a(spans="x" * 999), 400, "invalid_request", "spans"),
    (a(spans=["x" * 999]), 400, "invalid_request", "spans"),
    (a(prompt=["a", "b"], spans=[{"start": 0, "end": 1, "name": "a"}]), 400, "invalid_request", "spans"),
    (a(stream=True), 400, "invalid_request", "stream"),
    (a(suffix="x"), 400, "unsupported_field", "suffix"),
    (a(best_of=3), 400, "unsupported_field", "best_of"),
    (a(prompt=None), 400, "invalid_request", "prompt"),
    (a(prompt=[]), 400, "invalid_request", "prompt"),
    (a(prompt=[1, "x"]), 400, "invalid_request", "prompt"),
    (a(prompt=[True]), 400, "invalid_request", "prompt"),
    (a(prompt=[[1], [2, 3.0]]), 400, "invalid_request", "prompt"),
    (a(prompt="x" * (CONTEXT + 1)), 400, "context_length_exceeded", "prompt"),
    (a(prompt=["ok", "x" * (CONTEXT + 1)]), 400, "context_length_exceeded", "prompt"),
    (a(prompt=[13]), 400, "invalid_request", None),
    (a(max_tokens=0), 400, "invalid_request", "max_tokens"),
    (a(max_tokens="7"), 400, "invalid_request", "max_tokens"),
    (a(max_tokens=True), 400, "invalid_request", "max_tokens"),
    (a(temperature=2.5), 400, "invalid_request", "temperature"),
    (a(top_p=-1), 400, "invalid_request", "top_p"),
    (a(top_p=0, min_tokens=17), 400, "invalid_request", "min_tokens"),
    (a(n=0), 400, "invalid_request", "n"),
    (a(n=1000), 400, "invalid_request", "n"),
    (a(logprobs=6), 400, "invalid_request", "logprobs"),
    (a(logprobs=1, echo=True), 400, "unsupported_field", "echo"),
    (a(echo="yes"), 400, "invalid_request", "echo"),
    (a(stop=["a"] * 5), 400, "invalid_request", "stop"),
    (a(stop=[""]), 400, "invalid_request", "stop"),
    (a(seed=0.5), 400, "invalid_request", "seed"),
    (a(logit_bias={"x": 1}), 400, "invalid_request", "logit_bias"),
    (a(logit_bias={"3": 101}), 400, "invalid_request", "logit_bias"),
    (a(frequency_penalty=3), 400, "invalid_request", "frequency_penalty"),
    (a(stop_token_ids=[-1]), 400, "invalid_request", "stop_token_ids"),
    (a(skip_special_tokens=False), 400, "unsupported_field", "skip_special_tokens"),
    (request("a", {"messages": []}, url="/v1/chat/completions"), 400, "invalid_request", "messages"),
    (request("a", {"messages": [3]}, url="/v1/chat/completions"), 400, "invalid_request", "messages"),
    (chat([{"type": [], "text": "x"}]), 400, "unsupported_field", "messages"),
    (chat([{"type": {}, "text": "x"}, {"type": "text", "text": "x"}]), 400, "unsupported_field", "messages"),
    (chat([{"type": "text", "text": "x"}, "x"]), 400, "unsupported_field", "messages"),
    (chat([{"type": "text"}]), 400, "unsupported_field", "messages"),
    (chat([]), 400, "unsupported_field", "messages"),
    (request("a", {"prompt": "x"}, url="/v1/chat/completions"), 400, "unsupported_field", "prompt"),
]
"""Lines with the status, the code and the field of their errors."""
