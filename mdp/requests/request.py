"""One request to one device, and the stream of events that health, latency and statistics follow.

Pure.
"""

from typing import Literal

from msgspec import Struct

from mdp.requests.reason import Reason

#: A request was `sent`. It ended as `answered` or `refused` (no time there) before its deadline;
#: `full`: refused as others fill its queue, and to be sent again; `late`: answered or refused, but
#: after the deadline; `silent`: by the deadline; `no_frame`: the camera has none;
#: `unready`: the device cannot serve this client; `failed`: any other failure, or no valid answer;
#: `dropped`: its reply would not be recognised. The device was `asked` for its status, has `told`
#: it, its connection is up (`connected`) or was `lost` with requests in flight.
What = Literal[
    "sent", "answered", "refused", "full", "late", "silent", "no_frame", "unready", "failed",
    "dropped", "asked", "told", "connected", "lost",
]  # fmt: skip


class Request(Struct, eq=False, kw_only=True):
    """A session's action: send member `k`'s part to `device`, at `sent_s`.

    Where it has to wait for its turn (`mdp.requests.window`), `sent_s` and `budget_ms` change as
    it goes out.
    """

    k: int
    device: str
    sent_s: float
    budget_ms: float = 0.0
    #: Whether it waits for its turn now, and how long it has waited in all.
    held: bool = False
    held_s: float = 0.0
    #: When it was to go out, and how long its answer was expected to take; 0: not known.
    asked_s: float = 0.0
    expected_s: float = 0.0
    #: The device's last refusal, if others' requests fill its queue.
    refusal: Reason | None = None
    #: How many requests were out at the device as this one went out; -1: not in its window.
    ahead: int = -1
    #: Whether it goes out beside another one that has not been answered.
    hedged: bool = False
    #: Whether it tests a half-open device, or one that is too slow for its call.
    is_test: bool = False


class DeviceEvent(Struct):
    """An event at a device, or to a request in flight to it."""

    what: What
    device: str
    now_s: float
    request: Request | None = None
    #: The end of the request's time.
    until_s: float = 0.0
    #: Whether the request was in flight until now, and not `silent` already.
    in_flight: bool = False
    reason: Reason | None = None

    @property
    def trip_s(self) -> float:
        """The round trip; of a refusal all the time that there was: others are likely sooner."""
        if self.request is None:
            return 0.0
        return (self.until_s if self.what == "refused" else self.now_s) - self.request.sent_s
