"""Frames over ZeroMQ: the client's DEALERs and the agent's ROUTER. Nothing else imports zmq.

A client has one DEALER per agent, so that one slow peer never blocks another. With keys, a
connection is encrypted and both sides are authenticated (CurveZMQ, rfc.zeromq.org/spec/26).
"""

from mdp.transport.admission.access import AgentKeys, Audit
from mdp.transport.admission.connection_rate import network_of
from mdp.transport.dealers import CLOSED, FORKED, Dealers
from mdp.transport.events import ClientKeys, Connected, Disconnected, Received, TransportEvent
from mdp.transport.router import Peer, Router
from mdp.transport.sockets import new_pair, public_key_of, this_process

__all__ = [
    "CLOSED",
    "FORKED",
    "AgentKeys",
    "Audit",
    "ClientKeys",
    "Connected",
    "Dealers",
    "Disconnected",
    "Peer",
    "Received",
    "Router",
    "TransportEvent",
    "network_of",
    "new_pair",
    "public_key_of",
    "this_process",
]
