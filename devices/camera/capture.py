"""Opens folders, video files and cameras. The only module that imports OpenCV.

A folder is read with Pillow alone. OpenCV is the optional extra `camera`.
"""

import math
import os
from collections import deque
from pathlib import Path
from typing import Any

from PIL import Image

from devices.camera.frames import Camera, FrameBuffer, Source, SourceError, parse_source
from mdp.errors import AgentError, InputError, PictureError
from mdp.extras import install
from mdp.pictures.crop import MAX_PIXELS, Pixels, load_picture

#: Frames taken a second, unless --source-fps changes it.
DEFAULT_FPS = 10.0
#: How long a stream may take to open, and to give its next picture.
STREAM_TIMEOUT_MS = 5000


def open_frame_buffer(text: str, fps: float) -> FrameBuffer:
    """A buffer for what `--source` names, which is opened later.

    Raises InputError, or AgentError if OpenCV is needed and not installed.
    """
    source = parse_source(text)
    # False for NaN too.
    if not 0 < fps < math.inf:
        raise InputError(f"--source-fps: expected more than 0, got {fps:g}")
    if source.kind != "folder":
        _opencv()
    return FrameBuffer(source, lambda: open_camera(source), fps=fps)


def open_camera(source: Source) -> Camera:
    """`source`, open; raises SourceError."""
    if source.kind == "folder":
        return FolderCamera(Path(source.place))
    return OpenCvCamera(source)


class FolderCamera:
    """A folder's pictures by name, in a loop; the folder is listed anew in each round.

    Hidden files are left out, so that one may be written under a hidden name and then renamed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._left: deque[Path] = deque()
        self._file = folder

    def grab(self) -> None:
        """Select the next file; raises SourceError if there is none."""
        if not self._left:
            self._left.extend(self._files())
        self._file = self._left.popleft()

    def _files(self) -> list[Path]:
        try:
            # Regular files only: opening a pipe would wait for its writer.
            found = [
                path
                for path in self._folder.iterdir()
                if path.is_file() and not path.name.startswith(".")
            ]
        except OSError as error:
            raise SourceError(f"{self._folder}: {error.strerror or error}") from error
        if not found:
            raise SourceError(f"{self._folder}: holds no file")
        return sorted(found)

    def picture(self, *, smallest_side: int) -> Image.Image | Pixels:
        """The file's picture; raises PictureError."""
        return load_picture(self._file, smallest_side=smallest_side)

    def close(self) -> None:
        """Nothing is open."""


class OpenCvCamera:
    """A video file, in a loop, a local camera, or a stream."""

    def __init__(self, source: Source) -> None:
        """Open `source`; raises SourceError, or AgentError if OpenCV is not installed."""
        self._cv2 = _opencv()
        self._source = source
        self._given = 0
        self._capture = self._opened()

    def _opened(self) -> Any:
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
        """Grab the next picture; raises SourceError if none comes."""
        if not self._capture.grab():
            if self._source.is_live or self._given == 0:
                raise SourceError(f"{self._source}: gives no picture")
            # The file's end.
            self._capture.release()
            self._given = 0
            self._capture = self._opened()
            if not self._capture.grab():
                raise SourceError(f"{self._source}: gives no picture")
        self._given += 1

    def picture(self, *, smallest_side: int) -> Image.Image | Pixels:
        """The last grabbed picture; raises PictureError."""
        whole, pixels = self._capture.retrieve()
        if not whole:
            raise PictureError(f"{self._source}: a picture that cannot be decoded")
        rgb: Pixels = self._cv2.cvtColor(pixels, self._cv2.COLOR_BGR2RGB)
        return rgb

    def close(self) -> None:
        """Close the device, file or connection."""
        self._capture.release()


def _opencv() -> Any:
    # FFmpeg's messages about a stream that it cannot open contain the URL with its password.
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
    os.environ.setdefault("OPENCV_LOG_LEVEL", "SILENT")
    try:
        import cv2
    except ImportError as error:
        raise AgentError(
            "OpenCV is not installed; every --source but a folder needs it: " + install("camera")
        ) from error
    # Leaves the cores to the sub-model.
    cv2.setNumThreads(1)
    return cv2
