"""Accuracy, latency and shares of a simulation, and each device's figures."""

from collections import Counter
from typing import Annotated

import numpy as np
from msgspec import Meta, field
from numpy.typing import NDArray

from mdp.files import Record
from partitioner.simulation.answer_accuracy import AnswerAccuracy
from partitioner.simulation.engine import simulate
from partitioner.simulation.models import Scenario
from partitioner.simulation.trace import Trace

Share = Annotated[float, Meta(ge=0, le=1)]


class DeviceOutcome(Record, frozen=True):
    """One device: its utilisation, and its requests by outcome."""

    k: int
    #: Share of the time spent computing.
    utilisation: float
    asked: int
    #: Contributions used in an answer.
    used: int
    #: Contributions that arrived after the answer.
    late: int
    #: Refused or dropped by the device as too late.
    too_late: int
    #: Refused by the device, its queue being full.
    overloaded: int
    #: Failures.
    falls: int


class LatencyPercentiles(Record, frozen=True, rename={"p999": "p99.9"}):
    """Percentiles of the latency of answers, in milliseconds."""

    p50: float
    p90: float
    p99: float
    p999: float
    max: float


class Outcome(Record, frozen=True):
    """A fleet's figures; shares are of all requests."""

    deadline_ms: float
    #: Right answers; a request without an answer counts as wrong. None if unknown.
    accuracy: Share | None
    #: The same, unknown accuracies of subsets counting as 0.
    accuracy_at_least: Share
    #: Share of the answers that are right.
    accuracy_of_answers: Share | None
    answered: Share
    #: With every member, and with some missing.
    complete: Share
    partial: Share
    #: With a member below its top rung.
    lowered: Share
    latency_ms: LatencyPercentiles
    throughput_per_s: float
    modes: dict[str, float]
    #: Virtual duration.
    span_s: float
    devices: dict[str, DeviceOutcome] = field(default_factory=dict)


def outcome_of(scenario: Scenario, trace: Trace, accuracy: AnswerAccuracy) -> Outcome:
    """The figures of one simulation of `scenario`."""
    requests = len(trace.numbers)
    latencies_ms = np.frombuffer(trace.latencies_s) * 1e3
    partial = np.frombuffer(trace.partial, dtype=np.int8) > 0
    sure = np.frombuffer(trace.sure, dtype=np.int8) > 0
    right, unknown, answered = 0.0, False, np.ones(requests, dtype=bool)
    modes: Counter[str] = Counter()
    for members, places in trace.by_subset().items():
        if not members:
            answered[places] = False
            continue
        modes[accuracy.mode(members)] += len(places)
        for rungs, alike in trace.by_rungs(places).items():
            ended_first = int(sure[alike].sum())
            for answers, share in (
                (len(alike) - ended_first, accuracy.accuracy(members, rungs)),
                (ended_first, None if rungs else accuracy.sure_accuracy()),
            ):
                unknown |= bool(answers) and share is None
                right += answers * (share or 0.0)
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
        lowered=int((np.frombuffer(trace.rung, dtype=np.int64) > 0).sum()) / requests,
        latency_ms=_latency(given),
        throughput_per_s=count / trace.span_s if trace.span_s else 0.0,
        modes={mode: number / requests for mode, number in sorted(modes.items())},
        span_s=trace.span_s,
        devices=_devices(scenario, trace),
    )


def _latency(given_ms: NDArray[np.float64]) -> LatencyPercentiles:
    p50, p90, p99, p999, most = np.percentile(given_ms, [50, 90, 99, 99.9, 100]).tolist()
    return LatencyPercentiles(p50=p50, p90=p90, p99=p99, p999=p999, max=most)


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


def run_scenario(scenario: Scenario, accuracy: AnswerAccuracy) -> Outcome:
    """Simulate `scenario`."""
    return outcome_of(scenario, simulate(scenario), accuracy)
