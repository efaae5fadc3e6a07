"""Folders as cameras, and what is said where OpenCV is not installed."""

import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from devices.camera.capture import FolderCamera, open_camera, open_frame_buffer
from mdp.cameras import Source, SourceError
from mdp.errors import AgentError, InputError, PictureError
from mdp.testing.bundles import colour_picture


def write(path: Path, colour: str) -> None:
    Image.fromarray(colour_picture(colour)).save(path)


def play(camera: FolderCamera, count: int) -> list[str]:
    """The strongest channel of the next pictures."""
    seen = []
    for _ in range(count):
        camera.grab()
        picture = camera.picture(smallest_side=8)
        assert isinstance(picture, Image.Image)
        seen.append("RGB"[np.asarray(picture).mean(axis=(0, 1)).argmax()])
    return seen


def test_a_folder_is_played_by_name_again_and_again(tmp_path: Path) -> None:
    write(tmp_path / "2.png", "green")
    write(tmp_path / "1.png", "red")
    write(tmp_path / ".3.png", "blue")
    (tmp_path / "sub").mkdir()
    os.mkfifo(tmp_path / "pipe")
    camera = open_camera(Source(kind="folder", place=str(tmp_path)))
    assert isinstance(camera, FolderCamera)
    assert play(camera, 3) == ["R", "G", "R"]
    write(tmp_path / "3.png", "blue")
    assert play(camera, 4) == ["G", "R", "G", "B"], "new files are seen the next time round"
    camera.close()


def test_an_empty_folder_or_none(tmp_path: Path) -> None:
    camera = FolderCamera(tmp_path)
    with pytest.raises(SourceError, match=rf"^{tmp_path}: holds no file$"):
        camera.grab()
    with pytest.raises(SourceError, match=rf"^{tmp_path}/gone: No such file or directory$"):
        FolderCamera(tmp_path / "gone").grab()


def test_a_file_that_is_no_picture_and_one_that_went(tmp_path: Path) -> None:
    (tmp_path / "1.jpg").write_bytes(b"no picture")
    write(tmp_path / "2.png", "red")
    camera = FolderCamera(tmp_path)
    camera.grab()
    with pytest.raises(PictureError, match=r"1\.jpg: expected a picture"):
        camera.picture(smallest_side=8)
    camera.grab()
    (tmp_path / "2.png").unlink()
    with pytest.raises(PictureError, match=r"2\.png: No such file or directory"):
        camera.picture(smallest_side=8)


@pytest.mark.parametrize("fps", [0.0, -1.0, math.nan, math.inf])
def test_frames_a_second_that_are_none(tmp_path: Path, fps: float) -> None:
    with pytest.raises(InputError, match=r"^--source-fps: expected more than 0, got "):
        open_frame_buffer(f"folder:{tmp_path}", fps)


def test_without_opencv_only_folders_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    open_frame_buffer("folder:.", 1.0)
    with pytest.raises(AgentError) as raised:
        open_frame_buffer("camera:0", 1.0)
    assert str(raised.value) == (
        "OpenCV is not installed; cameras, streams and video files need it: "
        "pip install '.[camera]' in a checkout of MDP"
    )


class TestWithOpenCv:
    """Sources that only OpenCV can play."""

    @pytest.fixture(autouse=True)
    def _opencv(self) -> None:
        pytest.importorskip("cv2", reason="needs the camera extra")

    def test_a_video_begins_again_at_its_end(self, tmp_path: Path) -> None:
        film = tmp_path / "film.avi"
        write_film(film, ["red", "green", "blue"])
        camera = open_camera(Source(kind="video", place=str(film)))
        seen = []
        for _ in range(5):
            camera.grab()
            picture = camera.picture(smallest_side=8)
            assert not isinstance(picture, Image.Image)
            assert picture.shape == (40, 60, 3)
            seen.append("RGB"[picture.mean(axis=(0, 1)).argmax()])
        camera.close()
        assert seen == ["R", "G", "B", "R", "G"]

    def test_a_camera_or_a_film_that_is_none(self, tmp_path: Path) -> None:
        film = tmp_path / "film.avi"
        film.write_bytes(b"no film at all")
        for source in (Source(kind="video", place=str(film)), Source(kind="camera", place="63")):
            with pytest.raises(SourceError, match=rf"^{source}: cannot be opened$"):
                open_camera(source)

    def test_an_absent_stream_hides_its_password(self, capfd: pytest.CaptureFixture[str]) -> None:
        source = Source(kind="rtsp", place="rtsp://me:s3cret@127.0.0.1:9/x")
        with pytest.raises(SourceError, match=r"^rtsp://127\.0\.0\.1:9/x: cannot be opened$"):
            open_camera(source)
        said = capfd.readouterr()
        assert "s3cret" not in said.out + said.err


def write_film(path: Path, colours: list[str]) -> None:
    """A film of one picture per colour."""
    import cv2

    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, (60, 40))
    for colour in colours:
        writer.write(cv2.cvtColor(colour_picture(colour), cv2.COLOR_RGB2BGR))
    writer.release()
