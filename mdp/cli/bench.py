"""`mdp bench`: latency and throughput of a running fleet, at the caller."""

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.random import default_rng

from mdp import console
from mdp.cli.answers import (
    Cascade,
    DeadlineMs,
    FleetFile,
    FusionChoice,
    Insecure,
    Json,
    KeyFile,
    open_client,
    picture_files,
)
from mdp.client.base import DEFAULT_DEADLINE_MS
from mdp.client.sync import Client
from mdp.errors import InferenceError, PictureError
from mdp.pictures.crop import Picture, Pixels
from mdp.requests.deadline import check_deadline_ms
from mdp.requests.prediction import Prediction

WARM_UP_REQUESTS = 10
#: The least deadline of a warm-up call: the first on a connection takes several times as long as
#: later ones, and a late answer would exclude its device from measured calls.
WARM_UP_MS = DEFAULT_DEADLINE_MS
PAST_DEADLINE = (
    "WARNING: some answers came after the deadline: this client was kept from running, so that "
    "the latencies are not those of the fleet alone"
)


def bench(
    fleet: FleetFile,
    pictures: Annotated[list[Path] | None, typer.Argument(help="Noise if none is given.")] = None,
    requests: Annotated[int, typer.Option(min=1, max=1_000_000, help="Calls to measure.")] = 200,
    in_flight: Annotated[int, typer.Option(min=1, max=64, help="Pictures at a time.")] = 1,
    deadline_ms: DeadlineMs = DEFAULT_DEADLINE_MS,
    fusion: FusionChoice = "stacked",
    cascade: Cascade = False,
    key: KeyFile = None,
    insecure: Insecure = False,
    json: Json = False,
) -> None:
    """Measure latency, overhead and throughput of a running fleet.

    Example: mdp bench --fleet fleet.toml --requests 500 --in-flight 2

    Exit codes: 0 fine, 2 bad input, 3 the fleet could not answer, 1 unforeseen.
    """
    check_deadline_ms(deadline_ms, "--deadline-ms")
    files = []
    for path, unusable in picture_files(pictures or []):
        if unusable is not None:
            raise unusable
        files.append(path)
    with open_client(fleet, key, insecure, fusion, cascade) as client:
        side = client.bundle.manifest.plan.finest_px
        chosen: list[Picture] = list(files) or [noise_picture(side)]
        outcome = run_bench(
            client, chosen, requests=requests, deadline_ms=deadline_ms, in_flight=in_flight
        )
    if json:
        console.print_json(outcome)
    else:
        figures = list(flat(outcome))
        width = max(len(name) for name, _ in figures)
        for name, figure in figures:
            print(f"{name:<{width}} {figure}")
    if outcome["past_deadline"]:
        print(f"mdp: {PAST_DEADLINE}", file=sys.stderr)
    raise typer.Exit(0 if outcome["answered"] else InferenceError.exit_code)


def flat(outcome: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The names and figures of a run for people; `-` where there is no figure."""
    for key, value in outcome.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        elif value is None:
            yield prefix + key, "-"
        else:
            yield prefix + key, f"{value:.2f}" if isinstance(value, float) else f"{value}"


def noise_picture(side: int) -> Pixels:
    """A uint8 picture `[side, side, 3]` of noise."""
    return default_rng(0).integers(0, 256, size=(side, side, 3), dtype=np.uint8)


def overhead_ms(prediction: Prediction) -> float:
    """Latency of a call beyond the computing of its slowest member, as in docs/results/serving.md.

    With more than one picture in flight it includes the wait for the one before.
    """
    return prediction.latency_ms - max(member.compute_ms for member in prediction.members)


def percentiles(values: Sequence[float], points: Sequence[float]) -> dict[str, float]:
    """`{"p50": ...}` of one value or more for every point, by linear interpolation."""
    return {f"p{point}": float(np.percentile(values, point)) for point in points}


def _summary(values: Sequence[float], points: Sequence[float]) -> Mapping[str, float | None]:
    """`percentiles`, each None where there is no value."""
    return percentiles(values, points) if values else {f"p{point}": None for point in points}


def _by_device(told: Iterable[Mapping[str, str]]) -> dict[str, dict[str, int]]:
    """Device -> code of a reason -> in how many of the calls."""
    counts: dict[str, Counter[str]] = {}
    for codes in told:
        for device, code in codes.items():
            counts.setdefault(device, Counter())[code] += 1
    return {device: dict(counts[device]) for device in sorted(counts)}


def run_bench(
    client: Client,
    pictures: Sequence[Picture],
    *,
    requests: int,
    deadline_ms: float,
    in_flight: int = 1,
) -> dict[str, object]:
    """Send `requests` pictures with `in_flight` at a time, and sum up the answers.

    With one in flight this follows MLPerf's SingleStream, except for its duration. A sure first
    stage of a cascade is no partial answer: no member failed to answer. `unanswered` counts, by
    device and reason, the calls without an answer, `missing` the partial answers. Raises
    InferenceError if a call before the measured ones has no answer, and PictureError.
    """
    for picture in islice(cycle(pictures), WARM_UP_REQUESTS):
        client.classify(picture, deadline_ms=max(deadline_ms, WARM_UP_MS))
    started_s = time.perf_counter()
    given, failed = [], []
    for answer in client.stream(
        islice(cycle(pictures), requests),
        deadline_ms=deadline_ms,
        in_flight=in_flight,
        errors="yield",
    ):
        if isinstance(answer, PictureError):
            raise answer
        if isinstance(answer, Prediction):
            given.append(answer)
        else:
            failed.append(answer)
    took_s = time.perf_counter() - started_s
    partial = [each for each in given if each.partial and each.stage != "first"]
    latencies = [prediction.latency_ms for prediction in given]
    overheads = [overhead_ms(prediction) for prediction in given]
    modes: Counter[str] = Counter(prediction.mode for prediction in given)
    stages: Counter[str] = Counter(prediction.stage for prediction in given)
    return {
        "scenario": "single-stream" if in_flight == 1 else f"stream-{in_flight}",
        "requests": requests,
        "answered": len(given),
        "partial": len(partial),
        "unanswered": _by_device(error.codes for error in failed),
        "missing": _by_device(each.missing_codes for each in partial),
        "latency_ms": {**_summary(latencies, (50, 90, 99)), "max": max(latencies, default=None)},
        "past_deadline": sum(latency > deadline_ms for latency in latencies),
        "overhead_ms": _summary(overheads, (50, 99)),
        "throughput_per_s": len(given) / took_s,
        "modes": dict(modes),
        "stages": dict(stages),
    }
