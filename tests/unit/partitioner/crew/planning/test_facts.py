"""Facts: strict reading, sites, rounds of pairs."""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mdp.errors import ConfigError
from mdp.files import toml_bytes, write_toml
from partitioner.crew.planning.facts import (
    Facts,
    read_facts,
    reason_to_refuse_address,
    sites_of,
    tournament,
)
from tests.unit.partitioner.crew.planning.fleets import lines, three, two_sites


def test_facts_are_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "facts.toml"
    write_toml(path, two_sites())
    assert read_facts(path) == two_sites()
    assert read_facts(path).digest == two_sites().digest != three().digest
    assert three().of("nuc").pictures_per_s["member-1"] == 220
    assert three().is_connected(["coordinator", "nuc"])
    assert not Facts(trainer=three().trainer).is_connected(["coordinator", "nuc"])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: "colour = 1\n" + t, "unknown field `colour`"),
        (lambda t: t.replace('b = "nuc"', 'b = "nas"'), "`line`: expected a trainer of this file"),
        (
            lambda t: t.replace('name = "nuc"', 'name = "coordinator"'),
            "each name once, found 'coordinator'",
        ),
        (lambda t: t.replace('a = "tower"', 'a = "nuc"'), "expected two trainers, .* got nuc"),
        (lambda t: t.replace("127.0.0.1", "8.8.8.8"), "`address`: .* private address, got '8.8"),
        (lambda t: t.replace("127.0.0.1", "coordinator.lan"), "`address`: expected an IP address"),
        (lambda t: t.replace("= 400.0", "= 0.0"), r"Expected `float` > 0.0.*pictures_per_s"),
        (lambda t: t.replace("memory_bytes = 64", "memory = 64"), "missing required field|unknown"),
    ],
)
def test_wrong_facts_are_refused(tmp_path: Path, edit: Callable[[str], str], message: str) -> None:
    path = tmp_path / "facts.toml"
    text = toml_bytes(three()).decode()
    edited = edit(text)
    assert edited != text
    path.write_text(edited)
    with pytest.raises(ConfigError, match=message) as refused:
        read_facts(path)
    assert str(refused.value).startswith(str(path))


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("127.0.0.1", True),
        ("192.168.1.5:29500", True),
        ("10.0.0.1", True),
        ("100.64.3.2", True),
        ("fd00::1", True),
        ("[fd00::1]:29500", True),
        ("8.8.8.8:1", False),
        ("0.0.0.0", False),
        ("2606:4700::1111", False),
        ("224.0.0.1", False),
        ("coordinator", False),
        ("", False),
    ],
)
def test_addresses_are_loopback_or_private(address: str, allowed: bool) -> None:
    assert (reason_to_refuse_address(address) == "") == allowed


def test_sites_are_cut_where_the_rate_drops() -> None:
    assert two_sites().sites == [("a0", "a1"), ("b0", "b1")]
    # Wi-Fi beside a switch is a site of its own; half the rate is not.
    assert sites_of(lines({"a": 100, "b": 100, "c": 5}), "abc") == [("a", "b"), ("c",)]
    assert sites_of(lines({"a": 100, "b": 100, "c": 50}), "abc") == [("a", "b", "c")]
    assert sites_of((), "ab") == [("a",), ("b",)]


def test_trainers_of_one_address_are_one_machine() -> None:
    facts = three()
    addresses = ["10.9.0.1:47100", "10.9.0.2", "10.9.0.1"]
    pairs = zip(facts.trainer, addresses, strict=True)
    trainers = tuple(replace(trainer, address=address) for trainer, address in pairs)
    assert facts.names == ("coordinator", "tower", "nuc")
    assert replace(facts, trainer=trainers).machines == [("coordinator", "nuc"), ("tower",)]
    addresses = ["[fd00::1]:47100", "fd00::1", "fd00::2"]
    pairs = zip(facts.trainer, addresses, strict=True)
    trainers = tuple(replace(trainer, address=address) for trainer, address in pairs)
    assert replace(facts, trainer=trainers).machines == [("coordinator", "tower"), ("nuc",)]


def test_a_written_site_goes_first() -> None:
    named = Facts(
        trainer=tuple(msgspec.structs.replace(t, site="home") for t in two_sites().trainer),
        line=two_sites().line,
    )
    assert named.sites == [("a0", "a1", "b0", "b1")]


@given(st.integers(2, 13))
def test_a_tournament_pairs_everybody_once(count: int) -> None:
    names = [f"t{n}" for n in range(count)]
    rounds = tournament(names)
    assert len(rounds) == (count - 1 if count % 2 == 0 else count)
    for pairs in rounds:
        assert len({name for pair in pairs for name in pair}) == 2 * len(pairs)
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert sorted(map(sorted, met)) == sorted(map(sorted, combinations(names, 2)))
