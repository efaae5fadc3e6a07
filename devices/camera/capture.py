"""Opens what `--source` names; a folder is read with Pillow alone."""

import math
from collections import deque
from pathlib import Path

from PIL import Image

from devices.camera.frames import FrameBuffer
from mdp.cameras import Camera, OpenCvCamera, Source, SourceError, opencv, parse_source
from mdp.errors import InputError
from mdp.pictures.crop import Pixels, load_picture

#: Frames taken a second, unless --source-fps changes it.
DEFAULT_FPS = 10.0


def open_frame_buffer(text: str, fps: float) -> FrameBuffer:
    """A buffer for what `--source` names, which is opened later.

    Raises InputError, or AgentError if OpenCV is needed and not installed.
    """
    source = parse_source(text)
    # False for NaN too.
    if not 0 < fps < math.inf:
        raise InputError(f"--source-fps: expected more than 0, got {fps:g}")
    if source.kind != "folder":
        opencv()
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
