"""What the benchmarks of serving run against: stub agents, and the same exchange in bare pyzmq."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Self

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

#: Takes the place of `mdp-agent run`.
STUB = (sys.executable, "-m", "benchmarks.harness.stub_agent")
#: argv: a CURVE secret key or "", how many ROUTERs, and the sizes of a reply's frames; a port is
#: printed for each. Several ROUTERs of one process take turns in a poller.
ECHO = """
import sys, zmq
secret, count, sizes = sys.argv[1].encode(), int(sys.argv[2]), sys.argv[3:]
context, poller = zmq.Context(), zmq.Poller()
reply = [bytes(int(size)) for size in sizes]
for _ in range(count):
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    if secret:
        router.curve_server, router.curve_secretkey = True, secret
    print(router.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    poller.register(router, zmq.POLLIN)
while count == 1:
    router.send_multipart([router.recv_multipart()[0], *reply])
while True:
    for router, _ in poller.poll():
        router.send_multipart([router.recv_multipart()[0], *reply])
"""


@contextmanager
def served(
    make_bundle: Callable[[Path], object],
    *options: object,
    each: Mapping[str, Sequence[object]] = MappingProxyType({}),
    program: Sequence[str] = (),
    keys: bool = False,
    per_process: int = 1,
) -> Iterator[AgentFleet]:
    """An agent for every device of the bundle that `make_bundle` writes to the folder given.

    `options` are all agents', `each` has more of some devices; `program` takes the place of
    `mdp-agent run`.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        make_bundle(folder / "bundle")
        plan = Bundle.open(folder / "bundle").manifest.plan
        names = [assignment.device for assignment in plan.assignments]
        with AgentFleet(folder, folder / "bundle", keys=keys) as fleet:
            groups = [names[i : i + per_process] for i in range(0, len(names), per_process)]
            for own, *beside in groups:
                more = (*each.get(own, ()), *(("--beside", *beside) if beside else ()))
                fleet.start(own, *options, *more, program=program, wait_for=None)
            for group in groups:
                fleet.agents[group[0]].wait_for("READY", count=len(group))
            fleet.write(**addresses(fleet))
            yield fleet


def colour_bundle(count: int, side: int) -> Callable[[Path], Path]:
    """Writes a bundle of `count` devices whose models take next to no time."""
    names = tuple(f"device-{number}" for number in range(count))
    return partial(write_bundle, devices=names, sizes=(side,) * count)


def stub_fleet(
    count: int, *options: object, side: int, **more: Any
) -> AbstractContextManager[AgentFleet]:
    """`count` stub agents that take crops of `side` pixels; the rest is as for `served`."""
    return served(colour_bundle(count, side), *options, program=STUB, **more)


def addresses(fleet: AgentFleet) -> dict[str, str]:
    """Where each device listens, those that share a process too."""
    return {e["device"]: e["address"] for a in fleet.agents.values() for e in a.events}


@contextmanager
def client_of(fleet: AgentFleet) -> Iterator[Client]:
    """A client whose calls every agent answers."""
    with Client.connect(fleet.folder / "fleet.toml", timeout_s=PATIENCE_S) as client:
        until_s = time.monotonic() + PATIENCE_S
        # An agent that was not READY when it was first asked is not waited for by the next call.
        while client.classify(noise_picture(32), deadline_ms=PATIENCE_S * 1e3).partial:
            assert time.monotonic() < until_s, "the agents do not answer"
        yield client


def _request_to(digest: str, k: int, side: int) -> list[bytes]:
    """The frames that ask sub-model `k` for a crop of `side` pixels."""
    infer = Infer(
        request_id=1, digest=digest, k=k, budget_ms=9876.543, image_size=side, encoding="raw"
    )
    return [bytes(frame) for frame in encode(infer, bytes(side * side * 3))]


def _reply_sizes() -> list[int]:
    """How many bytes each frame of an agent's reply has."""
    classes = len(LABELS)
    result = Result(request_id=1, num_classes=classes, queue_ms=0.123, compute_ms=0.456)
    return [len(frame) for frame in encode(result, bytes(8 * classes))]


@dataclass(frozen=True, slots=True)
class BarePeer:
    """Whom a bare client asks, and with what."""

    address: str
    request: list[bytes]
    public_key: str | None = None


@contextmanager
def bare_exchange(
    count: int, *, side: int, keys: bool = False, per_process: int = 1
) -> Iterator["BareClient"]:
    """A bare client of `count` ROUTERs that answer anything with as many bytes as an agent does."""
    public, secret = new_pair() if keys else (None, "")
    request, pair = _request_to("0" * 64, 0, side), new_pair()
    with ExitStack() as stack:
        peers: list[BarePeer] = []
        for first in range(0, count, per_process):
            share = min(per_process, count - first)
            command = [sys.executable, "-c", ECHO, secret, share, *_reply_sizes()]
            process = stack.enter_context(LineProcess("the bare ROUTERs", command))
            for _ in range(share):
                address = f"tcp://127.0.0.1:{int(process.line('a port'))}"
                peers.append(BarePeer(address, request, public))
        yield stack.enter_context(BareClient(peers, KeyPair(public=pair[0], secret=pair[1])))


def asked_bare(fleet: AgentFleet, *, side: int) -> "BareClient":
    """A bare client of the agents of `fleet`, which asks them what this project's client asks."""
    bundle = Bundle.open(fleet.bundle)
    peers = [
        BarePeer(address, _request_to(bundle.digest, bundle.assignment(device).k, side),
                 fleet.public_keys.get(device))
        for device, address in addresses(fleet).items()
    ]  # fmt: skip
    return BareClient(peers, load_pair(fleet.key, public_key_of) if fleet.key else None)


class BareClient:
    """A DEALER per peer, no more: what a careful user of pyzmq would write."""

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
        return self._exchanged()[0]

    def overhead_ms(self) -> float:
        """A round trip to agents, less the slowest one's computing."""
        took_ms, replies = self._exchanged()
        messages = [decode(reply).message for reply in replies]
        results = [message for message in messages if isinstance(message, Result)]
        assert len(results) == len(messages), messages
        return took_ms - max(result.compute_ms for result in results)

    def _exchanged(self) -> tuple[float, list[list[bytes]]]:
        started_s = time.perf_counter()
        for dealer, request in self._requests:
            dealer.send_multipart(request)
        replies: list[list[bytes]] = []
        while len(replies) < len(self._requests):
            for dealer, _ in self._poller.poll():
                replies.append(dealer.recv_multipart())
        return (time.perf_counter() - started_s) * 1e3, replies

    def many(self, count: int, depth: int) -> None:
        """`count` exchanges with all, with up to `depth` of them under way."""
        sent = 0
        owed = {dealer: 0 for dealer, _ in self._requests}
        while sent < count or any(owed.values()):
            # The next one goes out as soon as the slowest peer has answered enough.
            while sent < count and max(owed.values()) < depth:
                for dealer, request in self._requests:
                    dealer.send_multipart(request)
                    owed[dealer] += 1
                sent += 1
            for dealer, _ in self._poller.poll():
                dealer.recv_multipart()
                owed[dealer] -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for dealer, _request in self._requests:
            dealer.close()
        self._context.term()
