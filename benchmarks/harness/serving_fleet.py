"""Fleets that benchmarks of serving call: agents, stub agents, and bare pyzmq exchanges."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Self

import zmq

from mdp.cli.bench import noise_picture
from mdp.client.sync import Client
from mdp.formats.bundle import Bundle
from mdp.formats.keys import KeyPair, load_pair
from mdp.protocol.messages import Infer, Result, decode, encode
from mdp.testing.agents import AgentFleet
from mdp.testing.bundles import LABELS, write_bundle
from mdp.testing.processes import PATIENCE_S, LineProcess
from mdp.transport import new_pair, public_key_of

#: Replaces `mdp-agent run`.
STUB = (sys.executable, "-m", "benchmarks.harness.stub_agent")
#: argv: a CURVE secret key or "", and the sizes of a reply's frames; prints the ROUTER's port.
ECHO = """
import sys, zmq
secret, sizes = sys.argv[1].encode(), sys.argv[2:]
router, reply = zmq.Context().socket(zmq.ROUTER), [bytes(int(size)) for size in sizes]
router.linger = 0
if secret:
    router.curve_server, router.curve_secretkey = True, secret
print(router.bind_to_random_port("tcp://127.0.0.1"), flush=True)
while True:
    router.send_multipart([router.recv_multipart()[0], *reply])
"""


@contextmanager
def serve_fleet(
    make_bundle: Callable[[Path], object],
    *options: object,
    program: Sequence[str] = (),
    keys: bool = False,
) -> Iterator[AgentFleet]:
    """An agent for every device of the bundle that `make_bundle` writes to the folder given.

    `options` are all agents'; `program` replaces `mdp-agent run`.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        make_bundle(folder / "bundle")
        plan = Bundle.open(folder / "bundle").manifest.plan
        with AgentFleet(folder, folder / "bundle", keys=keys) as fleet:
            for device in [assignment.device for assignment in plan.assignments]:
                fleet.start(device, *options, program=program, wait_for=None)
            for agent in fleet.agents.values():
                agent.wait_for("READY")
            fleet.write()
            yield fleet


def colour_bundle(count: int, side: int) -> Callable[[Path], Path]:
    """Writes a bundle of `count` devices whose models take next to no time."""
    names = tuple(f"device-{number}" for number in range(count))
    return partial(write_bundle, devices=names, sizes=(side,) * count)


def stub_fleet(
    count: int, *options: object, side: int, **more: Any
) -> AbstractContextManager[AgentFleet]:
    """`count` stub agents that take crops of `side` pixels; the rest is as for `serve_fleet`."""
    return serve_fleet(colour_bundle(count, side), *options, program=STUB, **more)


@contextmanager
def client_of(fleet: AgentFleet) -> Iterator[Client]:
    """A client whose calls every agent answers."""
    with Client.connect(fleet.folder / "fleet.toml", timeout_s=PATIENCE_S) as client:
        until_s = time.monotonic() + PATIENCE_S
        # An agent that was not READY when it was first asked is not waited for by the next call.
        while client.classify(noise_picture(32), deadline_ms=PATIENCE_S * 1e3).partial:
            assert time.monotonic() < until_s, "agents do not answer"
        yield client


def _request_to(digest: str, k: int, side: int) -> list[bytes]:
    """The frames that ask sub-model `k` for a crop of `side` pixels."""
    infer = Infer(
        request_id=1, digest=digest, k=k, budget_ms=9876.543, image_size=side, encoding="raw"
    )
    return [bytes(frame) for frame in encode(infer, bytes(side * side * 3))]


def _reply_sizes() -> list[int]:
    """Bytes of each frame of an agent's reply."""
    classes = len(LABELS)
    result = Result(request_id=1, num_classes=classes, queue_ms=0.123, compute_ms=0.456)
    return [len(frame) for frame in encode(result, bytes(8 * classes))]


class BarePeer(NamedTuple):
    """A bare client's peer, and the frames that it is sent."""

    address: str
    request: list[bytes]
    public_key: str | None


@contextmanager
def bare_exchange(count: int, *, side: int, keys: bool) -> Iterator["BareClient"]:
    """A bare client of `count` ROUTERs that reply to anything with as many bytes as an agent."""
    public, secret = new_pair() if keys else (None, "")
    request, pair = _request_to("0" * 64, 0, side), new_pair()
    command = [sys.executable, "-c", ECHO, secret, *_reply_sizes()]
    with ExitStack() as stack:
        peers: list[BarePeer] = []
        for _ in range(count):
            process = stack.enter_context(LineProcess("a bare ROUTER", command))
            address = f"tcp://127.0.0.1:{int(process.line('a port'))}"
            peers.append(BarePeer(address, request, public))
        yield stack.enter_context(BareClient(peers, KeyPair(public=pair[0], secret=pair[1])))


def open_bare_client(fleet: AgentFleet, *, side: int) -> "BareClient":
    """A bare client of the agents of `fleet`, with the requests of this project's client."""
    bundle = Bundle.open(fleet.bundle)
    peers = [
        BarePeer(agent.address, _request_to(bundle.digest, bundle.assignment(device).k, side),
                 fleet.public_keys.get(device))
        for device, agent in fleet.agents.items()
    ]  # fmt: skip
    return BareClient(peers, load_pair(fleet.key, public_key_of) if fleet.key else None)


class BareClient:
    """A DEALER per peer and a poller."""

    def __init__(self, peers: Sequence[BarePeer], pair: KeyPair | None) -> None:
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._requests: list[tuple[zmq.Socket[bytes], list[bytes]]] = []
        for peer in peers:
            dealer = self._context.socket(zmq.DEALER)
            dealer.linger = 0
            if pair is not None and peer.public_key is not None:
                dealer.curve_publickey = pair.public.encode()
                dealer.curve_secretkey = pair.secret.encode()
                dealer.curve_serverkey = peer.public_key.encode()
            dealer.connect(peer.address)
            self._requests.append((dealer, peer.request))
            self._poller.register(dealer, zmq.POLLIN)

    def round_trip_ms(self) -> float:
        """Send to all, wait for all."""
        return self._exchange()[0]

    def overhead_ms(self) -> float:
        """A round trip to agents, less the slowest one's computing."""
        took_ms, replies = self._exchange()
        messages = [decode(reply).message for reply in replies]
        results = [message for message in messages if isinstance(message, Result)]
        assert len(results) == len(messages), messages
        return took_ms - max(result.compute_ms for result in results)

    def _exchange(self) -> tuple[float, list[list[bytes]]]:
        started_s = time.perf_counter()
        for dealer, request in self._requests:
            dealer.send_multipart(request)
        replies: list[list[bytes]] = []
        while len(replies) < len(self._requests):
            for dealer, _ in self._poller.poll():
                replies.append(dealer.recv_multipart())
        return (time.perf_counter() - started_s) * 1e3, replies

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for dealer, _request in self._requests:
            dealer.close()
        self._context.term()
