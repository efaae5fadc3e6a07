"""Messages between a gateway and its workers, byte for byte."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from mdp.errors import (
    AgentError,
    DeadlineExceeded,
    InputError,
    MDPError,
    PictureError,
    QuorumNotMet,
    WireError,
)
from mdp.gateway import handover
from mdp.gateway.handover import (
    Answered,
    Asked,
    DevicesLeftOut,
    Opening,
    WorkerFleet,
    WorkerReady,
    ask,
    encode,
    error_of,
    failure_of,
    pictures_of,
    read_from_worker,
    read_to_worker,
)
from mdp.pictures.crop import Picture
from mdp.requests.prediction import MemberTiming, Prediction
from mdp.testing.bundles import colour_picture

ANSWER = Prediction(
    label="red", probability=0.75, top=(("red", 0.75), ("blue", 0.25)), mode="stacked",
    used=("alpha",), missing={"gamma": "late"}, missing_codes={"gamma": "late"},
    expected_accuracy=0.5, latency_ms=30.0, deadline_ms=100.0, bundle="ab", known=False,
    members=(
        MemberTiming(
            device="alpha", k=0, queue_ms=1.0, compute_ms=20.0, network_ms=4.0, anomaly_map=b"\x01"
        ),
    ),
)  # fmt: skip


def read(reading: Any, *parts: bytes | bytearray | memoryview) -> Any:
    """Read `parts`, behind which nothing comes, by `reading`."""

    async def run() -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(b"".join(parts))
        reader.feed_eof()
        found: Coroutine[Any, Any, Any] = reading(reader)
        return await found

    return asyncio.run(run())


def test_a_request_with_a_file_and_pixels() -> None:
    pixels, file = colour_picture("green"), bytearray(b"a file")
    # A view of more, as an upload in a form is, and pixels that are not contiguous.
    pictures: list[Picture] = [memoryview(file)[2:], pixels, pixels[:, ::2]]
    message, content = read(read_to_worker, *ask(7, "colours", pictures, 80.0, 12.5, "00-a"))
    assert isinstance(message, Asked)
    told = (message.number, message.model, message.deadline_ms, message.at_s, message.traceparent)
    assert told == (7, "colours", 80.0, 12.5, "00-a")
    found = pictures_of(message, content)
    assert found[0] == b"file"
    np.testing.assert_array_equal(found[1], pixels)
    np.testing.assert_array_equal(found[2], pixels[:, ::2])


@pytest.mark.parametrize(
    "message",
    [
        Opening(fleets={"porch": WorkerFleet(path="fleet.toml", key="secret")}, slots=2),
        DevicesLeftOut(model="porch", devices=["alpha"]),
    ],
)
def test_messages_to_a_worker(message: Opening | DevicesLeftOut) -> None:
    assert read(read_to_worker, *encode(message)) == (message, b"")


@pytest.mark.parametrize("message", [WorkerReady(), Answered(number=3, answers=[ANSWER, ANSWER])])
def test_messages_from_a_worker(message: WorkerReady | Answered) -> None:
    assert read(read_from_worker, *encode(message)) == message


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (DeadlineExceeded("no answer", {"alpha": "late"}, {"alpha": "late"}), DeadlineExceeded),
        (QuorumNotMet("nobody", {"alpha": "failed: it"}), QuorumNotMet),
        (PictureError("expected a picture"), PictureError),
        (InputError("closed"), InputError),
        # As the nearest kind that a gateway tells apart.
        (AgentError("a provider"), MDPError),
    ],
)
def test_errors_arrive_as_they_were(error: MDPError, kind: type[MDPError]) -> None:
    found = error_of(read(read_from_worker, *encode(failure_of(3, error))))
    assert type(found) is kind
    assert str(found) == str(error)
    for name in ("outcomes", "codes"):
        assert getattr(found, name, None) == getattr(error, name, None)


def test_an_unforeseen_error_is_none_of_the_fleet_s() -> None:
    found = error_of(failure_of(3, KeyError("a reason")))
    assert type(found) is RuntimeError
    assert str(found) == "in a worker: KeyError: 'a reason'"


def test_what_is_no_message() -> None:
    (whole,) = encode(WorkerReady())
    with pytest.raises(asyncio.IncompleteReadError):
        read(read_from_worker, bytes(whole)[:-1])
    with pytest.raises(WireError, match="between gateway and worker"):
        read(read_from_worker, *encode(DevicesLeftOut(model="porch", devices=[])))
    lengths = handover._LENGTHS.pack(handover.MAX_HEAD_BYTES + 1, 0)
    with pytest.raises(WireError, match=f"got {handover.MAX_HEAD_BYTES + 1} bytes"):
        read(read_from_worker, lengths)
    asked, content = read(read_to_worker, *ask(1, "colours", [b"file"], 80.0, 0.0))
    with pytest.raises(WireError, match="expected 4 bytes of a picture, got 3"):
        pictures_of(asked, content[:3])
