"""From a trace to the figures that matter: accuracy, latency, shares, and each device's part."""

from collections import Counter
from typing import Annotated

import numpy as np
from msgspec import Meta, field
from numpy.typing import NDArray

from mdp.files import Record
from partitioner.simulation.engine import simulate
from partitioner.simulation.models import Scenario
from partitioner.simulation.trace import Trace
from partitioner.simulation.worth import Worth

Share = Annotated[float, Meta(ge=0, le=1)]


class DeviceOutcome(Record, frozen=True):
    """One device's part: how busy it was, and what became of the requests to it."""

    k: int
    #: Share of the time in which it computed.
    utilisation: float
    asked: int
    #: Contributions that made it into an answer.
    used: int
    #: Contributions that came for a request already answered.
    late: int
    #: Refused or dropped by the device, which could not be on time.
    too_late: int
    #: Refused by the device, whose queue was full.
    overloaded: int
    #: How often the device was lost and came back.
    falls: int


class Latency(Record, frozen=True, rename={"p999": "p99.9"}):
    """Percentiles of the latency of what was answered, in milliseconds."""

    p50: float
    p90: float
    p99: float
    p999: float
    max: float


class Outcome(Record, frozen=True):
    """What callers get from a fleet; shares are of all requests."""

    deadline_ms: float
    #: Right answers; a request without an answer counts as wrong. None where it is not known.
    accuracy: Share | None
    #: The same where a subset's accuracy that is not known counts as nothing.
    accuracy_at_least: Share
    #: Right answers, of those that were given.
    accuracy_of_answers: Share | None
    answered: Share
    #: With every member, and with some missing.
    complete: Share
    partial: Share
    latency_ms: Latency
    throughput_per_s: float
    modes: dict[str, float]
    #: Virtual seconds that the requests took in all.
    span_s: float
    devices: dict[str, DeviceOutcome] = field(default_factory=dict)


def outcome_of(scenario: Scenario, trace: Trace, worth: Worth) -> Outcome:
    """Sum up one run of `scenario`."""
    requests = len(trace.numbers)
    numbers = np.frombuffer(trace.numbers, dtype=np.int64)
    latencies_ms = np.frombuffer(trace.latencies_s) * 1e3
    partial = np.frombuffer(trace.partial, dtype=np.int8) > 0
    sure = np.frombuffer(trace.sure, dtype=np.int8) > 0
    right, unknown, answered = 0.0, False, np.ones(requests, dtype=bool)
    modes: Counter[str] = Counter()
    for members, places in trace.by_subset().items():
        if not members:
            answered[places] = False
            continue
        modes[worth.mode(members)] += len(places)
        others = places[~sure[places]]
        for answers, accuracy in (
            (len(others), worth.accuracy(members, numbers[others]) if len(others) else 0.0),
            (len(places) - len(others), worth.sure_accuracy()),
        ):
            unknown |= bool(answers) and accuracy is None
            right += answers * (accuracy or 0.0)
    count = int(answered.sum())
    given = latencies_ms[answered] if count else np.zeros(1)
    return Outcome(
        deadline_ms=scenario.deadline_ms,
        accuracy=None if unknown else min(1.0, right / requests),
        accuracy_at_least=min(1.0, right / requests),
        accuracy_of_answers=None if unknown or not count else min(1.0, right / count),
        answered=count / requests,
        complete=int((answered & ~partial).sum()) / requests,
        partial=int((answered & partial).sum()) / requests,
        latency_ms=_latency(given),
        throughput_per_s=count / trace.span_s if trace.span_s else 0.0,
        modes={mode: number / requests for mode, number in sorted(modes.items())},
        span_s=trace.span_s,
        devices=_devices(scenario, trace),
    )


def _latency(given_ms: NDArray[np.float64]) -> Latency:
    p50, p90, p99, p999, most = np.percentile(given_ms, [50, 90, 99, 99.9, 100]).tolist()
    return Latency(p50=p50, p90=p90, p99=p99, p999=p999, max=most)


def _devices(scenario: Scenario, trace: Trace) -> dict[str, DeviceOutcome]:
    return {
        device.name: DeviceOutcome(
            k=device.k,
            utilisation=trace.busy_s[device.name] / trace.span_s if trace.span_s else 0.0,
            falls=trace.falls[device.name],
            **trace.counts[device.name],
        )
        for device in scenario.devices
    }


def play(scenario: Scenario, worth: Worth) -> Outcome:
    """Simulate `scenario` and sum it up."""
    return outcome_of(scenario, simulate(scenario), worth)
