"""Cameras that are played by folders, each of which shows one picture."""

import re
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

from mdp.client.sync import Client
from mdp.testing.processes import PATIENCE_S, until

#: Frames a second, unless told otherwise: so often is the picture read anew.
FPS = 100


class FolderCameras:
    """A folder for each device's camera."""

    def __init__(self, folder: Path, devices: Iterable[str], *, fps: int = FPS) -> None:
        """Folders are made in `folder`; pictures of before are removed from them."""
        self._fps = fps
        self.folders = {device: folder / f"camera-{device}" for device in devices}
        for path in self.folders.values():
            path.mkdir(exist_ok=True)
            for file in path.iterdir():
                file.unlink()

    def source(self, device: str) -> tuple[str, str, str, str]:
        """Options of the device's agent."""
        return "--source", f"folder:{self.folders[device]}", "--source-fps", str(self._fps)

    def put(self, pictures: Mapping[str, bytes]) -> None:
        """Put each named device's camera before a picture, given as a file's content."""
        for device, content in pictures.items():
            hidden = self.folders[device] / ".next"
            hidden.write_bytes(content)
            hidden.rename(self.folders[device] / "now")

    def wait_for_frames(self, client: Client, but: str | None = None) -> None:
        """Wait until each camera, `but` one, has given a frame that was begun after this call.

        Raises AssertionError where that takes too long.
        """
        wanted = self.folders.keys() - {but}
        before = self._frames(client, wanted)

        def all_new() -> bool:
            now = self._frames(client, wanted)
            # One frame may have been under way.
            return all(now[device] >= before[device] + 2 for device in wanted)

        until(all_new, "new frames")

    def _frames(self, client: Client, wanted: Set[str]) -> dict[str, int]:
        # By statuses, as looks in between would see the cameras change one after another.
        numbers: dict[str, int] = {}

        def all_there() -> bool:
            for status in client.status(timeout_s=PATIENCE_S):
                if found := re.search(r": frame (\d+), ", status.source):
                    numbers[status.device] = int(found[1])
            return numbers.keys() >= wanted

        until(all_there, "a frame of every camera")
        return numbers
