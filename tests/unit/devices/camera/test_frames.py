"""The frames a device keeps: which are taken, which one is given, and what is said instead."""

import threading
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from devices.camera.frames import (
    FIRST_RETRY_S,
    LONGEST_RETRY_S,
    MAX_SUSPECTING,
    RING_BYTES,
    RING_FRAMES,
    SUSPECTED,
    SUSPECTED_S,
    Frame,
    FrameBuffer,
    NoFrameError,
    Stillness,
    SuspicionNotes,
    capacity_for,
    nearest,
    view_of,
)
from mdp.cameras import Source, SourceError, parse_source
from mdp.errors import InputError, PictureError
from mdp.formats.plan import Region
from mdp.pictures.crop import Pixels
from mdp.testing.bundles import SIZES, colour_picture, colour_plan
from tests.support.clock import Clock

ALPHA = colour_plan().assignments[0]
VIEW = view_of(ALPHA)
FOLDER = Source(kind="folder", place="door")
LIVE = Source(kind="camera", place="0")


@dataclass
class ToyCamera:
    """Gives pictures, or raises what it is told to."""

    clock: Clock
    #: What the next grabs and pictures do; nothing said is a picture.
    grabs: list[Exception] = field(default_factory=list)
    pictures: list[Exception | Pixels] = field(default_factory=list)
    decoded: int = 0
    closed: int = 0
    opened: int = 0
    refusals: list[Exception] = field(default_factory=list)
    #: How long each grab takes, as a live camera's does.
    waits_s: float = 0.0
    age_s: float = 0.0

    def open(self) -> "ToyCamera":
        if self.refusals:
            raise self.refusals.pop(0)
        self.opened += 1
        return self

    def grab(self) -> None:
        self.clock.now_s += self.waits_s
        if self.grabs:
            raise self.grabs.pop(0)

    def picture(self, *, smallest_side: int) -> Image.Image | Pixels:
        self.decoded += 1
        given = self.pictures.pop(0) if self.pictures else colour_picture("red")
        if isinstance(given, Exception):
            raise given
        return given

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def camera() -> ToyCamera:
    return ToyCamera(Clock())


def buffer_of(camera: ToyCamera, source: Source = FOLDER, fps: float = 10.0) -> FrameBuffer:
    buffer = FrameBuffer(source, camera.open, fps=fps, clock=camera.clock)
    buffer.follow(lambda: [VIEW])
    return buffer


def frames_at(*moments_s: float) -> list[Frame]:
    crop = np.zeros((1, 1, 3), dtype=np.uint8)
    return [
        Frame(number=number, taken_s=taken_s, crops={VIEW: crop})
        for number, taken_s in enumerate(moments_s, start=1)
    ]


@pytest.mark.parametrize(
    ("text", "kind", "place", "shown"),
    [
        ("camera:0", "camera", "0", "camera:0"),
        ("camera:063", "camera", "63", "camera:63"),
        ("rtsp://door/1", "rtsp", "rtsp://door/1", "rtsp://door/1"),
        (
            "rtsp://me:s3cret@10.0.0.9:554/h264?token=t0ken",
            "rtsp",
            "rtsp://me:s3cret@10.0.0.9:554/h264?token=t0ken",
            "rtsp://10.0.0.9:554/h264",
        ),
        ("rtsps://me@door/1", "rtsp", "rtsps://me@door/1", "rtsps://door/1"),
    ],
)
def test_what_a_source_is_called(text: str, kind: str, place: str, shown: str) -> None:
    source = parse_source(text)
    assert (source.kind, source.place, str(source)) == (kind, place, shown)
    assert source.is_live


def test_folders_and_files_have_to_be_there(tmp_path: Path) -> None:
    film = tmp_path / "film.mp4"
    film.write_bytes(b"")
    assert parse_source(f"folder:{tmp_path}") == Source(kind="folder", place=str(tmp_path))
    assert parse_source(f"video:{film}") == Source(kind="video", place=str(film))
    assert not parse_source(f"video:{film}").is_live
    with pytest.raises(InputError, match=rf"^--source folder:{film}: expected a folder$"):
        parse_source(f"folder:{film}")
    with pytest.raises(InputError, match=rf"^--source video:{tmp_path}: expected a file$"):
        parse_source(f"video:{tmp_path}")


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("", "''"),
        ("camera", "'camera'"),
        ("camera:", "'camera:'"),
        ("camera:-1", "'camera:'"),
        ("camera:64", "'camera:'"),
        ("camera:¹", "'camera:'"),
        ("folder:", "'folder:'"),
        ("http://me:s3cret@door/1", "'http:'"),
        ("rtsp:door", "'rtsp:'"),
        ("mdp://door", "'mdp:'"),
        ("mdp://door:0", "'mdp:'"),
        ("mdp://me@door:7500", "'mdp:'"),
    ],
)
def test_what_is_no_source(text: str, got: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_source(text)
    assert str(raised.value) == (
        "--source: expected folder:PATH, video:FILE, camera:NUMBER (0 to 63), rtsp://HOST/PATH, "
        f"phone:PORT or mdp://HOST:PORT, got {got}"
    )
    for stream in ("rtsp://", "rtsp://:554/x", "rtsp://d:99999/", "rtsp://[::/x"):
        with pytest.raises(
            InputError, match=r"^--source: expected rtsp://HOST/PATH or rtsp://USER"
        ):
            parse_source(stream)


@pytest.mark.parametrize(
    ("wanted_s", "number"), [(-9.0, 1), (1.0, 1), (1.4, 1), (1.5, 2), (1.6, 2), (2.9, 3), (5.0, 3)]
)
def test_the_nearest_frame_of_the_view_or_the_newer_of_two_is_given(
    wanted_s: float, number: int
) -> None:
    frames = frames_at(1.0, 2.0, 3.0)
    found = nearest(frames, VIEW, wanted_s)
    assert found is not None
    assert found.number == number
    assert nearest(frames, (Region(right=0.5), 8), wanted_s) is None
    assert nearest([], VIEW, wanted_s) is None


@pytest.mark.parametrize(("wanted_s", "number"), [(0.9, 1), (2.0, 3), (2.9, 6)])
def test_times_need_not_ascend(wanted_s: float, number: int) -> None:
    """The same picture was fetched twice from another agent, and the network took its time."""
    frames = frames_at(1.0, 2.1, 2.0, 2.5, 2.5, 2.9)
    found = nearest(frames, VIEW, wanted_s)
    assert found is not None
    assert found.number == number


def test_memory_is_bounded_by_frames_and_by_bytes() -> None:
    assert capacity_for([(Region(), 224)]) == RING_FRAMES == 64
    assert capacity_for([(Region(), 300)]) == 62
    assert capacity_for([(Region(), 1024)]) == RING_BYTES // (3 * 1024**2) == 5
    assert capacity_for([(Region(), 1024)] * 8) == 2
    assert capacity_for([]) == RING_FRAMES


def test_no_more_frames_are_kept_than_fit(camera: ToyCamera) -> None:
    buffer = FrameBuffer(FOLDER, camera.open, fps=10.0, clock=camera.clock)
    large = msgspec.structs.replace(ALPHA.vit, image_size=1024)
    buffer.follow(lambda: [view_of(msgspec.structs.replace(ALPHA, submodel=large))])
    for _ in range(8):
        camera.clock.now_s += buffer.step()
    view = (ALPHA.region, 1024)
    first = buffer.match(view, ago_ms=1e6, within_ms=1e9)
    last = buffer.match(view, ago_ms=0.0, within_ms=1e9)
    assert (first.number, last.number) == (4, 8)


def test_a_frame_is_cut_as_the_assignment_says(camera: ToyCamera) -> None:
    buffer = buffer_of(camera)
    buffer.step()
    seen = buffer.match(VIEW, ago_ms=0.0, within_ms=0.0)
    assert (seen.number, seen.age_ms) == (1, 0.0)
    assert seen.crop.shape == (SIZES[0], SIZES[0], 3)
    assert seen.crop[..., 0].mean() > seen.crop[..., 2].mean() + 50


def test_a_picture_that_was_old_when_it_came_is_as_old_here(camera: ToyCamera) -> None:
    buffer, camera.age_s = buffer_of(camera), 0.25
    buffer.step()
    camera.clock.now_s += 0.1
    assert buffer.match(VIEW, ago_ms=0.0, within_ms=1e3).age_ms == pytest.approx(350.0)


def test_a_played_source_keeps_its_pace(camera: ToyCamera) -> None:
    buffer = buffer_of(camera, fps=4.0)
    waits = []
    for _ in range(3):
        waits.append(buffer.step())
        camera.clock.now_s += waits[-1]
    assert waits == pytest.approx([0.25, 0.25, 0.25])
    camera.clock.now_s += 10.0
    assert buffer.step() == pytest.approx(0.25), "what was missed is not made up for in a hurry"


def test_a_live_source_is_emptied_at_its_own_pace_and_decoded_at_ours(camera: ToyCamera) -> None:
    camera.waits_s = 0.05
    buffer = buffer_of(camera, LIVE, fps=5.0)
    assert [buffer.step() for _ in range(20)] == [0.0] * 20
    assert camera.decoded == 5


def test_a_moment_of_the_past(camera: ToyCamera) -> None:
    buffer = buffer_of(camera)
    for _ in range(5):
        camera.clock.now_s += buffer.step()
    # Frames 1 to 5 are 500 to 100 ms old.
    for ago_ms, number in ((0.0, 5), (100.0, 5), (220.0, 4), (290.0, 3), (500.0, 1)):
        seen = buffer.match(VIEW, ago_ms=ago_ms, within_ms=150.0)
        assert seen.number == number
        assert seen.age_ms == pytest.approx(600 - 100 * number)
    with pytest.raises(
        NoFrameError,
        match=r"^folder:door: the nearest frame is off by 200 ms, at most 150 ms were asked for$",
    ):
        buffer.match(VIEW, ago_ms=700.0, within_ms=150.0)


def test_an_old_frame_is_not_given_and_the_reason_is(camera: ToyCamera) -> None:
    buffer = buffer_of(camera, LIVE)
    with pytest.raises(NoFrameError, match=r"^camera:0 has given no frame yet$"):
        buffer.match(VIEW, ago_ms=0.0, within_ms=1e9)
    buffer.step()
    camera.grabs.append(SourceError("camera:0: gives no picture"))
    assert buffer.step() == FIRST_RETRY_S
    camera.clock.now_s += 3.0
    with pytest.raises(NoFrameError) as raised:
        buffer.match(VIEW, ago_ms=0.0, within_ms=2000.0)
    assert str(raised.value) == (
        "camera:0: the newest frame is 3000 ms old, at most 2000 ms were asked for "
        "(camera:0: gives no picture)"
    )
    assert buffer.describe() == "camera:0: frame 1, 3000 ms old; camera:0: gives no picture"


def test_a_camera_that_is_gone_is_opened_again_after_ever_longer_rests(camera: ToyCamera) -> None:
    gone = SourceError("camera:0: cannot be opened")
    camera.refusals = [gone] * 7
    buffer = buffer_of(camera, LIVE)
    rests = [buffer.step() for _ in range(7)]
    assert rests == [0.5, 1.0, 2.0, 4.0, LONGEST_RETRY_S, LONGEST_RETRY_S, LONGEST_RETRY_S]
    with pytest.raises(NoFrameError, match=r"no frame yet \(camera:0: cannot be opened\)$"):
        buffer.match(VIEW, ago_ms=0.0, within_ms=1e9)
    assert buffer.step() == 0.0
    assert buffer.describe() == "camera:0: frame 1, 0 ms old"
    camera.grabs.append(RuntimeError("\x1b[2J what a driver\nsays"))
    assert buffer.step() == FIRST_RETRY_S, "a frame has ended the long rests"
    assert (camera.opened, camera.closed) == (1, 1)
    assert buffer.describe() == "camera:0: frame 1, 0 ms old; ?[2J what a driver says"
    buffer.step()
    assert camera.opened == 2


def test_the_agent_s_log_says_that_a_camera_is_gone_and_that_it_is_back(camera: ToyCamera) -> None:
    told: list[str] = []
    camera.waits_s = 0.2
    camera.refusals = [SourceError("camera:0: cannot be opened")] * 3
    buffer = buffer_of(camera, LIVE)
    buffer.report_to(told.append)
    for _ in range(5):
        buffer.step()
    assert told == ["no pictures: camera:0: cannot be opened", "pictures again: camera:0"]
    camera.grabs += [SourceError("camera:0: gives no picture"), RuntimeError()]
    for _ in range(4):
        buffer.step()
    assert told[2:] == [
        "no pictures: camera:0: gives no picture",
        "no pictures: RuntimeError",
        "pictures again: camera:0",
    ]


def test_a_picture_that_cannot_be_read_costs_its_turn_only(camera: ToyCamera) -> None:
    camera.pictures = [
        PictureError("door/a.jpg: cannot be decoded: no"),
        np.zeros((4, 4, 2), dtype=np.uint8),
        colour_picture("blue"),
    ]
    buffer = buffer_of(camera)
    camera.clock.now_s += buffer.step()
    with pytest.raises(NoFrameError, match=r"yet \(door/a.jpg: cannot be decoded: no\)$"):
        buffer.match(VIEW, ago_ms=0.0, within_ms=1e9)
    camera.clock.now_s += buffer.step()
    assert "or [H, W, 4], got uint8 [4, 4, 2]" in buffer.describe()
    assert "; 2 could not be read" in buffer.describe()
    buffer.step()
    assert buffer.match(VIEW, ago_ms=0.0, within_ms=0.0).number == 1
    assert camera.closed == 0


def test_eyes_follow_what_is_served(camera: ToyCamera) -> None:
    beta = colour_plan().assignments[1]
    served = [ALPHA]
    buffer = buffer_of(camera)
    buffer.follow(lambda: list(map(view_of, served)))
    camera.clock.now_s += buffer.step()
    served.append(beta)
    camera.clock.now_s += buffer.step()
    assert buffer.match(VIEW, ago_ms=0.0, within_ms=1e9).number == 2
    assert buffer.match(view_of(beta), ago_ms=1e6, within_ms=1e9).number == 2
    del served[0]
    buffer.step()
    assert buffer.match(VIEW, ago_ms=0.0, within_ms=1e9).number == 2
    assert buffer.match(view_of(beta), ago_ms=0.0, within_ms=1e9).number == 3


def test_a_camera_that_hangs_keeps_nobody_waiting(
    camera: ToyCamera, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("devices.camera.frames.LEAVE_S", 0.01)
    hangs, released = threading.Event(), threading.Event()

    def grab() -> None:
        hangs.set()
        released.wait()

    monkeypatch.setattr(camera, "grab", grab)
    buffer = buffer_of(camera, LIVE)
    with buffer:
        assert hangs.wait(60)
        with pytest.raises(NoFrameError, match=r"^camera:0 has given no frame yet$"):
            buffer.match(VIEW, ago_ms=0.0, within_ms=1e9)
        assert buffer.describe() == "camera:0: no frame yet"
    # It was left behind, and lets go of the camera once it can.
    assert camera.closed == 0
    released.set()
    buffer._thread.join(60)
    assert camera.closed == 1


def test_a_live_camera_that_gives_one_picture_is_frozen_until_it_gives_another(
    camera: ToyCamera,
) -> None:
    camera.waits_s = 0.5
    told: list[str] = []
    buffer = buffer_of(camera, LIVE, fps=2.0)
    buffer.report_to(told.append)
    frozen = []
    for _ in range(26):
        buffer.step()
        frozen.append(buffer.match(VIEW, ago_ms=0.0, within_ms=1e9).frozen)
    # The first picture stands for 10 s before it is taken for frozen.
    assert frozen == [False] * 20 + [True] * 6
    assert told == ["camera:0: the same picture for 10 s and more: frozen?"]
    assert buffer.describe().endswith("ms old; the same picture for 10 s and more: frozen?")
    camera.pictures = [colour_picture("blue")]
    buffer.step()
    assert not buffer.match(VIEW, ago_ms=0.0, within_ms=1e9).frozen
    assert "frozen" not in buffer.describe()


def test_noise_is_no_frozen_camera_and_neither_is_a_still_folder(camera: ToyCamera) -> None:
    random = np.random.default_rng(1)
    camera.waits_s = 1.0
    dark = np.zeros((40, 60, 3), np.uint8)
    for source in (LIVE, FOLDER):
        noisy = [dark + random.integers(0, 2, dark.shape, np.uint8) for _ in range(30)]
        camera.pictures = [*noisy] if source is LIVE else []
        buffer = buffer_of(camera, source)
        for _ in range(30):
            buffer.step()
            assert not buffer.match(VIEW, ago_ms=0.0, within_ms=1e9).frozen


def test_two_equal_frames_far_apart_are_not_enough() -> None:
    stillness = Stillness()
    picture = colour_picture("red")
    assert [stillness.saw(picture, at_s) for at_s in (0.0, 60.0, 120.0)] == [False, False, True]


def test_a_client_s_suspicion_is_kept_for_a_while_for_all_others(camera: ToyCamera) -> None:
    told: list[str] = []
    buffer = buffer_of(camera)
    buffer.report_to(told.append)

    def is_suspect_for(route: bytes) -> bool:
        return buffer.match(VIEW, ago_ms=0.0, within_ms=1e9, route=route).suspected

    buffer.step()
    assert buffer.suspicion() is None
    for _ in range(3):
        buffer.note(b"finder", suspected=True)
        # Of clients that have found nothing out, or not yet.
        buffer.note(b"other", suspected=False)
        camera.clock.now_s += SUSPECTED_S / 2
        assert buffer.describe().endswith(f" ms old; {SUSPECTED}")
        assert buffer.suspicion() == "disagrees"
        # The finder knows by itself when it ends.
        assert (is_suspect_for(b"finder"), is_suspect_for(b"other")) == (False, True)
    assert told == [f"folder:door: {SUSPECTED}"]
    camera.clock.now_s += SUSPECTED_S / 2
    assert (buffer.suspicion(), is_suspect_for(b"other")) == (None, False)
    assert buffer.describe().endswith(" ms old")


def test_a_suspicion_ends_once_its_finder_s_looks_agree_again() -> None:
    notes = SuspicionNotes()
    notes.note(b"first", 0.0, suspected=True)
    notes.note(b"second", 1.0, suspected=True)
    notes.note(b"first", 2.0, suspected=False)
    assert notes.stands(2.0)
    assert not notes.stands(2.0, beside=b"second")
    notes.note(b"second", 3.0, suspected=False)
    assert not notes.stands(3.0)


def test_suspicions_of_many_connections_take_no_more_memory_each_time() -> None:
    notes = SuspicionNotes()
    routes = [number.to_bytes(2, "big") for number in range(2 * MAX_SUSPECTING)]
    for route in routes:
        notes.note(route, 0.0, suspected=True)
    for route in routes[MAX_SUSPECTING:]:
        assert notes.stands(1.0)
        notes.note(route, 1.0, suspected=False)
    assert not notes.stands(1.0)


def test_how_long_the_picture_stands_still(camera: ToyCamera) -> None:
    buffer = buffer_of(camera)
    with pytest.raises(NoFrameError, match="has given no frame yet"):
        buffer.rest(within_ms=1000)
    for colour in ("red", "red", "green", "green", "green"):
        camera.pictures.append(colour_picture(colour))
        buffer.step()
        camera.clock.now_s += 0.1
    rest = buffer.rest(within_ms=1000)
    assert (rest.number, rest.changes) == (5, 1)
    assert rest.still_ms == pytest.approx(200)
    assert rest.age_ms == pytest.approx(100)
    camera.clock.now_s += 5
    with pytest.raises(NoFrameError, match="the newest frame is 5100 ms old"):
        buffer.rest(within_ms=1000)
