"""Profiles of devices as quick as the machine that networks were timed on, and of slower ones."""

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.results import format_machine
from benchmarks.pilot.depths import SPEEDS
from mdp.formats.plan import SubModelSpec
from mdp.formats.profile import DeviceProfile, LatencyPoint, NetworkLink, NetworkPoint, Provenance
from partitioner.pilot.measure import plain_shapes

#: More than any network takes.
_MEMORY_BYTES = 2 * 1024**3
#: What says the shape of an encoder, beside its depth and the side of its pictures.
_SHAPE = ("patch_size", "embed_dim", "num_heads", "mlp_ratio")


def teacher_ms(times: Mapping[str, Any]) -> float:
    """Milliseconds of the teacher, which all others' times are compared with."""
    return next(float(one["ms"]) for one in times["candidates"] if one["ratio"] == 1)


def speed_profiles(times: Mapping[str, Any]) -> list[DeviceProfile]:
    """Profiles of the devices of `SPEEDS`, by results of `benchmarks.pilot.depths`.

    A network that was timed takes its milliseconds divided by the device's speed. The link takes no
    time, so that a latency is of computing alone.
    """
    timed = [one for one in times["candidates"] if one["timed"]]
    networks = {one["network"] for one in timed}
    shapes = plain_shapes(sorted(networks))
    measured = Provenance(
        "measured", f"benchmarks.pilot.depths on {format_machine(times['machine'])}"
    )
    unlimited = Provenance("estimated", "does not limit what is chosen")
    return [
        DeviceProfile(
            name=name.replace(" ", "-"),
            kind="cpu",
            provider="CPUExecutionProvider",
            threads=1,
            memory_bytes=_MEMORY_BYTES,
            link=NetworkLink(bandwidth_bps=1e15, round_trip_s=0.0),
            latency=[
                LatencyPoint(
                    threads=1, latency_ms=one["ms"] / speed, **_encoder(one, shapes[one["network"]])
                )
                for one in timed
                if one["depth"]
            ],
            networks=[
                NetworkPoint(
                    threads=1,
                    latency_ms=one["ms"] / speed,
                    name=one["network"],
                    image_size=one["image_size"],
                )
                for one in timed
                if not one["depth"]
            ],
            provenance=dict.fromkeys(("threads", "latency", "networks"), measured)
            | dict.fromkeys(("memory_bytes", "link", "availability"), unlimited),
        )
        for name, speed in SPEEDS.items()
    ]


def _encoder(one: Mapping[str, Any], whole: SubModelSpec) -> dict[str, Any]:
    """The shape of a cut of the network `whole`, as a profile states it."""
    shape = {key: getattr(whole, key) for key in _SHAPE}
    return {**shape, "depth": one["depth"], "image_size": one["image_size"]}
