"""Cameras of one scene, played by folders: what they show, and a bundle assembled from scenes."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from io import BytesIO
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from PIL import Image

from mdp.client.scenes import SceneFolder
from mdp.files import write_json
from mdp.formats.bundle import FUSION, MANIFEST, Bundle, file_entry
from mdp.pictures.crop import Pixels
from mdp.testing.bundles import LABELS, colour_model, colour_picture
from mdp.testing.folder_cameras import FolderCameras

#: Side of the networks' pictures in pixels.
SIDE = 16


class Stage(FolderCameras):
    """Cameras that see coloured pictures."""

    def __init__(self, folder: Path, cameras: Iterable[str]) -> None:
        super().__init__(folder, cameras)
        self._random = np.random.default_rng(5)

    def picture(self, label: str) -> Pixels:
        """A picture of the colour `label`, with noise of its own.

        `black` is a colour too, and `red+blue` the one that both make together: no class.
        """
        noise = self._random.integers(0, 7, (40, 60, 1), np.uint8)
        if label == "black":
            return noise + np.zeros((40, 60, 3), np.uint8)
        whole = np.zeros((40, 60, 3), np.uint8)
        for part in label.split("+"):
            whole = np.maximum(whole, colour_picture(part))
        return noise + whole

    def show(self, labels: Mapping[str, str]) -> None:
        """Put each camera before a colour."""
        # As most cameras give it: what is recorded and what is looked at differ little.
        self.put({camera: jpeg(self.picture(label)) for camera, label in labels.items()})

    def show_all(self, label: str) -> None:
        """Put all cameras before the same colour."""
        self.show(dict.fromkeys(self.folders, label))

    def write_scenes(self, out: Path, each: int, *, wrong: float = 0.0) -> None:
        """Write `each` scenes of every colour; a camera sees another in a share `wrong` of them."""
        for label in LABELS:
            self._write(out, label, [self.draw(label, wrong) for _ in range(each)])

    def write_unknown(self, out: Path, items: Iterable[str]) -> None:
        """Write a scene of each of `items`, which are of no class."""
        self._write(out, "unknown", [dict.fromkeys(self.folders, item) for item in items])

    def _write(self, out: Path, label: str, scenes: Iterable[Mapping[str, str]]) -> None:
        folder, at = SceneFolder(out, label), datetime(2026, 1, 1, tzinfo=UTC)
        for number, shown in enumerate(scenes):
            pictures = {camera: jpeg(self.picture(seen)) for camera, seen in shown.items()}
            folder.write(at + timedelta(seconds=number), pictures)

    def draw(self, label: str, wrong: float) -> dict[str, str]:
        """Labels that each camera sees of a scene of `label`."""
        return {
            camera: str(self._random.choice(LABELS)) if self._random.random() < wrong else label
            for camera in self.folders
        }


def with_cameras(bundle: Path, rate: float = 0.95) -> Path:
    """The bundle, each sub-model with a camera called as its device, of which `rate` agree."""
    opened = Bundle.open(bundle)
    manifest, count = opened.manifest, len(opened.manifest.plan.assignments)
    write_json(bundle / FUSION, replace(opened.fusion_weights(), agreement=(rate,) * count))
    parts = [replace(part, camera=part.device) for part in manifest.plan.assignments]
    files = {**manifest.files, FUSION: file_entry(bundle / FUSION)}
    plan = replace(manifest.plan, assignments=parts)
    write_json(bundle / MANIFEST, replace(manifest, plan=plan, files=files))
    return bundle


def png(picture: Pixels) -> bytes:
    """The picture as a PNG, quickly."""
    content = BytesIO()
    Image.fromarray(picture).save(content, "PNG", compress_level=1)
    return content.getvalue()


def jpeg(picture: Pixels) -> bytes:
    """The picture as a JPEG."""
    content = BytesIO()
    Image.fromarray(picture).save(content, "JPEG", quality=90)
    return content.getvalue()


def models_file(folder: Path, cameras: Iterable[str]) -> Path:
    """A models.toml with the same network for every camera, on the device of that name."""
    (folder / "net.onnx").write_bytes(colour_model(SIDE, 1.0, 8.0))
    (folder / "labels.txt").write_text("\n".join(LABELS) + "\n")
    entries = [
        f'[[models]]\ndevice = "{camera}"\ncamera = "{camera}"\nonnx = "net.onnx"\n'
        'labels = "labels.txt"\nregion = {}\n'
        for camera in cameras
    ]
    path = folder / "models.toml"
    path.write_text("\n".join(entries))
    return path
