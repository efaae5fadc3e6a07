"""Latency and throughput of a running fleet, at the caller."""

import time
from collections import Counter
from collections.abc import Sequence
from itertools import cycle, islice

import numpy as np

from mdp.client.base import DEFAULT_DEADLINE_MS
from mdp.client.sync import Client
from mdp.pictures.crop import Picture, Pixels
from mdp.requests.prediction import Prediction

WARM_UP_REQUESTS = 10
#: The least deadline of a warm-up call: the first on a connection takes several times as long as
#: later ones, and a late answer would exclude its device from measured calls.
WARM_UP_MS = DEFAULT_DEADLINE_MS


def noise_picture(side: int) -> Pixels:
    """A uint8 picture `[side, side, 3]` of noise."""
    return np.random.default_rng(0).integers(0, 256, size=(side, side, 3), dtype=np.uint8)


def overhead_ms(prediction: Prediction) -> float:
    """Latency of a call beyond the computing of its slowest member, as in docs/results/serving.md.

    With more than one picture in flight it includes the wait for the one before.
    """
    return prediction.latency_ms - max(member.compute_ms for member in prediction.members)


def percentiles(values: Sequence[float], points: Sequence[float]) -> dict[str, float]:
    """`{"p50": ...}` for every point, by linear interpolation; NaN-free for an empty list too."""
    if not values:
        return {f"p{point}": 0.0 for point in points}
    return {f"p{point}": float(np.percentile(values, point)) for point in points}


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
    stage of a cascade is no partial answer: no member failed to answer.
    """
    for picture in islice(cycle(pictures), WARM_UP_REQUESTS):
        client.classify(picture, deadline_ms=max(deadline_ms, WARM_UP_MS))
    started_s = time.perf_counter()
    answers = list(
        client.stream(
            islice(cycle(pictures), requests),
            deadline_ms=deadline_ms,
            in_flight=in_flight,
            errors="yield",
        )
    )
    took_s = time.perf_counter() - started_s
    given = [answer for answer in answers if isinstance(answer, Prediction)]
    latencies = [prediction.latency_ms for prediction in given]
    overheads = [overhead_ms(prediction) for prediction in given]
    modes: Counter[str] = Counter(prediction.mode for prediction in given)
    stages: Counter[str] = Counter(prediction.stage for prediction in given)
    return {
        "scenario": "single-stream" if in_flight == 1 else f"stream-{in_flight}",
        "requests": requests,
        "answered": len(given),
        "partial": sum(each.partial and each.stage != "first" for each in given),
        "latency_ms": {**percentiles(latencies, (50, 90, 99)), "max": max(latencies, default=0.0)},
        "overhead_ms": percentiles(overheads, (50, 99)),
        "throughput_per_s": len(given) / took_s,
        "modes": dict(modes),
        "stages": dict(stages),
    }
