"""Addresses that a coordinator may listen on."""

import pytest

from mdp.errors import InputError
from partitioner.crew.bus.address import exposure, parse_address, text_of
from partitioner.crew.planning.facts import reason_to_refuse_address


def resolve(host: str) -> list[str]:
    names = {"coordinator.lan": ["192.168.1.7"], "public.example": ["8.8.8.8"]}
    return names.get(host, [host])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:29400", ("127.0.0.1", 29400)),
        ("coordinator.lan:1", ("192.168.1.7", 1)),
        ("10.1.2.3:0", ("10.1.2.3", 0)),
        ("172.31.0.1:80", ("172.31.0.1", 80)),
        ("100.64.0.9:80", ("100.64.0.9", 80)),
        ("[::1]:80", ("::1", 80)),
        ("[fd00::1]:80", ("fd00::1", 80)),
    ],
)
def test_loopback_and_private_addresses(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text, resolve) == expected


@pytest.mark.parametrize(
    "text",
    ["0.0.0.0:80", "[::]:80", "8.8.8.8:80", "public.example:80", "172.32.0.1:80", "100.128.0.1:80",
     "[2001:db8::1]:80", "[::ffff:8.8.8.8]:80"],
)  # fmt: skip
def test_others_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected a loopback or private address"):
        parse_address(text, resolve)


@pytest.mark.parametrize("text", ["127.0.0.1", ":80", "127.0.0.1:", "127.0.0.1:65536", "h:x"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected HOST:PORT"):
        parse_address(text, resolve)


def test_what_is_said_of_a_network() -> None:
    assert exposure("127.0.0.1") == exposure("::1") == ""
    assert "anyone on the network of 10.0.0.1" in exposure("10.0.0.1")


def test_a_name_becomes_the_address_that_facts_take() -> None:
    address = text_of(*parse_address("tower.lan:47100", lambda name: ["192.168.1.7"]))
    assert address == "192.168.1.7:47100"
    assert not reason_to_refuse_address(address)
    assert text_of("fd00::7", 47100) == "[fd00::7]:47100"
    assert not reason_to_refuse_address("[fd00::7]:47100")
