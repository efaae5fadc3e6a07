"""A connection to a broker, as far as no broker is needed."""

from pathlib import Path

import pytest
from paho.mqtt.client import MQTTMessage
from paho.mqtt.enums import MQTTErrorCode

from mdp.errors import ConfigError
from mdp.mqtt.broker import MOST_IN_ORDER, MOST_UNCONFIRMED, Broker, Place


def broker(ca: Path | None = None) -> Broker:
    place = Place(host="::1", port=1883, login=("me", "s3cret"), ca=ca)
    return Broker(
        place,
        will=("availability", "offline"),
        own="homeassistant/device/mdp_a/+/config",
        connected=lambda: None,
        report=lambda text: None,
    )


def test_of_each_topic_the_newest_message_waits() -> None:
    kept = broker()
    kept.publish("config", "{}", retain=True)
    for number in range(1000):
        kept.publish("answer", str(number))
    assert kept._waiting == {"config": "{}", "answer": "999"}
    kept.retract("config")
    assert kept._waiting == {"config": "", "answer": "999"}
    assert kept._retained == {}
    kept.check()


def test_a_place_is_named_without_its_password() -> None:
    assert str(Place(host="::1", port=1, login=("me", "s3cret"))) == "[::1]:1"
    assert str(Place(host="home", port=1883)) == "home:1883"


def test_a_file_without_certificates(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.pem: expected a PEM file of certificates: No su"):
        broker(tmp_path / "none.pem")


class Sent:
    """A network client of which the broker has some messages, and confirms as many."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, str, int]] = []
        self.confirmed = 0
        self.state = MQTTErrorCode.MQTT_ERR_SUCCESS

    def want_write(self) -> bool:
        return False

    def publish(self, topic: str, payload: str, qos: int = 0, retain: bool = False) -> "Info":
        self.messages.append((topic, payload, qos))
        return Info(self, len(self.messages))


class Info:
    """The state of a message that was sent."""

    def __init__(self, sent: Sent, number: int) -> None:
        self._sent, self._number = sent, number
        self.rc = sent.state

    def is_published(self) -> bool:
        # As paho's does, whatever becomes of the message.
        if self.rc > 0:
            raise RuntimeError(f"Message publish failed: {self.rc}")
        return self._number <= self._sent.confirmed


def test_messages_in_order_are_sent_as_far_as_they_are_confirmed() -> None:
    kept, sent = broker(), Sent()
    kept._client = sent  # type: ignore[assignment]
    for number in range(50):
        kept.append("items", str(number))
    kept._send_in_order()
    assert len(sent.messages) == MOST_UNCONFIRMED
    while sent.confirmed < len(sent.messages):
        sent.confirmed = len(sent.messages)
        kept._send_in_order()
    assert sent.messages == [("items", str(number), 1) for number in range(50)]


def test_messages_that_a_break_met_are_waited_for_like_others() -> None:
    """paho sends them again once it is connected."""
    kept, sent = broker(), Sent()
    kept._client = sent  # type: ignore[assignment]
    kept.append("items", "1")
    sent.state = MQTTErrorCode.MQTT_ERR_CONN_LOST
    kept._send_in_order()
    sent.state = MQTTErrorCode.MQTT_ERR_SUCCESS
    kept.append("items", "2")
    kept._send_in_order()
    assert [payload for _, payload, _ in sent.messages] == ["1", "2"]
    sent.confirmed = 2
    kept._send_in_order()
    assert kept._unconfirmed == []


def test_of_too_many_messages_in_order_the_oldest_are_dropped() -> None:
    said: list[str] = []
    kept = Broker(
        Place(host="home", port=1883), will=("a", "b"), connected=lambda: None, report=said.append
    )
    for number in range(MOST_IN_ORDER + 5):
        kept.append("items", str(number))
    assert len(kept._in_order) == MOST_IN_ORDER
    assert kept._in_order[0] == ("items", "5")
    assert said == ["broker home:1883: away for too long: messages dropped 1"]


def test_what_is_heard_is_handed_on_unless_it_is_retained() -> None:
    heard: list[bytes] = []
    kept = Broker(
        Place(host="home", port=1883), will=("a", "b"), heard={"belt/+": heard.append},
        connected=lambda: None, report=lambda text: None,
    )  # fmt: skip
    for topic, payload, retain in (
        ("belt/item", b"17", False), ("belt/item", b"16", True), ("other", b"18", False),
    ):  # fmt: skip
        message = MQTTMessage(topic=topic.encode())
        message.payload, message.retain = payload, retain
        kept._on_message(kept._client, None, message)
    assert heard == [b"17"]


def test_what_a_process_before_announced_is_handed_on_or_removed() -> None:
    former: list[tuple[str, bytes]] = []
    kept = Broker(
        Place(host="home", port=1883), will=("a", "b"), own="configs/+",
        former=lambda topic, content: former.append((topic, content)),
        connected=lambda: None, report=lambda text: None,
    )  # fmt: skip
    kept.publish("configs/fleet", "new", retain=True)
    for topic, payload, retain in (
        ("configs/fleet", b"old", True), ("configs/fleet", b"new", False),
        ("configs/fleet", b"", True), ("configs/gone", b"old", True),
    ):  # fmt: skip
        message = MQTTMessage(topic=topic.encode())
        message.payload, message.retain = payload, retain
        kept._on_message(kept._client, None, message)
    assert former == [("configs/fleet", b"old")]
    assert kept._waiting == {"configs/fleet": "new", "configs/gone": ""}
