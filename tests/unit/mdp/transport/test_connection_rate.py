"""Rate at which a host may connect, and the filter that keeps it to that. Pure."""

import ipaddress
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdp.transport.admission import syn_filter
from mdp.transport.admission.connection_rate import (
    AT_ONCE,
    LONGEST_S,
    PER_S,
    ConnectionRate,
    network_of,
)
from mdp.transport.admission.syn_filter import MOST_NETWORKS, Instruction, Network, program

HOST, OTHER = "10.0.0.7", "10.0.0.8"
SYN, ACK, RST = 0x02, 0x10, 0x04


def test_a_host_may_connect_so_often_at_once() -> None:
    rate = ConnectionRate(per_s=4, at_once=10)
    assert [rate.count_connection(HOST, 5.0) for _ in range(10)] == [*[False] * 9, True]
    assert rate.hosts_to_block == {network_of(HOST)}
    assert not rate.count_connection(OTHER, 5.0)
    assert rate.hosts_to_block == {network_of(HOST)}


def test_a_host_that_is_kept_out_comes_back_with_a_second_of_its_allowance() -> None:
    rate = ConnectionRate(per_s=4, at_once=10)
    for _ in range(10):
        rate.count_connection(HOST, 5.0)
    assert rate.due_s == pytest.approx(6.0)
    assert not rate.unblock(5.9)
    assert rate.unblock(6.0)
    assert (rate.hosts_to_block, rate.due_s) == (frozenset(), math.inf)
    assert [rate.count_connection(HOST, 6.0) for _ in range(4)] == [False, False, False, True]


def test_what_came_before_it_could_be_kept_out_is_paid_back() -> None:
    rate = ConnectionRate(per_s=4, at_once=10)
    assert sum(rate.count_connection(HOST, 5.0) for _ in range(18)) == 1
    assert not rate.unblock(7.9)
    assert rate.unblock(8.0)


def test_nobody_is_kept_out_for_long_that_has_stopped() -> None:
    rate = ConnectionRate()
    for _ in range(5000):
        rate.count_connection(HOST, 5.0)
    back_s = rate.due_s
    assert back_s == pytest.approx(5.0 + LONGEST_S)
    assert not rate.unblock(back_s - 0.1)
    assert rate.unblock(back_s)
    assert [rate.count_connection(HOST, back_s) for _ in range(int(PER_S))] == [
        *[False] * (int(PER_S) - 1),
        True,
    ]


def test_who_connects_now_and_then_is_never_kept_out() -> None:
    rate = ConnectionRate(per_s=4, at_once=10)
    assert not any(rate.count_connection(HOST, number / 4) for number in range(1000))


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 40)), max_size=60))
def test_the_long_run_rate_is_bounded(visits: list[tuple[float, int]]) -> None:
    rate, now_s, made = ConnectionRate(), 0.0, 0
    for pause_s, size in visits:
        now_s += pause_s
        rate.unblock(now_s)
        for _ in range(size):
            # The filter takes effect at once.
            if not rate.hosts_to_block:
                rate.count_connection(HOST, now_s)
                made += 1
        assert made <= AT_ONCE + PER_S * now_s


def test_hosts_that_have_their_whole_allowance_are_forgotten() -> None:
    rate = ConnectionRate()
    for number in range(100_000):
        rate.count_connection(str(ipaddress.IPv4Address(number)), number / 100)
    assert len(rate._full_s) < 1000


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.0.2.1", "192.0.2.1/32"),
        ("::ffff:192.0.2.1", "192.0.2.1/32"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
    ],
)
def test_what_counts_as_one_host(host: str, network: str) -> None:
    assert str(network_of(host)) == network


def syn_from(host: str, flags: int = SYN) -> tuple[bytes, bytes]:
    """The headers of a segment: IP's as far as its source, and TCP's."""
    address = ipaddress.ip_address(host)
    tcp = bytes(13) + bytes([flags]) + bytes(6)
    if address.version == 4:
        return b"\x45" + bytes(11) + address.packed + bytes(4), tcp
    return b"\x60" + bytes(7) + address.packed + bytes(16), tcp


def passes(instructions: list[Instruction], headers: tuple[bytes, bytes]) -> bool:
    """Run as the kernel would: an interpreter of as much of BPF as is used."""
    ip, tcp = headers
    accumulator = place = 0
    while True:
        code, if_true, if_false, operand = instructions[place]
        assert if_true < 256
        assert if_false < 256
        place += 1
        if code in (syn_filter.LOAD_BYTE, syn_filter.LOAD_WORD):
            layer, at = (ip, operand - syn_filter.IP_HEADER) if operand >> 20 else (tcp, operand)
            form = ">I" if code == syn_filter.LOAD_WORD else ">B"
            (accumulator,) = struct.unpack_from(form, layer, at)
        elif code == syn_filter.AND:
            accumulator &= operand
        elif code == syn_filter.SHIFT_RIGHT:
            accumulator >>= operand
        elif code == syn_filter.IF_EQUAL:
            place += if_true if accumulator == operand else if_false
        else:
            assert code == syn_filter.RETURN
            return operand > 0


HOSTS = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)


@given(st.lists(HOSTS, max_size=MOST_NETWORKS), HOSTS, st.integers(0, 255))
def test_only_new_connections_are_dropped(hosts: list[str], other: str, flags: int) -> None:
    networks: set[Network] = {network_of(host) for host in hosts}
    instructions = program(networks)
    is_syn = flags & (SYN | ACK) == SYN
    for host in (*hosts, other):
        # How an address was written decides which headers it comes with.
        kept_out = is_syn and _as_it_travels(host) in networks
        assert passes(instructions, syn_from(host, flags)) is not kept_out


def _as_it_travels(host: str) -> Network:
    address = ipaddress.ip_address(host)
    if address.version == 4:
        return network_of(host)
    return ipaddress.IPv6Network((int(address) >> 64 << 64, 64))


def test_beyond_so_many_everybody_is_kept_out() -> None:
    networks = [network_of(f"10.0.1.{number}") for number in range(MOST_NETWORKS + 1)]
    instructions = program(networks)
    assert not passes(instructions, syn_from("192.0.2.1"))
    assert passes(instructions, syn_from("192.0.2.1", ACK))
    assert passes(instructions, syn_from("10.0.1.5", SYN | ACK))
    assert passes(program(networks[1:]), syn_from("192.0.2.1"))
    assert not passes(program(networks[1:]), syn_from("10.0.1.5"))
