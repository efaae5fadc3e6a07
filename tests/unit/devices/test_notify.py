"""The messages to systemd, and the sockets they are sent to."""

import os
import socket
from pathlib import Path

import pytest

from devices.notify import Notices, Notifier


def test_each_change_is_told_once() -> None:
    notices = Notices(watchdog=False)

    def due(state: str, *, reloading: bool = False) -> list[str]:
        return notices.due(state, reloading=reloading, alive=True, now_us=7)

    assert due("WARMING") == ["STATUS=WARMING"]
    assert due("WARMING", reloading=True) == []
    assert due("READY") == ["READY=1", "STATUS=READY"]
    assert due("READY") == []
    assert due("READY", reloading=True) == ["RELOADING=1\nMONOTONIC_USEC=7"]
    assert due("READY", reloading=True) == []
    assert due("READY") == ["READY=1"]
    assert due("FAILED") == ["STATUS=FAILED"]
    assert due("DRAINING", reloading=True) == ["STOPPING=1", "STATUS=DRAINING"]
    assert due("DRAINING") == []


def test_only_what_is_alive_pings() -> None:
    notices = Notices(watchdog=True)
    for alive in (True, False, True):
        messages = notices.due("STARTING", reloading=False, alive=alive, now_us=0)
        assert ("WATCHDOG=1" in messages) == alive


@pytest.mark.parametrize("abstract", [False, True])
def test_what_no_one_took_is_sent_later(tmp_path: Path, abstract: bool) -> None:
    name = f"mdp-test-{os.getpid()}"
    address, bound = f"{tmp_path}/notify", f"{tmp_path}/notify"
    if abstract:
        address, bound = f"@{name}", f"\0{name}"
    notifier = Notifier.of({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1"})
    assert notifier is not None
    notifier.send_due("READY", reloading=False, alive=True, now_us=0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(bound)
        receiver.setblocking(False)
        notifier.send_due("READY", reloading=False, alive=True, now_us=0)
        told = [receiver.recv(100).decode() for _ in range(3)]
        assert told == ["READY=1", "STATUS=READY", "WATCHDOG=1"]
        with pytest.raises(BlockingIOError):
            receiver.recv(100)


def test_nothing_is_sent_unless_asked() -> None:
    assert Notifier.of({}) is None
    assert Notifier.of({"NOTIFY_SOCKET": "vsock:2:1"}) is None
    for more in ({}, {"WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}):
        notifier = Notifier.of({"NOTIFY_SOCKET": "/run/none", **more})
        assert notifier is not None
        due = notifier.notices.due("STARTING", reloading=False, alive=True, now_us=0)
        assert "WATCHDOG=1" not in due
