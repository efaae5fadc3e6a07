"""Answers of the gateway as JSON."""

from collections.abc import Mapping

import msgspec
from starlette.responses import Response


def json_response(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A response with `content`, which msgspec encodes."""
    # As a file of text: curl leaves a terminal's cursor where the answer ends.
    body = msgspec.json.encode(content) + b"\n"
    return Response(body, status, headers=headers, media_type="application/json")
