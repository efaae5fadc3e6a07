"""Pictures of an agent's camera for clients: who gets them, how often, and what is told of it."""

import io
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest
from PIL import Image

from devices.agent.counters import Counters
from devices.agent.record import FORBIDDEN, SILENT_S, TOO_MANY, RecordAccess, Recording, to_jpeg
from devices.agent.replies import Replies
from devices.camera.frames import FrameBuffer
from mdp.errors import PictureError
from mdp.pictures.crop import Pixels
from mdp.protocol.messages import Buffer, Failure, Message, decode
from mdp.protocol.recording import SMALL_PER_S, SMALL_SIDE, PictureReply, PictureRequest
from mdp.testing.processes import until
from mdp.transport import Peer, Router
from tests.support.clock import Clock
from tests.unit.devices.camera.test_frames import FOLDER, ToyCamera, buffer_of

SMALL = np.zeros((48, SMALL_SIDE, 3), np.uint8)
LARGE = np.zeros((48, SMALL_SIDE + 1, 3), np.uint8)
OWNER, OTHER, STRANGER = "owner", "other", "stranger"


class Desk:
    """An agent's part that answers about pictures, without the rest."""

    def __init__(self) -> None:
        self.sent: list[tuple[Message, list[Buffer]]] = []
        self.told: list[str] = []
        self.audited: list[tuple[str, str, str]] = []
        self.clock = Clock()
        self.camera = ToyCamera(self.clock)
        self.frames: FrameBuffer = buffer_of(self.camera)
        self.recording = Recording(
            RecordAccess(
                may_record=lambda client: client != STRANGER,
                name_of=lambda client: f"the {client}",
                audit=lambda event, key, address, why: self.audited.append((event, key, why)),
            ),
            self.frames,
            Replies(cast(Router, self), Counters(), report=lambda _: None),
            self.told.append,
            self.clock,
        )

    def send(self, route: bytes, frames: list[Buffer]) -> bool:
        """Stands for the router."""
        envelope = decode(frames)
        self.sent.append((envelope.message, list(envelope.buffers)))
        return True

    def ask(self, client: str = OWNER, within_ms: float = 1000.0, side: int = 1280) -> Message:
        before = len(self.sent)
        request = PictureRequest(request_id=before + 1, within_ms=within_ms, side=side)
        self.recording.receive(Peer(b"route", client), request)
        until(lambda: len(self.sent) > before, "a reply")
        message = self.sent[-1][0]
        assert message.request_id == before + 1
        return message


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    with desk.recording.worker:
        pass


def refusal(message: Message) -> tuple[str, str]:
    assert isinstance(message, Failure)
    return message.code, message.text


def test_the_newest_frame_is_given_whole_and_its_owner_told(desk: Desk) -> None:
    assert refusal(desk.ask()) == ("no_frame", "folder:door has given no frame yet")
    assert not desk.recording.is_recorded
    desk.camera.pictures = [np.full((30, 40, 3), 200, np.uint8), np.zeros((90, 120, 3), np.uint8)]
    desk.frames.step()
    desk.clock.now_s += 0.1
    desk.frames.step()
    desk.clock.now_s += 0.25
    reply = desk.ask(side=60)
    assert isinstance(reply, PictureReply)
    assert reply.frame == 2
    assert reply.age_ms == pytest.approx(250.0)
    picture = Image.open(io.BytesIO(bytes(desk.sent[-1][1][0])))
    assert (picture.format, picture.size, picture.getpixel((0, 0))) == ("JPEG", (60, 45), (0, 0, 0))
    assert desk.told == ["the owner begins to record"]
    assert desk.audited == [("record", OWNER, "begins to record")]
    assert desk.recording.is_recorded
    assert "; being recorded" in desk.frames.describe(recorded=True)
    code, text = refusal(desk.ask(within_ms=200.0))
    assert code == "no_frame"
    assert "the newest frame is 250 ms old, at most 200 ms" in text


def test_a_key_without_the_right_gets_none(desk: Desk) -> None:
    desk.frames.step()
    assert refusal(desk.ask(STRANGER)) == ("no_frame", FORBIDDEN)
    assert desk.audited == [("refuse", STRANGER, f"record: {FORBIDDEN}")]
    assert desk.told == []


def test_two_pictures_a_second_for_all_clients_together(desk: Desk) -> None:
    desk.camera.pictures = [LARGE] * 7
    given = []
    for step in range(31):
        if step % 5 == 0:
            desk.frames.step()
        message = desk.ask(OWNER if step % 2 else OTHER)
        if isinstance(message, PictureReply):
            given.append(step)
        else:
            assert refusal(message) == ("overloaded", TOO_MANY)
        desk.clock.now_s += 0.1
    # Two in ten steps of 0.1 s, and one that was saved up.
    assert len(given) in (7, 8)
    assert all(later - first >= 9 for first, later in zip(given[1:], given[3:], strict=False))


@pytest.mark.parametrize(
    ("picture", "side"), [(LARGE, SMALL_SIDE), (SMALL, 1280), (Image.fromarray(SMALL), 1280)]
)
def test_pictures_that_are_sent_small_count_a_tenth(desk: Desk, picture: Pixels, side: int) -> None:
    desk.camera.pictures = [*[picture] * 40, LARGE]
    desk.frames.step()
    for _ in range(40):
        assert isinstance(desk.ask(side=side), PictureReply)
        desk.clock.now_s += 1 / SMALL_PER_S
        desk.frames.step()
    for _ in range(2):
        assert isinstance(desk.ask(side=SMALL_SIDE + 1), PictureReply)
    assert refusal(desk.ask(side=SMALL_SIDE + 1)) == ("overloaded", TOO_MANY)


def test_the_end_of_a_recording_is_told(desk: Desk) -> None:
    desk.frames.step()
    for _ in range(3):
        desk.ask(within_ms=1e6)
        desk.clock.now_s += 1.0
        desk.recording.tend()
    desk.ask(OTHER, within_ms=1e6)
    desk.clock.now_s += SILENT_S - 1.5
    desk.recording.tend()
    assert len(desk.told) == 2
    desk.clock.now_s += 1.0
    desk.recording.tend()
    assert desk.told[2:] == ["the owner has ended recording: pictures 3"]
    assert desk.recording.is_recorded
    desk.clock.now_s += 1.0
    desk.recording.tend()
    assert desk.audited[-1] == ("record", OTHER, "has ended recording: pictures 1")
    assert not desk.recording.is_recorded


def test_no_picture_is_kept_where_none_may_be_recorded() -> None:
    camera = ToyCamera(Clock())
    frames = buffer_of(camera)
    frames.step()
    with pytest.raises(Exception, match=f"{FOLDER} has given no frame yet"):
        frames.newest(within_ms=1e9)


def test_a_picture_that_no_message_takes() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (1920, 1920, 3), np.uint8)
    with pytest.raises(PictureError, match="more than a message takes"):
        to_jpeg(noise, 1920)
    # Never enlarged, and without what a file says besides its pixels.
    small = Image.open(io.BytesIO(to_jpeg(noise[:20, :30], 1280)))
    assert small.size == (30, 20)
    assert not small.getexif()


def test_the_end_of_the_agent_ends_every_recording(desk: Desk) -> None:
    desk.frames.step()
    desk.ask()
    desk.recording.tend(over=True)
    assert desk.audited[-1] == ("record", OWNER, "has ended recording: pictures 1")
    assert not desk.recording.is_recorded
