"""Properties of a link by times of messages. No sockets."""

from collections.abc import Callable
from pathlib import Path

import pytest

from devices.probe.link import (
    REPEATED,
    ROUND_TRIPS,
    SIDES,
    bandwidth_bps,
    link_of,
    measure_link,
    peer_keys,
)
from mdp.errors import InputError
from mdp.protocol.messages import MIN_FRAME_BYTES, Infer, Message, StatusRequest


def line(bits_per_second: float, round_trip_s: float, sent: list[int]) -> Callable[..., float]:
    """A line on which every message takes as long as its bytes."""

    def exchange(message: Message, *buffers: bytes) -> float:
        size = sum(map(len, buffers))
        sent.append(size)
        assert isinstance(message, Infer) == bool(size)
        return round_trip_s + 8 * size / bits_per_second

    return exchange


@pytest.mark.parametrize("bits_per_second", [1e6, 5e7, 1e9, 4e9])
def test_a_line_is_measured_as_it_is(bits_per_second: float) -> None:
    link = link_of("peer", line(bits_per_second, 0.003, []))
    assert link.bandwidth_bps == pytest.approx(bits_per_second, rel=0.01)
    assert link.round_trip_s == link.p10_s == link.p90_s == 0.003


def test_a_slow_line_is_not_kept_busy_with_large_crops() -> None:
    sent: list[int] = []
    assert link_of("peer", line(1e6, 0.003, sent)).request_bytes == 256 * 256 * 3
    assert max(sent) == 256 * 256 * 3
    assert len(sent) == ROUND_TRIPS + 2 * REPEATED


def test_a_fast_line_is_measured_with_the_largest_crop() -> None:
    sent: list[int] = []
    assert link_of("peer", line(1e9, 0.0003, sent)).request_bytes == SIDES[-1] ** 2 * 3
    assert len(sent) == ROUND_TRIPS + len(SIDES) * REPEATED


def test_one_slow_round_trip_of_many_shows_in_the_spread_only() -> None:
    asked = 0

    def exchange(message: Message, *buffers: bytes) -> float:
        nonlocal asked
        asked += isinstance(message, StatusRequest)
        return 0.05 if buffers else (1.0 if asked % 8 == 0 else 0.002)

    link = link_of("peer", exchange)
    assert link.round_trip_s == 0.002
    assert link.p90_s == 1.0


def test_bytes_that_take_no_time_give_no_endless_bandwidth() -> None:
    assert bandwidth_bps(1000, 0.001, 0.002) == pytest.approx(8000 / 0.0001)


@pytest.mark.parametrize("peer", ["10.0.0.1:7500", "tcp://host", "tcp://host:0", "ipc://x:1"])
def test_a_peer_is_given_by_host_and_port(peer: str) -> None:
    with pytest.raises(InputError, match=r"^--peer: expected tcp://HOST:PORT of a running agent"):
        measure_link(peer)


def test_a_peer_elsewhere_is_not_spoken_to_in_plain_text() -> None:
    with pytest.raises(
        InputError, match=r"^--peer tcp://192\.0\.2\.1:7500 is not on this machine: "
    ):
        measure_link("tcp://192.0.2.1:7500")


def test_keys_come_in_pairs() -> None:
    assert peer_keys(None, None) is None
    for key, peer_key in ((Path("a.secret"), None), (None, Path("b.public"))):
        with pytest.raises(InputError, match=r"^--key and --peer-key: expected both, or neither"):
            peer_keys(key, peer_key)


def test_every_agent_takes_the_largest_crop() -> None:
    assert SIDES[-1] ** 2 * 3 <= MIN_FRAME_BYTES
