"""Proposals from announcements: honest, broken and hostile ones. No network."""

from pathlib import Path
from typing import Any

import pytest

from mdp.discovery.announcements import (
    SHOWN_CHARACTERS,
    Announcement,
    FleetProposal,
    Found,
    LeftOut,
    fleet_text,
    propose,
    read_announcement,
    texts_of,
)
from mdp.files import read_toml
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import Fleet
from mdp.formats.plan import MAX_MEMBERS
from mdp.testing.bundles import write_bundle

#: Any 32 bytes are somebody's public key.
KEYS = {name: letter * 40 for name, letter in zip(("alpha", "beta", "client"), "abc", strict=True)}
TEXTS = {b"v": b"1", b"device": b"alpha", b"bundle": b"ab" * 8, b"k": b"0", b"key": b""}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle.open(write_bundle(tmp_path_factory.mktemp("discovery") / "bundle"))


def make_found(
    bundle: Bundle,
    device: str,
    k: int,
    *,
    key: str | None = None,
    address: str = "10.0.0.7",
    port: int = 7500,
    digest: str | None = None,
) -> Found:
    """Announcement of an agent."""
    texts = texts_of(device=device, digest=digest or bundle.digest, k=k, public_key=key)
    return Found(
        name=f"{device}-1",
        addresses=(address,),
        port=port,
        texts={name.encode(): text.encode() for name, text in texts.items()},
    )


def propose_fleet(bundle: Bundle, *announced: Found, on_loopback: bool = False) -> FleetProposal:
    # Where plain text is tried, nobody has a key.
    return propose(bundle, announced, keys={} if on_loopback else KEYS, on_loopback=on_loopback)


def reasons(proposal: FleetProposal) -> list[tuple[str, str, str]]:
    assert not proposal.entries
    return [(left.device, left.address, left.reason) for left in proposal.left_out]


def test_the_key_of_another_device_is_not_proposed(bundle: Bundle) -> None:
    # Unknown and changed keys, and those in --keys: tests/integration/commands/test_discovery.py.
    assert reasons(propose_fleet(bundle, make_found(bundle, "alpha", 0, key=KEYS["beta"]))) == [
        ("alpha", "tcp://10.0.0.7:7500", "announces the key of beta")
    ]


def test_plain_text_is_proposed_on_loopback_only(bundle: Bundle) -> None:
    here = make_found(bundle, "alpha", 0, address="127.0.0.1")
    (entry,) = propose_fleet(bundle, here, on_loopback=True).entries
    assert (entry.device, entry.address, entry.key) == ("alpha", "tcp://127.0.0.1:7500", None)
    why = "announces no key: plain text over a network is never proposed"
    assert reasons(propose_fleet(bundle, here)) == [("alpha", "tcp://127.0.0.1:7500", why)]
    there = make_found(bundle, "alpha", 0)
    assert reasons(propose_fleet(bundle, there, on_loopback=True)) == [
        ("alpha", "tcp://10.0.0.7:7500", why)
    ]


def test_plain_text_is_not_proposed_for_a_device_whose_key_is_known(bundle: Bundle) -> None:
    here = make_found(bundle, "alpha", 0, address="127.0.0.1")
    why = "announces no key, --keys has alpha.public: expected an encrypted agent"
    proposal = propose(bundle, [here], keys=KEYS, on_loopback=True)
    assert reasons(proposal) == [("alpha", "tcp://127.0.0.1:7500", why)]


def test_replicas_are_told_apart_by_their_key_files(bundle: Bundle) -> None:
    keys = {"alpha": "a" * 40, "alpha-attic": "d" * 40}
    announced = [
        make_found(bundle, "alpha", 0, key="d" * 40, address="10.0.0.9"),
        make_found(bundle, "alpha", 0, key="a" * 40),
    ]
    proposal = propose(bundle, announced, keys=keys, on_loopback=False)
    assert [(e.device, e.address, e.key) for e in proposal.entries] == [
        ("alpha", "tcp://10.0.0.7:7500", "a" * 40),
        ("alpha/attic", "tcp://10.0.0.9:7500", "d" * 40),
    ]


def test_a_device_whose_name_begins_like_another_s_is_no_replica(tmp_path: Path) -> None:
    bundle = Bundle.open(write_bundle(tmp_path / "b", devices=("pi", "pi-5", "n100")))
    announced = make_found(bundle, "pi", 0, key="d" * 40)
    proposal = propose(bundle, [announced], keys={"pi-5": "d" * 40}, on_loopback=False)
    assert [left.reason for left in proposal.left_out] == ["announces the key of pi-5"]


def test_two_agents_that_claim_one_device_are_both_left_out(bundle: Bundle) -> None:
    announced = [
        make_found(bundle, "alpha", 0, key=KEYS["alpha"], address=f"10.0.0.{host}")
        for host in (7, 8)
    ]
    why = "2 agents claim to be alpha with the same key: at most one is genuine"
    assert reasons(propose_fleet(bundle, *announced)) == [
        ("alpha", "tcp://10.0.0.7:7500", why),
        ("alpha", "tcp://10.0.0.8:7500", why),
    ]
    plain = [
        make_found(bundle, "alpha", 0, address="127.0.0.1", port=port) for port in (7500, 7501)
    ]
    assert [why for _, _, why in reasons(propose_fleet(bundle, *plain, on_loopback=True))] == [
        "2 agents claim to be alpha"
    ] * 2


def test_two_devices_at_one_address_are_both_left_out(bundle: Bundle) -> None:
    announced = [
        make_found(bundle, name, k, key=KEYS[name]) for k, name in enumerate(("alpha", "beta"))
    ]
    why = "another device announces the same address"
    assert reasons(propose_fleet(bundle, *announced)) == [
        ("alpha", "tcp://10.0.0.7:7500", why),
        ("beta", "tcp://10.0.0.7:7500", why),
    ]


def test_agents_of_something_else_are_left_out(bundle: Bundle) -> None:
    mine = bundle.digest[:16]
    announced = [
        make_found(bundle, "alpha", 0, key=KEYS["alpha"], digest="0" * 64),
        make_found(bundle, "alpha", 1, key=KEYS["alpha"]),
        make_found(bundle, "stranger", 0, key=KEYS["alpha"]),
    ]
    assert [why for _, _, why in reasons(propose_fleet(bundle, *announced))] == [
        f"serves another bundle: {'0' * 16}, expected {mine}",
        "announces sub-model 1, the bundle gives it 0",
        "is no device of this bundle",
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({b"v": b"2"}, "Invalid enum value '2' - at `$.v`"),
        ({b"device": b"Alpha"}, "Expected `str` matching regex"),
        ({b"device": b"a" * 65}, "Expected `str` matching regex"),
        ({b"device": b"alpha\n[[devices]]"}, "Expected `str` matching regex"),
        ({b"device": b"alpha\n"}, "Expected `str` matching regex"),
        ({b"bundle": b"ab" * 8 + b"\n"}, "Expected `str` matching regex"),
        ({b"key": b"\n"}, "Expected `str` matching regex"),
        ({b"device": None}, "Expected `str` matching regex"),
        ({b"device": b"\xff"}, "texts that are no UTF-8"),
        ({b"k": str(MAX_MEMBERS).encode()}, f"Expected `int` <= {MAX_MEMBERS - 1} - at `$.k`"),
        ({b"k": b"x"}, "Expected `int`, got `str` - at `$.k`"),
        ({b"bundle": b"AB" * 8}, "Expected `str` matching regex"),
        ({b"key": b"0" * 31}, "Expected `str` matching regex"),
    ],
)
def test_texts_that_are_malformed(changes: dict[bytes, bytes | None], reason: str) -> None:
    assert notice(texts={**TEXTS, **changes}).reason.startswith(f"malformed: {reason}")


def notice(**changes: Any) -> LeftOut:
    """Notice about an announcement that cannot be used."""
    known = {"name": "x", "addresses": ("10.0.0.7",), "port": 7500, "texts": TEXTS}
    read = read_announcement(Found(**{**known, **changes}))
    assert isinstance(read, LeftOut)
    return read


@pytest.mark.parametrize(
    ("addresses", "port", "reason"),
    [
        ((), 7500, "expected an IPv4 address"),
        (("fe80::1",), 7500, "expected an IPv4 address"),
        (("0.0.0.0", "224.0.0.251", "255.255.255.255"), 7500, "expected an IPv4 address"),
        (("10.0.0.7\n",), 7500, "expected an IPv4 address"),
        (("1.2.3.999",), 7500, "Octet 999 (> 255) not permitted in '1.2.3.999'"),
        (("10.0.0.7",), 0, "expected a port from 1 to 65535, got 0"),
        (("10.0.0.7",), 65536, "expected a port from 1 to 65535, got 65536"),
        (("::",) * 8 + ("10.0.0.7",), 7500, "expected an IPv4 address"),
    ],
)
def test_addresses_that_nobody_can_dial(addresses: tuple[str, ...], port: int, reason: str) -> None:
    assert notice(addresses=addresses, port=port).reason == f"malformed: {reason}"


def test_unknown_texts_are_passed_over() -> None:
    more = {**TEXTS, b"colour": b"red"}
    read = read_announcement(Found(name="x", addresses=("10.0.0.7",), port=7500, texts=more))
    assert read == Announcement(
        device="alpha", address="tcp://10.0.0.7:7500", bundle="ab" * 8, k=0, key=""
    )


def test_untrusted_texts_are_shown_short_and_printable() -> None:
    assert notice(addresses=()).address == "nowhere"
    assert notice(name="n" * SHOWN_CHARACTERS, port=0).device == "n" * SHOWN_CHARACTERS
    hostile = "\x1b[2J\r\n[[devices]]\n" + "x" * 10_000
    texts = {b"device": hostile.encode()}
    read = notice(name=hostile, addresses=(hostile,) * 1000, port=1, texts=texts)
    for text in (read.device, read.address, read.reason):
        assert text.isprintable()
        assert len(text) <= 1024
    assert len(read.device) <= 83


def test_any_announcement_makes_a_valid_file(tmp_path: Path, bundle: Bundle) -> None:
    (entry,) = propose_fleet(bundle, make_found(bundle, "alpha", 0, key=KEYS["alpha"])).entries
    fleet = Fleet(bundle="bundle", devices=[entry], key="client.secret")
    hostile = LeftOut(device="a\nb = 1", address="x\r[[devices]]", reason="\u2028\x00" + "y" * 5000)
    path = tmp_path / "fleet.toml"
    path.write_bytes(fleet_text(fleet, [hostile]))
    assert read_toml(path, Fleet) == fleet
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert len(comments) == 2
    assert comments[1].startswith("# Left out: a b = 1 at x [[devices]]: ")
