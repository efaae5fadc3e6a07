"""What `stream` gets out of a fleet, beside its slowest member's model run in a loop.

    python -m benchmarks.serving --only stream           # about 3 minutes

Real agents serve ViT sub-models of untrained weights, one thread each. In turns, a block each, the
slowest member's model runs in a loop in this process, with the same runtime and threads, and a
client streams pictures through the fleet. With `--batch`, an agent that computes several pictures
at once is held against onnxruntime's own rate at that batch size.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from benchmarks.resampling import ratio_interval
from benchmarks.serving_fleet import served
from devices.runtime import OrtRuntime, Runtime
from mdp import Client
from mdp.bench import noise_picture
from mdp.bundle import MANIFEST, Bundle, file_entry, model_path
from mdp.crop import Picture, Pixels
from mdp.errors import InferenceError
from mdp.files import write_json
from mdp.plan import SubModelSpec
from partitioner.export import ServedMember, to_onnx
from partitioner.submodel import SubModel
from tests.support.bundles import LABELS, write_bundle

NAME = "stream"
DEADLINE_MS = 10_000.0
#: With more partial answers than this share, the rate would be another fleet's.
MOST_PARTIAL = 0.01
#: About 20 and 8 ms on one core of the machine that the aims were set on.
SLOW = SubModelSpec(
    image_size=128, patch_size=8, embed_dim=192, depth=6, num_heads=3, mlp_ratio=4.0
)
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


def cases(batch: int) -> list[Case]:
    """One member and two, then one in batches."""
    alone = Case(members=(SLOW,), in_flight=(1, 2, 4))
    two = Case(members=(SLOW, QUICK), in_flight=(2, 4))
    batched = Case(members=(SMALL,), in_flight=(batch, 2 * batch), batch=batch)
    return [alone, two, batched] if batch > 1 else [alone, two]


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


def loop_rate(runtime: Runtime, pixels: Pixels, seconds: float) -> float:
    """Pictures a second of the model alone, `pixels[N, ...]` at a time."""
    done, started_s = 0, time.perf_counter()
    while (took_s := time.perf_counter() - started_s) < seconds:
        runtime.run(pixels)
        done += len(pixels)
    return done / took_s


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


def measure(case: Case, options: argparse.Namespace) -> list[dict[str, object]]:
    """The loop and the streams in turns; a row for each number of pictures under way."""
    loops: list[list[float]] = []
    streams: dict[int, list[list[float]]] = {number: [] for number in case.in_flight}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        bundle = vit_bundle(Path(name) / "bundle", case.members)
        spec, slowest = case.members[0], bundle.manifest.plan.assignments[0]
        runtime = OrtRuntime(
            bundle.verified(model_path(0)), slowest, num_classes=len(LABELS), threads=1
        )
        more = ("--batch", case.batch) if case.batch > 1 else ()
        fleet = stack.enter_context(served(bundle, Path(name), "--threads", 1, *more))
        client = stack.enter_context(fleet.client())
        picture = noise_picture(spec.image_size)
        pixels = np.repeat(picture[None], case.batch, axis=0)
        for number in range(options.stream_rounds + 1):
            loop = loop_rate(runtime, pixels, options.stream_s)
            rates = {n: stream_rate(client, picture, n, options.stream_s) for n in streams}
            if number:  # the first one warms up
                loops.append([loop])
                for n, rate in rates.items():
                    streams[n].append([rate])
    return [row_of(case, in_flight, streams[in_flight], loops) for in_flight in streams]


def row_of(
    case: Case, in_flight: int, streams: list[list[float]], loops: list[list[float]]
) -> dict[str, object]:
    """What one number of pictures under way came to."""
    alone, streamed = float(np.median(loops)), float(np.median(streams))
    return {
        "members": len(case.members),
        "in_flight": in_flight,
        "batch": case.batch,
        "loop_per_s": alone,
        "stream_per_s": streamed,
        "ratio": streamed / alone,
        "ratio_95": ratio_interval(streams, loops, 50),
    }


def run(options: argparse.Namespace, say: Callable[[str], None]) -> list[dict[str, object]]:
    """Every case."""
    rows = []
    for case in cases(options.batch):
        for row in measure(case, options):
            rows.append(row)
            say(line_of(row))
    return rows


def line_of(row: dict[str, object]) -> str:
    """One row, for people."""
    return (
        f"{row['members']} member(s), {row['in_flight']} under way, batch {row['batch']}: "
        f"{row['stream_per_s']:.1f}/s streamed, {row['loop_per_s']:.1f}/s in a loop, "
        f"ratio {row['ratio']:.3f} ({row['ratio_95'][0]:.3f}-{row['ratio_95'][1]:.3f})"
    )


def table(rows: list[dict[str, object]]) -> str:
    """The page's table."""
    lines = [
        "| members | under way | batch | streamed, pictures a second | model in a loop "
        "| ratio | 95 % |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["ratio_95"]
        lines.append(
            f"| {row['members']} | {row['in_flight']} | {row['batch']} | {row['stream_per_s']:.1f} "
            f"| {row['loop_per_s']:.1f} | {row['ratio']:.3f} | {low:.3f}-{high:.3f} |"
        )
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """How long to measure."""
    parser.add_argument("--batch", type=int, default=8, help="1 leaves batches out.")
    parser.add_argument("--stream-rounds", type=int, default=6)
    parser.add_argument("--stream-s", type=float, default=2.0)
