"""Records of a line's items on an MQTT broker, and its triggers from there."""

from collections.abc import Callable

from mdp.errors import InputError
from mdp.mqtt.broker import Broker, Place, matches
from mdp.mqtt.messages import OFFLINE, ONLINE

_MAX_TOPIC_BYTES = 65_535


def check_topic(topic: str) -> None:
    """Raise InputError unless one can subscribe to `topic`, by the rules of MQTT 3.1.1."""
    levels = topic.split("/")
    wild = [level for level in levels if "+" in level or "#" in level]
    if (
        not topic
        or not topic.isprintable()
        or len(topic.encode()) > _MAX_TOPIC_BYTES
        or any(level not in ("+", "#") for level in wild)
        or "#" in levels[:-1]
    ):
        raise InputError(f"--trigger mqtt:{topic}: expected a topic, or a filter of topics")


class LineBroker:
    """A broker that gets the records of a line, in order, and hands in triggers."""

    def __init__(
        self,
        place: Place,
        name: str,
        *,
        topic: str | None,
        trigger: Callable[[bytes], None],
        report: Callable[[str], None],
    ) -> None:
        """`name` is the line's in topics; `trigger` gets what is published under `topic`, if any.

        Raises ConfigError for a wrong CA file, InputError for a topic that none is, or under which
        the records themselves are published.
        """
        self.items = f"mdp/{name}/items"
        if topic is not None:
            check_topic(topic)
            if matches(topic, self.items):
                raise InputError(
                    f"--trigger mqtt:{topic}: expected another topic than {self.items}, where "
                    "records are published"
                )
        availability = f"mdp/{name}/line"
        self.broker = Broker(
            place,
            will=(availability, OFFLINE),
            heard={} if topic is None else {topic: trigger},
            connected=lambda: self.broker.publish(availability, ONLINE, retain=True),
            report=report,
        )

    def publish(self, record: bytes) -> None:
        """Publish an item's record, JSON in UTF-8; never waits."""
        self.broker.append(self.items, record.decode())
