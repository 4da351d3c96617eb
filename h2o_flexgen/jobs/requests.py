"""Requests of any format: prompts with settings, refusals, and the text of a result once they are answered."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

from h2o_flexgen.config.prompt import Prompt
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.requests.chat import marked_chat
from h2o_flexgen.errors import ContextLengthError, UsageError
from h2o_flexgen.jobs.source import Record

if TYPE_CHECKING:
    from h2o_flexgen.engine.requests.reader import PromptLike
    from h2o_flexgen.engine.requests.sequence import RequestOutput
    from h2o_flexgen.engine.requests.tokenizer import TextCodec

_FIELDS = {"sequence_bias": "logit_bias", "min_new_tokens": "min_tokens", "max_new_tokens": "max_tokens"}
"""Settings, and the fields of a body that they are of."""
_SETTINGS = frozenset(item.name for item in fields(SamplingParams)) - _FIELDS.keys()
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


class Refused(Exception):
    """A request that gets an error for its answer; others go on. `param`: the field of the body that is at fault."""

    def __init__(
        self, message: str, code: str | None = "invalid_request", *, status: int = 400, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.code, self.status, self.param = message, code, status, param

    def body(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @classmethod
    def of(cls, error: UsageError, param: str | None = None) -> Refused:
        too_long = isinstance(error, ContextLengthError)
        return cls(str(error), "context_length_exceeded" if too_long else "invalid_request", param=param)

    @classmethod
    def of_output(cls, output: RequestOutput) -> Refused:
        """Of a sequence that failed: by what was asked of it, or by a failure here."""
        if output.fault in ("settings", "response_format"):
            return cls(str(output.error), param="response_format" if output.fault == "response_format" else None)
        return cls(str(output.error), "server_error", status=500)

    def by_field(self) -> Refused:
        """The same in the words of a body: names of settings are the program's own."""
        found = [name for name in _FIELDS if self.message.startswith(f"{name}=") or f"{name} holds" in self.message]
        first = self.message.partition(" ")[0].partition("=")[0]
        own = first if first in _SETTINGS else None
        message, param = self.message, self.param or next((_FIELDS[name] for name in found), own)
        for name, field_ in _FIELDS.items() if found else ():
            message = message.replace(name, field_)
        return Refused(message, self.code, status=self.status, param=param)

    def of_model(self, model: str, names: Iterable[str]) -> Refused:
        """The same with the id `model` in the place of paths among the model's `names`."""
        message = self.message
        for name in names:
            message = message.replace(name, model) if "/" in name else message
        return Refused(message, self.code, status=self.status, param=self.param)


def with_spans(prompt: str | list[int], spans: Any) -> PromptLike:
    """A prompt with the spans of its request. Refused where they make no sense."""
    try:
        return Prompt(prompt, spans)
    except UsageError as error:
        raise Refused.of(error, param="spans") from None


def talk_of(codec: TextCodec | None, model: str, messages: Any, spans: Any, arguments: Any = None) -> Prompt:
    """The token ids of a conversation; spans count in what the model's template makes of it, `arguments` are the
    template's. Refused as above."""
    try:
        return marked_chat(codec, model, messages, spans, "messages", arguments)
    except UsageError as error:
        param = "spans" if spans and "span" in error.found else "messages"
        param = "chat_template_kwargs" if "chat_template_kwargs" in error.found else param
        raise Refused.of(error, param=param) from None


@dataclass
class BatchRequest:
    """The prompts of one request. `scores`: their own tokens get log-probabilities, and nothing is generated."""

    prompts: list[PromptLike]
    params: SamplingParams
    scores: bool = False
    fits: bool = False
    """Nobody said how many tokens are to be generated: no more than the context leaves."""
    body: dict[str, Any] = field(default_factory=dict)
    """The fields that the format needs for its answer."""


class RequestFormat(Protocol):
    """How requests and results are written."""

    def asked(self, record: Record) -> BatchRequest:
        """The prompts and settings of a record. Refused where it cannot be answered."""

    def answer(self, record: Record, asked: BatchRequest, outputs: Sequence[Sequence[RequestOutput]]) -> dict[str, Any]:
        """The result, from the outputs of each prompt in the order of its samples."""

    def refusal(self, record: Record, why: Refused) -> dict[str, Any]:
        """The result of a request that cannot be answered, or failed."""


def seed_of(job: int, line: int) -> int:
    """The seed of a request that names none: of the job's and its line alone."""
    return int.from_bytes(hashlib.sha256(f"{job} {line}".encode()).digest()[:6])


def output_json(output: RequestOutput) -> dict[str, Any]:
    """An answer under the names of RequestOutput; log-probabilities and kept tokens if it has some."""
    found: dict[str, Any] = {"text": output.text, "token_ids": output.token_ids, "finish_reason": output.finish_reason}
    if output.logprobs is not None:
        found["logprobs"] = [finite(value) for value in output.logprobs]
    if output.top_logprobs is not None:
        found["top_logprobs"] = [
            {str(token): finite(value) for token, value in likeliest.items()} for likeliest in output.top_logprobs
        ]
    if output.kept is not None:
        found["kept"] = output.kept
    return found


def sure_text(text: str, ends: Sequence[str], stops: Sequence[str]) -> str:
    """The start of `text` that later tokens do not change: up to the first of `ends` (the caller cuts at whole
    `stops`), without a last part that may begin one of `ends` or `stops`, and without half a character."""
    text = text.rstrip("\ufffd")
    end = min([len(text), *(text.find(each) for each in ends if each in text)])
    for each in (*ends, *stops):
        begun = (count for count in range(1, min(len(each), len(text) + 1)) if text.endswith(each[:count]))
        end = min(end, len(text) - max(begun, default=0))
    return text[:end]


def finite(value: float) -> float | None:
    """JSON has no infinity: the logarithm of a probability of 0 is null."""
    return value if math.isfinite(value) else None


def line_of(result: dict[str, Any]) -> str:
    """One line by every reader's idea of a line: some end one at U+2028, U+2029 or U+0085 too. A name of a file that
    is no text has question marks."""
    text = _JSON.encode(result).encode(errors="replace").decode()
    for separator in "\u2028\u2029\x85":
        text = text.replace(separator, f"\\u{ord(separator):04x}")
    return text + "\n"
