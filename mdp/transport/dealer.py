"""One device's DEALER and its monitor."""

import math
from dataclasses import dataclass

import zmq

from mdp.transport.events import ClientKeys
from mdp.transport.sockets import configure, monitor_of

RECONNECT_MS = 100
RECONNECT_MAX_MS = 1000
#: An unanswered attempt to connect is repeated after so long. TCP's retries back off: after 45 s
#: without a network, a device was reconnected only 29 s after it was back.
CONNECT_MS = 2000
#: ZMQ_RECONNECT_STOP_HANDSHAKE_FAILED (zmq.h)
_STOP_AFTER_FAILED_HANDSHAKE = 2
FAILED = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
WATCHED = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | FAILED


@dataclass(slots=True)
class Dealer:
    """A device's sockets, and the state of its connection."""

    socket: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    #: Where it connects to: an address, also for a host's name.
    address: str
    #: When the connection was made; infinity without one.
    up_s: float = math.inf
    #: Messages received less messages sent.
    unasked: int = 0


def open_dealer(
    context: "zmq.Context[zmq.Socket[bytes]]",
    device: str,
    address: str,
    keys: ClientKeys | None,
    failures: int,
    max_frame_bytes: int,
) -> Dealer:
    """The sockets of `device`, to be connected to `address` after `failures` handshakes.

    Raises ZMQError.
    """
    socket = context.socket(zmq.DEALER)
    try:
        configure(socket, address, max_frame_bytes)
        socket.reconnect_ivl = RECONNECT_MS
        socket.reconnect_ivl_max = RECONNECT_MAX_MS
        socket.connect_timeout = CONNECT_MS
        socket.setsockopt(zmq.RECONNECT_STOP, _STOP_AFTER_FAILED_HANDSHAKE)
        if keys is not None and device in keys.agents:
            socket.curve_publickey = keys.public.encode()
            socket.curve_secretkey = keys.secret.encode()
            socket.curve_serverkey = keys.of_agent(device, failures)
        return Dealer(socket, monitor_of(socket, WATCHED), address)
    except zmq.ZMQError:
        socket.close(linger=0)
        raise
