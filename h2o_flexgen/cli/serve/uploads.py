"""A file that comes as multipart/form-data: to the disk as it comes, in constant memory, whatever its size."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from python_multipart.exceptions import FormParserError, MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from h2o_flexgen.cli.serve.desk import ApiError

PATIENCE = 60.0
"""Seconds without a byte, after which a client is given up."""
_WRITTEN_AT_ONCE = 1 << 20
_LONGEST_FIELD, _MOST_PARTS, _LONGEST_NAME = 4096, 32, 255


async def pieces(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The pieces of a body. ApiError 408 where none comes for so long."""
    while True:
        try:
            async with asyncio.timeout(PATIENCE):
                piece = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise ApiError(408, f"nothing came for {PATIENCE:.0f} s", code="request_timeout") from None
        yield piece


async def whole_body(stream: AsyncIterator[bytes], most: int) -> bytes:
    """A short body. ApiError 413 where it is longer than `most` bytes, 408 as above."""
    body = bytearray()
    async for piece in pieces(stream):
        body += piece
        if len(body) > most:
            raise too_large(most)
    return bytes(body)


async def receive(stream: AsyncIterator[bytes], content_type: str, path: Path, most: int) -> FormReader:
    """Writes the file of a form to `path`, at most `most` bytes; the caller removes it where this raises.

    ApiError 400 for what is no such form, 413 for a file that is too long, 408 for a client that is too slow.
    """
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise ApiError(400, "the body must be multipart/form-data, with a file", "file")
    reader = FormReader(most)
    try:
        parser = MultipartParser(options[b"boundary"], reader.callbacks())
    except FormParserError as error:
        raise ApiError(400, f"the body is not a form: {error}") from None
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        async for piece in pieces(stream):
            try:
                parser.write(piece)
            except MultipartParseError as error:
                raise ApiError(400, f"the body is not a form: {error}") from None
            if len(reader.waiting) >= _WRITTEN_AT_ONCE:
                await asyncio.to_thread(_write, fd, reader.taken())
        if not reader.ended:
            raise ApiError(400, "the body ends in the middle of a form")
        await asyncio.to_thread(_write, fd, reader.taken(), True)
    finally:
        os.close(fd)
    return reader


def too_large(most: int) -> ApiError:
    return ApiError(413, f"this is longer than {most:,} bytes", code="too_large")


def _write(fd: int, data: bytes, last: bool = False) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    if last:
        os.fsync(fd)


class FormReader:
    """The callbacks of a form's parser, and their results: `fields`, the `filename` of the file, None where there was
    none, and its bytes that are `waiting` to be written."""

    def __init__(self, most: int) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.waiting, self.ended = bytearray(), False
        self._left, self._parts, self._most = most, 0, most
        self._headers: dict[bytes, bytes] = {}
        self._header, self._value = bytearray(), bytearray()
        self._name: str | None = None
        self._text = bytearray()

    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_end,
            "on_end": self._finish,
        }

    def taken(self) -> bytes:
        """The bytes that wait, which no longer do."""
        data, self.waiting = bytes(self.waiting), bytearray()
        return data

    def _begin(self) -> None:
        self._headers, self._name, self._text = {}, None, bytearray()
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise ApiError(400, f"the form has more than {_MOST_PARTS} parts")

    def _header_end(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._header, self._value = bytearray(), bytearray()

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name == "file":
            if self.filename is not None:
                raise ApiError(400, "the form has two files", "file")
            shown = options.get(b"filename", b"").decode("utf-8", "replace")
            # The name alone: a path before it, with slashes of either kind, is of the client's machine.
            self.filename = shown.replace("\\", "/").rpartition("/")[2][:_LONGEST_NAME] or "upload"
        else:
            self._name = name

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name is None:
            self._left -= end - start
            if self._left < 0:
                raise too_large(self._most)
            self.waiting += memoryview(data)[start:end]
            return
        self._text += data[start:end]
        if len(self._text) > _LONGEST_FIELD:
            raise ApiError(400, f"a field of the form is longer than {_LONGEST_FIELD} bytes", self._name[:80])

    def _end(self) -> None:
        if self._name is not None:
            self.fields[self._name] = self._text.decode("utf-8", "replace")

    def _finish(self) -> None:
        self.ended = True
