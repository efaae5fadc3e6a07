"""Looks at what a fleet's cameras see, asks its devices how they are, and publishes both."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from mdp.client.following import FollowedFiles
from mdp.client.sync import Client
from mdp.errors import InferenceError
from mdp.mqtt.messages import ONLINE, Topics, answer_payload, discovery, health_payload

#: A device's health is published when it changes, and so often for what varies all the time.
HEALTH_S = 10.0
_VARIES = ("latency_ms", "temperature_c")
#: How long devices may take to say how they are.
STATUS_TIMEOUT_S = 0.8


class Publisher(Protocol):
    """The methods of a broker that a bridge needs."""

    def publish(self, topic: str, payload: str, *, retain: bool = False) -> None:
        """Send this as soon as it is possible."""

    def retract(self, topic: str) -> None:
        """Have the broker forget a retained message."""


class Bridge:
    """Publishes one fleet under its name."""

    def __init__(
        self,
        client: Client,
        path: Path,
        name: str,
        broker: Publisher,
        report: Callable[[str], None],
    ) -> None:
        """`path` is the fleet file of `client`; announces it and its devices.

        `report` gets one line where the file stays wrong.
        """
        self._client, self._broker = client, broker
        self._name = name
        self._announced: set[str] = set()
        #: Device -> milliseconds that it took for its latest answer.
        self._latencies_ms: dict[str, float] = {}
        #: Topic -> its latest health, less what varies, and when that was published.
        self._told: dict[str, tuple[dict[str, Any], float]] = {}
        self._files = FollowedFiles(path, client, report)
        self._announce()

    def _announce(self) -> None:
        names = [entry.device for entry in self._client.fleet.devices]
        self.topics = Topics(self._name, names)
        wanted = discovery(self.topics, self._client.fleet, self._client.bundle)
        for topic in self._announced - wanted.keys():
            self._broker.retract(topic)
        for topic, payload in wanted.items():
            self._broker.publish(topic, _json(payload), retain=True)
        self._broker.publish(self.topics.availability, ONLINE, retain=True)
        self._announced = set(wanted)
        self._told.clear()

    def step(self, *, deadline_ms: float, now: Callable[[], str]) -> None:
        """Look once, and publish what was seen, at the time that `now` gives, and the health."""
        self._renew()
        seen: Any
        try:
            seen = self._client.look(deadline_ms=deadline_ms)
            for member in seen.members:
                self._latencies_ms[member.device] = member.spent_ms
        except InferenceError as error:
            seen = error
        self._broker.publish(self.topics.answer, _json(answer_payload(now(), seen)))
        with suppress(InferenceError):
            self._tell_health()

    def _renew(self) -> None:
        """Follow a fleet file or bundle that has changed."""
        with self._files.following() as changed:
            if changed:
                self._client.reload()
                self._announce()

    def _tell_health(self) -> None:
        now_s = time.monotonic()
        for status in self._client.status(timeout_s=STATUS_TIMEOUT_S):
            topic = self.topics.health(status.device)
            payload = health_payload(status, self._latencies_ms.get(status.device))
            lasting = {key: value for key, value in payload.items() if key not in _VARIES}
            before, told_s = self._told.get(topic, ({}, 0.0))
            if lasting != before or now_s - told_s >= HEALTH_S:
                self._broker.publish(topic, _json(payload))
                self._told[topic] = (lasting, now_s)

    def again(self) -> None:
        """Publish every device's health at the next step: the broker is a new one, or was away."""
        self._told.clear()


def _json(payload: dict[str, Any]) -> str:
    return msgspec.json.encode(payload).decode()
