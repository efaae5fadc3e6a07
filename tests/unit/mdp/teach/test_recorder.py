"""The recorder of cameras: what a recording keeps others from, and how it ends."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from mdp.client.cameras import FleetCameras
from mdp.client.scenes import Scene, SceneFolder
from mdp.formats.fleet import read_devices
from mdp.protocol.masking import MaskReply
from mdp.teach.recorder import BusyError, CameraRecorder, RecordRequest
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
    use: Callable[[CameraRecorder, Callable[[RecordRequest], None]], Awaitable[None]],
    fault: Exception | None = None,
) -> CameraRecorder:
    """A recorder after `use`, which gets a function that begins to record."""

    async def play() -> CameraRecorder:
        recorder = CameraRecorder(tmp_path / "fleet.toml", None, lambda: None)
        cameras = PlayedCameras()
        cameras.fault = fault
        setattr(recorder, "_connect", lambda: cameras)  # noqa: B010
        folder = SceneFolder(tmp_path / "scenes", "nut")
        async with asyncio.timeout(PATIENCE_S):
            await use(recorder, lambda wanted: recorder.record(wanted, folder))
            await recorder.close()
        return recorder

    return asyncio.run(play())


async def first_scene(recorder: CameraRecorder) -> None:
    while recorder.recording is None or recorder.recording.scenes < 1:
        await asyncio.sleep(0.01)


SLOW = RecordRequest(label="nut", count=5, every_s=60.0, countdown_s=0.0)


@pytest.mark.parametrize("end", ["stop", "close"])
def test_a_recording_ends_before_its_next_scene(tmp_path: Path, end: str) -> None:
    async def use(recorder: CameraRecorder, record: Callable[[RecordRequest], None]) -> None:
        record(SLOW)
        await first_scene(recorder)
        await getattr(recorder, end)()

    recording: Any = play(tmp_path, use).recording
    assert (recording.state, recording.scenes) == ("stopped", 1)


def test_masks_are_refused_during_a_recording(tmp_path: Path) -> None:
    async def use(recorder: CameraRecorder, record: Callable[[RecordRequest], None]) -> None:
        record(SLOW)
        await first_scene(recorder)
        for request in (recorder.masks(), recorder.set_mask("a", None)):
            with pytest.raises(BusyError, match="nut is being recorded, 1 of 5 scenes: expected"):
                await request
        await recorder.stop()
        assert await recorder.masks() == ({}, {"a": "too old"})

    play(tmp_path, use)


def test_an_unforeseen_error_ends_a_recording(tmp_path: Path) -> None:
    async def use(recorder: CameraRecorder, record: Callable[[RecordRequest], None]) -> None:
        record(SLOW)
        assert recorder._task is not None
        with pytest.raises(ZeroDivisionError):
            await recorder._task

    recording: Any = play(tmp_path, use, ZeroDivisionError()).recording
    assert (recording.state, recording.error) == ("failed", "unforeseen error: the log says more")


def test_another_fleet_file_is_connected_to_before_the_next_picture(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    entry = '[[devices]]\ndevice = "{0}"\naddress = "tcp://127.0.0.1:{1}"\nk = {2}\n'
    entries = [entry.format(name, k + 1, k) for k, name in enumerate("ab")]
    path.write_text('bundle = "bundle"\n' + "".join(entries))
    connected: list[list[str]] = []

    async def use() -> None:
        recorder = CameraRecorder(path, None, lambda: None)

        def connect() -> PlayedCameras:
            recorder._devices = read_devices(path)
            connected.append([one.device for one in recorder._devices.devices])
            return PlayedCameras()

        setattr(recorder, "_connect", connect)  # noqa: B010
        for _ in range(2):
            await recorder.masks()
        # While somebody edits it, the cameras of the last good one stay.
        path.write_text("bundle = ")
        await recorder.masks()
        path.write_text('bundle = "bundle"\n' + entries[0])
        await recorder.masks()
        await recorder.close()

    asyncio.run(use())
    assert connected == [["a", "b"], ["a"]]


def test_previews_go_on_while_an_item_is_being_placed(tmp_path: Path) -> None:
    async def use(recorder: CameraRecorder, record: Callable[[RecordRequest], None]) -> None:
        record(RecordRequest(label="nut", count=1, countdown_s=60.0))
        assert recorder.recording is not None
        assert set((await recorder.preview()).pictures) == {"a", "b"}
        assert recorder.recording.state == "countdown"
        await recorder.stop()

    play(tmp_path, use)
