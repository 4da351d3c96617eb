"""Single requests: read by the engine's thread while it works, run with what it runs, answered piece by piece."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

from h2o_flexgen.cli.serve.desk import ApiError
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.requests.chat import prompt_ids
from h2o_flexgen.engine.requests.reader import SAMPLE_BITS
from h2o_flexgen.engine.requests.sequence import Hooks, RequestOutput
from h2o_flexgen.engine.requests.sequence import Sequence as Row
from h2o_flexgen.engine.requests.tokenizer import UNKNOWN, Decode, TextCodec, added_text
from h2o_flexgen.jobs.job import PROMPT_BITS, OpenRequest, opened
from h2o_flexgen.jobs.openai import CHAT, OpenAIFormat
from h2o_flexgen.jobs.reasoning import spelt
from h2o_flexgen.jobs.requests import BatchRequest, Refused
from h2o_flexgen.jobs.source import Record

log = logging.getLogger(__name__)
MOST_WAITING = 256
"""Requests that are not finished; more are refused."""
_FIRST_LINE, _LINES = 1 << 31, 1 << 31
"""Numbers beyond those of lines of files."""
_TAIL = 32  # tokens
_LONG = 1 << 18  # bytes of a request whose tokens are made beside the engine's thread, for which others wait
_STOPS = "the service is being stopped"
_NONE = Record(0, None)
_NOTHING: Mapping[str, str] = {}


class LiveEvent(NamedTuple):
    """A message to a client: pieces of text of a `choice`, by field, with the log-probabilities of more of its tokens,
    or how the request ended: `status`, `body`."""

    choice: int = 0
    pieces: Mapping[str, str] = _NOTHING
    status: int = 0
    body: dict[str, Any] | None = None
    logprobs: dict[str, Any] | None = None


@dataclass(eq=False)
class LiveRequest:
    """One request. `tell` is called by the engine's thread; `streams`: pieces of text are told as they come; `gone`:
    nobody waits for it any more. It has a `form` once it has a number, and is `open` once it was read."""

    url: str
    body: dict[str, Any]
    streams: bool
    tell: Callable[[LiveEvent], None]
    gone: bool = False
    record: Record = _NONE
    form: OpenAIFormat = field(init=False)
    asked: BatchRequest | Exception | None = None
    open: OpenRequest = field(init=False)
    over: bool = False

    @property
    def head(self) -> dict[str, Any]:
        """The fields that begin all events of a stream; of a request that was read."""
        return self.form.head(self.record, self.url, self.body.get("model"))


class LiveRequests:
    """The unfinished requests. Any thread may call `put`, only the engine's all else. `wake`: called once there is
    something to read; `called`: ids of models by their names, the first one for requests that name none."""

    def __init__(self, called: Mapping[str, str]) -> None:
        self._called, self._loaded = called, ""
        self._engine: Engine
        self._form: OpenAIFormat
        self._new: deque[LiveRequest] = deque()
        self._long: SimpleQueue[LiveRequest] | None = None
        self._elsewhere: list[LiveRequest] = []
        self._lock, self._count, self._lines, self._stopped = threading.Lock(), 0, 0, False
        self._rows: deque[tuple[Row, LiveRequest]] = deque()
        self._running: dict[int, tuple[Row, LiveRequest]] = {}
        self.wake: Callable[[], None] = lambda: None

    def put(self, request: LiveRequest) -> None:
        """ApiError 429 where too many wait, 503 once the service stops."""
        with self._lock:
            if self._stopped:
                raise ApiError(503, _STOPS, code="service_stopping")
            if self._count >= MOST_WAITING:
                raise ApiError(429, f"{self._count} requests wait already", code="rate_limit_exceeded")
            self._count += 1
            self._new.append(request)
        self.wake()

    def use(self, model: str, engine: Engine, form: OpenAIFormat) -> None:
        """From now on this model answers, and those that waited for it do no longer."""
        self._loaded, self._engine, self._form = model, engine, form
        self._new.extendleft(reversed(self._elsewhere))
        self._elsewhere = []

    def unload(self) -> None:
        """From now on no model answers; sequences that wait do so until theirs is used again."""
        self._loaded = ""

    def wanted(self) -> str | None:
        """The model that the first of those waits for which the loaded one does not answer."""
        parked = [request for _, request in self._rows if not self._is_loaded(request)]
        while parked and parked[0].gone:
            parked.pop(0)  # `take` forgets it
        while self._elsewhere and self._elsewhere[0].gone:
            self._end(self._elsewhere.pop(0))
        return next((self._model_of(request) for request in (*parked, *self._elsewhere)), None)

    def lost(self, model: str, message: str) -> None:
        """Answers the requests for a model that cannot be used by an error."""
        every = {id(each): each for each in (*self._elsewhere, *(request for _, request in self._rows))}
        lost = {name: each for name, each in every.items() if self._model_of(each) == model}
        self._elsewhere = [each for each in self._elsewhere if id(each) not in lost]
        self._rows = deque(entry for entry in self._rows if id(entry[1]) not in lost)
        for request in lost.values():
            if request.record is _NONE:
                self._number(request)
            self._refuse(request, Refused(message, "model_not_loaded", status=503, param="model"))

    def stop(self) -> None:
        """The service ends: all are told that no answer comes."""
        with self._lock:
            self._stopped = True
        begun = [request for _, request in (*self._rows, *self._running.values())]
        for request in {id(each): each for each in (*self._new, *self._elsewhere, *begun)}.values():
            if request.record is _NONE:
                self._number(request)
            self._refuse(request, Refused(_STOPS, "service_stopping", status=503))

    @property
    def waiting(self) -> bool:
        return bool(self._new) or self.left

    @property
    def left(self) -> bool:
        return any(self._is_loaded(request) for _, request in self._rows)

    def read(self) -> None:
        """Makes sequences of new requests; answers requests that cannot be run."""
        while self._new:
            request = self._new.popleft()
            if request.gone:
                self._end(request)
            elif not self._is_loaded(request):
                request.asked = None
                self._elsewhere.append(request)
            else:
                self._read(request)

    def take(self, most: int, fits: Callable[[Row], bool] = lambda row: True) -> list[Row]:
        """Up to `most` of the sequences that `fits`, which now run."""
        self.read()
        taken, left = list[Row](), deque[tuple[Row, LiveRequest]]()
        for row, request in self._rows:
            if request.gone:
                self._end(request)
            elif len(taken) < most and self._is_loaded(request) and fits(row):
                self._running[row.row_id] = row, request
                taken.append(row)
            else:
                left.append((row, request))
        self._rows = left
        return taken

    def finished(self, row: Row, output: RequestOutput) -> bool:
        """A sequence has its result; False for one that is not of these."""
        if row.row_id < _FIRST_LINE << SAMPLE_BITS + PROMPT_BITS:
            return False
        _, request = self._running.pop(row.row_id, (row, None))
        if request is not None:
            request.open.outputs[row.row_id] = output
            if not request.open.waiting:
                self._answer(request)
        return True

    def again(self, rows: Iterable[Row] | None = None) -> None:
        """These, or all that were running, have to be run again from their prompts, if anyone waits for them."""
        for row_id in list(self._running) if rows is None else [row.row_id for row in rows]:
            if row_id in self._running:
                row, request = self._running.pop(row_id)
                row.restart()
                self._rows.append((row, request))

    def fail(self, rows: Iterable[Row], message: str, code: str) -> None:
        """The requests of these sequences are answered by an error."""
        every = {**self._running, **{row.row_id: (row, request) for row, request in self._rows}}
        failing = {id(entry[1]): entry[1] for row in rows if (entry := every.get(row.row_id))}
        for request in failing.values():
            self._refuse(request, Refused(message, code, status=500))
        self._running = {i: entry for i, entry in self._running.items() if id(entry[1]) not in failing}
        self._rows = deque(entry for entry in self._rows if id(entry[1]) not in failing)

    def _model_of(self, request: LiveRequest) -> str:
        """The id of the model that is asked; of one that is not known, who refuses that: the loaded one."""
        name = request.body.get("model")
        if name is None:
            return next(iter(self._called.values()))
        return self._called.get(name, self._loaded) if isinstance(name, str) else self._loaded

    def _is_loaded(self, request: LiveRequest) -> bool:
        return self._model_of(request) == self._loaded

    def _number(self, request: LiveRequest) -> None:
        """It is a line of a file without end, for the model that is loaded."""
        self._lines = (self._lines + 1) % _LINES
        body = {name: value for name, value in request.body.items() if name not in ("stream", "stream_options")}
        line = {"custom_id": "live", "method": "POST", "url": request.url, "body": body}
        request.record = Record(_FIRST_LINE + self._lines, json.dumps(line).encode())
        request.form = replace(
            self._form, created=int(time.time()), job=secrets.token_hex(16), seed=secrets.randbits(48)
        )

    def _beside(self, request: LiveRequest) -> None:
        """It comes back with its tokens, or with why it has none."""
        if self._long is None:
            self._long = SimpleQueue()
            threading.Thread(target=self._ask, args=(self._long,), name="long requests", daemon=True).start()
        self._long.put(request)

    def _ask(self, requests: SimpleQueue[LiveRequest]) -> None:
        while True:
            request = requests.get()
            if not request.gone:
                _tokenise(request)
            self._new.append(request)
            self.wake()

    def _read(self, request: LiveRequest) -> None:
        if request.asked is None:
            self._number(request)
            if len(request.record.data or b"") > _LONG:
                self._beside(request)
                return
        try:
            if isinstance(request.asked, Exception):
                raise request.asked
            request.open = opened(self._engine, request.form, request.record, request.asked)
        except Refused as why:
            self._refuse(request, why)
            return
        except Exception as error:  # of one request: all others go on
            log.exception("a request could not be read")
            self._refuse(request, Refused(type(error).__name__, "server_error", status=500))
            return
        rows = [(place, row) for place, each in enumerate(request.open.rows) for row in each]
        for place, row in rows:
            row.hooks = Hooks(row.given_ids)
            row.hooks.on_token = _Listener(self._form.codec, request, row, place)
            self._rows.append((row, request))
        if not rows:
            self._answer(request)

    def _answer(self, request: LiveRequest) -> None:
        task = request.open
        outputs = [[task.outputs[row.row_id] for row in each] for each in task.rows]
        response = request.form.answer(task.record, task.asked, outputs)["response"]
        request.tell(LiveEvent(status=response["status_code"], body=response["body"]))
        self._end(request)

    def _refuse(self, request: LiveRequest, why: Refused) -> None:
        response = request.form.refusal(request.record, why)["response"]
        request.tell(LiveEvent(status=response["status_code"], body=response["body"]))
        self._end(request)

    def _end(self, request: LiveRequest) -> None:
        with self._lock:
            self._count -= not request.over
            request.over = True


def _tokenise(request: LiveRequest) -> None:
    """Notes what a request asks for, with token ids in the place of texts where its answer has no need of these."""
    form = request.form
    try:
        asked = request.asked = form.asked(request.record)
        if form.codec is not None and not asked.body.get("echo"):
            encode = partial(prompt_ids, form.codec, where="the prompt")
            asked.prompts = [encode(each) if isinstance(each, str) else each for each in asked.prompts]
    except Exception as error:  # which the engine's thread tells, or finds again
        request.asked = request.asked or error


@dataclass
class Growing:
    """The text that tokens from the `cut`-th on add to those before it, as more and more of them come: each time a
    tail is decoded, and what is `before` it is kept."""

    decode: Decode
    cut: int = 0
    before: str = ""

    def __call__(self, ids: list[int]) -> str:
        text = self.before + added_text(self.decode, ids, self.cut)
        if len(ids) - self.cut > 2 * _TAIL and not text.endswith(UNKNOWN):
            cut = len(ids) - _TAIL
            rest = added_text(self.decode, ids, cut)
            if text.endswith(rest):  # else they begin within a character
                self.cut, self.before = cut, text[: len(text) - len(rest)]
        return text


@dataclass
class _Listener:
    """Hears of each new token of a row, the `place`-th prompt's, and tells what its answer has more of."""

    codec: TextCodec | None
    request: LiveRequest
    row: Row
    place: int
    told: Mapping[str, str] = field(default_factory=dict)
    tokens: int = 0
    """How many new tokens were told with their log-probabilities."""
    at: int = 0
    """Where the text of the last of these begins."""

    def __post_init__(self) -> None:
        self._text = self._spelt = Growing(lambda ids: "")
        if (codec := self.codec) is not None:
            self._text = Growing(codec.decode, len(self.row.given_ids))
            self._spelt = Growing(lambda ids: spelt(codec, ids))

    def __call__(self, token: int) -> None:
        request, row = self.request, self.row
        if request.gone:  # it ends with this token
            row.params = replace(row.params, max_new_tokens=len(row.token_ids), min_new_tokens=0)
        elif request.streams:
            form, asked, likely = request.form, request.open.asked, row.params.logprobs
            prompt, new = row.given_ids, row.token_ids
            # An eos after a text with a form may have a text of its own.
            ended = row.grammar is not None and token in row.eos
            text = None if self.codec is None else self._text([*prompt, *(new[:-1] if ended else new)])
            known = None if likely is None else row.logprobs, row.top_logprobs if likely else None
            output = RequestOutput(row.index, row.sample, prompt, new, text, "length", *known)
            said = form.so_far(asked, output, lambda _, ids: self._spelt(list(ids)))
            before = {name: self.told.get(name, "") for name in said}
            pieces = {name: text[len(before[name]) :] for name, text in said.items() if text.startswith(before[name])}
            pieces = {name: text for name, text in pieces.items() if text}
            self.told = {**self.told, **{name: before[name] + text for name, text in pieces.items()}}
            if not pieces:
                return
            logprobs = form.logprobs(asked, output, self.tokens, self.at)
            self.tokens = len(new)
            if logprobs is not None and logprobs.get("text_offset"):
                self.at = logprobs["text_offset"][-1]
            for index in self._indices():
                request.tell(LiveEvent(index, pieces, logprobs=logprobs))

    def _indices(self) -> Iterator[int]:
        """The choices that are this row: greedy samples are all the same, and computed once."""
        task = self.request.open
        samples, asked = len(task.rows[self.place]), int(task.asked.body["n"])
        first = self.place * asked
        yield from [first + self.row.sample] if samples > 1 else range(first, first + asked)


def chunk_of(request: LiveRequest, choice: dict[str, Any] | None, **more: Any) -> str:
    """One event of a stream, as OpenAI's services write it, with `more` fields."""
    body = {**request.head, "choices": [] if choice is None else [choice]}
    body |= {"object": "chat.completion.chunk"} if request.url == CHAT else {}
    return f"data: {json.dumps(body | more)}\n\n"
