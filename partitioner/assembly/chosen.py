"""Models of an assembled bundle chosen by measurement: their files, and their entries."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from mdp.formats.bundle import sha256_of
from partitioner.assembly.members import Model
from partitioner.assembly.write import Assembly
from partitioner.pilot.candidates import DeviceLatency
from partitioner.pilot.measure import Pictures, Pilot, backbone_of, write_member
from partitioner.regions import WHOLE

#: File with the names of the data's classes, beside the weights.
_LABELS = "labels.txt"


def write_models(
    pilot: Pilot,
    assembly: Assembly,
    weights: Mapping[str, Path],
    devices: Sequence[DeviceLatency],
    cameras: Mapping[str, str],
) -> list[Model]:
    """Fit and write every chosen member's weights into the assembly's folder; their entries.

    Classifiers are fitted to at most `assembly.limit` pictures of the train split.
    """
    data, folder = assembly.data, assembly.folder
    pictures = Pictures.of(data, assembly.limit)
    (folder / _LABELS).write_text("".join(f"{label}\n" for label in data.labels))
    written: dict[int, Path] = {}
    models = []
    for device in devices:
        name = device.profile.name
        row = pilot.choice.rows[name]
        measured = pilot.measured[row]
        if row not in written:
            written[row] = folder / f"member-{row}.safetensors"
            source = weights[measured.candidate.name]
            write_member(
                measured,
                source,
                pictures,
                len(data.labels),
                assembly.cache,
                assembly.progress,
                written[row],
            )
        backbone = backbone_of(measured.candidate)
        models.append(
            Model(
                device=name,
                labels=_LABELS,
                timm=backbone.name,
                weights=written[row].name,
                image_size=backbone.image_size,
                depth=backbone.depth,
                pooling=backbone.pooling,
                region=WHOLE,
                camera=cameras.get(name),
            )
        )
    return models


def origin_of(pilot: Pilot, weights: Mapping[str, Path]) -> dict[str, str]:
    """Facts for the manifest: given weights, and the accuracy that was measured before."""
    chosen = [pilot.measured[row] for row in pilot.choice.rows.values()]
    names = {one.candidate.name for one in chosen}
    own = any(one.blend is not None for one in chosen)
    return {
        "method": "networks with given weights, cut and chosen by measurement, with classifiers "
        f"fitted to the owner's pictures{' and rows of their own' if own else ''}",
        "measured_before": f"{pilot.choice.together:.4f} on {pilot.count} pictures left out",
        **{
            f"given_{name}": f"{weights[name].name}, sha256 {sha256_of(weights[name])}"
            for name in sorted(names)
        },
    }
