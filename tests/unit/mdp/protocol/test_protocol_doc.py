"""docs/reference/protocol.md and mdp/protocol/messages.py say the same."""

import re
from pathlib import Path
from typing import get_args

import pytest

from mdp.protocol import masking, recording, rest, transfer
from mdp.protocol import messages as wire
from mdp.transport import sockets, zap
from mdp.transport.admission import pending as pending

PAGE = (Path(__file__).parents[4] / "docs" / "reference" / "protocol.md").read_text()
KINDS = (
    wire.Infer,
    wire.StatusRequest,
    wire.Result,
    wire.Failure,
    wire.Status,
    wire.FrameRequest,
    wire.FrameReply,
    transfer.BundleRequest,
    transfer.BundlePiece,
    transfer.BundleRead,
    transfer.BundleState,
    transfer.BundleContent,
    transfer.BundleRefusal,
    recording.PictureRequest,
    recording.PictureReply,
    rest.RestRequest,
    rest.RestReply,
    masking.MaskRequest,
    masking.MaskReply,
)


def test_version_and_magic() -> None:
    assert f"# Protocol, version {wire.VERSION}" in PAGE
    assert f"`{wire.MAGIC.hex(' ').upper()}`" in PAGE
    assert f"(`{wire.VERSION:02X}`)" in PAGE


def test_limits() -> None:
    assert f"{wire.MAX_HEADER_BYTES:,}" in PAGE
    assert f"{wire.MAX_BUFFER_BYTES:,}" in PAGE
    assert f"1 to {wire.MAX_CLASSES:,}" in PAGE
    assert f"{transfer.PIECE_BYTES:,} bytes" in PAGE
    assert f"{wire.request_frame_bytes(4):,} bytes at least" in PAGE
    assert f"{wire.reply_frame_bytes(2):,} bytes at least" in PAGE
    assert f"more than\n{pending.MAX_PENDING:,} that" in PAGE
    assert f"{recording.LEAST_SIDE} to {recording.MOST_SIDE:,}" in PAGE
    assert f"after {sockets.HANDSHAKE_MS // 1000} s" in PAGE
    assert f"domain is `{zap.DOMAIN.decode()}`" in PAGE


def test_every_kind_is_listed_with_its_buffers() -> None:
    rows = re.findall(r"^\| (\d+) \| (\w+) \| \w+, \w+ \| (\d)", PAGE, flags=re.MULTILINE)
    assert rows == [(str(kind.kind), kind.__name__, str(kind.buffers)) for kind in KINDS]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_header_key_is_described(kind: type[wire.Message]) -> None:
    section = PAGE.split(f"**{kind.__name__}**")[1].split("\n**")[0]
    for key in kind.__struct_fields__:
        assert f"`{key}`" in section, f"{kind.__name__}.{key} is not described"


def test_every_failure_code_is_described() -> None:
    for code in get_args(wire.FailureCode):
        assert f"| `{code}` |" in PAGE


def test_every_state_is_named() -> None:
    for state in get_args(wire.State):
        assert f"`{state}`" in PAGE
