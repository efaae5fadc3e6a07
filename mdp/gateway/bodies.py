"""Bodies of requests, within limits of size and time."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from python_multipart.exceptions import FormParserError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from mdp.gateway.refusals import Refusal, busy

#: 64 pictures of 400x400 pixels in binary, or a photograph of any camera.
MAX_BODY_BYTES = 32 * 2**20
#: Of all requests together, so that many large ones do not fill a small board's memory.
MAX_HELD_BYTES = 8 * MAX_BODY_BYTES
#: Seconds until a whole body has to be there.
BODY_S = 30.0


class Bodies:
    """Reads bodies; knows how much of them is held."""

    def __init__(self) -> None:
        self._held_bytes = 0

    @asynccontextmanager
    async def held(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body, as long as the block lasts.

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
            yield bytes(content)
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


class _Parser(MultiPartParser):
    # Nothing goes to a disk, which may be read-only.
    spool_max_size = MAX_BODY_BYTES


async def uploaded(content_type: str, body: bytes) -> bytes:
    """The encoded picture in `body`: the one file of a multipart form, or all; raises Refusal."""
    if not content_type.lower().startswith("multipart/form-data"):
        if not body:
            raise Refusal(400, "expected a picture, got an empty body")
        return body

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body
        yield b""

    headers = Headers({"content-type": content_type})
    try:
        form = await _Parser(headers, stream(), max_files=1, max_fields=8).parse()
    except (MultiPartException, FormParserError, KeyError, ValueError) as error:
        raise Refusal(400, f"multipart form: {getattr(error, 'message', error)}") from error
    for _, value in form.multi_items():
        if isinstance(value, UploadFile) and (picture := await value.read()):
            await form.close()
            return picture
    raise Refusal(400, "multipart form: expected one file with a picture, got none")
