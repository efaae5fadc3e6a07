"""What `stream` gets out of a fleet, beside its slowest member's model run in a loop.

    python -m benchmarks.serving --only stream           # about 3 minutes

Real agents serve ViT sub-models of untrained weights, one thread each. In turns, a block each, the
slowest member's model runs in a loop in this process, with the same runtime and threads, and a
client streams pictures through the fleet. An agent that computes several pictures
at once is held against onnxruntime's own rate at that batch size.

A stream is held against two loops. `alone` nothing else runs on the machine: what a device with a
processor of its own would give. `beside the other members' computing` each other member's model
runs in a process of its own, once for each time that the slowest one does, and there are no agents
and no client: what members on cores of one machine leave each other of its memory's and its caches'
speed, which no client can give back. With one member there is only the first.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.harness.models import vit
from benchmarks.harness.resampling import ratio_interval
from benchmarks.harness.serving_fleet import served
from mdp import Client
from mdp.cli.bench import noise_picture
from mdp.errors import InferenceError
from mdp.files import write_json
from mdp.formats.bundle import MANIFEST, Bundle, file_entry, model_path
from mdp.formats.plan import SubModelSpec
from mdp.pictures.crop import Picture, Pixels
from mdp.runtimes.base import Execution, Runtime
from mdp.runtimes.onnxruntime import OrtRuntime
from mdp.testing.bundles import LABELS, write_bundle
from partitioner.export.write import ServedMember, to_onnx
from partitioner.networks.submodel import SubModel

NAME = "stream"
#: A model that is not ready to be run after so long is not coming.
READY_S = 60.0
DEADLINE_MS = 10_000.0
#: With more partial answers than this share, the rate would be another fleet's.
MOST_PARTIAL = 0.01
#: About 20 and 8 ms on one core of the machine that the aims were set on.
SLOW = vit(128, 8, 192, 6, 3)
QUICK = msgspec.structs.replace(SLOW, depth=2)
#: Small enough that several at once pay.
SMALL = msgspec.structs.replace(SLOW, image_size=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fleet, and how many pictures are under way in turns."""

    members: tuple[SubModelSpec, ...]
    in_flight: tuple[int, ...]
    #: Pictures that an agent computes at once at most, and so does the loop.
    batch: int = 1


_BATCH, ROUNDS, BLOCK_S = 8, 6, 2.0
CASES = (
    Case(members=(SLOW,), in_flight=(1, 2, 4)),
    Case(members=(SLOW, QUICK), in_flight=(2, 4)),
    Case(members=(SMALL,), in_flight=(_BATCH, 2 * _BATCH), batch=_BATCH),
)


def vit_bundle(folder: Path, specs: Sequence[SubModelSpec]) -> Bundle:
    """A bundle of one device per shape whose models are ViTs of untrained weights."""
    torch.manual_seed(0)
    devices = tuple(f"device-{k}" for k in range(len(specs)))
    write_bundle(folder, devices=devices, sizes=tuple(spec.image_size for spec in specs))
    manifest = Bundle.open(folder).manifest
    files = dict(manifest.files)
    for k, spec in enumerate(specs):
        model = folder / model_path(k)
        module = ServedMember(SubModel(spec, len(LABELS)))
        model.write_bytes(to_onnx(module, spec.image_size, ["boost", "bag"], {}))
        files[model_path(k)] = file_entry(model)
    write_json(folder / MANIFEST, msgspec.structs.replace(manifest, files=files))
    return Bundle.open(folder)


def runtime_of(bundle: Bundle, k: int) -> OrtRuntime:
    """Member `k`'s model as its agent runs it."""
    planned = Execution.of(bundle.manifest.plan.assignments[k])
    execution = msgspec.structs.replace(planned, threads=1)
    return OrtRuntime(bundle.model(k), execution, num_classes=len(LABELS))


def pixels_for(spec: SubModelSpec, batch: int) -> Pixels:
    """The same picture `batch` times, as `spec` takes it."""
    return np.repeat(noise_picture(spec.image_size)[None], batch, axis=0)


def loop_rate(
    runtime: Runtime, pixels: Pixels, seconds: float, others: Sequence[Connection] = ()
) -> float:
    """Pictures a second of the model alone, `pixels[N, ...]` at a time; `others` keep its pace."""
    runs, started_s = 0, time.perf_counter()
    while (took_s := time.perf_counter() - started_s) < seconds:
        for other in others:
            other.send(True)
        runtime.run(pixels)
        runs += 1
    # What they still compute shall not be beside what is measured next.
    for other in others:
        for _ in range(runs):
            other.recv()
    return runs * len(pixels) / took_s


def keep_pace(folder: Path, k: int, batch: int, pace: Connection) -> None:
    """Run member `k`'s model once for each message, and answer it, until `pace` is closed."""
    bundle = Bundle.open(folder)
    runtime = runtime_of(bundle, k)
    pixels = pixels_for(bundle.manifest.plan.assignments[k].vit, batch)
    runtime.run(pixels)
    pace.send(True)
    try:
        while pace.recv():
            runtime.run(pixels)
            pace.send(True)
    except EOFError:
        pass


@contextmanager
def computing_beside(bundle: Bundle, k: int, batch: int) -> Iterator[Connection]:
    """A process with member `k`'s model; each message to it is one computation."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=keep_pace, args=(bundle.path, k, batch, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(READY_S), f"member {k} is not ready"
        ours.recv()
        yield ours
    finally:
        ours.close()
        process.join()


def stream_rate(client: Client, picture: Picture, in_flight: int, seconds: float) -> float:
    """Answers a second between the first `in_flight` answers and the end of a stream."""
    until_s = time.perf_counter() + seconds

    def pictures() -> Iterator[Picture]:
        while time.perf_counter() < until_s:
            yield picture

    times, partial = [], 0
    for answer in client.stream(pictures(), deadline_ms=DEADLINE_MS, in_flight=in_flight):
        assert not isinstance(answer, InferenceError), answer
        partial += answer.partial
        times.append(time.perf_counter())
    # The last ones are answered while no new ones come.
    steady = times[in_flight - 1 : len(times) - in_flight + 1]
    assert partial < MOST_PARTIAL * len(times), f"{partial} of {len(times)} answers are partial"
    return (len(steady) - 1) / (steady[-1] - steady[0])


@dataclass(slots=True)
class Rates:
    """Pictures a second, of each round: `[[rate], ...]`."""

    alone: list[list[float]] = field(default_factory=list)
    #: Nothing where there are no other members.
    beside: list[list[float]] = field(default_factory=list)
    #: By how many were under way.
    streams: dict[int, list[list[float]]] = field(default_factory=dict)


def measure(case: Case) -> list[dict[str, Any]]:
    """The loops and the streams in turns; a row for each number of pictures under way."""
    rates = Rates(streams={number: [] for number in case.in_flight})
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        bundle = vit_bundle(Path(name) / "bundle", case.members)
        runtime, pixels = runtime_of(bundle, 0), pixels_for(case.members[0], case.batch)
        more = ("--batch", case.batch) if case.batch > 1 else ()
        fleet = stack.enter_context(served(bundle, Path(name), "--threads", 1, *more))
        client = stack.enter_context(fleet.client())
        others = [
            stack.enter_context(computing_beside(bundle, k, case.batch))
            for k in range(1, len(case.members))
        ]
        for number in range(ROUNDS + 1):
            alone = loop_rate(runtime, pixels, BLOCK_S)
            beside = loop_rate(runtime, pixels, BLOCK_S, others) if others else None
            streamed = {n: stream_rate(client, pixels[0], n, BLOCK_S) for n in rates.streams}
            if number:  # the first one warms up
                rates.alone.append([alone])
                if beside is not None:
                    rates.beside.append([beside])
                for n, rate in streamed.items():
                    rates.streams[n].append([rate])
    return [row_of(case, in_flight, rates) for in_flight in case.in_flight]


def row_of(case: Case, in_flight: int, rates: Rates) -> dict[str, Any]:
    streams = rates.streams[in_flight]
    row: dict[str, Any] = {
        "members": len(case.members),
        "in_flight": in_flight,
        "batch": case.batch,
        "stream_per_s": float(np.median(streams)),
    }
    for name, loops in (("alone", rates.alone), ("beside", rates.beside)):
        per_s = float(np.median(loops)) if loops else None
        row[f"loop_{name}_per_s"] = per_s
        row[f"ratio_{name}"] = row["stream_per_s"] / per_s if per_s else None
        row[f"ratio_{name}_95"] = ratio_interval(streams, loops, 50) if loops else None
    return row


def run() -> Iterator[dict[str, Any]]:
    for case in CASES:
        yield from measure(case)


def _ratio(name: str) -> Callable[[dict[str, Any]], str]:
    """The stream's ratio to a loop, with its interval."""

    def cell(row: dict[str, Any]) -> str:
        if row[f"loop_{name}_per_s"] is None:
            return "-"
        low, high = row[f"ratio_{name}_95"]
        return f"{row[f'ratio_{name}']:.3f} ({low:.3f}-{high:.3f})"

    return cell


def _beside(row: dict[str, Any]) -> str:
    return "-" if row["loop_beside_per_s"] is None else f"{row['loop_beside_per_s']:.1f}"


COLUMNS = (
    ("members", "{members}"),
    ("under way", "{in_flight}"),
    ("batch", "{batch}"),
    ("streamed, pictures a second", "{stream_per_s:.1f}"),
    ("model in a loop, alone", "{loop_alone_per_s:.1f}"),
    ("ratio (95 %)", _ratio("alone")),
    ("beside the other members' computing", _beside),
    ("ratio (95 %)", _ratio("beside")),
)
