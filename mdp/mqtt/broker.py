"""A connection to an MQTT broker that comes back. The only module that imports paho-mqtt."""

import contextlib
import secrets
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from paho.mqtt.client import Client, ConnectFlags, MQTTMessage, MQTTMessageInfo, topic_matches_sub
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from mdp.errors import ConfigError, LoginRefused

#: Wait before the next attempt to connect; doubles with each failure up to the longest.
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
#: A broker that is silent for longer than this is left, and asked anew.
KEEPALIVE_S = 15
#: How long one turn of the network thread waits for something to read.
_TURN_S = 0.1
#: How long the last messages may take.
_ENDING_S = 2.0
#: Messages in order that wait for the broker, and that it may have without a receipt.
MOST_IN_ORDER, MOST_UNCONFIRMED = 10_000, 20
#: MQTT 5's numbers of the answers to a wrong password; paho translates those of MQTT 3.1.1.
_REFUSED = (134, 135)


def matches(topics: str, topic: str) -> bool:
    """Tell whether messages of `topic` are heard by the filter `topics`."""
    return bool(topic_matches_sub(topics, topic))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Address of a broker, and the way to speak to it."""

    host: str
    port: int
    #: User and password.
    login: tuple[str, str] | None = None
    #: PEM file of the certificates that the broker's is checked by; None for plain text.
    ca: Path | None = None

    def __str__(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


class Broker:
    """Keeps a connection, and the newest message of each topic until it is sent.

    All of it happens in one thread, so that whoever publishes never waits. Messages have quality of
    service 0: retained ones are sent again whenever the connection is new. Messages in order have
    quality of service 1: each is sent until the broker has it, perhaps twice.
    """

    def __init__(
        self,
        place: Place,
        *,
        will: tuple[str, str],
        own: str | None = None,
        former: Callable[[str, bytes], None] = lambda topic, content: None,
        heard: Mapping[str, Callable[[bytes], None]] = MappingProxyType({}),
        connected: Callable[[], None],
        report: Callable[[str], None],
    ) -> None:
        """Raises ConfigError for a CA file that is none.

        `will` is a topic and the retained payload that the broker publishes when this process is
        gone; retained messages of the filter `own` that this process does not publish are removed,
        and `former` is called, in the network thread, with the topic and payload of each that it
        does publish: what a process before had there, or its own.
        `heard` are filters and what is called, in the network thread, with each payload that is
        published there from then on; retained ones are not.
        `connected` is called on every connection, `report` once when it is lost, and once when it
        is back.
        """
        self._place, self._will, self._own = place, will, own
        self._heard, self._former = dict(heard), former
        self._connected, self._report = connected, report
        self._lock = threading.Lock()
        #: Topic -> payload that waits; retained ones, which are sent again.
        self._waiting: dict[str, str] = {}
        self._retained: dict[str, str] = {}
        #: Topics and payloads in order; those that were sent without a receipt yet.
        self._in_order: deque[tuple[str, str]] = deque()
        self._unconfirmed: list[MQTTMessageInfo] = []
        self._dropped = 0
        self._over = threading.Event()
        #: Whether there was a connection, and is one, since when; why none was ever let in.
        self._ever = self._is_up = False
        self._since_s = 0.0
        #: Why there is none, and whether that was reported.
        self._problem, self._reported = "", False
        self._refusal: LoginRefused | None = None
        self._client = self._new_client()
        self._thread = threading.Thread(target=self._run, name="broker", daemon=True)

    def _new_client(self) -> Client:
        client = Client(
            CallbackAPIVersion.VERSION2,
            # Of its own for each process: a broker ends a connection whose identifier comes again.
            client_id=f"mdp-{secrets.token_hex(6)}",
            reconnect_on_failure=False,
        )
        client.will_set(*self._will, retain=True)
        if self._place.login is not None:
            client.username_pw_set(*self._place.login)
        if self._place.ca is not None:
            try:
                client.tls_set_context(ssl.create_default_context(cafile=self._place.ca))
            except (ssl.SSLError, OSError) as error:
                reason = getattr(error, "strerror", None) or error
                raise ConfigError(
                    f"{self._place.ca}: expected a PEM file of certificates: {reason}"
                ) from error
        client.on_connect = self._on_connect
        client.on_message = self._on_message
        return client

    def publish(self, topic: str, payload: str, *, retain: bool = False) -> None:
        """Send this as soon as it is possible, unless a newer one of the topic takes its place."""
        with self._lock:
            self._waiting[topic] = payload
            if retain:
                self._retained[topic] = payload

    def append(self, topic: str, payload: str) -> None:
        """Send this behind all that was appended before; of too many, the oldest is dropped."""
        with self._lock:
            self._in_order.append((topic, payload))
            dropped = len(self._in_order) > MOST_IN_ORDER
            if dropped:
                self._in_order.popleft()
                self._dropped += 1
        if dropped and self._dropped in (1, MOST_IN_ORDER):
            self._report(
                f"broker {self._place}: away for too long: messages dropped {self._dropped:,}"
            )

    def retract(self, topic: str) -> None:
        """Have the broker forget a retained message."""
        with self._lock:
            self._retained.pop(topic, None)
            self._waiting[topic] = ""

    def check(self) -> None:
        """Raise ConfigError if the broker has refused this client before it ever let it in."""
        if self._refusal is not None:
            raise self._refusal

    def __enter__(self) -> Self:
        """Start the network thread."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Say that this process leaves, and end the thread; a broker that hangs is left alone."""
        self._over.set()
        self._thread.join(_ENDING_S + 1)

    def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while not self._over.is_set() and self._refusal is None:
            self._problem = "the connection is lost"
            try:
                self._client.connect(self._place.host, self._place.port, KEEPALIVE_S)
                while not self._over.is_set() and self._turn():
                    pass
            except ssl.SSLCertVerificationError as error:
                self._on_refusal(f"its certificate is not trusted: {error.verify_message}")
            except Exception as error:  # of something that is no broker, any type
                self._problem = getattr(error, "strerror", None) or str(error) or "no answer"
            if self._over.is_set():
                break
            if self._is_up and time.monotonic() - self._since_s > LONGEST_RETRY_S:
                retry_s = FIRST_RETRY_S
            if self._refusal is None and (self._is_up or not self._reported):
                self._reported = True
                self._report(f"broker {self._place}: {self._problem}; trying again")
            self._is_up = False
            self._over.wait(retry_s)
            retry_s = min(2 * retry_s, LONGEST_RETRY_S)
        self._leave()

    def _turn(self) -> bool:
        """Read and write what there is; returns whether the connection goes on."""
        goes_on = self._client.loop(_TURN_S) == MQTTErrorCode.MQTT_ERR_SUCCESS
        if goes_on and self._is_up:
            self._send()
            self._send_in_order()
        return goes_on

    def _send(self) -> None:
        """Send what waits, as fast as the broker takes it."""
        while not self._client.want_write():
            with self._lock:
                if not self._waiting:
                    return
                topic = next(iter(self._waiting))
                payload = self._waiting.pop(topic)
                retain = topic in self._retained or not payload
            self._client.publish(topic, payload, retain=retain)

    def _send_in_order(self) -> None:
        """Send what waits in order, as far as the broker confirms it."""
        self._unconfirmed = [one for one in self._unconfirmed if not one.is_published()]
        while len(self._unconfirmed) < MOST_UNCONFIRMED and not self._client.want_write():
            with self._lock:
                if not self._in_order:
                    return
                topic, payload = self._in_order.popleft()
            sent = self._client.publish(topic, payload, qos=1)
            if sent.rc != MQTTErrorCode.MQTT_ERR_QUEUE_SIZE:
                # Where the connection was lost in the middle, paho keeps the message and sends it
                # again, but its state would raise for ever.
                sent.rc = MQTTErrorCode.MQTT_ERR_SUCCESS
            self._unconfirmed.append(sent)

    def _leave(self) -> None:
        if not self._is_up:
            return
        self.publish(*self._will, retain=True)
        until_s = time.monotonic() + _ENDING_S
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            while self._turn() and time.monotonic() < until_s:
                waits = self._waiting or self._in_order or self._unconfirmed
                if not self._client.want_write() and not waits:
                    break
            # In order, so that the broker does not publish the will again.
            self._client.disconnect()

    def _on_connect(
        self,
        client: Client,
        userdata: Any,
        flags: ConnectFlags,
        reason: ReasonCode,
        properties: Properties | None,
    ) -> None:
        if reason.is_failure:
            self._problem = f"refused: {reason}"
            if reason.value in _REFUSED:
                self._on_refusal(f"it refuses this user or password: {reason}")
            return
        with self._lock:
            self._waiting = {**self._retained, **self._waiting}
        if self._own is not None:
            client.subscribe(self._own)
        for topics in self._heard:
            client.subscribe(topics, qos=1)
        self._ever = self._is_up = True
        self._since_s = time.monotonic()
        self._connected()

    def _on_refusal(self, why: str) -> None:
        # Later on, a broker that restarts may refuse for a while what it will let in again.
        self._problem = why
        if not self._ever:
            self._refusal = LoginRefused(f"broker {self._place}: {why}")

    def _on_message(self, client: Client, userdata: Any, message: MQTTMessage) -> None:
        for topics, call in self._heard.items():
            if matches(topics, message.topic):
                # A retained one is of before: nobody knows since when.
                if not message.retain:
                    call(bytes(message.payload))
                return
        with self._lock:
            known = message.topic in self._retained
        if message.retain and message.payload and known:
            self._former(message.topic, bytes(message.payload))
        elif message.retain and message.payload:
            self.retract(message.topic)
