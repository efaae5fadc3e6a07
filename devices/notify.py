"""Reports an agent's state to systemd, as sd_notify(3) does, where $NOTIFY_SOCKET is set."""

import os
import socket
from collections.abc import Mapping
from typing import Self

#: States in which a service has ended its start, successfully or with an error that may pass.
_STARTED = ("READY", "FAILED")
READY, STOPPING, WATCHDOG = "READY=1", "STOPPING=1", "WATCHDOG=1"


class Notices:
    """Messages that are due, by an agent's state. Pure."""

    def __init__(self, *, watchdog: bool) -> None:
        """Without `watchdog`, no pings are due."""
        self._watchdog = watchdog
        self._state = ""
        self._ready = self._reloading = self._stopping = False

    def due(self, state: str, *, reloading: bool, alive: bool, now_us: int) -> list[str]:
        """Messages to send now, in order.

        `now_us` is CLOCK_MONOTONIC in microseconds, by which systemd orders reloads.
        """
        messages = []
        if state in _STARTED and not self._ready:
            self._ready = True
            messages.append(READY)
        if state == "DRAINING" and not self._stopping:
            self._stopping = True
            messages.append(STOPPING)
        if self._ready and not self._stopping and reloading != self._reloading:
            self._reloading = reloading
            messages.append(f"RELOADING=1\nMONOTONIC_USEC={now_us}" if reloading else READY)
        if state != self._state:
            self._state = state
            messages.append(f"STATUS={state}")
        if self._watchdog and alive:
            messages.append(WATCHDOG)
        return messages


class Notifier:
    """Sends notices to $NOTIFY_SOCKET; a message that the socket has no room for is sent later."""

    def __init__(self, address: str, *, watchdog: bool) -> None:
        """`address` is a path, or `@NAME` for an abstract socket."""
        self.notices = Notices(watchdog=watchdog)
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._unsent: list[str] = []

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """A notifier to `NOTIFY_SOCKET`; None if it is no path and no abstract socket."""
        address = environment.get("NOTIFY_SOCKET", "")
        if not address.startswith(("/", "@")):
            return None
        for_me = environment.get("WATCHDOG_PID") in (None, str(os.getpid()))
        return cls(address, watchdog=for_me and "WATCHDOG_USEC" in environment)

    def send_due(self, state: str, *, reloading: bool, alive: bool, now_us: int) -> None:
        """Send what is due; never waits and never raises."""
        due = self.notices.due(state, reloading=reloading, alive=alive, now_us=now_us)
        self._unsent = [message for message in self._unsent if message != WATCHDOG] + due
        if not self._unsent:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            try:
                while self._unsent:
                    sender.sendto(self._unsent[0].encode(), self._address)
                    del self._unsent[0]
            except OSError:
                # No room, or no receiver.
                return
