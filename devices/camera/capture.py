"""Opens what `--source` names; OpenCV is needed for cameras, streams and videos alone."""

import math
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from devices.camera.certificate import own_address, phone_files
from devices.camera.fetched import FetchedCamera, owner_keys
from devices.camera.frames import FrameBuffer
from devices.camera.phone import PhoneCamera, door_of
from mdp.cameras import Camera, OpenCvCamera, Source, SourceError, opencv, parse_source
from mdp.errors import InputError
from mdp.pictures.crop import Pixels, load_picture
from mdp.transport import ClientKeys

#: Frames taken a second, unless --source-fps changes it.
DEFAULT_FPS = 10.0


def open_frame_buffer(
    text: str, fps: float, *, key: Path | None = None, source_key: Path | None = None
) -> FrameBuffer:
    """A buffer for what `--source` names, which is opened later.

    `key` is this agent's secret key file, `source_key` the public one of another agent that is the
    source. Raises InputError or ConfigError, or AgentError if OpenCV is needed and not installed.
    """
    source, keys = parse_source(text), None
    # False for NaN too.
    if not 0 < fps < math.inf:
        raise InputError(f"--source-fps: expected more than 0, got {fps:g}")
    if source.kind == "mdp":
        keys = owner_keys(key, source_key)
    elif source.kind == "phone":
        return FrameBuffer(source, _phone(source), fps=fps)
    elif source.kind != "folder":
        opencv()
    return FrameBuffer(source, lambda: open_camera(source, keys), fps=fps)


def _phone(source: Source) -> Callable[[], PhoneCamera]:
    """Function that opens the camera of a phone, whose owner is told how to give it."""
    address = own_address()
    door = door_of(source, address, phone_files(address))
    print(door.invitation(terminal=sys.stderr.isatty()), end="", file=sys.stderr, flush=True)
    return lambda: PhoneCamera(source, door)


def open_camera(source: Source, keys: ClientKeys | None = None) -> Camera:
    """`source`, open; another agent's camera with `keys`. Raises SourceError."""
    if keys is not None:
        return FetchedCamera(source, keys)
    if source.kind == "folder":
        return FolderCamera(Path(source.place))
    return OpenCvCamera(source)


class FolderCamera:
    """A folder's pictures by name, in a loop; the folder is listed anew in each round.

    Hidden files are left out, so that one may be written under a hidden name and then renamed.
    """

    age_s = 0.0

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
