"""Measures the network to a running agent with MDP's messages and this device's clock.

A round trip is a status request and its reply. Bandwidth is measured with large raw crops for an
unknown bundle, which the agent receives whole before it refuses. Replies are small, so only the way
to the agent is measured.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mdp.errors import AgentError, InputError
from mdp.files import Record
from mdp.formats.keys import is_loopback, load_pair, load_public
from mdp.protocol.messages import Buffer, Infer, Message, Status, StatusRequest, decode, encode
from mdp.transport import ClientKeys, Connected, Dealers, Received, public_key_of
from mdp.transport.outage import ANOTHER_KEY, CLIENT_IS_PLAIN

_PEER = "peer"
ROUND_TRIPS = 50
#: Sides of the crops sent: the next is tried while one takes less than ENOUGH_S. Every agent
#: accepts the largest (MIN_FRAME_BYTES).
SIDES = (64, 256)
REPEATED, ENOUGH_S = 5, 0.2
CONNECT_S, REPLY_S = 5.0, 30.0
#: In messages, a probe has options in place of a client's fleet file.
_IN_A_PROBE = {
    ANOTHER_KEY: "the agent's key is another one than --peer-key's",
    CLIENT_IS_PLAIN: "the agent has a key: expected --peer-key, its public key file, and --key",
}
#: The digest of no bundle.
_UNKNOWN = "0" * 64


class MeasuredLink(Record, frozen=True):
    """The network to one agent: medians, and percentiles of round trips."""

    peer: str
    round_trip_s: float
    p10_s: float
    p90_s: float
    bandwidth_bps: float
    request_bytes: int


def peer_keys(key: Path | None, peer_key: Path | None) -> ClientKeys | None:
    """This device's keys and the agent's public one, from their files; None for plain text.

    Raises InputError or ConfigError.
    """
    if (key is None) != (peer_key is None):
        raise InputError("--key and --peer-key: expected both, or neither")
    if key is None or peer_key is None:
        return None
    own, agents = load_pair(key, public_key_of), {_PEER: load_public(peer_key)}
    return ClientKeys(public=own.public, secret=own.secret, agents=agents)


def measure_link(
    address: str,
    keys: ClientKeys | None = None,
    *,
    insecure: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> MeasuredLink:
    """Measure the network to the agent at `tcp://HOST:PORT`; raises InputError without an answer.

    Without `keys` only on this machine, unless `insecure` allows plain text over a network.
    """
    port = address.rpartition(":")[2]
    if not address.startswith("tcp://") or not (port.isdecimal() and 0 < int(port) < 65536):
        raise InputError(f"--peer: expected tcp://HOST:PORT of a running agent, got {address!r}")
    if keys is None and not insecure and not is_loopback(address):
        raise InputError(
            f"--peer {address} is not on this machine: expected --key and --peer-key, or "
            "--insecure for plain text"
        )
    dealers = Dealers({_PEER: address}, keys=keys)
    try:
        _connect(dealers, address, clock)
        return link_of(
            address,
            lambda message, *buffers: _time_reply(dealers, address, clock, message, *buffers),
        )
    finally:
        dealers.close()


#: Sends a message and its buffers; returns the seconds until the answer.
Exchange = Callable[..., float]


def link_of(peer: str, exchange: Exchange) -> MeasuredLink:
    """Time status requests and crops of growing size."""
    trips_s = [exchange(StatusRequest(request_id=number)) for number in range(ROUND_TRIPS)]
    tenths = statistics.quantiles(trips_s, n=10, method="inclusive")
    round_trip_s = statistics.median(trips_s)
    for side in SIDES:
        size = side * side * 3
        request = Infer(
            request_id=side, digest=_UNKNOWN, k=0, budget_ms=0.0, image_size=side, encoding="raw"
        )
        took_s = statistics.median(exchange(request, bytes(size)) for _ in range(REPEATED))
        if took_s > ENOUGH_S:
            break
    return MeasuredLink(
        peer=peer,
        round_trip_s=round_trip_s,
        p10_s=tenths[0],
        p90_s=tenths[-1],
        bandwidth_bps=bandwidth_bps(size, took_s, round_trip_s),
        request_bytes=size,
    )


def bandwidth_bps(size: int, took_s: float, round_trip_s: float) -> float:
    """Bits per second of `size` bytes, without the round trip of an empty message.

    Within one machine both can take equally long; the bytes then count as a tenth of the time.
    """
    return 8 * size / max(took_s - round_trip_s, took_s / 10)


def _connect(dealers: Dealers, address: str, clock: Callable[[], float]) -> None:
    until_s = clock() + CONNECT_S
    while (left_s := until_s - clock()) > 0:
        if any(isinstance(event, Connected) for event in dealers.poll(left_s)):
            return
        if _PEER in dealers.refused:
            why = dealers.refused[_PEER]
            raise InputError(f"--peer {address}: {_IN_A_PROBE.get(why, why)}")
    raise InputError(f"--peer {address}: no agent answers there within {CONNECT_S:g} s")


def _time_reply(
    dealers: Dealers, address: str, clock: Callable[[], float], message: Message, *buffers: bytes
) -> float:
    """Seconds until the reply to `message`."""
    start_s = clock()
    if not dealers.send(_PEER, encode(message, *buffers)):
        raise AgentError(f"--peer {address}: the connection was lost")
    while (left_s := start_s + REPLY_S - clock()) > 0:
        for event in dealers.poll(left_s):
            if isinstance(event, Received):
                took_s = clock() - start_s
                _check_reply(address, message, event.frames)
                return took_s
    raise AgentError(f"--peer {address}: no answer within {REPLY_S:g} s")


def _check_reply(address: str, message: Message, frames: Sequence[Buffer]) -> None:
    """Raise AgentError unless this is a status, or the refusal of a crop."""
    reply = decode(frames).message
    if isinstance(message, StatusRequest) != isinstance(reply, Status):
        raise AgentError(f"--peer {address}: unexpected {type(reply).__name__}")
