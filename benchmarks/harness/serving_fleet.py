"""What the benchmarks of serving run against: stub agents, and the same exchange in bare pyzmq."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Self

import zmq

from mdp.cli.bench import noise_picture
from mdp.client.sync import Client
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import new_fleet
from mdp.formats.keys import KeyPair, load_pair, new_keys
from mdp.protocol.messages import Infer, Result, decode, encode
from mdp.testing.agents import AgentProcess, agent_command
from mdp.testing.bundles import LABELS, write_bundle
from mdp.testing.processes import LineProcess
from mdp.transport import new_pair, public_key_of

#: Agents that are not there after so long are not coming.
CONNECT_S = 60.0
#: argv: a CURVE secret key or "", then the sizes of a reply's frames; one port a line of stdin's
#: count. Several ROUTERs of one process take turns in a poller.
ECHO = """
import sys, zmq
secret, count, sizes = sys.argv[1].encode(), int(sys.argv[2]), sys.argv[3:]
context, poller = zmq.Context(), zmq.Poller()
reply = [bytes(int(size)) for size in sizes]
routers = []
for _ in range(count):
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    if secret:
        router.curve_server, router.curve_secretkey = True, secret
    print(router.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    poller.register(router, zmq.POLLIN)
    routers.append(router)
if count == 1:
    while True:
        peer = router.recv_multipart()[0]
        router.send_multipart([peer, *reply])
while True:
    for router, _ in poller.poll():
        peer = router.recv_multipart()[0]
        router.send_multipart([peer, *reply])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFleet:
    """Running agents: their fleet file, where each listens and the process that serves it."""

    path: Path
    bundle: Bundle
    #: The clients' secret key file, if connections are encrypted, and each device's public key.
    key: Path | None
    public_keys: Mapping[str, str]
    addresses: dict[str, str]
    processes: dict[str, AgentProcess]
    #: How to start a device's process again.
    commands: dict[str, list[str]]

    def client(self) -> Client:
        """A client whose calls every agent answers."""
        client = Client.connect(self.path, timeout_s=CONNECT_S)
        until_s = time.monotonic() + CONNECT_S
        while any(status.state != "READY" for status in client.status(timeout_s=CONNECT_S)):
            assert time.monotonic() < until_s, "the agents are not READY"
            time.sleep(0.1)
        # Whoever was not READY when it was asked first is not waited for by the next call.
        while client.classify(noise_picture(32), deadline_ms=CONNECT_S * 1e3).partial:
            assert time.monotonic() < until_s, "the agents do not answer"
        return client

    def restart(self, device: str) -> None:
        """Start a device's process again, after its end, where it listened before."""
        where = ["--bind", self.addresses[device]]
        self.processes[device].close()
        process = AgentProcess(device, [*self.commands[device], *where]).wait_for("LISTENING")
        self.processes[device] = process
        assert process.address == self.addresses[device]


@contextmanager
def running(bundle: Bundle, folder: Path, commands: Mapping[tuple[str, ...], list[str]],
            public_keys: Mapping[str, str] = MappingProxyType({}),
            key: Path | None = None) -> Iterator[ServedFleet]:  # fmt: skip
    """A process per command, each of which says for every of its devices where it is LISTENING."""
    fleet = ServedFleet(
        path=folder / "fleet.toml", bundle=bundle, key=key, public_keys=public_keys,
        addresses={}, processes={}, commands={},
    )  # fmt: skip
    try:
        for devices, command in commands.items():
            process = AgentProcess(devices[0], command)
            fleet.processes.update(dict.fromkeys(devices, process))
            fleet.commands.update(dict.fromkeys(devices, command))
        for devices in commands:
            said = fleet.processes[devices[0]].wait_for("LISTENING", count=len(devices)).events
            fleet.addresses.update((event["device"], event["address"]) for event in said)
        entries = [f"{device}={address}" for device, address in fleet.addresses.items()]
        new_fleet(bundle, entries, fleet.path, public_key=public_keys.get, key=key)
        yield fleet
    finally:
        for process in {*fleet.processes.values()}:
            process.close()


@contextmanager
def stub_fleet(
    folder: Path,
    count: int,
    *options: object,
    side: int,
    keys: bool = False,
    per_process: int = 1,
) -> Iterator[ServedFleet]:
    """`count` stub agents that take crops of `side` pixels; `options` are the agents' own."""
    bundle = colour_bundle(folder, count, side)
    names = [a.device for a in bundle.manifest.plan.assignments]
    known: dict[str, str] = {}
    options = ("--bundle", bundle.path, *options)
    if keys:
        new_keys(folder, "client", new_pair)
        known = {name: new_keys(folder, name, new_pair).public for name in names}
        options += ("--keys", folder)
    module = [sys.executable, "-m", "benchmarks.harness.stub_agent", *map(str, options)]
    groups = [tuple(names[first : first + per_process]) for first in range(0, count, per_process)]
    commands: dict[tuple[str, ...], list[str]] = {
        group: [*module, "--device", *group] for group in groups
    }
    key = folder / "client.secret" if keys else None
    with running(bundle, folder, commands, known, key) as fleet:
        yield fleet


def colour_bundle(folder: Path, count: int, side: int) -> Bundle:
    """A bundle of `count` devices whose models take next to no time."""
    names = tuple(f"device-{number}" for number in range(count))
    return Bundle.open(write_bundle(folder / "bundle", devices=names, sizes=(side,) * count))


@contextmanager
def served(bundle: Bundle, folder: Path, *options: object) -> Iterator[ServedFleet]:
    """`mdp-agent run` for every assignment of `bundle`."""
    commands: dict[tuple[str, ...], list[str]] = {
        (a.device,): agent_command(bundle.path, a.device, *options)
        for a in bundle.manifest.plan.assignments
    }
    with running(bundle, folder, commands) as fleet:
        yield fleet


def request_to(digest: str, k: int, side: int) -> list[bytes]:
    """The frames that ask sub-model `k` for a crop of `side` pixels."""
    infer = Infer(
        request_id=1, digest=digest, k=k, budget_ms=9876.543, image_size=side, encoding="raw"
    )
    return [bytes(frame) for frame in encode(infer, bytes(side * side * 3))]


def reply_sizes() -> list[int]:
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
    request = request_to("0" * 64, 0, side)
    with ExitStack() as stack:
        peers: list[BarePeer] = []
        shares = [min(per_process, count - first) for first in range(0, count, per_process)]
        for share in shares:
            command = [sys.executable, "-c", ECHO, secret, str(share), *map(str, reply_sizes())]
            process = stack.enter_context(LineProcess("the bare ROUTERs", command))
            for _ in range(share):
                address = f"tcp://127.0.0.1:{int(process.line('a port'))}"
                peers.append(BarePeer(address, request, public))
        yield stack.enter_context(BareClient(peers, _some_pair() if keys else None))


def _some_pair() -> KeyPair:
    public, secret = new_pair()
    return KeyPair(public=public, secret=secret)


def asked_bare(fleet: ServedFleet, *, side: int) -> "BareClient":
    """A bare client of the agents of `fleet`, which asks them what this project's client asks."""
    digest = fleet.bundle.digest
    peers = [
        BarePeer(address, request_to(digest, fleet.bundle.assignment(device).k, side),
                 fleet.public_keys.get(device))
        for device, address in fleet.addresses.items()
    ]  # fmt: skip
    return BareClient(peers, load_pair(fleet.key, public_key_of) if fleet.key else None)


class BareClient:
    """A DEALER per peer, no more: what a careful user of pyzmq would write."""

    def __init__(self, peers: Sequence[BarePeer], pair: KeyPair | None) -> None:
        self._context = zmq.Context()
        self.poller = zmq.Poller()
        self.requests: list[tuple[zmq.Socket[bytes], list[bytes]]] = []
        for peer in peers:
            dealer = self._context.socket(zmq.DEALER)
            dealer.linger = 0
            if pair is not None and peer.public_key is not None:
                dealer.curve_publickey, dealer.curve_secretkey = (
                    pair.public.encode(), pair.secret.encode()
                )  # fmt: skip
                dealer.curve_serverkey = peer.public_key.encode()
            dealer.connect(peer.address)
            self.requests.append((dealer, peer.request))
            self.poller.register(dealer, zmq.POLLIN)

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
        for dealer, request in self.requests:
            dealer.send_multipart(request)
        replies: list[list[bytes]] = []
        while len(replies) < len(self.requests):
            for dealer, _ in self.poller.poll():
                replies.append(dealer.recv_multipart())
        return (time.perf_counter() - started_s) * 1e3, replies

    def many(self, count: int, depth: int) -> None:
        """`count` exchanges with all, with up to `depth` of them under way."""
        sent = 0
        owed = {dealer: 0 for dealer, _ in self.requests}
        while sent < count or any(owed.values()):
            # The next one goes out as soon as the slowest peer has answered enough.
            while sent < count and max(owed.values()) < depth:
                for dealer, request in self.requests:
                    dealer.send_multipart(request)
                    owed[dealer] += 1
                sent += 1
            for dealer, _ in self.poller.poll():
                dealer.recv_multipart()
                owed[dealer] -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for dealer, _request in self.requests:
            dealer.close()
        self._context.term()
