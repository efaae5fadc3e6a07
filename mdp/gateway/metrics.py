"""`/metrics` in Prometheus' text format; times in seconds."""

import re
from collections import Counter as Sums
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from mdp.errors import DeadlineExceeded, MDPError
from mdp.gateway.devices import kind_of
from mdp.gateway.fleets import ServedFleet
from mdp.gateway.refusals import refusal_of
from mdp.gateway.workers import Workers
from mdp.protocol.messages import OUTCOMES, RELOADS, Suspicion, answers_key
from mdp.requests.prediction import Prediction

#: From a picture of a quick board to the longest deadline.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
#: Reasons of a missing device that say that it was not in time.
LATE = ("late", "slow", "silent", "too_late", "not asked")
#: Providers that an agent of this version may run on: onnxruntime's, and OpenVINO's devices.
_PROVIDERS = re.compile(
    r"(ACL|Azure|CANN|CPU|CUDA|CoreML|Dml|Dnnl|Js|MIGraphX|Nnapi|NvTensorRTRTX|OpenVINO|QNN|ROCM|"
    r"Rknpu|Tensorrt|VSINPU|VitisAI|WebGpu|WebNN|Xnnpack)ExecutionProvider|"
    r"openvino:(CPU|(GPU|NPU)(\.[0-9])?)"
)
#: The label of whatever else an agent says: each new text would be a series for ever.
OTHER = "other"


def provider_label(told: str | None) -> str:
    """The provider that an agent says it runs on, empty before; `other` for an unknown one."""
    return OTHER if told and not _PROVIDERS.fullmatch(told) else told or ""


def outcome_counts(counts: Mapping[str, int]) -> dict[str, int]:
    """An agent's counts by outcome, those that this version does not know together as `other`.

    How many of the answers were each bundle's is left out: `answered` has all of them.
    """
    sums: Sums[str] = Sums()
    for outcome, count in counts.items():
        if not outcome.startswith(answers_key("")):
            sums[outcome if outcome in OUTCOMES + RELOADS else OTHER] += count
    return dict(sums)


class Metrics:
    """Counts what the gateway answers; what the devices say is read at each scrape."""

    def __init__(self, fleets: Mapping[str, ServedFleet], workers: Workers | None = None) -> None:
        """Metrics of `fleets`, by their models' names, and of `workers`."""
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "mdp_requests",
            "Requests by outcome: answered, degraded (answered without a device), deadline "
            "(nothing had arrived), unavailable, refused.",
            ["model", "outcome"],
            registry=registry,
        )
        self._answer = Histogram(
            "mdp_answer_seconds",
            "From a picture in the gateway to its answer.",
            ["model"],
            buckets=SECONDS,
            registry=registry,
        )
        self._member = Histogram(
            "mdp_member_seconds",
            "Of one device in one answer: held here, in its queue, computing, on the network.",
            ["model", "device", "part"],
            buckets=SECONDS,
            registry=registry,
        )
        self._missing = Counter(
            "mdp_member_missing",
            "Answers that lack a device, by reason (docs/reference/reasons.md).",
            ["model", "device", "reason"],
            registry=registry,
        )
        self._late = Counter(
            "mdp_member_late",
            "Answers that lack a device because it was not in time.",
            ["model", "device"],
            registry=registry,
        )
        self._unknown = Counter(
            "mdp_unknown_answers",
            "Answers that an item is none of the classes.",
            ["model"],
            registry=registry,
        )
        self._under_way = Gauge(
            "mdp_requests_under_way", "Requests being answered.", ["model"], registry=registry
        )
        registry.register(_DeviceGauges(fleets))
        if workers is not None:
            registry.register(_WorkerGauges(workers))
        for name, fleet in fleets.items():
            self.add(name, fleet)

    def add(self, name: str, fleet: ServedFleet) -> None:
        """Begin the series of a fleet that is served as `name`."""
        for outcome in ("answered", "degraded", "deadline", "unavailable", "refused"):
            self._requests.labels(name, outcome)
        for device in fleet.roll.devices:
            self._late.labels(name, device)
        self._answer.labels(name)
        self._unknown.labels(name)
        self._under_way.labels(name)

    def begin_request(self, model: str) -> None:
        """Count a request for `model` as under way."""
        self._under_way.labels(model).inc()

    def end_request(self, model: str) -> None:
        """End the count of a request for `model`."""
        self._under_way.labels(model).dec()

    def count_answers(self, model: str, predictions: Sequence[Prediction]) -> None:
        """Count answers and what they are made of."""
        for each in predictions:
            self._requests.labels(model, "degraded" if each.degraded else "answered").inc()
            self._answer.labels(model).observe(each.latency_ms / 1e3)
            if each.known is False:
                self._unknown.labels(model).inc()
            for member in each.members:
                parts = {
                    "queue": member.queue_ms,
                    "compute": member.compute_ms,
                    "network": member.network_ms,
                    "held": member.held_ms,
                }
                for part, spent_ms in parts.items():
                    self._member.labels(model, member.device, part).observe(spent_ms / 1e3)
            self._count_missing(model, each.missing)

    def count_failure(self, model: str, error: MDPError) -> None:
        """Count a request without an answer."""
        outcome = "unavailable" if refusal_of(error).status == 503 else "refused"
        if isinstance(error, DeadlineExceeded):
            outcome = "deadline"
        self._requests.labels(model, outcome).inc()
        self._count_missing(model, getattr(error, "outcomes", {}))

    def _count_missing(self, model: str, missing: Mapping[str, str]) -> None:
        for device, reason in missing.items():
            kind = kind_of(reason)
            self._missing.labels(model, device, kind).inc()
            if kind in LATE:
                self._late.labels(model, device).inc()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The page, and its content type, in a format that `accept` names."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _WorkerGauges(Collector):
    """Facts of a gateway's own processes."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        """Numbers of those there are now, and of those that have died."""
        yield GaugeMetricFamily(
            "mdp_gateway_workers",
            "Worker processes that answer pictures now.",
            value=self._workers.ready,
        )
        yield CounterMetricFamily(
            "mdp_gateway_workers_died",
            "Worker processes that have ended by themselves, or were killed.",
            value=self._workers.died,
        )


class _DeviceGauges(Collector):
    """Gauges of what the devices said last."""

    def __init__(self, fleets: Mapping[str, ServedFleet]) -> None:
        self._fleets = fleets

    def collect(self) -> Iterator[Metric]:
        """Every device's state, as it was a second ago at most."""
        label = ["model", "device"]
        up = GaugeMetricFamily("mdp_device_up", "Whether a device can answer.", labels=label)
        used = GaugeMetricFamily(
            "mdp_device_in_use", "Whether this gateway asks a device.", labels=label
        )
        info = GaugeMetricFamily(
            "mdp_device",
            "1, with a device's state, provider and sub-model.",
            labels=[*label, "state", "provider", "submodel"],
        )
        queue = GaugeMetricFamily(
            "mdp_device_queue_depth", "Requests that wait at a device.", labels=label
        )
        warm = GaugeMetricFamily(
            "mdp_device_temperature_celsius", "Of a device's warmest sensor.", labels=label
        )
        suspect = GaugeMetricFamily(
            "mdp_camera_suspect",
            "Whether a device's camera disagrees with the others (covered, turned or moved?), by "
            "any client's looks of the last minute, or is frozen.",
            labels=[*label, "why"],
        )
        done = CounterMetricFamily(
            "mdp_device_requests",
            "Requests of all clients that ended so since a device's agent started.",
            labels=[*label, "outcome"],
        )
        worth = GaugeMetricFamily(
            "mdp_expected_accuracy",
            "Measured accuracy of the devices that can answer now, a fraction.",
            labels=["model"],
        )
        for model, fleet in self._fleets.items():
            for name, device in fleet.roll.devices.items():
                up.add_metric([model, name], float(device.usable))
                used.add_metric([model, name], float(device.in_use))
                told = [device.state, provider_label(device.provider), device.submodel]
                info.add_metric([model, name, *told], 1)
                for why in get_args(Suspicion) if device.source else ():
                    suspect.add_metric([model, name, why], float(device.suspect == why))
                if device.queued is not None and device.usable:
                    queue.add_metric([model, name], device.queued)
                if device.temperature_c is not None and device.usable:
                    warm.add_metric([model, name], device.temperature_c)
                for outcome, count in outcome_counts(device.counts).items():
                    done.add_metric([model, name, outcome], count)
            expected = fleet.roll.accuracy_now()
            if expected is not None:
                worth.add_metric([model], expected)
        yield from (up, used, info, queue, warm, suspect, done, worth)
