"""Good items that a bundle's anomaly heads learn from anew: DIR/good, and DIR/defects to measure.

Layout as of `mdp-partition inspect`: DIR/good/SCENE/CAMERA.jpg.
"""

from collections.abc import Mapping
from pathlib import Path

from mdp.errors import InputError
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import Fleet
from mdp.line.kept import KeptItem
from mdp.requests.reason import SUSPECT, Suspicion

GOOD, DEFECTS = "good", "defects"


def require_heads(bundle: Bundle) -> None:
    """Raise InputError for a bundle whose models say nothing of good items."""
    if not bundle.manifest.inspection:
        raise InputError(f"{bundle.path} has no anomaly heads: mdp-partition inspect adds them")


def cameras_of(fleet: Fleet, bundle: Bundle) -> dict[str, str]:
    """Device -> its camera's name in the bundle's plan, one device for each camera.

    Raises InputError for a bundle without anomaly heads, or without cameras.
    """
    require_heads(bundle)
    found: dict[str, str] = {}
    for entry in fleet.devices:
        camera = bundle.assignment(entry.plan_device).camera
        if camera is None:
            raise InputError(
                f"{bundle.path}: expected a camera for each sub-model, got none for "
                f"{entry.plan_device}: items are good scenes of bundles of cameras"
            )
        if camera not in found.values():
            found[entry.device] = camera
    return found


def good_pictures(
    item: KeptItem, cameras: Mapping[str, str], suspected: Mapping[str, Suspicion]
) -> dict[str, Path]:
    """Camera -> its picture of a kept item that is to be a good scene.

    `suspected` are devices whose cameras are suspected now. Raises InputError where the item's
    record, or that, suspects a camera, and for an item without a picture of each camera.
    """
    name = item.record.item
    doubts = {**item.record.answer.suspects, **suspected}
    for device in cameras:
        if (why := doubts.get(device)) is not None:
            raise InputError(
                f"item {name}: {device}: {SUSPECT[why]} Expected a picture as of the good scenes: "
                "put the camera back, or learn anew from other good scenes"
            )
    missing = [device for device in cameras if device not in item.pictures]
    if missing:
        raise InputError(
            f"item {name}: expected a picture of each camera, found none of {', '.join(missing)}"
        )
    return {camera: item.pictures[device] for device, camera in cameras.items()}


def data_words(folder: Path, option: str, percent: float) -> list[str]:
    """The options of `mdp-partition` that name the scenes in `folder`; `option` takes good ones.

    What people have called good is not doubted.
    """
    words = [option, str(folder / GOOD), "--all-good", "--rate", f"{percent:g}"]
    if (folder / DEFECTS).is_dir():
        words += ["--defects", str(folder / DEFECTS)]
    return words
