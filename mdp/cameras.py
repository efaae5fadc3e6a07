"""Cameras, streams and video files: what names one, and its pictures one by one.

The only module that imports OpenCV, which is the optional extra `camera`.
"""

import os
import queue
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from PIL import Image

from mdp.errors import AgentError, InputError, MDPError, PictureError
from mdp.extras import install
from mdp.pictures.crop import MAX_PIXELS, Pixels
from mdp.protocol.messages import as_line

MAX_CAMERA = 63
#: How long a stream may take to open, and to give its next picture.
STREAM_TIMEOUT_MS = 5000
#: How long `close` waits for a thread that grabs pictures.
LEAVE_S = 1.0
#: How long a reader waits for a picture: opening and the first one, twice the timeout of each.
LIVE_TIMEOUT_S = 4 * STREAM_TIMEOUT_MS / 1e3

_AGENT = re.compile(r"//([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")

SourceKind = Literal["folder", "video", "camera", "rtsp", "mdp", "phone"]


class SourceError(AgentError):
    """A source gives no picture."""


class NoPictureYet(PictureError):
    """A source that waits to be given pictures got none since the last one."""


class EndOfVideo(SourceError):
    """A video file that is not repeated has no further picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A folder of pictures, a video file, a camera here, of a phone or an agent, or a stream."""

    kind: SourceKind
    #: A path, a number, a port, `//HOST:PORT` of an agent, or a whole URL, which may hold a
    #: password.
    place: str

    @property
    def is_live(self) -> bool:
        """Tell whether it sets the pace of its pictures itself."""
        return self.kind in ("camera", "rtsp", "phone")

    def __str__(self) -> str:
        """The source without a URL's user, password and query."""
        if self.kind != "rtsp":
            return as_line(f"{self.kind}:{self.place}")
        parts = urlsplit(self.place)
        return as_line(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")


def parse_source(text: str, name: str = "--source") -> Source:
    """The source that `text`, the value of the option `name`, names; raises InputError.

    Folders and files have to exist; a camera may be plugged in later.
    """
    kind, separator, place = text.partition(":")
    if kind in ("rtsp", "rtsps") and place.startswith("//"):
        _check_url(text, name)
        return Source(kind="rtsp", place=text)
    if kind == "folder" and place:
        if not Path(place).is_dir():
            raise InputError(f"{name} {as_line(text)}: expected a folder")
        return Source(kind="folder", place=place)
    if kind == "video" and place:
        if not Path(place).is_file():
            raise InputError(f"{name} {as_line(text)}: expected a file")
        return Source(kind="video", place=place)
    if kind == "camera" and place.isascii() and place.isdigit() and int(place) <= MAX_CAMERA:
        return Source(kind="camera", place=str(int(place)))
    if kind == "mdp" and _AGENT.fullmatch(place) and 0 < int(place.rpartition(":")[2]) < 65536:
        return Source(kind="mdp", place=place)
    if kind == "phone" and place.isascii() and place.isdigit() and 0 < int(place) < 65536:
        return Source(kind="phone", place=str(int(place)))
    # Only the first word is shown: a mistyped URL may contain a password.
    shown = as_line(kind + separator)[:32]
    raise InputError(
        f"{name}: expected folder:PATH, video:FILE, camera:NUMBER "
        f"(0 to {MAX_CAMERA}), rtsp://HOST/PATH, phone:PORT or mdp://HOST:PORT, got {shown!r}"
    )


def _check_url(text: str, name: str) -> None:
    """Raise InputError, naming the option `name`, unless `text` is the address of a stream."""
    try:
        parts = urlsplit(text)
        named = bool(parts.hostname) and parts.port != 0
    except ValueError:
        named = False
    if not named or not text.isprintable():
        raise InputError(f"{name}: expected rtsp://HOST/PATH or rtsp://USER:PASSWORD@HOST/PATH")


class Camera(Protocol):
    """An open source."""

    #: How old a picture is as it is asked for, in seconds; 0 where that is not known.
    age_s: float

    def grab(self) -> None:
        """Grab the next picture, waiting for it if it is live; raises SourceError."""

    def picture(self, *, smallest_side: int) -> Image.Image | Pixels:
        """The picture grabbed last, as `load_picture` gives it; raises PictureError."""

    def close(self) -> None:
        """Close the device or file."""


class OpenCvCamera:
    """A video file, a local camera, or a stream."""

    age_s = 0.0

    def __init__(self, source: Source, *, repeat: bool = True) -> None:
        """Open `source`; a video file begins again at its end with `repeat`.

        Raises SourceError, or AgentError if OpenCV is not installed.
        """
        self._cv2 = opencv()
        self._source = source
        self._repeat = repeat
        self._given = 0
        self._capture = self._open_capture()

    def _open_capture(self) -> Any:
        cv2, source = self._cv2, self._source
        if source.kind == "camera":
            capture = cv2.VideoCapture(int(source.place), cv2.CAP_V4L2)
            # No buffer in the driver, where pictures would grow old.
            capture.set(cv2.CAP_PROP_BUFFERSIZE, 1)
        else:
            # An absolute path cannot be taken for a URL.
            place = source.place if source.is_live else str(Path(source.place).resolve())
            capture = cv2.VideoCapture(
                place,
                cv2.CAP_FFMPEG,
                [
                    cv2.CAP_PROP_OPEN_TIMEOUT_MSEC,
                    STREAM_TIMEOUT_MS,
                    cv2.CAP_PROP_READ_TIMEOUT_MSEC,
                    STREAM_TIMEOUT_MS,
                ],
            )
        if not capture.isOpened():
            capture.release()
            raise SourceError(f"{source}: cannot be opened")
        width = capture.get(cv2.CAP_PROP_FRAME_WIDTH)
        height = capture.get(cv2.CAP_PROP_FRAME_HEIGHT)
        if width * height > MAX_PIXELS:
            capture.release()
            raise SourceError(
                f"{source}: expected at most {MAX_PIXELS:,} pixels, got {width:.0f}x{height:.0f}"
            )
        return capture

    def grab(self) -> None:
        """Grab the next picture; raises SourceError if none comes, EndOfVideo after the last."""
        if not self._capture.grab():
            if self._source.is_live or self._given == 0:
                raise SourceError(f"{self._source}: gives no picture")
            if not self._repeat:
                raise EndOfVideo(f"{self._source}: its end")
            self._capture.release()
            self._given = 0
            self._capture = self._open_capture()
            if not self._capture.grab():
                raise SourceError(f"{self._source}: gives no picture")
        self._given += 1

    def picture(self, *, smallest_side: int = 1) -> Pixels:
        """The last grabbed picture `[height, width, 3]`; raises PictureError."""
        whole, pixels = self._capture.retrieve()
        if not whole:
            raise PictureError(f"{self._source}: a picture that cannot be decoded")
        rgb: Pixels = self._cv2.cvtColor(pixels, self._cv2.COLOR_BGR2RGB)
        return rgb

    @property
    def at_s(self) -> float:
        """The time in a video file of the picture grabbed last, in seconds from its beginning."""
        at_ms = float(self._capture.get(self._cv2.CAP_PROP_POS_MSEC))
        # Some containers have no times.
        fps = float(self._capture.get(self._cv2.CAP_PROP_FPS))
        return at_ms / 1e3 if at_ms > 0 or fps <= 0 else (self._given - 1) / fps

    def close(self) -> None:
        """Close the device, file or connection."""
        self._capture.release()


def opencv() -> Any:
    """OpenCV, told to be quiet; raises AgentError where it is not installed."""
    # FFmpeg's messages about a stream that it cannot open contain the URL with its password.
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
    os.environ.setdefault("OPENCV_LOG_LEVEL", "SILENT")
    try:
        import cv2
    except ImportError as error:
        raise AgentError(
            "OpenCV is not installed; cameras, streams and video files need it: "
            + install("camera")
        ) from error
    # Leaves the cores to the sub-model.
    cv2.setNumThreads(1)
    return cv2


def video_pictures(source: Source, every_s: float) -> Iterator[tuple[float, Pixels | PictureError]]:
    """A video file's pictures, at most one in `every_s` seconds of it, with their times in it.

    A picture that cannot be decoded is an error in its place. Raises SourceError, or AgentError.
    """
    camera = OpenCvCamera(source, repeat=False)
    due_s = 0.0
    try:
        while True:
            camera.grab()
            if (at_s := camera.at_s) >= due_s:
                due_s = at_s + every_s
                yield at_s, _picture_or_error(camera)
    except EndOfVideo:
        return
    finally:
        camera.close()


class LiveReader:
    """A camera's or stream's newest picture, whenever one is asked for.

    A thread grabs all pictures, so that none ages in the driver or on the network, and so that
    whoever waits can be interrupted.
    """

    def __init__(self, source: Source) -> None:
        """Begin to open `source`."""
        self._source = source
        self._wanted, self._over = threading.Event(), threading.Event()
        self._found: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # One that hangs in a driver must not keep the process from ending.
        self._thread = threading.Thread(target=self._read, name="camera", daemon=True)
        self._thread.start()

    def next(self) -> Pixels:
        """The next picture that comes; raises SourceError, or PictureError for a broken one."""
        self._wanted.set()
        try:
            found: Pixels | Exception = self._found.get(timeout=LIVE_TIMEOUT_S)
        except queue.Empty:
            raise SourceError(
                f"{self._source}: expected a picture within {LIVE_TIMEOUT_S:g} s, got none"
            ) from None
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        """End the thread; one that hangs in a driver is left behind."""
        self._over.set()
        self._thread.join(LEAVE_S)

    def _read(self) -> None:
        try:
            camera = OpenCvCamera(self._source)
            try:
                while not self._over.is_set():
                    camera.grab()
                    if self._wanted.is_set():
                        self._wanted.clear()
                        self._found.put(_picture_or_error(camera))
            finally:
                camera.close()
        except Exception as error:  # camera libraries raise types of their own
            self._found.put(
                error if isinstance(error, MDPError) else SourceError(f"{self._source}: {error}")
            )


def _picture_or_error(camera: OpenCvCamera) -> Pixels | PictureError:
    try:
        return camera.picture()
    except PictureError as error:
        return error
