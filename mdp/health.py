"""Which devices are worth asking, judged from ordinary traffic. Pure; the clock is an argument.

A device that lets several requests in a row go unanswered is rested, and asked again after a
back-off that doubles up to a bound; any sign of life takes it back at once. This keeps a frozen
device from costing every call its whole deadline.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

#: Unanswered requests in a row before a device is rested.
TOLERATED_SILENCES = 3
FIRST_REST_S = 0.5
LONGEST_REST_S = 30.0
#: The reason of a device to which there is no connection.
UNREACHABLE = "unreachable"


@dataclass(slots=True)
class Health:
    """One device as its client sees it."""

    silences: int = 0
    rest_s: float = FIRST_REST_S
    rested_until_s: float = float("-inf")

    def available(self, now_s: float) -> bool:
        """Whether to ask this device now."""
        return now_s >= self.rested_until_s

    def heard(self) -> None:
        """Anything came from the device: it lives."""
        self.silences, self.rest_s, self.rested_until_s = 0, FIRST_REST_S, float("-inf")

    def silent(self, now_s: float) -> None:
        """A request to the device went unanswered until its deadline."""
        self.silences += 1
        if self.silences >= TOLERATED_SILENCES:
            self.rested_until_s = now_s + self.rest_s
            self.rest_s = min(2 * self.rest_s, LONGEST_REST_S)


def unavailable(
    health: Mapping[str, Health], gone: Collection[str], *, devices: int, now_s: float
) -> dict[str, str]:
    """Device -> reason, for those of a fleet of `devices` that are not to be asked now.

    Whoever is `gone` is not connected. With nobody else left, a silent device is still a chance.
    """
    unreachable = dict.fromkeys(gone, UNREACHABLE)
    resting = {
        device: f"silent: {known.silences} requests unanswered"
        for device, known in health.items()
        if device not in unreachable and not known.available(now_s)
    }
    return unreachable if len(unreachable) + len(resting) == devices else unreachable | resting
