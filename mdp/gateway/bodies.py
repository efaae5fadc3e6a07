"""Bodies of requests, within limits of size and time."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from email.message import Message
from email.parser import BytesHeaderParser

from starlette.requests import ClientDisconnect, Request

from mdp.gateway.places import Claim, Pool
from mdp.gateway.refusals import Refusal, busy

#: 64 pictures of 400x400 pixels in binary, or a photograph of any camera.
MAX_BODY_BYTES = 32 * 2**20
#: Of all requests together, so that many large ones do not fill a small board's memory.
MAX_HELD_BYTES = 8 * MAX_BODY_BYTES
#: Of JSON, which takes many times its text and holds all threads up while it is decoded.
MAX_JSON_BYTES = 2 * 2**20
#: Of the switch of a device.
MAX_SWITCH_BYTES = 1024
#: Of a multipart form: its fields, each one's headers, the form's own header and its boundary,
#: which is RFC 2046's. The parser of headers is quadratic in their length.
MAX_FIELDS, MAX_FIELD_HEADER_BYTES, MAX_FORM_HEADER_BYTES, MAX_BOUNDARY_BYTES = 9, 2048, 256, 70
#: Seconds until a whole body has to be there.
BODY_S = 30.0


Buffer = bytes | bytearray | memoryview


class Bodies:
    """Reads bodies; knows how much of them is held, and by whom."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, copies: int = 1) -> None:
        """Bodies of which so many `copies` are in memory at a time."""
        self._pool, self._clock = Pool(MAX_HELD_BYTES // copies), clock

    @asynccontextmanager
    async def hold(
        self, request: Request, most_bytes: int, what: str = "a body"
    ) -> AsyncIterator[bytearray]:
        """The whole body, in memory once, as long as the block lasts; `what` names it in errors.

        Raises Refusal: 413 too large, 408 too slow, 503 too many at once. Where these are too many,
        others' unfinished bodies are given up for this one, or this one, by the rule of `Pool`.
        """
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refusal(415, "expected a body without Content-Encoding")
        told = request.headers.get("content-length", "0")
        if told.isascii() and told.isdigit() and int(told) > most_bytes:
            raise too_large(what, most_bytes)
        content = bytearray()
        claim = Claim(getattr(request.state, "caller", ""), self._clock())
        try:
            await self._fill(content, request, claim, most_bytes, what)
            claim.busy = True
            yield content
        finally:
            self._pool.release(claim)

    async def _fill(
        self, content: bytearray, request: Request, claim: Claim, most_bytes: int, what: str
    ) -> None:
        given_up = False
        try:
            async with asyncio.timeout(BODY_S) as limit:

                def give_up() -> None:
                    nonlocal given_up
                    given_up = True
                    content.clear()
                    if not limit.expired():
                        limit.reschedule(asyncio.get_running_loop().time())

                claim.leave = give_up
                async for part in request.stream():
                    if given_up:
                        # It went on before it was told.
                        raise TimeoutError
                    claim.moved_s = self._clock()
                    if len(content) + len(part) > most_bytes:
                        raise too_large(what, most_bytes)
                    if part and not self._pool.take(claim, len(part)):
                        raise busy("too many large requests at once")
                    content += part
        except TimeoutError as error:
            text = f"expected the whole body within {BODY_S:g} s"
            if given_up:
                text = "expected a body that does not stop while others wait for room"
            raise Refusal(408, text, {"connection": "close"}) from error
        except ClientDisconnect as error:
            raise Refusal(400, "the connection ended before the body") from error


def too_large(what: str, most_bytes: int) -> Refusal:
    """413 for `what` of more than `most_bytes`."""
    # The rest is not read: the connection cannot be used again.
    return Refusal(413, f"expected {what} of at most {most_bytes} bytes", {"connection": "close"})


def parse_upload(content_type: str, body: bytearray) -> Buffer:
    """The encoded picture in `body`: the one file of a multipart form, or all; raises Refusal."""
    if not content_type.lower().startswith("multipart/form-data"):
        if not body:
            raise Refusal(400, "expected a picture, got an empty body")
        return body
    header = Message()
    header["content-type"] = content_type[:MAX_FORM_HEADER_BYTES]
    boundary = (_parameter(header, "boundary", "content-type") or "").encode("latin-1", "replace")
    if not 0 < len(boundary) <= MAX_BOUNDARY_BYTES:
        raise Refusal(
            400,
            "multipart form: expected a boundary of 1 to "
            f"{MAX_BOUNDARY_BYTES} characters in Content-Type",
        )
    return _file_of(body, b"--" + boundary)


def _file_of(body: bytearray, delimiter: bytes) -> Buffer:
    """The content of the one file in a form, without a copy of it; raises Refusal.

    Each byte is looked at once, by `find`, and so often as there may be fields.
    """
    if not body.startswith(delimiter):
        raise Refusal(400, "multipart form: expected its boundary at the start")
    found: list[memoryview] = []
    at = len(delimiter)
    fields = 0
    while not body.startswith(b"--", at):
        fields += 1
        if fields > MAX_FIELDS:
            raise Refusal(400, f"multipart form: expected at most {MAX_FIELDS} fields")
        end = body.find(b"\r\n\r\n", at, at + MAX_FIELD_HEADER_BYTES)
        whole = len(body) >= at + MAX_FIELD_HEADER_BYTES or end >= 0
        if whole and (end < 0 or not body.startswith(b"\r\n", at)):
            raise Refusal(400, "multipart form: expected a field's headers after its boundary")
        content = end + len(b"\r\n\r\n")
        end_of_content = body.find(b"\r\n" + delimiter, content) if whole else -1
        if end_of_content < 0:
            raise Refusal(400, "multipart form: it breaks off")
        if _is_file(bytes(body[at:end])):
            found.append(memoryview(body)[content:end_of_content])
        at = end_of_content + len(b"\r\n" + delimiter)
    if len(found) > 1:
        raise Refusal(400, "multipart form: expected one file with a picture, got several")
    if not found or not found[0]:
        raise Refusal(400, "multipart form: expected one file with a picture, got none")
    return found[0]


def _is_file(headers: bytes) -> bool:
    """Tell whether a field's headers name a file."""
    parsed = BytesHeaderParser().parsebytes(headers.lstrip())
    return _parameter(parsed, "filename", "content-disposition") is not None


def _parameter(message: Message, name: str, header: str) -> str | None:
    """A header's parameter as it was sent, None without it.

    Unlike `get_filename` and `get_boundary`, which raise ValueError for a character set that
    nobody can have (RFC 2231), this decodes none.
    """
    value = message.get_param(name, header=header)
    return value[2] if isinstance(value, tuple) else value
