"""The device's own camera: a buffer of its last frames.

A thread grabs frames, cuts each to this device's crop and buffers the last few. Requests are
answered from the buffer, so that a camera that hangs or is gone delays none. Whole pictures are
kept only where clients may record them, and then the newest alone. A mask is applied to a picture
before anything else is done with it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self
from zlib import crc32

import numpy as np
from PIL import Image

from devices.camera.rest import SceneRest, grey_of
from mdp.cameras import LEAVE_S, Camera, NoPictureYet, Source
from mdp.closing import Closing
from mdp.errors import AgentError, PictureError
from mdp.formats.mask import CameraMask
from mdp.formats.plan import Assignment, Region
from mdp.pictures.crop import Pixels, crop, load_picture, side_for
from mdp.pictures.masking import check_fits, mask_picture, side_before, size_of
from mdp.protocol.messages import Suspicion, as_line

#: Frames that are kept: so many, in at most so many bytes (but two at least).
RING_FRAMES = 64
RING_BYTES = 16 * 1024 * 1024
#: Wait before a source that failed is reopened; doubles with each failure up to the longest.
FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 8.0
#: A live source is frozen once all frames of so long, three at least, have been the same picture:
#: cameras have noise, and a stream's next key frame changes at least some pixels.
FROZEN_S, FROZEN_FRAMES = 10.0, 3
#: Of each side, one pixel in so many is compared: the noise is everywhere.
_COMPARED = 4
#: How long a client's suspicion is kept after its latest look, and of how many connections.
SUSPECTED_S, MAX_SUSPECTING = 60.0, 64
FROZEN = f"the same picture for {FROZEN_S:g} s and more: frozen?"
MASKED = "masked"
SUSPECTED = "a client's looks disagree: covered, turned or moved?"

#: One device's view: what is cut from a picture, and to how many pixels.
ViewKey = tuple[Region, int]


class NoFrameError(AgentError):
    """No frame is near enough to the requested moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameMatch:
    """The frame that a request is answered from."""

    number: int
    #: When the request arrived.
    age_ms: float
    crop: Pixels
    #: Whether the source gives the same picture again and again.
    frozen: bool = False
    #: Whether the looks of another client suspect the camera.
    suspected: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RestSeen:
    """Rest of a camera's picture, as its newest frame shows it."""

    #: Of the newest frame.
    number: int
    #: Of that frame, when the request arrived.
    age_ms: float
    #: From the first frame that looks like it to that frame.
    still_ms: float
    #: Frames since the start that were unlike those before.
    changes: int


class Stillness:
    """Finds out whether a live source gives the same picture again and again."""

    def __init__(self) -> None:
        self._checksum, self._since_s, self._frames = -1, 0.0, 0

    def saw(self, picture: Image.Image | Pixels, taken_s: float) -> bool:
        """Tell whether the source is frozen, by its newest frame."""
        pixels = np.asarray(picture)[::_COMPARED, ::_COMPARED]
        checksum = crc32(pixels.tobytes())
        if checksum != self._checksum:
            self._checksum, self._since_s, self._frames = checksum, taken_s, 0
        self._frames += 1
        return self._frames >= FROZEN_FRAMES and taken_s - self._since_s >= FROZEN_S


class SuspicionNotes:
    """The connections whose looks suspect the camera: each as long as it goes on saying so.

    A note ends with the first look of its own connection that does not suspect the camera, and
    `SUSPECTED_S` after the last one that does. Other connections' looks end nothing: they may have
    been too few to find anything out.
    """

    def __init__(self) -> None:
        #: Connection -> when its latest look suspected the camera, the oldest first.
        self._noted_s: dict[bytes, float] = {}

    def note(self, route: bytes, now_s: float, *, suspected: bool) -> None:
        """Keep or end the note of the connection `route`; of too many, the oldest ends."""
        self._noted_s.pop(route, None)
        if suspected:
            self._noted_s[route] = now_s
            if len(self._noted_s) > MAX_SUSPECTING:
                del self._noted_s[next(iter(self._noted_s))]

    def stands(self, now_s: float, *, beside: bytes = b"") -> bool:
        """Tell whether a connection's note stands, of any other than `beside`."""
        while self._noted_s:
            oldest = next(iter(self._noted_s))
            if now_s - self._noted_s[oldest] < SUSPECTED_S:
                break
            del self._noted_s[oldest]
        return len(self._noted_s) > (beside in self._noted_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The crops of one picture."""

    #: From 1, over all openings of the source.
    number: int
    #: By this device's clock.
    taken_s: float
    crops: dict[ViewKey, Pixels]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeFrame:
    """The newest picture, as the camera gave it but for what the mask hides."""

    #: From 1, over all openings of the source.
    number: int
    #: By this device's clock.
    taken_s: float
    picture: Image.Image | Pixels
    #: What it was cut and blackened by.
    mask: CameraMask | None = None


def view_of(assignment: Assignment) -> ViewKey:
    """The view of an assignment."""
    return assignment.region, assignment.spec.image_size


def capacity_for(views: Iterable[ViewKey]) -> int:
    """The number of frames with crops of these views that fit into the buffer."""
    frame_bytes = sum(3 * image_size**2 for _, image_size in views)
    return max(2, min(RING_FRAMES, RING_BYTES // max(1, frame_bytes)))


def nearest(frames: Sequence[Frame], view: ViewKey, wanted_s: float) -> Frame | None:
    """The frame with a crop of `view` that was taken nearest to `wanted_s`; the newer of two."""
    # Times need not ascend: one camera's frame may be fetched twice from another agent.
    seen = (frame for frame in reversed(frames) if view in frame.crops)
    return min(seen, key=lambda frame: abs(frame.taken_s - wanted_s), default=None)


class FrameBuffer(Closing):
    """Keeps the last frames of one source, cut to the views of the served bundles."""

    def __init__(
        self,
        source: Source,
        open_camera: Callable[[], Camera],
        *,
        fps: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_camera` may raise SourceError; `fps` frames a second are taken."""
        self.source = source
        #: Least shorter side in pixels of the newest whole picture, which is kept; 0: none is.
        self.whole_side = 0
        self._open_camera = open_camera
        self._period_s = 1.0 / fps
        self._clock = clock
        self._camera: Camera | None = None
        self._due_s = float("-inf")
        self._retry_s = FIRST_RETRY_S
        self._served: Callable[[], Sequence[ViewKey]] = tuple
        self._report: Callable[[str], None] = lambda event: None
        #: The last reported failure; empty while there are pictures.
        self._reported = ""
        self._views: tuple[ViewKey, ...] = ()
        #: Guards everything below, which other threads read.
        self._lock = threading.Lock()
        self._ring: deque[Frame] = deque(maxlen=RING_FRAMES)
        self._whole: WholeFrame | None = None
        self._mask: CameraMask | None = None
        #: Width and height of the newest picture as the camera gave it; zeros before a first one.
        self._given = (0, 0)
        self._taken = 0
        self._unreadable = 0
        #: Why there is no newer frame; empty if there is one.
        self._problem = ""
        self._frozen = False
        self._still_s, self._changes = 0.0, 0
        self._notes = SuspicionNotes()
        self._stillness, self._rest = Stillness(), SceneRest()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._capture, name="camera", daemon=True)

    def follow(self, served: Callable[[], Sequence[ViewKey]]) -> None:
        """Cut every frame to the views that are `served` by then."""
        self._served = served

    def report_to(self, report: Callable[[str], None]) -> None:
        """Report when the source fails, and when it recovers."""
        self._report = report

    def match(
        self, view: ViewKey, *, ago_ms: float, within_ms: float, route: bytes = b""
    ) -> FrameMatch:
        """The frame nearest to `ago_ms` before now, for the client at `route`.

        Any thread; never waits.
        Raises NoFrameError if it is further than `within_ms` from that moment, or there is none.
        """
        now_s = self._clock()
        wanted_s = now_s - ago_ms / 1e3
        with self._lock:
            frame = nearest(self._ring, view, wanted_s)
            why = f" ({self._problem})" if self._problem else ""
            frozen = self._frozen
            suspected = self._notes.stands(now_s, beside=route)
        if frame is None:
            raise self._none_yet(why)
        off_ms = abs(frame.taken_s - wanted_s) * 1e3
        if off_ms > within_ms:
            which = "newest frame is" if ago_ms == 0 else "nearest frame is off by"
            raise self._too_far(which, off_ms, " old" if ago_ms == 0 else "", within_ms, why)
        age_ms = max(0.0, (now_s - frame.taken_s) * 1e3)
        return FrameMatch(
            number=frame.number,
            age_ms=age_ms,
            crop=frame.crops[view],
            frozen=frozen,
            suspected=suspected,
        )

    def rest(self, *, within_ms: float) -> RestSeen:
        """Tell how long the picture has stood still. Any thread; never waits.

        Raises NoFrameError if the newest frame is older than `within_ms`, or there is none.
        """
        now_s = self._clock()
        with self._lock:
            newest = self._ring[-1] if self._ring else None
            still_s, changes = self._still_s, self._changes
            why = f" ({self._problem})" if self._problem else ""
        if newest is None:
            raise self._none_yet(why)
        age_ms = max(0.0, (now_s - newest.taken_s) * 1e3)
        if age_ms > within_ms:
            raise self._too_far("newest frame is", age_ms, " old", within_ms, why)
        still_ms = still_s * 1e3
        return RestSeen(number=newest.number, age_ms=age_ms, still_ms=still_ms, changes=changes)

    def newest(self, *, within_ms: float) -> tuple[WholeFrame, float]:
        """The newest whole picture and its age in milliseconds. Any thread; never waits.

        Raises NoFrameError if it is older than `within_ms`, or there is none.
        """
        now_s = self._clock()
        with self._lock:
            whole = self._whole
            why = f" ({self._problem})" if self._problem else ""
        if whole is None:
            raise self._none_yet(why)
        age_ms = max(0.0, (now_s - whole.taken_s) * 1e3)
        if age_ms > within_ms:
            raise self._too_far("newest frame is", age_ms, " old", within_ms, why)
        return whole, age_ms

    def _none_yet(self, why: str) -> NoFrameError:
        return NoFrameError(f"{self.source} has given no frame yet{why}")

    def _too_far(
        self, which: str, off_ms: float, old: str, within_ms: float, why: str
    ) -> NoFrameError:
        return NoFrameError(
            f"{self.source}: the {which} {off_ms:.0f} ms{old}, "
            f"at most {within_ms:.0f} ms were asked for{why}"
        )

    @property
    def mask(self) -> CameraMask | None:
        """The part of the camera's pictures that is used; None: all. Any thread."""
        return self._mask

    @property
    def source_size(self) -> tuple[int, int]:
        """Width and height of the newest picture as the camera gave it, or zeros. Any thread."""
        with self._lock:
            return self._given

    def set_mask(self, mask: CameraMask | None) -> None:
        """Use another mask; what was kept under the former one is dropped. Any thread.

        Raises MaskError if the newest picture has another shape.
        """
        with self._lock:
            if mask is not None and self._given != (0, 0):
                check_fits(mask, *self._given)
            self._mask, self._whole = mask, None
            self._ring.clear()

    def note(self, route: bytes, *, suspected: bool) -> None:
        """Take in whether the looks of the client at `route` suspect the camera. Any thread."""
        now_s = self._clock()
        with self._lock:
            before = self._notes.stands(now_s)
            self._notes.note(route, now_s, suspected=suspected)
        if suspected and not before:
            self._report(f"{self.source}: {SUSPECTED}")

    def suspicion(self) -> Suspicion | None:
        """The reason to suspect this camera, of its own or of any client's looks. Any thread."""
        now_s = self._clock()
        with self._lock:
            if self._frozen:
                return "frozen"
            return "disagrees" if self._notes.stands(now_s) else None

    def describe(self, *, recorded: bool = False) -> str:
        """The source and its condition, in one line for people. Any thread."""
        now_s = self._clock()
        with self._lock:
            newest = self._ring[-1] if self._ring else None
            parts = ["being recorded"] * recorded + [self._problem] * bool(self._problem)
            if self._unreadable:
                parts.append(f"{self._unreadable} could not be read")
            parts += [FROZEN] * self._frozen + [SUSPECTED] * self._notes.stands(now_s)
            parts += [MASKED] * (self._mask is not None)
        seen = "no frame yet"
        if newest is not None:
            seen = f"frame {newest.number}, {(now_s - newest.taken_s) * 1e3:.0f} ms old"
        return as_line("; ".join([f"{self.source}: {seen}", *parts]))

    def step(self) -> float:
        """Take a frame, if one is due; returns the seconds until the next step."""
        try:
            if self._camera is None:
                self._camera = self._open_camera()
            self._camera.grab()
            self._take(self._camera)
            self._retry_s = FIRST_RETRY_S
        except NoPictureYet as error:
            with self._lock:
                self._problem = as_line(str(error))
        except PictureError as error:
            # The next picture may be readable.
            with self._lock:
                self._unreadable += 1
                self._problem = as_line(str(error))
        except Exception as error:  # camera libraries raise types of their own
            return self._on_failure(error)
        return 0.0 if self.source.is_live else max(0.0, self._due_s - self._clock())

    def _take(self, camera: Camera) -> None:
        """Keep the grabbed picture, unless the next frame is not due yet."""
        taken_s = self._clock()
        if taken_s < self._due_s and self.source.is_live:
            # It was grabbed, so that none grows old in the driver.
            return
        # Missed frames are not caught up.
        behind = taken_s > self._due_s + self._period_s
        self._due_s = (taken_s if behind else self._due_s) + self._period_s
        views = self._views_now()
        side = max(max((side_for(*view) for view in views), default=1), self.whole_side)
        mask = self._mask
        given = load_picture(
            camera.picture(smallest_side=side if mask is None else side_before(side, mask))
        )
        with self._lock:
            self._given = size_of(given)
        # Nothing below sees what it hides.
        picture = given if mask is None else mask_picture(given, mask)
        taken_s -= camera.age_s
        crops = {view: crop(picture, *view) for view in views}
        frozen = self.source.is_live and self._stillness.saw(picture, taken_s)
        if frozen and not self._frozen:
            self._report(f"{self.source}: {FROZEN}")
        self._rest.saw(grey_of(picture), taken_s)
        with self._lock:
            if self._mask is not mask:
                # It was changed meanwhile: the next picture is the first under the new one.
                return
            self._taken += 1
            self._still_s, self._changes = self._rest.still_s, self._rest.changes
            self._problem, self._frozen = "", frozen
            self._ring.append(Frame(number=self._taken, taken_s=taken_s, crops=crops))
            if self.whole_side:
                self._whole = WholeFrame(
                    number=self._taken, taken_s=taken_s, picture=picture, mask=mask
                )
        if self._reported:
            self._reported = ""
            self._report(f"pictures again: {self.source}")

    def _views_now(self) -> tuple[ViewKey, ...]:
        """The served views; the oldest frames are dropped where the new ones need more room."""
        views = tuple(dict.fromkeys(self._served()))
        if views != self._views:
            self._views = views
            with self._lock:
                self._ring = deque(self._ring, maxlen=capacity_for(views))
        return views

    def _on_failure(self, error: Exception) -> float:
        """Close the source; returns the seconds until it is reopened."""
        self._close_camera()
        retry_s, self._retry_s = self._retry_s, min(2 * self._retry_s, LONGEST_RETRY_S)
        problem = as_line(str(error) or type(error).__name__)
        with self._lock:
            self._problem = problem
        # Once, and not at each retry.
        if problem != self._reported:
            self._reported = problem
            self._report(f"no pictures: {problem}")
        return retry_s

    def _close_camera(self) -> None:
        camera, self._camera = self._camera, None
        if camera is not None:
            camera.close()

    def _capture(self) -> None:
        while not self._over.wait(self.step()):
            pass
        self._close_camera()

    def __enter__(self) -> Self:
        """Start the thread that grabs frames."""
        self._thread.start()
        return self

    def close(self) -> None:
        """End the thread that reads the source."""
        self._over.set()
        self._thread.join(LEAVE_S)
