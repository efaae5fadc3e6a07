"""A probed profile as rows of docs/results/boards.md. Pure.

Nothing in a row is its owner's: no name of the device, no address, no serial number.
"""

from collections.abc import Iterator, Mapping, Sequence

from mdp.errors import InputError
from mdp.formats.profile import DeviceProfile, LatencyPoint, NetworkPoint, Precision
from mdp.load import is_busy

#: The graphs of the table, all among those of --quick: heading and how a point is told.
GRAPHS: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("ViT 112/16, 192 x 6", (112, 16, 192, 6)),
    ("ViT 160/16, 384 x 4", (160, 16, 384, 4)),
    ("MobileNetV4-S, 128 px", ("mobilenetv4_conv_small", 128)),
    ("EfficientNet-B0, 160 px", ("efficientnet_b0", 160)),
)
#: In each cell, in this order.
PRECISIONS: tuple[Precision, ...] = ("fp32", "int8-static")
HEADING = (
    "| board | processor | cores | runtime | "
    + " | ".join(heading for heading, _ in GRAPHS)
    + " | measured |"
)
_NONE = "-"


def rows_to_share(profile: DeviceProfile, board: str) -> list[str]:
    """A row for each runtime and provider that was measured; raises InputError for too few points.

    Cells are the milliseconds of one picture in fp32 and in static int8, each with the number of
    threads that is quickest; * while other processes kept the machine busy.
    """
    record = profile.probe
    points: list[LatencyPoint | NetworkPoint] = [*profile.latency, *profile.networks]
    shown = [point for point in points if point.batch == 1 and _graph(point) is not None]
    if record is None or {_graph(point) for point in shown} != {told for _, told in GRAPHS}:
        raise InputError("--share: expected all points of --quick at least, as rows are compared")
    ways = dict.fromkeys((point.runtime, point.provider or profile.provider) for point in shown)
    return [
        _row(
            [
                _plain(board),
                _plain(record.processor),
                str(record.cores),
                _runtime(runtime, provider, _version(record.versions, runtime)),
                *_cells(
                    [
                        point
                        for point in shown
                        if (point.runtime, point.provider or profile.provider)
                        == (runtime, provider)
                    ]
                ),
                f"{record.date}, mdp-edge {record.versions.get('mdp-edge', _NONE)}",
            ]
        )
        for runtime, provider in ways
    ]


def _version(versions: Mapping[str, str], runtime: str) -> str:
    """The version of a runtime, whose package has another name where it is built for GPUs."""
    return versions.get(runtime) or versions.get(f"{runtime}-gpu", "")


def _graph(point: LatencyPoint | NetworkPoint) -> tuple[object, ...] | None:
    told: tuple[object, ...] = (
        (point.name, point.image_size)
        if isinstance(point, NetworkPoint)
        else (point.image_size, point.patch_size, point.embed_dim, point.depth)
    )
    return told if told in [graph for _, graph in GRAPHS] else None


def _cells(points: Sequence[LatencyPoint | NetworkPoint]) -> Iterator[str]:
    for _, graph in GRAPHS:
        of_graph = [point for point in points if _graph(point) == graph]
        yield " / ".join(
            _quickest([point for point in of_graph if point.precision == precision])
            for precision in PRECISIONS
        )


def _quickest(points: Sequence[LatencyPoint | NetworkPoint]) -> str:
    if not points:
        return _NONE
    best = min(points, key=lambda point: point.latency_ms)
    return f"{best.latency_ms:.3g}{'*' if is_busy(best.others_cores) else ''}"


def _runtime(runtime: str, provider: str, version: str) -> str:
    where = provider.removesuffix("ExecutionProvider")
    return _plain(f"{runtime} {version}".rstrip() + f", {where}")


def _plain(text: str) -> str:
    """Text that keeps the table's columns apart, in one line."""
    return " ".join(text.replace("|", "/").split()) or _NONE


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
