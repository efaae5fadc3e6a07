"""The desk of cameras: what a recording keeps others from, and how it ends."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from mdp.client.cameras import FleetCameras
from mdp.client.scenes import Scene, SceneFolder
from mdp.protocol.masking import MaskReply
from mdp.teach.recorder import BusyError, CameraDesk, RecordRequest
from mdp.testing.processes import PATIENCE_S


class PlayedCameras(FleetCameras):
    """Two cameras, which give the same pictures again and again."""

    fault: Exception | None = None

    def __init__(self) -> None:
        self._clock = time.monotonic

    def take(self, side: int = 0) -> Scene:
        if self.fault is not None:
            raise self.fault
        return Scene(pictures={"a": b"\xff\xd8a", "b": b"\xff\xd8b"}, missing={})

    def masks(self) -> tuple[dict[str, MaskReply], dict[str, str]]:
        return {}, {"a": "too old"}

    def wait(self, until_s: float) -> None:
        time.sleep(max(0.0, until_s - self._clock()))

    def close(self) -> None:
        """Nothing to close."""


def play(
    tmp_path: Path,
    use: Callable[[CameraDesk, Callable[[RecordRequest], None]], Awaitable[None]],
    fault: Exception | None = None,
) -> CameraDesk:
    """A desk after `use`, which gets a function that begins to record."""

    async def play() -> CameraDesk:
        desk = CameraDesk(tmp_path / "fleet.toml", None, lambda: None)
        cameras = PlayedCameras()
        cameras.fault = fault
        setattr(desk, "_connect", lambda: cameras)  # noqa: B010
        folder = SceneFolder(tmp_path / "scenes", "nut")
        async with asyncio.timeout(PATIENCE_S):
            await use(desk, lambda wanted: desk.record(wanted, folder))
            await desk.close()
        return desk

    return asyncio.run(play())


async def first_scene(desk: CameraDesk) -> None:
    while desk.recording is None or desk.recording.scenes < 1:
        await asyncio.sleep(0.01)


SLOW = RecordRequest(label="nut", count=5, every_s=60.0, countdown_s=0.0)


@pytest.mark.parametrize("end", ["stop", "close"])
def test_a_recording_ends_before_its_next_scene(tmp_path: Path, end: str) -> None:
    async def use(desk: CameraDesk, record: Callable[[RecordRequest], None]) -> None:
        record(SLOW)
        await first_scene(desk)
        await getattr(desk, end)()

    recording: Any = play(tmp_path, use).recording
    assert (recording.state, recording.scenes) == ("stopped", 1)


def test_masks_are_refused_during_a_recording(tmp_path: Path) -> None:
    async def use(desk: CameraDesk, record: Callable[[RecordRequest], None]) -> None:
        record(SLOW)
        await first_scene(desk)
        for request in (desk.masks(), desk.set_mask("a", None)):
            with pytest.raises(BusyError, match="nut is being recorded, 1 of 5 scenes: expected"):
                await request
        await desk.stop()
        assert await desk.masks() == ({}, {"a": "too old"})

    play(tmp_path, use)


def test_an_unforeseen_error_ends_a_recording(tmp_path: Path) -> None:
    async def use(desk: CameraDesk, record: Callable[[RecordRequest], None]) -> None:
        record(SLOW)
        assert desk._task is not None
        with pytest.raises(ZeroDivisionError):
            await desk._task

    recording: Any = play(tmp_path, use, ZeroDivisionError()).recording
    assert (recording.state, recording.error) == ("failed", "unforeseen error: the log says more")
