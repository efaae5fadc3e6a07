"""Output of commands about several cameras."""

from pathlib import Path

import pytest

from mdp.cli.answers import evaluation_items
from mdp.cli.doctor import camera_finding
from mdp.formats.bundle import Bundle
from mdp.testing.bundles import write_bundle
from tests.support.faults.stage import with_cameras


def test_accuracies_of_several_cameras_are_of_scenes(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    assert evaluation_items(Bundle.open(bundle)) == "test pictures"
    assert evaluation_items(Bundle.open(with_cameras(bundle))) == "test scenes"


@pytest.mark.parametrize(
    ("says", "ok"),
    [
        ("frame 7, 2000 ms old", True),
        ("frame 7, 40 ms old; being recorded; 3 could not be read", True),
        ("frame 7, 40 ms old; being recorded; masked", True),
        ("frame 7, 2001 ms old", False),
        ("frame 7, 40 ms old; the same picture for 10 s and more: frozen?", False),
        ("no frame yet; camera:0: cannot be opened", False),
    ],
)
def test_a_camera_without_a_frame_for_a_look_is_a_problem(says: str, ok: bool) -> None:
    found = camera_finding("n100", f"rtsp://10.0.0.30:554/door: {says}")
    assert (found.subject, found.ok) == ("n100's camera", ok)
