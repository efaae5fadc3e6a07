"""A connection to a broker, as far as no broker is needed."""

from pathlib import Path

import pytest

from mdp.errors import ConfigError
from mdp.mqtt.broker import Broker, Place


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
