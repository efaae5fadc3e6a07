"""Facts of each device for the page and the metrics: its state, its latest times, its faults. Pure.

Times are handed in: seconds since 1970.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict

from mdp.client.status import DeviceStatus
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import Fleet
from mdp.formats.plan import Assignment
from mdp.fusion.fuse import Fusion, rule_for
from mdp.requests.prediction import Prediction
from mdp.requests.reason import LEFT_OUT, NOT_IN_FLEET, NOT_NEEDED, Suspicion

#: Latencies of a device's sparkline, and faults of a fleet that are kept.
KEPT_LATENCIES, KEPT_FAULTS = 60, 100
#: Members up to which all their subsets are looked at.
MOST_SUBSETS_OF = 8
#: Reasons that are no fault: a cascade was sure, or somebody wanted it so.
_NO_FAULT = (str(NOT_NEEDED), str(NOT_IN_FLEET), str(LEFT_OUT))


def kind_of(reason: str) -> str:
    """A reason without what is of one device or moment, for counting: `late`, `slow`, `failed`."""
    return reason.partition(":")[0][:40]


class Fault(Struct, frozen=True):
    """Something that happened to a device, or its end."""

    at_s: float
    device: str
    what: str
    #: Whether it is the end of a fault.
    over: bool = False


class DeviceFacts(Struct):
    """One entry of a fleet file, as the gateway has seen it."""

    name: str
    k: int
    submodel: str
    #: Fractions of the centred square: left, top, right, bottom.
    region: tuple[float, float, float, float]
    #: Milliseconds of a picture there, as the plan predicts them.
    predicted_ms: float
    #: Accuracy of its answers alone; None for a bundle never evaluated.
    accuracy: float | None = None
    in_use: bool = True
    state: str = "UNKNOWN"
    usable: bool = False
    reason: str = ""
    provider: str | None = None
    source: str = ""
    #: Why its camera is suspected, by any client's looks or by its agent; None if it is not.
    suspect: Suspicion | None = None
    counts: dict[str, int] = field(default_factory=dict)
    #: Requests that wait there; None if it has not said.
    queued: int | None = None
    #: Degrees Celsius of its warmest sensor; None if it has not said.
    temperature_c: float | None = None
    #: Milliseconds from sending to the answer, the newest last.
    latencies_ms: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_LATENCIES))
    fault: str = ""


class DeviceChoice(Struct, frozen=True):
    """Devices to answer with, what they take and what they are worth."""

    devices: list[str]
    #: Of the slowest of them, as the plan predicts it.
    latency_ms: float
    #: As measured, a fraction.
    accuracy: float


class Roll:
    """All devices of one fleet, and the history of their faults."""

    def __init__(
        self, fleet: Fleet, bundle: Bundle, fusion: Fusion, *, cascade: bool = False
    ) -> None:
        """Devices of which nothing is known yet; their answers are fused by `fusion`.

        cascade: they are asked in two stages.
        """
        self.devices: dict[str, DeviceFacts] = {}
        for entry in fleet.devices:
            assignment = bundle.manifest.plan.assignments[entry.k]
            region = assignment.region
            self.devices[entry.device] = DeviceFacts(
                name=entry.device,
                k=entry.k,
                submodel=assignment.spec.words,
                region=(region.left, region.top, region.right, region.bottom),
                predicted_ms=assignment.predicted_ms.total,
            )
        self.faults: deque[Fault] = deque(maxlen=KEPT_FAULTS)
        self._bundle = bundle
        self._weights = bundle.fusion_weights()
        self._fusion: Fusion = fusion
        self._cascade = cascade
        for device in self.devices.values():
            device.accuracy = self._accuracy({device.k})
        self._front = self._pareto()

    def _pareto(self) -> list[DeviceChoice]:
        """The sets of members of which none is both quicker and more accurate, quickest first."""
        plan = self._bundle.manifest.plan.assignments
        quickest = sorted({d.k for d in self.devices.values()}, key=_latency_of(plan))
        found: list[DeviceChoice] = []
        for place, k in enumerate(quickest):
            others, latency_ms = quickest[:place], plan[k].predicted_ms.total
            # Of many devices, the quickest few alone.
            sizes = range(place + 1) if len(quickest) <= MOST_SUBSETS_OF else (place,)
            subsets = ({k, *some} for size in sizes for some in combinations(others, size))
            best = max(subsets, key=lambda members: self._accuracy(members) or 0.0)
            accuracy = self._accuracy(best)
            if accuracy is None or (found and accuracy <= found[-1].accuracy):
                continue
            if found and found[-1].latency_ms == latency_ms:
                found.pop()
            devices = [plan[member].device for member in sorted(best)]
            found.append(DeviceChoice(devices=devices, latency_ms=latency_ms, accuracy=accuracy))
        return found

    def on_statuses(self, statuses: Iterable[DeviceStatus], now_s: float) -> None:
        """Take in what the devices say of themselves."""
        for status in statuses:
            device = self.devices.get(status.device)
            if device is None:
                continue
            was_usable = device.usable
            device.state, device.usable, device.reason = status.state, status.usable, status.reason
            device.source, device.counts = status.source, status.counts
            device.suspect = status.suspect
            device.queued, device.temperature_c = status.queued, status.temperature_c
            device.provider = status.provider or device.provider
            if not status.usable:
                self._fault(device, f"{status.state}: {status.reason}".rstrip(": "), now_s)
            elif not was_usable:
                self._fault(device, "", now_s)
            # That it was late, say, ends with its next answer.

    def take_over(self, former: "Roll") -> None:
        """Go on after `former`: its faults, and what it has switched off, if that is not all."""
        self.faults.extend(former.faults)
        off = [name for name, d in former.devices.items() if not d.in_use and name in self.devices]
        if len(off) < len(self.devices):
            for name in off:
                self.devices[name].in_use = False

    def on_answer(self, prediction: Prediction, now_s: float) -> None:
        """Take in what one answer was made of, and what it lacks."""
        for member in prediction.members:
            device = self.devices.get(member.device)
            if device is not None:
                device.latencies_ms.append(round(member.spent_ms, 2))
                if device.fault and device.usable:
                    self._fault(device, "", now_s)
        self.on_missing(prediction.missing, now_s)

    def on_missing(self, missing: Mapping[str, str], now_s: float) -> None:
        """Take in why devices were missing in an answer."""
        for name, reason in missing.items():
            device = self.devices.get(name)
            # Of a device that is down, the status says more.
            if device is not None and device.usable and reason not in _NO_FAULT:
                self._fault(device, reason, now_s)

    def _fault(self, device: DeviceFacts, fault: str, now_s: float) -> None:
        if kind_of(fault) == kind_of(device.fault):
            return
        over = not fault
        # The first status of a healthy device ends nothing.
        if fault or device.fault:
            what = f"back after {device.fault}" if over else fault
            self.faults.append(Fault(at_s=now_s, device=device.name, what=what, over=over))
        device.fault = fault

    def is_last(self, name: str) -> bool:
        """Tell whether no other device in use could answer in the place of `name`, as far as known.

        A device that cannot answer leaves others that cannot either: only the last one in use is.
        """
        can_answer = self.devices[name].usable
        others = (d for d in self.devices.values() if d.in_use and d.name != name)
        return not any(other.usable or not can_answer for other in others)

    def on_switch(self, name: str, in_use: bool, now_s: float) -> None:
        """Note that somebody took a device out of this gateway's calls, or put it back."""
        self.devices[name].in_use = in_use
        what = f"switched {'on' if in_use else 'off'} at this gateway"
        self.faults.append(Fault(at_s=now_s, device=name, what=what, over=in_use))

    def accuracy_now(self) -> float | None:
        """The accuracy of an answer of the devices that can be used now; None if unknown."""
        return self._accuracy_of_answers(
            {d.k for d in self.devices.values() if d.in_use and d.usable}
        )

    def _accuracy_of_answers(self, members: set[int]) -> float | None:
        """That of a cascade was measured with all members alone."""
        if not self._cascade:
            return self._accuracy(members)
        count = len(self._bundle.manifest.plan.assignments)
        if members != set(range(count)):
            return None
        return self._bundle.cascade_accuracy(
            rule_for(tuple(range(count)), self._fusion, self._weights)
        )

    def _accuracy(self, members: set[int]) -> float | None:
        ordered = tuple(sorted(members))
        rule = rule_for(ordered, self._fusion, self._weights) if members else self._fusion
        return self._bundle.expected_accuracy(ordered, rule)

    def snapshot(self) -> dict[str, Any]:
        """Devices and faults for the page, for msgspec to encode."""
        return {
            "expected_accuracy": self.accuracy_now(),
            "expected_accuracy_all": self._accuracy_of_answers(
                {d.k for d in self.devices.values()}
            ),
            "devices": [
                asdict(device) | {"latencies_ms": list(device.latencies_ms)}
                for device in self.devices.values()
            ],
            "faults": list(reversed(self.faults)),
            "front": self._front,
        }


def _latency_of(plan: Sequence[Assignment]) -> Callable[[int], float]:
    return lambda k: plan[k].predicted_ms.total
