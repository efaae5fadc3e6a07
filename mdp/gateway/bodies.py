"""Bodies of requests, within limits of size and time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect, Request

from mdp.gateway.refusals import Refusal, busy

#: 64 pictures of 400x400 pixels in binary, or a photograph of any camera.
MAX_BODY_BYTES = 32 * 2**20
#: Of all requests together, so that many large ones do not fill a small board's memory.
MAX_HELD_BYTES = 8 * MAX_BODY_BYTES
#: Of a multipart form.
MAX_FIELDS = 9
#: Seconds until a whole body has to be there.
BODY_S = 30.0


Buffer = bytes | bytearray | memoryview


class Bodies:
    """Reads bodies; knows how much of them is held."""

    def __init__(self) -> None:
        self._held_bytes = 0

    @asynccontextmanager
    async def held(self, request: Request) -> AsyncIterator[bytearray]:
        """The whole body, in memory once, as long as the block lasts.

        Raises Refusal: 413 too large, 408 too slow, 503 too many at once.
        """
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refusal(415, "expected a body without Content-Encoding")
        told = request.headers.get("content-length", "0")
        if told.isascii() and told.isdigit() and int(told) > MAX_BODY_BYTES:
            raise _too_large()
        content = bytearray()
        try:
            await self._fill(content, request)
            yield content
        finally:
            self._held_bytes -= len(content)

    async def _fill(self, content: bytearray, request: Request) -> None:
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    content += part
                    self._held_bytes += len(part)
                    if len(content) > MAX_BODY_BYTES:
                        raise _too_large()
                    if self._held_bytes > MAX_HELD_BYTES:
                        raise busy("too many large requests at once")
        except TimeoutError as error:
            text = f"expected the whole body within {BODY_S:g} s"
            raise Refusal(408, text, {"connection": "close"}) from error
        except ClientDisconnect as error:
            raise Refusal(400, "the connection ended before the body") from error


def _too_large() -> Refusal:
    # The rest is not read: the connection cannot be used again.
    return Refusal(
        413, f"expected a body of at most {MAX_BODY_BYTES} bytes", {"connection": "close"}
    )


class _Form:
    """Finds the one file of a multipart form, without a copy of it."""

    def __init__(self) -> None:
        self._parts: list[memoryview] = []
        self._header = [b"", b""]
        self._fields = 0
        self._is_file = False
        self._done = False

    def callbacks(self) -> Any:
        """What the parser calls."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._add(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._add(1, data[start:end]),
            "on_header_end": self._end_header,
            "on_part_data": self._data,
            "on_end": self._end,
        }

    def picture(self) -> Buffer:
        """The file's content; raises Refusal without one."""
        if not self._done:
            raise Refusal(400, "multipart form: it breaks off")
        if not any(self._parts):
            raise Refusal(400, "multipart form: expected one file with a picture, got none")
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    def _begin(self) -> None:
        self._is_file = False
        self._fields += 1
        if self._fields > MAX_FIELDS:
            raise Refusal(400, f"multipart form: expected at most {MAX_FIELDS} fields")

    def _add(self, place: int, text: bytes) -> None:
        self._header[place] += text

    def _end_header(self) -> None:
        (name, value), self._header = self._header, [b"", b""]
        if name.lower() != b"content-disposition" or b"filename" not in _options(value):
            return
        if self._parts:
            raise Refusal(400, "multipart form: expected one file with a picture, got several")
        self._is_file = True

    def _data(self, data: Buffer, start: int, end: int) -> None:
        if self._is_file:
            self._parts.append(memoryview(data)[start:end])

    def _end(self) -> None:
        self._done = True


def _options(header: bytes | str) -> dict[bytes, bytes]:
    return parse_options_header(header)[1]


def uploaded(content_type: str, body: bytearray) -> Buffer:
    """The encoded picture in `body`: the one file of a multipart form, or all; raises Refusal."""
    if not content_type.lower().startswith("multipart/form-data"):
        if not body:
            raise Refusal(400, "expected a picture, got an empty body")
        return body
    form, boundary = _Form(), _options(content_type).get(b"boundary", b"")
    if not boundary:
        raise Refusal(400, "multipart form: expected a boundary in Content-Type, got none")
    try:
        MultipartParser(boundary, form.callbacks()).write(cast(bytes, body))
    except FormParserError as error:
        raise Refusal(400, f"multipart form: {error}") from error
    return form.picture()
