"""What both clients are made of: a fleet, its bundle, the sockets, and the calls in flight."""

import math
import os
import time
import warnings
from pathlib import Path

from mdp.bundle import Bundle
from mdp.crop import Picture
from mdp.errors import (
    DeadlineExceeded,
    InferenceError,
    InputError,
    InsecureWarning,
    NeverEarlyWarning,
)
from mdp.exchange import Answer, Clock, Exchange, View, cut_views, reserve_s
from mdp.fleet import PLAIN_TEXT, Fleet, agent_keys, exposed, read_fleet
from mdp.fusion import Fusion
from mdp.hedging import DEFAULT_SHARE
from mdp.keys import load_pair
from mdp.prediction import Prediction
from mdp.session import NO_TIME
from mdp.status import DeviceStatus, device_status
from mdp.transport import ClientKeys, Dealers, public_key_of
from mdp.wire import reply_frame_bytes

DEFAULT_DEADLINE_MS = 1000.0
#: How long `connect` waits for devices that do not answer.
CONNECT_TIMEOUT_S = 1.0
#: What is said of a bundle that early termination was asked for in vain.
NEVER_EARLY = "no answer ends early, as that was never measured: run mdp-partition evaluate"


class Connection:
    """What both clients hold: a fleet, its bundle, the sockets, and the calls in flight."""

    def __init__(
        self,
        fleet: str | os.PathLike[str],
        *,
        fusion: Fusion,
        key: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        hedge_after_ms: float | None = None,
        hedge_share: float = DEFAULT_SHARE,
        early: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        if hedge_after_ms is not None and not (
            math.isfinite(hedge_after_ms) and hedge_after_ms >= 0
        ):
            raise InputError(f"hedge_after_ms: expected 0 or more, got {hedge_after_ms:g}")
        if not 0 <= hedge_share <= 1:
            raise InputError(f"hedge_share: expected 0 to 1, got {hedge_share:g}")
        self.fleet: Fleet
        self.bundle: Bundle
        self.fleet, self.bundle = read_fleet(Path(fleet))
        for entry in exposed(self.fleet) if insecure else ():
            warnings.warn(
                f"device {entry.device!r} at {entry.address} is {PLAIN_TEXT}",
                InsecureWarning,
                stacklevel=4,
            )
        if early and self.bundle.manifest.early is None:
            warnings.warn(f"{self.bundle.path}: {NEVER_EARLY}", NeverEarlyWarning, stacklevel=4)
        self._clock = clock
        self._transport = Dealers(
            {entry.device: entry.address for entry in self.fleet.devices},
            keys=_client_keys(self.fleet, Path(fleet).parent, key, insecure=insecure),
            max_frame_bytes=reply_frame_bytes(len(self.bundle.manifest.labels)),
        )
        try:
            self._exchange = Exchange(
                self.fleet,
                self.bundle,
                self._transport,
                clock=clock,
                fusion=fusion,
                hedge_after_s=None if hedge_after_ms is None else hedge_after_ms / 1e3,
                hedge_share=hedge_share,
                early=early,
            )
        except BaseException:
            self._transport.close()
            raise

    @property
    def counters(self) -> dict[str, int]:
        """Replies that were ignored: `late`, `duplicate` and `malformed`."""
        return dict(self._exchange.counters)

    def _views(self, picture: Picture) -> dict[int, View]:
        return cut_views(picture, self._exchange.assignments)

    def _too_late(self, deadline_ms: float, why: str) -> DeadlineExceeded:
        outcomes = {entry.device: NO_TIME for entry in self.fleet.devices}
        return DeadlineExceeded(f"no answer within {deadline_ms:g} ms: {why}", outcomes)

    def _all_settled(self) -> bool:
        """Whether every device is connected, or has said that it will not be."""
        settled = self._transport.connected | self._transport.refused.keys()
        return len(settled) == len(self.fleet.devices)

    def _left_s(self, started_s: float, deadline_ms: float) -> float:
        decide_s = started_s + deadline_ms / 1e3 - reserve_s(deadline_ms)
        return max(0.0, decide_s - self._clock())

    def _ask_all(self) -> set[str]:
        """Ask every connected device for its status; returns those asked."""
        self._exchange.handle(self._transport.poll(0))
        self._exchange.statuses.clear()
        return {entry.device for entry in self.fleet.devices if self._exchange.ask(entry.device)}

    def _all_told(self, asked: set[str]) -> bool:
        return asked & self._transport.connected <= self._exchange.statuses.keys()

    def _device_statuses(self, asked: set[str]) -> list[DeviceStatus]:
        return [
            device_status(
                entry,
                self._exchange.statuses.get(entry.device),
                self.bundle,
                silent=entry.device in asked & self._transport.connected,
                refused=self._transport.refused.get(entry.device),
            )
            for entry in self.fleet.devices
        ]


def _client_keys(
    fleet: Fleet, folder: Path, key: str | os.PathLike[str] | None, *, insecure: bool
) -> ClientKeys | None:
    """The keys to connect with; `key` stands above the one that the fleet file names."""
    path = folder / fleet.key if key is None and fleet.key is not None else key
    agents = agent_keys(fleet, has_key=path is not None, insecure=insecure)
    if path is None:
        return None
    own = load_pair(Path(path), public_key_of)
    return ClientKeys(public=own.public, secret=own.secret, agents=agents)


def given(answer: Answer) -> Prediction:
    """The prediction; raises the InferenceError that takes its place."""
    if isinstance(answer, InferenceError):
        raise answer
    return answer
