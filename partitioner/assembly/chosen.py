"""Models of an assembled bundle chosen by measurement: their entries, and where they come from."""

from collections.abc import Mapping
from pathlib import Path

from partitioner.assembly.members import Model
from partitioner.pilot.measure import Pilot, backbone_of
from partitioner.regions import WHOLE

#: File with the names of the data's classes, beside the weights.
LABELS = "labels.txt"


def entries(pilot: Pilot, members: Mapping[int, Path], cameras: Mapping[str, str]) -> list[Model]:
    """The model of each device; `members` are files of weights by row of the pilot."""
    models = []
    for device, row in pilot.choice.rows.items():
        backbone = backbone_of(pilot.measured[row].candidate)
        models.append(
            Model(
                device=device,
                labels=LABELS,
                timm=backbone.name,
                # From wherever the command was given: an assembly reads paths in its own folder.
                weights=str(members[row].absolute()),
                image_size=backbone.image_size,
                depth=backbone.depth,
                pooling=backbone.pooling,
                region=WHOLE,
                camera=cameras.get(device),
            )
        )
    return models


def origin_of(
    pilot: Pilot, weights: Mapping[str, Path], digests: Mapping[str, str]
) -> dict[str, str]:
    """Facts for the manifest: given weights, and the accuracy that was measured before."""
    chosen = [pilot.measured[row] for row in pilot.choice.rows.values()]
    names = {one.candidate.name for one in chosen}
    own = any(one.blend is not None for one in chosen)
    return {
        "method": "networks with given weights, cut and chosen by measurement, with classifiers "
        f"fitted to the owner's pictures{' and rows of their own' if own else ''}",
        "measured_before": f"{pilot.choice.together:.4f} on {pilot.count} pictures left out",
        **{
            f"given_{name}": f"{weights[name].name}, sha256 {digests[name]}"
            for name in sorted(names)
        },
    }
