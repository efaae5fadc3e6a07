"""Looks at what a fleet's cameras see, asks its devices how they are, and publishes both."""

import queue
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from mdp.client.following import FollowedFiles
from mdp.client.sync import Client
from mdp.errors import InferenceError
from mdp.mqtt.messages import (
    ONLINE,
    Topics,
    answer_payload,
    discovery,
    entities_of,
    health_payload,
    remove_former,
)

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
        #: Topic -> what is announced there, and key -> platform of every entity that ever was.
        self._announced: dict[str, dict[str, Any]] = {}
        self._entities: dict[str, dict[str, str]] = {}
        self._before: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
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
        for topic in self._announced.keys() - wanted.keys():
            self._broker.retract(topic)
            # With its topic each of its entities is gone.
            self._entities.pop(topic, None)
        self._announced = wanted
        for topic in wanted:
            self._announce_at(topic)
        self._broker.publish(self.topics.availability, ONLINE, retain=True)
        self._told.clear()

    def _announce_at(self, topic: str) -> None:
        payload, former = self._announced[topic], self._entities.setdefault(topic, {})
        self._broker.publish(topic, _json(remove_former(payload, former)), retain=True)
        former |= {key: one["platform"] for key, one in payload["components"].items()}

    def on_former(self, topic: str, content: bytes) -> None:
        """Take in what a process before has announced under a topic; any thread."""
        self._before.put((topic, content))

    def _remove_former(self) -> None:
        """Remove entities that only a process before had, as of another bundle's labels."""
        with suppress(queue.Empty):
            while True:
                topic, content = self._before.get_nowait()
                known, found = self._entities.get(topic), entities_of(content)
                if known is not None and not found.keys() <= known.keys():
                    known |= found
                    self._announce_at(topic)

    def step(self, *, deadline_ms: float, now: Callable[[], str]) -> None:
        """Look once, and publish what was seen, at the time that `now` gives, and the health."""
        self._renew()
        self._remove_former()
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
