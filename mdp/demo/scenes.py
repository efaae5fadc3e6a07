"""Scenes of a bundle's cameras, and a belt on which their items come by."""

import io
import mimetypes
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from PIL import Image

from mdp.client.sync import Client
from mdp.errors import InferenceError, InputError, MDPError
from mdp.formats.bundle import Bundle
from mdp.requests.prediction import Prediction
from mdp.testing.folder_cameras import FolderCameras

#: Beside the bundle of four cameras: scenes that nothing was trained or fitted on.
SCENES = "scenes"
#: Beside a bundle without cameras: test pictures, a folder for each class.
PICTURES = "pictures"
#: The folder of scenes of items that are of no class.
UNKNOWN = "unknown"
#: Times that one call is made, at most.
MOST_CALLS = 4

#: A picture per camera.
Scene = Mapping[str, Path]


class DemoFailed(MDPError):
    """A step of the demo failed."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Scenes:
    """Scenes of a bundle's cameras."""

    #: Device -> camera.
    cameras: Mapping[str, str]
    #: Label and scene; those of one class never follow each other where there are others.
    known: Sequence[tuple[str, Scene]]
    #: Scenes of items of no class.
    unknown: Sequence[Scene]

    @classmethod
    def of(cls, bundle: Bundle, folder: Path | None) -> "Scenes":
        """Read `CLASS/SCENE/CAMERA.*` of `folder`, by default those beside `bundle`."""
        folder = bundle.path / SCENES if folder is None else folder
        plan = bundle.manifest.plan
        cameras = {a.device: a.camera for a in plan.assignments if a.camera is not None}
        shot: dict[Path, dict[str, Path]] = {}
        for file in picture_files(folder, "*/*/*"):
            shot.setdefault(file.parent, {})[file.stem] = file
        by_class: dict[str, list[Scene]] = {}
        for where, scene in shot.items():
            if lacking := set(cameras.values()) - scene.keys():
                raise InputError(f"{where}: expected a picture of camera {min(lacking)!r}")
            by_class.setdefault(where.parent.name, []).append(scene)
        unknown = by_class.pop(UNKNOWN, [])
        check_classes(folder, by_class, bundle)
        turns = zip_longest(*([(label, one) for one in some] for label, some in by_class.items()))
        known = [item for turn in turns for item in turn if item is not None]
        if not known:
            raise InputError(
                f"{folder}: expected scenes, CLASS/SCENE/CAMERA.jpg, of {bundle.path}'s cameras"
            )
        return cls(cameras, known, unknown)

    def contents(self, scene: Scene) -> dict[str, bytes]:
        """Pictures of a scene, by device."""
        return {device: scene[camera].read_bytes() for device, camera in self.cameras.items()}


@dataclass(slots=True)
class RepeatedCalls:
    """Makes a call again that had no answer, as other work may keep this machine busy."""

    deadline_ms: float
    #: Calls that were made again.
    count: int = 0

    def answer(self, call: Callable[[], Prediction]) -> Prediction:
        """The first answer of `call`; raises DemoFailed where there is none."""
        for _ in range(MOST_CALLS - 1):
            try:
                return call()
            except InferenceError:
                self.count += 1
        try:
            return call()
        except InferenceError as error:
            raise DemoFailed(
                f"{error}, {MOST_CALLS} times in a row; on a machine with other work give "
                f"--deadline-ms {4 * self.deadline_ms:g}"
            ) from error


@dataclass(slots=True)
class Belt:
    """Items that come by before cameras, one of which may be covered."""

    scenes: Scenes
    cameras: FolderCameras
    client: Client
    calls: RepeatedCalls
    #: The device whose camera is covered, and the one that was killed.
    covered: str | None = None
    gone: str | None = None

    def look_at(self, scene: Scene) -> Prediction:
        """The fleet's answer for one scene, once every camera that is there sees it."""
        shown = self.scenes.contents(scene)
        if self.covered is not None:
            shown[self.covered] = blacken(shown[self.covered])
        self.cameras.put(shown)
        try:
            self.cameras.wait_for_frames(self.client, but=self.gone)
        except AssertionError as error:
            raise DemoFailed(f"the cameras: {error}") from error
        return self.calls.answer(lambda: self.client.look(deadline_ms=self.calls.deadline_ms))

    def look(self, number: int) -> Prediction:
        """The answer for the item in a place of the belt, which comes round."""
        return self.look_at(self._item(number)[1])

    def label(self, number: int) -> str:
        """The class of the item in a place of the belt."""
        return self._item(number)[0]

    def _item(self, number: int) -> tuple[str, Scene]:
        return self.scenes.known[number % len(self.scenes.known)]


def blacken(content: bytes) -> bytes:
    """A picture of the same size that shows nothing."""
    size, covered = Image.open(io.BytesIO(content)).size, io.BytesIO()
    Image.new("RGB", size).save(covered, "JPEG")
    return covered.getvalue()


def picture_files(folder: Path, pattern: str) -> list[Path]:
    """The files that are pictures by their names, which a README beside them is not."""
    kinds = ((file, mimetypes.guess_type(file.name)[0] or "") for file in folder.glob(pattern))
    return sorted(file for file, kind in kinds if kind.startswith("image/") and file.is_file())


def check_classes(folder: Path, labels: Collection[str], bundle: Bundle) -> None:
    """Raise InputError for a label that is no class of `bundle`."""
    if strange := sorted(set(labels) - set(bundle.manifest.labels)):
        raise InputError(
            f"{folder}: expected folders named after classes of {bundle.path}, found {strange[0]!r}"
        )
