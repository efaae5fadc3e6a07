"""Addresses of announcements, and the message where zeroconf is not installed."""

import ipaddress
import sys

import pytest

from mdp.discovery import mdns
from mdp.discovery.mdns import Announcer, addresses_behind, listen
from mdp.errors import AddressUnavailable, AgentError, InputError


def test_only_reachable_addresses_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [ipaddress.IPv4Address(text) for text in ("127.0.0.1", "10.0.0.7", "192.168.1.7")]
    monkeypatch.setattr(mdns, "_own_addresses", lambda: own)
    assert addresses_behind("tcp://127.0.0.1:7500") == ["127.0.0.1"]
    assert addresses_behind("tcp://10.0.0.7:7500") == ["10.0.0.7"]
    for anywhere in ("tcp://0.0.0.0:7500", "tcp://*:7500"):
        assert addresses_behind(anywhere) == ["10.0.0.7", "192.168.1.7"]
    monkeypatch.setattr(mdns, "_own_addresses", lambda: own[:1])
    # There may be one later: systemd tries again.
    no_network = "--announce: this machine has no IPv4 address but loopback"
    with pytest.raises(AddressUnavailable, match=f"^{no_network}$"):
        addresses_behind("tcp://0.0.0.0:7500")


@pytest.mark.parametrize("host", ["[::1]", "[::]", "n100.local"])
def test_only_ipv4_is_announced(host: str) -> None:
    with pytest.raises(InputError) as raised:
        addresses_behind(f"tcp://{host}:7500")
    assert str(raised.value) == (
        f"--announce: expected --bind with an IPv4 address or 0.0.0.0, got '{host}'"
    )


def test_without_zeroconf_both_sides_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("zeroconf")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    with pytest.raises(AgentError) as raised:
        Announcer("tcp://127.0.0.1:7500", {"device": "n100"})
    assert str(raised.value) == (
        "zeroconf is not installed; --announce needs it: "
        "pip install '.[discover]' in a checkout of MDP"
    )
    with pytest.raises(InputError, match=r"^zeroconf is not installed; mdp fleet discover needs"):
        listen("127.0.0.1", seconds=0.1)
