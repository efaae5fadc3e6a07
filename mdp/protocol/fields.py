"""Types of header keys that several kinds of messages have."""

from typing import Annotated

from msgspec import Meta

from mdp.files import Record

RequestId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
MAX_MILLISECONDS = 1e9
Milliseconds = Annotated[float, Meta(ge=0, le=MAX_MILLISECONDS)]
Text = Annotated[str, Meta(max_length=1024)]


def check_printable(record: Record, *keys: str) -> None:
    """Raise ValueError for control characters, which terminals execute."""
    for key in keys:
        if not getattr(record, key).isprintable():
            raise ValueError(f"`{key}`: expected printable characters only")
