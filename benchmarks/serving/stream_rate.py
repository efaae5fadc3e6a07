"""The rate of `stream` against the slowest member's model run in a loop.

Agents serve ViT sub-models of untrained weights, one thread each. In turns, a block each, the
slowest member's model runs in a loop in this process, with the same runtime and threads, and a
client streams pictures through the fleet. The loop has the machine to itself, as a device with a
processor of its own has; two members on one machine share memory and caches (docs/lab-log.md).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from benchmarks.harness.models import refilled, vit
from benchmarks.harness.resampling import in_rounds, ratio_interval
from benchmarks.harness.serving_fleet import client_of, served
from mdp import Client
from mdp.cli.bench import noise_picture
from mdp.errors import InferenceError
from mdp.formats.bundle import Bundle
from mdp.formats.plan import SubModelSpec
from mdp.pictures.crop import Picture, Pixels
from mdp.runtimes.base import Execution, Runtime
from mdp.runtimes.onnxruntime import OrtRuntime
from mdp.testing.bundles import LABELS, write_bundle
from partitioner.export.write import ServedMember, to_onnx
from partitioner.networks.submodel import SubModel

DEADLINE_MS = 10_000.0
#: Share of partial answers beyond which the rate is not that of this fleet.
MOST_PARTIAL = 0.01
#: About 20 and 8 ms on one core of the machine that the aims were set on.
SLOW = vit(128, 8, 192, 6, 3)
QUICK = msgspec.structs.replace(SLOW, depth=2)
#: Small enough that several at once pay.
SMALL = msgspec.structs.replace(SLOW, image_size=64)


ROUNDS, BLOCK_S = 6, 2.0


class Case(NamedTuple):
    members: tuple[SubModelSpec, ...]
    in_flight: tuple[int, ...]
    #: Pictures that an agent, and the loop, computes at once at most.
    batch: int = 1


CASES = (Case((SLOW,), (1, 2, 4)), Case((SLOW, QUICK), (2, 4)), Case((SMALL,), (8, 16), batch=8))


def vit_bundle(folder: Path, specs: Sequence[SubModelSpec]) -> Bundle:
    """A bundle of one device per shape whose models are ViTs of untrained weights."""
    torch.manual_seed(0)
    devices = tuple(f"device-{k}" for k in range(len(specs)))
    write_bundle(folder, devices=devices, sizes=tuple(spec.image_size for spec in specs))
    members = [ServedMember(SubModel(spec, len(LABELS))) for spec in specs]
    return refilled(
        folder,
        [
            to_onnx(m, s.image_size, m.submodel.heads, {})
            for m, s in zip(members, specs, strict=True)
        ],
    )


def loop_rate(runtime: Runtime, pixels: Pixels) -> list[float]:
    """Pictures a second of the model in a loop, `pixels[N, ...]` at a time."""
    runs, started_s = 0, time.perf_counter()
    while (took_s := time.perf_counter() - started_s) < BLOCK_S:
        runtime.run(pixels)
        runs += 1
    return [runs * len(pixels) / took_s]


def stream_rate(client: Client, picture: Picture, in_flight: int) -> list[float]:
    """Answers a second between the first `in_flight` answers and the end of a stream."""
    until_s = time.perf_counter() + BLOCK_S

    def pictures() -> Iterator[Picture]:
        while time.perf_counter() < until_s:
            yield picture

    times, lacking = [], 0
    for answer in client.stream(pictures(), deadline_ms=DEADLINE_MS, in_flight=in_flight):
        assert not isinstance(answer, InferenceError), answer
        lacking += answer.partial
        times.append(time.perf_counter())
    # The last ones are answered while no new ones come.
    steady = times[in_flight - 1 : len(times) - in_flight + 1]
    assert lacking < MOST_PARTIAL * len(times), f"{lacking} of {len(times)} answers are partial"
    return [(len(steady) - 1) / (steady[-1] - steady[0])]


def measure(case: Case, rounds: int) -> Iterator[dict[str, Any]]:
    """The loop and the streams in turns; a row for each number of pictures in flight."""
    more = ("--batch", case.batch) if case.batch > 1 else ()
    agents = served(partial(vit_bundle, specs=case.members), "--threads", 1, *more)
    with agents as fleet, client_of(fleet) as client:
        bundle = Bundle.open(fleet.bundle)
        planned = Execution.of(bundle.manifest.plan.assignments[0])
        execution = msgspec.structs.replace(planned, threads=1)
        runtime = OrtRuntime(bundle.model(0), execution, num_classes=len(LABELS))
        picture = noise_picture(case.members[0].image_size)
        pixels = np.repeat(picture[None], case.batch, axis=0)
        blocks: dict[int, Callable[[], list[float]]] = {
            n: partial(stream_rate, client, picture, n) for n in case.in_flight
        }
        rates = in_rounds({0: partial(loop_rate, runtime, pixels), **blocks}, rounds)
    loop_per_s = float(np.median(rates[0]))
    for in_flight in case.in_flight:
        stream_per_s = float(np.median(rates[in_flight]))
        yield {
            "members": len(case.members),
            "in_flight": in_flight,
            "batch": case.batch,
            "stream_per_s": stream_per_s,
            "loop_alone_per_s": loop_per_s,
            "ratio_alone": stream_per_s / loop_per_s,
            "ratio_alone_95": ratio_interval(rates[in_flight], rates[0], 50),
        }


def run(*, quick: bool) -> Iterator[dict[str, Any]]:
    for case in CASES[: 1 if quick else None]:
        yield from measure(case, 1 if quick else ROUNDS)


COLUMNS = (
    ("members", "{members}"),
    ("under way", "{in_flight}"),
    ("batch", "{batch}"),
    ("streamed, pictures a second", "{stream_per_s:.1f}"),
    ("model in a loop, alone", "{loop_alone_per_s:.1f}"),
    ("ratio (95 %)", "{ratio_alone:.3f} ({ratio_alone_95[0]:.3f}-{ratio_alone_95[1]:.3f})"),
)
