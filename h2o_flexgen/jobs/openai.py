"""Requests and results as OpenAI's batch files have them.

Errors are written in every place where readers of some producer look: the status code, the body's `error`, and the
line's own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from h2o_flexgen.config.checks import shown
from h2o_flexgen.config.prompt import Prompt
from h2o_flexgen.config.response_format import ResponseFormat
from h2o_flexgen.config.sampling import LEAST_TEMPERATURE, SamplingParams
from h2o_flexgen.engine.requests.sequence import RequestOutput
from h2o_flexgen.engine.requests.tokenizer import TextCodec, TokenText, stop_in
from h2o_flexgen.errors import UsageError, required
from h2o_flexgen.folders import last_part
from h2o_flexgen.jobs.idle import asks_nothing, known
from h2o_flexgen.jobs.reasoning import SPEECH_FIELDS, Speaker, Spell, spelt
from h2o_flexgen.jobs.requests import BatchRequest, Refused, finite, seed_of, sure_text, talk_of, with_spans
from h2o_flexgen.jobs.source import BadLine, Record, custom_id_of, load_json

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_TOKENS = {COMPLETIONS: 16, CHAT: 512}
"""New tokens where a request does not say how many; of a chat the service's own default is the rest of the context."""
MOST_PROMPTS, MOST_SAMPLES, MOST_STOPS = 2048, 128, 4

_LINE = frozenset(["custom_id", "method", "url", "body"])
_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, math.inf),
}
_SAMPLING = {"max_tokens", "n", "stop", "seed", "logit_bias", "top_k", "min_tokens", "ignore_eos", "stop_token_ids"}
_SAMPLING |= _BOUNDS.keys() | {"skip_special_tokens", "logprobs", "response_format", "fold"}
_COMMON = _SAMPLING | {"model", "stream", "spans"}
_FIELDS = {
    COMPLETIONS: _COMMON | {"prompt", "echo", "best_of", "suffix"},
    CHAT: _COMMON | {"messages", "max_completion_tokens", "top_logprobs", *SPEECH_FIELDS},
}


@dataclass
class OpenAIFormat:
    """The format for one model. `model`: its name as it was typed; `served`: others that bodies may call it by; `job`:
    a text that ids are made from; `sampling`: settings in the place of the service's defaults, by their names in
    SamplingParams; `doubled`: lines whose custom_id stood in an earlier one."""

    model: str
    codec: TextCodec | None
    eos: tuple[int, ...]
    seed: int
    sampling: Mapping[str, Any]
    created: int
    job: str
    dummy: bool = False
    doubled: frozenset[int] = frozenset()
    served: tuple[str, ...] = ()

    def asked(self, record: Record) -> BatchRequest:
        """The request in a line; Refused with the field that cannot be served."""
        line = self._line(record)
        url, body = line["url"], line["body"]
        for name, value in body.items():
            if name not in _FIELDS[url] and not asks_nothing(name, value):
                why = f"is {shown(value)}, which is not supported" if known(name) else "is not known"
                raise Refused(f"the field {name!r} of the body {why}", "unsupported_field", param=name)
        fields = _Body(body)
        names = {self.model, last_part(self.model), *self.served}
        if body.get("model") is not None and fields.text("model") not in names:
            found = f"model is {shown(body['model'])}, and this job runs {self.model} (see --served-model-name)"
            raise Refused(found, "model_not_found", status=404, param="model")
        if fields.get("stream", False) is not False:
            raise Refused("stream must be false in a batch", param="stream")
        asked = self._chat(record, fields) if url == CHAT else self._completion(record, fields)
        asked.body |= {"url": url, "model": body.get("model") or self.model, "custom_id": line["custom_id"]}
        return asked

    def answer(self, record: Record, asked: BatchRequest, outputs: Sequence[Sequence[RequestOutput]]) -> dict[str, Any]:
        """A line of status 200; 500 where a sequence failed."""
        failed = next((output for each in outputs for output in each if output.error is not None), None)
        if failed is not None:
            return self.refusal(record, Refused.of_output(failed))
        chat = asked.body["url"] == CHAT
        choices = list[dict[str, Any]]()
        for prompt, samples in zip(asked.prompts, outputs, strict=True):
            # Greedy samples are all the same: they are computed once.
            repeated: list[RequestOutput | None] = [*samples] or [None]
            repeated *= asked.body["n"] if len(repeated) == 1 else 1
            for output in repeated:
                name = f"{self._id(record)} {len(choices)}"
                made = self._chat_choice(asked, output, name) if chat else self._choice(asked, prompt, output)
                made |= {"kept": output.kept} if output is not None and output.kept is not None else {}
                choices.append({"index": len(choices), **made})
        body = {
            **self.head(record, asked.body["url"], asked.body["model"]),
            "choices": choices,
            "usage": _usage(asked, outputs) | self._thought(asked, outputs),
            **({"weights": "dummy"} if self.dummy else {}),
        }
        return self._response(record, asked.body["custom_id"], 200, body)

    def head(self, record: Record, url: str, model: str | None) -> dict[str, Any]:
        """The fields that begin the answer to a record, and each part of it where it comes in parts."""
        chat = url == CHAT
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self._id(record)}",
            "object": "chat.completion" if chat else "text_completion",
            "created": self.created,
            "model": model or self.model,
            "system_fingerprint": f"h2o_flexgen-{self.job[:12]}",
        }

    def so_far(self, asked: BatchRequest, output: RequestOutput, spell: Spell = spelt) -> dict[str, str]:
        """Texts of an unfinished answer that its end will not change, by field; none where the end says what it is."""
        before = asked.prompts[output.index] if asked.body.get("echo") else ""
        if asked.scores or output.text is None or not isinstance(before, str):  # which would be decoded for each token
            return {}
        if asked.body["url"] == COMPLETIONS:
            return {"text": before + self._sure(output.text, output, asked.params)}
        if asked.body["speech"].form is not None or not self._speaker.in_order:
            return {}
        said = self._speaker.message(asked.body["speech"], output, asked.params, "", spell)
        told, marks = {name: text for name, text in said.items() if name != "role" and text}, self._speaker.marks
        return {name: self._sure(text, output, asked.params, marks) for name, text in told.items()}

    def _sure(self, text: str, output: RequestOutput, params: SamplingParams, marks: Sequence[str] = ()) -> str:
        """The start of an unfinished answer's `text`, or of a part of it, that further tokens do not change."""
        codec = required(self.codec, "a text comes from one")
        cut = stop_in(text, codec.decode, output.prompt_ids, output.token_ids, params)
        return sure_text(text if cut is None else text[: cut[0]], marks, params.stop_strings)

    def refusal(self, record: Record, why: Refused) -> dict[str, Any]:
        """A line of another status, its error in all three places."""
        why = why.by_field().of_model(self.model, self.served)
        custom_id = custom_id_of(record)
        if custom_id is None:
            why.message = f"line {record.line}: {why.message}"
        return self._response(record, custom_id, why.status, why.body())

    def _line(self, record: Record) -> dict[str, Any]:
        try:
            entry = load_json(record.data)
        except BadLine as error:
            raise Refused(f"the line {error}", "invalid_json_line") from None
        if not isinstance(entry, dict):
            raise Refused("the line is not a JSON object", "invalid_json_line")
        if not isinstance(entry.get("custom_id"), str) or not entry["custom_id"]:
            found = "custom_id is missing, or not a text"
            if not _LINE & entry.keys():
                found += f", and so are method, url and body; a prompt in {shown(sorted(entry))} is for --prompt-column"
            raise Refused(found, "missing_custom_id", param="custom_id")
        if record.line in self.doubled:
            raise Refused("custom_id stood in an earlier line", "duplicate_custom_id", param="custom_id")
        if entry.get("method") != "POST":
            raise Refused(f"method is {shown(entry.get('method'))}, needed 'POST'", "invalid_method", param="method")
        if entry.get("url") not in (COMPLETIONS, CHAT):  # which may be anything, and not hashable
            found = f"url is {shown(entry.get('url'))}, needed {COMPLETIONS!r} or {CHAT!r}"
            raise Refused(found, "invalid_url", status=404, param="url")
        if not isinstance(entry.get("body"), dict):
            raise Refused("body is not a JSON object", param="body")
        return entry

    def _completion(self, record: Record, fields: _Body) -> BatchRequest:
        prompts, spans = _prompts(fields.get("prompt")), fields.get("spans")
        if spans:
            if len(prompts) > 1:
                raise Refused(f"spans are given, and {len(prompts)} prompts", param="spans")
            prompts = [with_spans(prompts[0], spans)]
        if not asks_nothing("suffix", fields.get("suffix")):
            raise Refused("suffix is not supported", "unsupported_field", param="suffix")
        n = self._samples(fields)
        if fields.whole("best_of", n, 1, MOST_SAMPLES) != n:
            raise Refused("best_of other than n is not supported", "unsupported_field", param="best_of")
        echo = fields.switch("echo")
        logprobs = fields.get("logprobs", None if echo else self.sampling.get("logprobs"))
        logprobs = None if logprobs is None or logprobs is False else fields.whole("logprobs", logprobs, 0, 5)
        scores = fields.get("max_tokens") == 0 and echo
        if scores:
            params = SamplingParams(logprobs=logprobs or 0)
        elif echo and logprobs is not None:
            raise Refused("echo with logprobs is served with max_tokens 0 only", "unsupported_field", param="echo")
        else:
            most = fields.whole("max_tokens", self._most(COMPLETIONS), 1)
            params = self._params(record, fields, logprobs, most)
        fits = not scores and self._free(fields, "max_tokens")
        return BatchRequest(prompts, params, scores, fits, {"n": n, "echo": echo, "logprobs": logprobs})

    def _chat(self, record: Record, fields: _Body) -> BatchRequest:
        speech = self._speaker.asked(fields.body, _messages(fields.get("messages")))
        talk = talk_of(self.codec, self.model, speech.messages, fields.get("spans", ()), speech.arguments)
        usual = self.sampling.get("logprobs")
        asked = fields.switch("logprobs", usual is not None)
        logprobs = fields.whole("top_logprobs", usual or 0, 0, 20) if asked else None
        if logprobs is None and not asks_nothing("top_logprobs", fields.get("top_logprobs")):
            raise Refused("top_logprobs is given without logprobs", param="top_logprobs")
        name = "max_tokens" if fields.get("max_completion_tokens") is None else "max_completion_tokens"
        params = self._params(record, fields, logprobs, fields.whole(name, self._most(CHAT), 1), speech.form)
        params = self._speaker.thinking(speech, self._ids_of(talk.content), params)
        if isinstance(params.eos_token_id, tuple) and set(self.eos) <= set(params.eos_token_id):  # of stop_token_ids
            params = replace(params, eos_token_id=tuple(dict.fromkeys((*params.eos_token_id, *talk.ends))))
        body = {"n": self._samples(fields), "logprobs": logprobs, "speech": speech}
        return BatchRequest([talk], params, fits=self._free(fields, name), body=body)

    def _most(self, url: str) -> int:
        return int(self.sampling.get("max_new_tokens", MAX_TOKENS[url]))

    def _samples(self, fields: _Body) -> int:
        return fields.whole("n", self.sampling.get("num_return_sequences", 1), 1, MOST_SAMPLES)

    def _free(self, fields: _Body, name: str) -> bool:
        """Whether neither the request, in the field `name`, nor a flag says how many tokens are to be generated."""
        return fields.get(name) is None and "max_new_tokens" not in self.sampling

    def _params(
        self, record: Record, fields: _Body, logprobs: int | None, most: int, form: ResponseFormat | None = None
    ) -> SamplingParams:
        """The settings of one request: the service's, in which everything is sampled at temperature 1. `form`: of an
        answer that calls tools."""
        if form is not None and fields.get("response_format", {"type": "text"}) != {"type": "text"}:
            raise Refused("response_format is given beside tools: needed one of the two", param="response_format")
        typed = self.sampling
        temperature = fields.number("temperature", typed.get("temperature", 1.0))
        draws = temperature >= LEAST_TEMPERATURE and typed.get("do_sample", True)
        seed = fields.whole("seed", seed_of(self.seed, record.line), -(2**63), 2**63 - 1)
        given: dict[str, Any] = {
            **typed,
            "max_new_tokens": most,
            "do_sample": draws,
            "logprobs": logprobs,
            "seed": seed % 2**63,
            "num_return_sequences": self._samples(fields) if draws else 1,
            "stop_strings": _stops(fields.get("stop")) or typed.get("stop_strings", ()),
            "response_format": form or fields.get("response_format"),
            "fold": fields.get("fold"),
            "min_new_tokens": fields.whole("min_tokens", typed.get("min_new_tokens", 0)),
            "repetition_penalty": fields.number("repetition_penalty", typed.get("repetition_penalty", 1.0)),
            "presence_penalty": fields.number("presence_penalty", 0.0),
            "frequency_penalty": fields.number("frequency_penalty", 0.0),
            **self._ends(fields),
            **fields.biases(),
        }
        top_k = fields.whole("top_k", typed.get("top_k", 0), -1)
        top_p, min_p = (fields.number(name, typed.get(name, usual)) for name, usual in (("top_p", 1.0), ("min_p", 0.0)))
        if draws:
            given |= {"temperature": temperature, "top_k": max(0, top_k), "top_p": top_p, "min_p": min_p}
        else:
            for name in ("temperature", "top_k", "top_p", "min_p"):
                given.pop(name, None)
        if not fields.switch("skip_special_tokens", True):
            raise Refused("special tokens are never shown", "unsupported_field", param="skip_special_tokens")
        try:
            return SamplingParams(**given)
        except UsageError as error:
            raise Refused.of(error, param="response_format" if "schema" in error.found else None) from None

    def _ends(self, fields: _Body) -> dict[str, Any]:
        """Settings of the end: tokens that the request names end a sequence even where it ignores the model's own."""
        ignores = fields.switch("ignore_eos", self.sampling.get("ignore_eos", False))
        stops = fields.tokens("stop_token_ids")
        if not stops:
            return {"ignore_eos": ignores}
        return {"ignore_eos": False, "eos_token_id": tuple(stops) if ignores else (*self.eos, *stops)}

    def _choice(self, asked: BatchRequest, prompt: Any, output: RequestOutput | None) -> dict[str, Any]:
        before = self._text_of(prompt) if asked.body["echo"] else ""
        if asked.scores:
            ids = self._ids_of(prompt) if output is None else [*output.prompt_ids, *output.token_ids]
            known = [] if output is None else _logprobs(output)
            logprobs = None
            if asked.body["logprobs"] is not None:
                logprobs = self._logprobs([], ids, [None] * (len(ids) - len(known)) + known, asked)
            return {"text": before, "logprobs": logprobs, "finish_reason": "length"}
        assert output is not None, "a generated choice has an output"
        logprobs = self.logprobs(asked, output)
        return {"text": before + (output.text or ""), "logprobs": logprobs, "finish_reason": output.finish_reason}

    def _chat_choice(self, asked: BatchRequest, output: RequestOutput | None, name: str) -> dict[str, Any]:
        """`name`: the text that ids of calls are made from."""
        assert output is not None, "a generated choice has an output"
        message = self._speaker.message(asked.body["speech"], output, asked.params, name)
        reason = "tool_calls" if "tool_calls" in message and output.finish_reason == "stop" else output.finish_reason
        return {"message": message, "logprobs": self.logprobs(asked, output), "finish_reason": reason}

    def logprobs(
        self, asked: BatchRequest, output: RequestOutput, start: int = 0, at: int = 0
    ) -> dict[str, Any] | None:
        """Log-probabilities of the new tokens from `start` on; None where none are asked for. `at`: where the text of
        the token before these begins."""
        if asked.body["logprobs"] is None:
            return None
        if asked.body["url"] == COMPLETIONS:
            before = [*output.prompt_ids, *output.token_ids[:start]]
            at += len(self._told(before, len(before) - 1).text) if start else 0
            return self._logprobs(before, output.token_ids[start:], _logprobs(output, start), asked, at)
        every, content = [*output.prompt_ids, *output.token_ids], list[dict[str, Any]]()
        for place, (value, top) in enumerate(_logprobs(output, start), len(output.prompt_ids) + start):
            likeliest = [_chat_token(self._told(every, place, token), other) for token, other in top.items()]
            content.append({**_chat_token(self._told(every, place), value), "top_logprobs": likeliest})
        return {"content": content}

    @cached_property
    def _speaker(self) -> Speaker:
        return Speaker(self.codec, self.model, self.eos)

    def _thought(self, asked: BatchRequest, outputs: Sequence[Sequence[RequestOutput]]) -> dict[str, Any]:
        """Tokens of reasoning, for the usage of a chat whose answers have some."""
        every = [output for each in outputs for output in each] if asked.body["url"] == CHAT else []
        tokens = sum(map(self._speaker.reasoning_tokens, every))
        return {"completion_tokens_details": {"reasoning_tokens": tokens}} if tokens else {}

    def _logprobs(
        self, before: list[int], ids: list[int], known: list[Any], asked: BatchRequest, at: int = 0
    ) -> dict[str, Any]:
        """As the service has them for completions; None where there is no probability, as for a first token."""
        every, places = [*before, *ids], range(len(before), len(before) + len(ids))
        told = [self._told(every, place) for place in places]
        top = [each and self._likeliest(every, place, each[1]) for place, each in zip(places, known, strict=False)]
        return {
            "tokens": [each.label for each in told],
            "token_logprobs": [each and finite(each[0]) for each in known],
            "top_logprobs": top if asked.body["logprobs"] else None,
            "text_offset": list(accumulate((len(each.text) for each in told), initial=at))[:-1],
        }

    def _likeliest(self, ids: list[int], place: int, top: Mapping[int, float]) -> dict[str, float | None]:
        return {self._told(ids, place, token).label: finite(value) for token, value in top.items()}

    def _told(self, ids: list[int], place: int, other: int | None = None) -> TokenText:
        """The token at `place`, where special ones read as nothing; or an `other` one there."""
        token = ids[place] if other is None else other
        told = None if self.codec is None else self.codec.told(ids, place, token)
        if told is None or (not told.name and other is not None):
            return TokenText(f"token_id:{token}", f"token_id:{token}".encode())
        return told

    def _text_of(self, prompt: Any) -> str:
        prompt = prompt.content if isinstance(prompt, Prompt) else prompt
        if isinstance(prompt, str):
            return prompt
        return "" if self.codec is None else self.codec.decode(list(prompt))

    def _ids_of(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        return [] if self.codec is None else self.codec.encode(prompt)

    def _id(self, record: Record) -> str:
        return f"{self.job[:16]}{record.line:08x}"

    def _response(self, record: Record, custom_id: str | None, status: int, body: dict[str, Any]) -> dict[str, Any]:
        name, error = self._id(record), body.get("error")
        error = error and {"code": error["code"], "message": error["message"]}
        response = {"status_code": status, "request_id": f"req_{name}", "body": body}
        return {"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": error}


class _Body:
    """The fields of a body, checked as they are read; null is as if a field were not there."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body

    def get(self, name: str, usual: Any = None) -> Any:
        value = self.body.get(name)
        return usual if value is None else value

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise Refused(f"{name} is {shown(value)}, needed a text", param=name)
        return value

    def switch(self, name: str, usual: bool = False) -> bool:
        value = self.get(name, usual)
        if not isinstance(value, bool):
            raise Refused(f"{name} is {shown(value)}, needed true or false", param=name)
        return value

    def whole(self, name: str, usual: int, low: int = 0, high: float = math.inf) -> int:
        value = self.get(name, usual)
        if type(value) is not int or not low <= value <= high:
            most = "" if high == math.inf else f" to {high}"
            raise Refused(f"{name} is {shown(value)}, needed a whole number from {low}{most}", param=name)
        return value

    def number(self, name: str, usual: float) -> float:
        value = self.get(name, usual)
        low, high = _BOUNDS[name]
        most = min(high, sys.float_info.max)  # whole numbers have no end
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= most:
            raise Refused(f"{name} is {shown(value)}, needed a number from {low} to {high}", param=name)
        return float(value)

    def tokens(self, name: str) -> list[int]:
        value = self.get(name, [])
        if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
            raise Refused(f"{name} is {shown(value)}, needed a list of token ids", param=name)
        return value

    def biases(self) -> dict[str, Any]:
        """The setting for logit_bias; none where it does nothing."""
        biases = self.get("logit_bias", {})
        if not isinstance(biases, dict) or len(biases) > 1024:
            raise Refused("logit_bias is no object of up to 1024 tokens", param="logit_bias")
        pairs = []
        for token, value in biases.items():
            number = not isinstance(value, bool) and isinstance(value, (int, float)) and -100 <= value <= 100
            if not (token.isdecimal() and token.isascii() and len(token) < 12 and number):
                raise Refused("logit_bias needs token ids, each with a number from -100 to 100", param="logit_bias")
            pairs.append(((int(token),), float(value)))
        return {"sequence_bias": tuple(pairs)} if pairs else {}


def _prompts(given: Any) -> list[Any]:
    """The prompts of a completion: a text, ids, or a list of these."""
    if isinstance(given, str) or (isinstance(given, list) and given and all(type(each) is int for each in given)):
        return [given]
    if isinstance(given, list) and 0 < len(given) <= MOST_PROMPTS:
        if all(isinstance(each, str) for each in given):
            return given
        if all(isinstance(each, list) and all(type(token) is int for token in each) for each in given):
            return given
    raise Refused(
        f"prompt is {shown(given)}, needed a text, token ids, or a list of up to {MOST_PROMPTS} of one of these",
        param="prompt",
    )


def _messages(given: Any) -> list[dict[str, Any]]:
    """A conversation; of a content in parts the texts are joined. Refused for anything but text."""
    if not isinstance(given, list) or not given:
        raise Refused(f"messages is {shown(given)}, needed a list of messages", param="messages")
    talk = []
    for message in given:
        if not isinstance(message, dict):
            raise Refused(f"messages holds {shown(message)}, needed objects", param="messages")
        content = message.get("content")
        if isinstance(content, list):
            told = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
            texts = [part.get("text") for part in told]
            if not 0 < len(texts) == len(content) or not all(isinstance(text, str) for text in texts):
                raise Refused("messages holds content that is not text", "unsupported_field", param="messages")
            message = {**message, "content": "".join(text for text in texts if text)}
        talk.append(message)
    return talk


def _stops(given: Any) -> tuple[str, ...]:
    stops = [] if given is None or given == "" else [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise Refused(f"stop is {shown(given)}, needed a text or up to {MOST_STOPS} of them", param="stop")
    return tuple(stops)


def _usage(asked: BatchRequest, outputs: Sequence[Sequence[RequestOutput]]) -> dict[str, int]:
    """Tokens of each prompt once, and of all that was generated."""
    before = sum(len(each[0].prompt_ids) for each in outputs if each)
    new = sum(len(output.token_ids) for each in outputs for output in each)
    if asked.scores:
        before, new = before + new, 0
    return {"prompt_tokens": before, "completion_tokens": new, "total_tokens": before + new}


def _logprobs(output: RequestOutput, start: int = 0) -> list[tuple[float, dict[int, float]]]:
    """Of each new token from `start` on its log-probability, and the likeliest ones with theirs."""
    values, top = (output.logprobs or [])[start:], (output.top_logprobs or [])[start:]
    return list(zip(values, top or [{} for _ in values], strict=True))


def _chat_token(told: TokenText, value: float) -> dict[str, Any]:
    return {"token": told.name, "logprob": finite(value), "bytes": list(told.raw)}
