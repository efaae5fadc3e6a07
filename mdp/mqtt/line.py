"""Records of a line's items on an MQTT broker, and its triggers from there."""

from collections.abc import Callable

from mdp.mqtt.broker import Broker, Place
from mdp.mqtt.messages import OFFLINE, ONLINE


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

        Raises ConfigError for a wrong CA file.
        """
        self.items = f"mdp/{name}/items"
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
