"""The service's HTTP: who may ask, what is answered, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import base64
import binascii
import errno
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import h2o_flexgen
from h2o_flexgen.cli.serve.arguments import ServeArguments
from h2o_flexgen.cli.serve.desk import UNFINISHED, ApiError, Desk, Entry, expiry_of, shown
from h2o_flexgen.cli.serve.live import LiveEvent, LiveRequest, LiveRequests, chunk_of
from h2o_flexgen.cli.serve.uploads import pieces, receive, whole_body
from h2o_flexgen.jobs.forecast import Percentiles, seconds_text
from h2o_flexgen.jobs.openai import CHAT, COMPLETIONS
from h2o_flexgen.jobs.source import LONGEST_LINE, BadLine, load_json
from h2o_flexgen.pages.jobs import jobs_page

_FORM_ROOM = 1 << 20
"""Bytes of a form beside its file."""
_LINGER_BYTES, _LINGER_S = 64 << 20, 5.0
"""Of the body of a request that is refused: read, so that its client gets to the answer."""
_REALM = 'Basic realm="h2o_flexgen", charset="UTF-8"'


def make_app(arguments: ServeArguments, desk: Desk, live: LiveRequests) -> ASGIApp:
    """The whole service. Handlers that are no coroutines run in threads, since they write to the disk."""
    service = _Service(arguments, desk, live)
    routes = [
        Route("/", service.page),
        Route("/health", service.health),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.model),
        Route("/v1/files", service.upload, methods=["POST"]),
        Route("/v1/files", _page_of(desk.list_files)),
        Route("/v1/files/{name}", service.delete_file, methods=["DELETE"]),
        Route("/v1/files/{name}", _entry_of(desk.file)),
        Route("/v1/files/{name}/content", service.content),
        Route("/v1/batches", service.create_batch, methods=["POST"]),
        Route("/v1/batches", _page_of(desk.list_batches)),
        Route("/v1/batches/{name}", _entry_of(desk.batch)),
        Route("/v1/batches/{name}/cancel", _entry_of(desk.cancel), methods=["POST"]),
        Route(CHAT, service.answer, methods=["POST"]),
        Route(COMPLETIONS, service.answer, methods=["POST"]),
    ]
    handlers: Any = {ApiError: _refused, HTTPException: _http, OSError: _disk, Exception: _bug}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Guard(app, arguments.api_key, arguments.host)


def _page_of(listed: Callable[[Mapping[str, str]], Entry]) -> Callable[[Request], Response]:
    return lambda request: JSONResponse(listed(request.query_params))


def _entry_of(named: Callable[[str], Entry]) -> Callable[[Request], Response]:
    return lambda request: JSONResponse(shown(named(request.path_params["name"])))


class Guard:
    """Lets those in who have the key, and no page of another site: a browser sends what any page tells it to."""

    def __init__(self, app: ASGIApp, key: str | None, host: str) -> None:
        self._app, self._key = app, None if key is None else key.encode()
        self._hosts = {"localhost", "127.0.0.1", "[::1]", host.lower(), f"[{host.lower()}]"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            self._check(scope["method"], scope["path"], Headers(scope=scope))
        except ApiError as error:
            await _drained(Request(scope, receive).stream())
            headers = {"WWW-Authenticate": _REALM if scope["path"] == "/" else "Bearer"} if error.status == 401 else {}
            await JSONResponse(error.body(), error.status, headers)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        host = headers.get("host", "").lower()
        origin = headers.get("origin")
        if origin is not None and _host_of(origin) != host:
            raise ApiError(403, "pages of other sites may not ask", code="forbidden_origin")
        if self._key is None:
            name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
            if name not in self._hosts:
                raise ApiError(403, "without a key only this machine's own names are answered", code="forbidden_host")
        elif path != "/health":
            given = _key_of(headers.get("authorization", ""), basic=method in ("GET", "HEAD"))
            if not hmac.compare_digest(given, self._key):
                found = "Incorrect API key provided." if given else "You didn't provide an API key."
                raise ApiError(401, f"{found} It is sent as: Authorization: Bearer KEY", code="invalid_api_key")


def _host_of(origin: str) -> str | None:
    """The host and port of an address; None for what is no address."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _key_of(header: str, *, basic: bool) -> bytes:
    """The key of a header, empty where there is none; of a browser's dialogue it is the password."""
    kind, _, value = header.partition(" ")
    if kind.lower() == "bearer":
        return value.strip().encode("latin-1")
    if kind.lower() == "basic" and basic:
        with suppress(binascii.Error, ValueError):
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    return b""


class _Service:
    """The handlers of all paths."""

    def __init__(self, arguments: ServeArguments, desk: Desk, live: LiveRequests) -> None:
        self._models, self._called, self._most = list(arguments.models), arguments.called, arguments.max_file
        self._listed = dict.fromkeys((*self._models, *arguments.jobs.served_model_name))  # no folders
        self._desk, self._live = desk, live
        self._started = int(time.time())

    def page(self, request: Request) -> Response:
        page = jobs_page(self._models, list(self._desk.batches.values()), _left_text, self._desk.files)
        return HTMLResponse(page.html, headers={"Content-Security-Policy": page.policy, **_PRIVATE})

    def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "version": h2o_flexgen.__version__})

    def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self._listed]})

    def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._called:
            raise ApiError(404, f"The model '{name[:80]}' does not exist.", "model", "model_not_found")
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._started, "owned_by": "h2o_flexgen"}

    # Files

    async def upload(self, request: Request) -> Response:
        length = request.headers.get("content-length", "")
        stream, path = request.stream(), self._desk.new_upload()
        try:
            if length.isdecimal() and int(length) > self._most + _FORM_ROOM:
                raise ApiError(413, f"this is longer than {self._most:,} bytes", "file", "too_large")
            came = await receive(stream, request.headers.get("content-type", ""), path, self._most)
            if came.filename is None:
                raise ApiError(400, "the form has no file", "file")
            if came.fields.get("purpose") != "batch":
                raise ApiError(400, "purpose must be 'batch'", "purpose")
            parts = [came.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds")]
            seconds = int(parts[1]) if parts[1] and parts[1].isdecimal() and len(parts[1]) < 12 else parts[1]
            lives_s = None if parts == [None, None] else expiry_of({"anchor": parts[0], "seconds": seconds})
            add = self._desk.add_file
            return JSONResponse(shown(await asyncio.to_thread(add, path, came.filename, "batch", lives_s)))
        except ApiError as error:
            if error.status != 408:
                await _drained(stream)
            raise
        finally:
            path.unlink(missing_ok=True)

    def delete_file(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._desk.delete_file(name)
        return JSONResponse({"id": name, "object": "file", "deleted": True})

    def content(self, request: Request) -> Response:
        path = self._desk.content(request.path_params["name"])
        headers = {"X-Content-Type-Options": "nosniff", **_PRIVATE}
        return FileResponse(path, media_type="application/octet-stream", filename=f"{path.name}.jsonl", headers=headers)

    # Batches

    async def create_batch(self, request: Request) -> Response:
        body = await _json(request)
        return JSONResponse(shown(await asyncio.to_thread(self._desk.create_batch, body)))

    # Single requests

    async def answer(self, request: Request) -> Response:
        """The engine's thread answers: the first thing that it says decides the status."""
        body = await _json(request)
        if not isinstance(body, dict):
            raise ApiError(400, "the body is not a JSON object")
        streams, usage = _streams(body)
        loop, events = asyncio.get_running_loop(), asyncio.Queue[LiveEvent]()

        def tell(event: LiveEvent) -> None:
            with suppress(RuntimeError):  # the service ends
                loop.call_soon_threadsafe(events.put_nowait, event)

        asked = LiveRequest(request.url.path, body, streams, tell)
        self._live.put(asked)
        first = await _or_gone(events.get(), request, asked)
        if first is None:
            return Response(status_code=499)
        if first.body is not None and (first.status != 200 or not streams):
            return JSONResponse(first.body, first.status)
        return StreamingResponse(_stream(asked, first, events, usage), media_type="text/event-stream", headers=_PRIVATE)


_PRIVATE = {"Cache-Control": "no-store"}
_STREAM_OPTIONS = ("include_usage", "include_obfuscation")
"""Of which the second pads events of a service elsewhere, and does nothing here."""


def _streams(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether an answer comes in pieces, and its usage behind them. ApiError 400 where that is not clear."""
    streams, options = body.get("stream"), body.get("stream_options")
    if not (streams is None or isinstance(streams, bool)):
        raise ApiError(400, "stream must be true or false", "stream")
    options = {} if options is None else options
    fits = isinstance(options, dict) and all(name in _STREAM_OPTIONS for name in options)
    if not fits or not all(value is None or isinstance(value, bool) for value in options.values()):
        needed = f"an object of {' and '.join(_STREAM_OPTIONS)}, each true or false"
        raise ApiError(400, f"stream_options must be {needed}", "stream_options")
    return streams is True, options.get("include_usage") is True


def _left_text(batch: Mapping[str, Any]) -> str:
    """How long a batch takes, in words; empty where that is not known, or the batch is over."""
    told = {name: Percentiles(**each) for name in ("starts", "left") if (each := (batch["forecast"] or {}).get(name))}
    if "left" not in told or batch["status"] not in UNFINISHED:
        return ""
    left = seconds_text(told["left"])
    return f"begins in {seconds_text(told['starts'])}, done in {left}" if "starts" in told else f"{left} left"


async def _or_gone(waited: Awaitable[LiveEvent], request: Request, asked: LiveRequest) -> LiveEvent | None:
    """The event that is `waited` for; None once the client has gone, and `asked` is marked so."""
    task = asyncio.ensure_future(waited)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        asked.gone = True
        return None
    finally:
        for each in (task, gone):
            each.cancel()


async def _gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stream(
    asked: LiveRequest, first: LiveEvent, events: asyncio.Queue[LiveEvent], usage: bool
) -> AsyncIterator[str]:
    """The events of a stream: the pieces as they come, then what the whole answer has beyond them."""
    chat, told, tokens = asked.url == CHAT, dict[tuple[int, str], str](), dict[int, int]()
    more = {"usage": None} if usage else {}

    def piece(index: int, said: Mapping[str, Any], logprobs: Any) -> str:
        begun = any(choice == index for choice, _ in told)
        told.update({(index, name): told.get((index, name), "") + text for name, text in said.items()})
        if chat and not begun:
            said = {"role": "assistant", "content": "", **said}
            told.setdefault((index, "content"), "")
        tokens[index] = tokens.get(index, 0) + (len(logprobs["content" if chat else "tokens"]) if logprobs else 0)
        shown = {"delta": said} if chat else {"text": "", **said}
        return chunk_of(asked, {"index": index, **shown, "logprobs": logprobs, "finish_reason": None}, **more)

    try:
        event = first
        while event.body is None:
            yield piece(event.choice, event.pieces, event.logprobs)
            event = await events.get()
        if event.status != 200:
            yield f"data: {json.dumps(event.body)}\n\n"
            return
        for choice in event.body["choices"]:
            index, message = choice["index"], choice["message"] if chat else {"text": choice["text"]}
            whole = {name: text for name, text in message.items() if isinstance(text, str) and name != "role"}
            rest = {name: _beyond(told.get((index, name), ""), text) for name, text in whole.items()}
            rest = {name: text for name, text in rest.items() if text}
            since, logprobs = tokens.get(index, 0), choice["logprobs"]
            if logprobs is not None:
                logprobs = {name: each and each[since:] for name, each in logprobs.items()}
                logprobs = logprobs if any(logprobs.values()) else None
            if rest or logprobs is not None or not any(each == index for each, _ in told):
                yield piece(index, rest, logprobs)
            calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
            last: dict[str, Any] = {"delta": {"tool_calls": calls} if calls else {}} if chat else {"text": ""}
            ends = {"finish_reason": choice["finish_reason"]}
            yield chunk_of(asked, {"index": index, **last, "logprobs": None, **ends}, **more)
        if usage:
            yield chunk_of(asked, None, usage=event.body["usage"])
        yield "data: [DONE]\n\n"
    finally:
        asked.gone = True  # or answered, which is as well


def _beyond(told: str, text: str) -> str:
    """`text` from where it is another than what was told, which bytes that became no character may have changed: that
    cannot be taken back."""
    same = zip(told, text, strict=False)
    return text[next((i for i, (one, other) in enumerate(same) if one != other), min(len(told), len(text))) :]


async def _json(request: Request) -> Any:
    stream = request.stream()
    try:
        return load_json(await whole_body(stream, LONGEST_LINE))
    except ApiError as error:
        if error.status == 413:
            await _drained(stream)
        raise
    except BadLine as error:
        raise ApiError(400, f"the body {error}", code="invalid_json") from None


async def _drained(stream: AsyncIterator[bytes]) -> None:
    """Reads on for a while, and keeps nothing: who is still sending does not listen yet."""
    count = 0
    with suppress(ApiError, TimeoutError, ClientDisconnect, RuntimeError):
        async with asyncio.timeout(_LINGER_S):
            async for piece in pieces(stream):
                count += len(piece)
                if count > _LINGER_BYTES:
                    return


def _refused(request: Request, error: Any) -> Response:
    return JSONResponse(error.body(), error.status)


def _http(request: Request, error: Any) -> Response:
    found = {404: "there is nothing at this address", 405: f"{request.method[:16]} is not for this address"}
    told = ApiError(error.status_code, found.get(error.status_code, str(error.detail)))
    return JSONResponse(told.body(), error.status_code, error.headers)


def _disk(request: Request, error: Any) -> Response:
    number = error.errno or getattr(error.__cause__, "errno", None)
    full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    found = f"the data folder: {error.strerror or error}"
    return _refused(request, ApiError(507 if full else 500, found, code="storage_failed"))


def _bug(request: Request, error: Any) -> Response:
    return _refused(request, ApiError(500, f"{type(error).__name__}", code="internal_error"))
