"""Keys, and connections without them: real agents on loopback."""

import datetime
import json
import re
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from devices.cli.main import main as agent_main
from devices.probe.link import measure_link, peer_keys
from mdp.client.sync import Client
from mdp.errors import ConfigError, InputError
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import new_fleet
from mdp.formats.keys import fingerprint
from mdp.protocol.messages import Infer, StatusRequest, encode, request_frame_bytes
from mdp.testing.agents import AgentProcess, agent_command
from mdp.testing.bundles import SIZES, colour_picture, write_bundle
from mdp.testing.processes import PATIENCE_S, until
from mdp.transport import AgentKeys, ClientKeys, Dealers, Router, new_pair, sockets
from mdp.transport.admission import connection_rate as arrivals
from mdp.transport.admission import pending as door
from mdp.transport.admission.access import TOO_MANY, UNKNOWN_KEY
from mdp.transport.greeting import PROBE
from mdp.transport.outage import AGENT_IS_PLAIN, ANOTHER_KEY, CLIENT_IS_PLAIN, NO_MORE, NOT_ACCEPTED
from tests.integration.commands.test_command_line import assert_refusal, here
from tests.support.command_lines import run_here
from tests.support.fakes import StrangePeer, other_program
from tests.support.faults.strangers import Keys, Relay, crowd, host_and_port, hung_up
from tests.support.fleet import PLENTY_MS, Fleet
from tests.support.serving import ask_status

pytestmark = pytest.mark.usefixtures("no_leaks")

RED = colour_picture("red")
SIZE = SIZES[0]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, keys: Keys) -> Iterator[Fleet]:
    """Alpha lets in the office's client and asks for keys, beta speaks plain text."""
    folder = tmp_path_factory.mktemp("strangers")
    with Fleet(folder, write_bundle(folder / "bundle")) as fleet:
        keys.pair("alpha")
        clients = keys.allow(folder / "clients", "office")
        fleet.start("alpha", "--key", keys.secret("alpha"), "--clients", clients)
        fleet.start("beta")
        yield fleet


@pytest.fixture
def alpha(fleet: Fleet) -> AgentProcess:
    return fleet.agents["alpha"]


def write(
    fleet: Fleet,
    folder: Path,
    agent_keys: dict[str, str],
    key: Path | None = None,
    **addresses: str,
) -> Path:
    """A fleet file in which devices have these public keys."""
    entries = {name: agent.address for name, agent in fleet.agents.items()} | addresses
    path = folder / "fleet.toml"
    devices = [f"{name}={address}" for name, address in entries.items()]
    new_fleet(Bundle.open(fleet.bundle), devices, path, public_key=agent_keys.get, key=key)
    return path


@pytest.fixture
def own(fleet: Fleet, tmp_path: Path) -> Iterator[Fleet]:
    """A fleet of the test's own, with nobody in it yet."""
    with Fleet(tmp_path, fleet.bundle) as own:
        yield own


def guard_options(own: Fleet, keys: Keys, *clients: str, key: str = "alpha") -> list[object]:
    """Options of an agent that has the keys `key` and lets in `clients`."""
    allowed = keys.allow(own.folder / "clients", *clients)
    keys.pair(key)
    return ["--key", keys.secret(key), "--clients", allowed]


@contextmanager
def office(fleet: Fleet, keys: Keys, folder: Path, **addresses: str) -> Iterator[Client]:
    """The client that alpha lets in."""
    known = {"alpha": keys.pair("alpha").public}
    path = write(fleet, folder, known, keys.secret("office"), **addresses)
    with Client.connect(path, timeout_s=PATIENCE_S) as client:
        yield client


def peer_of(alpha: AgentProcess, keys: Keys, name: str = "office") -> StrangePeer:
    """A client of alpha that sends whatever it is told, with the keys of `name`."""
    own = keys.pair(name)
    return StrangePeer(alpha.address, (own.public, own.secret, keys.pair("alpha").public))


def test_the_right_keys_give_answers(fleet: Fleet, keys: Keys, tmp_path: Path) -> None:
    with office(fleet, keys, tmp_path) as client:
        answer = client.classify(RED, deadline_ms=PLENTY_MS)
        assert (answer.label, answer.used) == ("red", ("alpha", "beta"))
        statuses = {status.device: status for status in client.status()}
    assert [statuses[name].encrypted for name in ("alpha", "beta")] == [True, False]
    assert statuses["alpha"].state == statuses["beta"].state == "READY"
    # A key may be given beside the fleet file too; one that is not there is refused at once.
    path = write(fleet, tmp_path, {"alpha": keys.pair("alpha").public})
    with Client.connect(path, key=keys.secret("office"), timeout_s=PATIENCE_S) as client:
        assert "alpha" in client.classify(RED, deadline_ms=PLENTY_MS).used
    with pytest.raises(ConfigError, match=r"gone\.secret: cannot be read: No such file"):
        Client(path, key=tmp_path / "gone.secret")


def test_nothing_can_be_read_on_the_way(fleet: Fleet, keys: Keys, tmp_path: Path) -> None:
    digest = Bundle.open(fleet.bundle).digest.encode()
    for device, expected in (("alpha", False), ("beta", True)):
        with (
            Relay(fleet.agents[device].address) as relay,
            office(fleet, keys, tmp_path, **{device: relay.front}) as client,
        ):
            assert device in client.classify(RED, deadline_ms=PLENTY_MS).used
            assert (digest in relay.sent) is expected
            assert len(relay.sent) > SIZE * SIZE * 3 or device == "beta"


#: Agents' keys by device, the client's own, and the device that is refused with the reason.
REFUSALS = {
    "another client": ({"alpha": "alpha"}, "stranger", "alpha", NOT_ACCEPTED),
    "another agent": ({"alpha": "impostor"}, "office", "alpha", ANOTHER_KEY),
    "plain client": ({}, None, "alpha", CLIENT_IS_PLAIN),
    "plain agent": ({"alpha": "alpha", "beta": "impostor"}, "office", "beta", AGENT_IS_PLAIN),
}


def fleet_with_refusal(fleet: Fleet, keys: Keys, folder: Path, how: str) -> tuple[Path, str, str]:
    """A fleet file, the device that is refused, and why."""
    agents, own, device, reason = REFUSALS[how]
    if own is not None:
        keys.pair(own)
    known = {name: keys.pair(whose).public for name, whose in agents.items()}
    return write(fleet, folder, known, None if own is None else keys.secret(own)), device, reason


@pytest.mark.parametrize("how", REFUSALS)
def test_a_refusal_names_its_reason(fleet: Fleet, keys: Keys, tmp_path: Path, how: str) -> None:
    path, device, reason = fleet_with_refusal(fleet, keys, tmp_path, how)
    with Client.connect(path, timeout_s=PATIENCE_S) as client:
        answer = client.classify(RED, deadline_ms=PLENTY_MS)
        assert answer.missing[device] == f"refused: {reason}"
        assert device not in answer.used
        assert len(answer.used) == 1
        status = {status.device: status for status in client.status()}[device]
        assert (status.state, status.reason, status.usable) == ("REFUSED", reason, False)


def test_the_commands_name_the_reason(fleet: Fleet, keys: Keys, tmp_path: Path) -> None:
    path, device, reason = fleet_with_refusal(fleet, keys, tmp_path, "another client")

    def seen() -> dict[str, str]:
        code, out, err = here("status", "--fleet", path, "--json")
        assert (code, err) == (3, "")
        return {said["device"]: said["reason"] for said in json.loads(out)["devices"]}

    # On a busy machine, a second may not suffice for two handshakes.
    until(lambda: seen()[device] == reason, "the status names the reason")
    code, out, err = here("doctor", "--fleet", path)
    assert (code, err) == (3, "")
    assert f"PROBLEM {device}: tcp://" in out


def test_a_replaced_key_needs_both_in_the_fleet(own: Fleet, keys: Keys, tmp_path: Path) -> None:
    old, new = (guard_options(own, keys, "office", key=name) for name in ("alpha", "alpha-2"))
    own.start("alpha", *old)
    first, second = (keys.pair(name).public for name in ("alpha", "alpha-2"))
    (tmp_path / "both").mkdir()
    both = write(own, tmp_path / "both", {"alpha": first}, keys.secret("office"))
    both.write_text(both.read_text().replace(f'"{first}"', f'["{first}", "{second}"]'))

    def state(client: Client, expected: str) -> bool:
        return client.status(timeout_s=0.05)[0].state == expected

    with (
        office(own, keys, tmp_path) as strict,
        Client.connect(both, timeout_s=PATIENCE_S) as lenient,
    ):
        assert lenient.classify(RED, deadline_ms=PLENTY_MS).used == ("alpha",)
        own.agents["alpha"].kill()
        own.restart("alpha", *new)
        until(lambda: state(strict, "REFUSED"), "its key is another")
        assert strict.status()[0].reason == ANOTHER_KEY
        until(lambda: state(lenient, "READY"), "its new key is known")
        assert lenient.classify(RED, deadline_ms=PLENTY_MS).used == ("alpha",)
        own.agents["alpha"].kill()
        until(lambda: state(strict, "UNREACHABLE"), "the reason is dropped with the device")
        own.restart("alpha", *old)
        for client in (strict, lenient):
            until(partial(state, client, "READY"), "its old key is known")
            assert client.classify(RED, deadline_ms=PLENTY_MS).used == ("alpha",)


@pytest.mark.parametrize("words", [b"", PROBE, PROBE + bytes(30)], ids=["0", "11", "41"])
def test_silent_connections_do_not_keep_clients_out(
    fleet: Fleet, alpha: AgentProcess, keys: Keys, tmp_path: Path, words: bytes
) -> None:
    with peer_of(alpha, keys) as before, crowd(alpha.address, 200, words) as visitors:
        assert ask_status(before).state == "READY"
        with office(fleet, keys, tmp_path) as client:
            for _ in range(5):
                assert client.classify(RED, deadline_ms=PLENTY_MS).used == ("alpha", "beta")
        assert ask_status(before).state == "READY"
        assert not any(map(hung_up, visitors[-50:]))


def plain_handshake() -> bytes:
    """All that a client without keys says before its first message."""
    greeting = PROBE + b"\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    return greeting + b"\x04" + bytes([len(ready)]) + ready


def thin_out(router: Router, visitors: list[socket.socket], left: int) -> None:
    """Poll until only the newest `left` of a crowd are there."""

    def polled() -> bool:
        list(router.poll(0.005))
        return sum(not hung_up(visitor) for visitor in visitors) == left

    until(polled, "the oldest have to go")
    assert not any(map(hung_up, visitors[-left:]))
    assert router.take_rejections()["handshakes crowded out"] == len(visitors) - left


def test_an_authenticated_connection_is_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "MAX_PENDING", 20)
    (agent, agent_secret), (client, client_secret) = new_pair(), new_pair()
    keys = AgentKeys(secret=agent_secret, allowed=frozenset([client]))
    with (
        Router("tcp://127.0.0.1:0", keys=keys) as router,
        StrangePeer(router.address, (client, client_secret, agent)) as peer,
    ):
        peer.send(encode(StatusRequest(request_id=1)))
        until(lambda: any(router.poll(0.005)), "the key is good")
        # Their handshakes could not be over: they are shorter than any with keys.
        with crowd(router.address, 50, plain_handshake()[:64] + bytes(400)) as visitors:
            until(
                lambda: any(router.poll(0.005)) or all(map(hung_up, visitors)),
                "nonsense is cut off",
            )
        # From where the one with the key is: it is the oldest there.
        half = plain_handshake()[:60]
        with crowd(router.address, 50, half, host="127.0.0.1") as visitors:
            thin_out(router, visitors, left=20)
        peer.send(encode(StatusRequest(request_id=2)))
        until(lambda: any(router.poll(0.005)), "it is still heard")


def come(router: Router, host: str) -> list[socket.socket]:
    """Connections from `host`, begun and polled for until one does not come about."""
    visitors: list[socket.socket] = []
    while router.take_rejections().get("host connecting too often", 0) == 0:
        visitors.append(visit(router, host))
        assert len(visitors) <= arrivals.AT_ONCE
        until(lambda: is_made(visitors[-1]), "it is connected")
        list(router.poll(0.01))
    return visitors


def visit(router: Router, host: str) -> socket.socket:
    """A connection that is begun from `host`, which may be kept out."""
    visitor = socket.socket()
    visitor.bind((host, 0))
    visitor.setblocking(False)
    visitor.connect_ex(host_and_port(router.address))
    return visitor


def is_made(visitor: socket.socket) -> bool:
    """Tell whether a connection has come about."""
    try:
        visitor.getpeername()
    except OSError:
        return False
    return True


def test_a_host_that_connects_too_often_has_to_wait_and_no_other_host() -> None:
    with ExitStack() as stack:
        router = stack.enter_context(Router("tcp://127.0.0.1:0"))
        peer = stack.enter_context(StrangePeer(router.address, None))
        peer.send(encode(StatusRequest(request_id=1)))
        until(lambda: any(router.poll(0.005)), "somebody is there already")
        greedy, other = "127.0.0.99", "127.0.0.98"
        visitors = come(router, greedy)
        assert len(visitors) == arrivals.AT_ONCE
        visitors.append(visit(router, greedy))
        for connection in (*visitors, neighbour := visit(router, other)):
            stack.callback(connection.close)
        # What comes after it is there before it.
        until(lambda: is_made(neighbour), "others are let in")
        assert not is_made(visitors[-1])
        peer.send(encode(StatusRequest(request_id=2)))
        until(lambda: any(router.poll(0.005)), "whoever is connected is heard")

        def let_in() -> bool:
            # Without a limit: this ends when a host's time has come, and when somebody has.
            list(router.poll(None))
            return is_made(visitors[-1])

        until(let_in, "it does not have to wait for good")


def test_silent_connections_are_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HANDSHAKE_MS", 300)
    with Router("tcp://127.0.0.1:0") as router, crowd(router.address, 20) as visitors:
        until(lambda: all(map(hung_up, visitors)), "the silent are cut off")


def test_descriptors_of_closed_connections_are_freed(alpha: AgentProcess, keys: Keys) -> None:
    process = psutil.Process(alpha.process.pid)
    with peer_of(alpha, keys) as peer:
        ask_status(peer)
        before = process.num_fds()
        for _ in range(3):
            with crowd(alpha.address, 200):
                ask_status(peer)
        until(lambda: process.num_fds() <= before, "descriptors are given back")
        ask_status(peer)


def test_a_large_frame_ends_its_connection(fleet: Fleet, alpha: AgentProcess, keys: Keys) -> None:
    largest = request_frame_bytes(SIZE)
    infer = Infer(
        request_id=5,
        digest=Bundle.open(fleet.bundle).digest,
        k=0,
        budget_ms=PLENTY_MS,
        image_size=256,
        encoding="raw",
    )
    with peer_of(alpha, keys) as other, peer_of(alpha, keys) as peer:
        ask_status(other)
        # As large as is taken: refused in words, in a connection that goes on.
        peer.send(encode(infer, bytes(largest)))
        assert peer.receive().message.text.startswith("expected a crop of 16 pixels")  # type: ignore[union-attr]
        peer.send([encode(infer, b"")[0], bytes(largest + 64)])
        ask_status(other)
        with pytest.raises(AssertionError, match="no reply"):
            peer.receive(timeout_s=0.3)


def null_greeting_and_message() -> bytes:
    """Bytes that a client without keys would send: greeting, READY, and a StatusRequest."""
    (head,) = encode(StatusRequest(request_id=1))
    return plain_handshake() + b"\x00" + bytes([len(head)]) + bytes(head)


OLD = [b"\x01\x00", b"\xff" + (1).to_bytes(8, "big") + b"\x7f\x01"]


@pytest.mark.parametrize("start", [null_greeting_and_message(), *OLD], ids=["null", "1.0", "2.0"])
def test_no_weaker_protocol_is_accepted(alpha: AgentProcess, keys: Keys, start: bytes) -> None:
    (head,) = encode(StatusRequest(request_id=1))
    with crowd(alpha.address, 1, start + b"\x00" + bytes([len(head)]) + bytes(head)) as (peer,):
        peer.settimeout(PATIENCE_S)
        heard = b""
        try:
            while data := peer.recv(4096):
                heard += data
        except OSError:
            pass
        assert b"request_id" not in heard
    with peer_of(alpha, keys) as known:
        ask_status(known)


@pytest.mark.parametrize("greeting", [b"\x01\x00" * 20, b"SSH-2.0-x\r\n", OLD[1]])
def test_a_client_with_keys_accepts_no_weaker_protocol(keys: Keys, greeting: bytes) -> None:
    own = keys.pair("office")
    known = ClientKeys(
        public=own.public, secret=own.secret, agents={"alpha": keys.pair("alpha").public}
    )
    with other_program(0, greeting) as port:
        dealers = Dealers({"alpha": f"tcp://127.0.0.1:{port}"}, keys=known)
        try:
            assert dealers.poll(0.5) == []
            assert not dealers.connected
        finally:
            dealers.close()


def test_a_replay_is_ignored(fleet: Fleet, alpha: AgentProcess, keys: Keys, tmp_path: Path) -> None:
    with Relay(alpha.address) as relay, office(fleet, keys, tmp_path, alpha=relay.front) as client:
        assert "alpha" in client.classify(RED, deadline_ms=PLENTY_MS).used
        recorded = bytes(relay.sent)
    with peer_of(alpha, keys) as peer:
        before = ask_status(peer).counts
        for part in (recorded, recorded[:64] + recorded[300:], recorded[-500:]):
            with crowd(alpha.address, 1, part) as (replayed,):
                until(partial(hung_up, replayed), "it is not listened to")
        assert ask_status(peer).counts == before


def test_a_changed_byte(fleet: Fleet, alpha: AgentProcess, keys: Keys, tmp_path: Path) -> None:
    with Relay(alpha.address) as relay, office(fleet, keys, tmp_path, alpha=relay.front) as client:
        before = client.classify(RED, deadline_ms=PLENTY_MS)
        assert before.used == ("alpha", "beta")
        relay.flip = len(relay.sent) + 400
        changed = client.classify(RED, deadline_ms=PLENTY_MS)
        assert changed.missing["alpha"] == "disconnected"
        assert (changed.label, changed.used) == ("red", ("beta",))
        until(
            lambda: "alpha" in client.classify(RED, deadline_ms=PLENTY_MS).used,
            "it is dialled again",
        )
        assert relay.connections == 2


def read_audit(path: Path) -> list[dict[str, Any]]:
    """The whole lines of an audit log."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if "\n" in line]


def reasons(path: Path) -> list[tuple[str, str, str]]:
    """Event, key and reason of each line of an audit log; none before its first line."""
    lines = read_audit(path) if path.exists() else []
    return [(line["event"], line["key"], line.get("reason", "")) for line in lines]


def test_removal_works_beside_a_wrong_key_file(fleet: Fleet, keys: Keys, tmp_path: Path) -> None:
    audit = tmp_path / "audit"
    keys.pair("newcomer")
    with Fleet(tmp_path, fleet.bundle) as own:
        clients = keys.allow(tmp_path / "clients", "office", "phone")
        agent = own.start(
            "alpha", "--key", keys.secret("alpha"), "--clients", clients, "--audit", audit
        )
        with peer_of(agent, keys) as office, peer_of(agent, keys, "phone") as phone:
            assert ask_status(office).reason == ask_status(phone).reason == ""
            keys.allow(clients, "phone", "newcomer")
            (clients / "broken.public").write_text("?")
            agent.signal(signal.SIGHUP)
            until(lambda: "clients: " in ask_status(phone).reason, "the status names what is wrong")
            assert ask_status(phone).reason.startswith(f"clients: {clients}/broken.public: ")
            # Its connection was ended.
            revoked = fingerprint(keys.pair("office").public)

            def ended() -> bool:
                lines = [line for line in read_audit(audit) if line["event"] == "revoke"]
                return [line["key"] for line in lines] == [revoked]

            until(ended, "the office's connection is ended")
            # Where something is wrong, nobody new is let in.
            with peer_of(agent, keys, "newcomer") as newcomer:
                newcomer.send(encode(StatusRequest(request_id=1)))
                unknown = fingerprint(keys.pair("newcomer").public)
                until(
                    lambda: (
                        (unknown, "refuse") in [(a["key"], a["event"]) for a in read_audit(audit)]
                    ),
                    "a newcomer is refused",
                )
                assert ask_status(phone).state == "READY"
                # Once nothing is wrong any more, its next connection is accepted.
                (clients / "broken.public").unlink()
                agent.signal(signal.SIGHUP)
                agent.wait_for("2 clients allowed")
            with peer_of(agent, keys, "newcomer") as newcomer:
                assert ask_status(newcomer).state == "READY"
        connected = [line for line in read_audit(audit) if line["event"] == "connect"]
        assert {line["client"] for line in connected} == {"office", "phone", "newcomer"}
        assert all(line["address"].startswith("127.0.0.1:") for line in connected)


def test_a_client_is_disconnected_when_its_key_expires(own: Fleet, keys: Keys) -> None:
    options = guard_options(own, keys, "office", "phone")
    soon = datetime.datetime.now(tz=datetime.UTC) + datetime.timedelta(seconds=2)
    (own.folder / "clients" / "phone.limits").write_text(f"expires = {soon.isoformat()}")
    audit = own.folder / "audit"
    agent = own.start("alpha", *options, "--audit", audit)
    with peer_of(agent, keys) as office, peer_of(agent, keys, "phone") as phone:
        phone.send(encode(StatusRequest(request_id=1)))
        expired = fingerprint(keys.pair("phone").public)
        # Disconnected, it tries to connect again.
        refused = ("refuse", expired, UNKNOWN_KEY)
        until(lambda: refused in reasons(audit), "the phone is refused")
        assert ask_status(office).state == "READY"


def test_one_key_cannot_take_all_descriptors(fleet: Fleet, keys: Keys, tmp_path: Path) -> None:
    clients = keys.allow(tmp_path / "clients", "greedy", "office")
    audit, greedy = tmp_path / "audit", fingerprint(keys.pair("greedy").public)
    options = ["--key", keys.secret("alpha"), "--clients", clients, "--audit", audit]
    # Half of them are the process's own.
    command = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh"]
    command += agent_command(fleet.bundle, "alpha", *options)
    pair, server, context = keys.pair("greedy"), keys.pair("alpha").public, zmq.Context()
    with AgentProcess("alpha", command, tmp_path / "alpha.log").wait_for("READY") as agent:
        host, port = host_and_port(agent.address)
        dealers = [context.socket(zmq.DEALER) for _ in range(60)]
        try:
            for number, dealer in enumerate(dealers):
                dealer.curve_publickey, dealer.curve_secretkey = (
                    pair.public.encode(),
                    pair.secret.encode(),
                )
                dealer.curve_serverkey = server.encode()
                # From several addresses, as one may only connect so often.
                dealer.connect(f"tcp://127.0.7.{number // 15 + 1}:0;{host}:{port}")
            until(lambda: ("refuse", greedy, TOO_MANY) in reasons(audit), "some are refused")
            with peer_of(agent, keys) as office:
                assert ask_status(office).state == "READY"
        finally:
            context.destroy(linger=0)


def test_too_many_connections_are_a_reason(own: Fleet, keys: Keys, tmp_path: Path) -> None:
    options = guard_options(own, keys, "office")
    (own.folder / "clients" / "office.limits").write_text("connections = 1")
    agent = own.start("alpha", *options)
    with office(own, keys, tmp_path) as first, office(own, keys, tmp_path) as second:
        assert first.classify(RED, deadline_ms=PLENTY_MS).used == ("alpha",)
        (status,) = second.status()
        assert (status.state, status.reason) == ("REFUSED", NO_MORE)
        # The agent's first refusal is reported at once, others every ten seconds.
        agent.wait_for(re.compile(f"not answered: .*{TOO_MANY}.*"))
        first.close()
        until(lambda: second.status(timeout_s=0.05)[0].state == "READY", "the place is free again")


def test_an_unpolled_router_can_be_closed() -> None:
    router = Router("tcp://127.0.0.1:0")
    host, port = host_and_port(router.address)
    for _ in range(4):
        with crowd(f"tcp://{host}:{port}", 300):
            pass
    router.close()


def test_a_refused_client_does_not_reconnect_unless_polled() -> None:
    public, secret = new_pair()
    known = ClientKeys(public=public, secret=secret, agents={"alpha": new_pair()[0]})
    agent = AgentKeys(secret=new_pair()[1], allowed=frozenset())
    with Router("tcp://127.0.0.1:0", keys=agent) as router, Relay(router.address) as relay:
        dealers = Dealers({"alpha": relay.front}, keys=known)
        try:
            until(lambda: relay.connections > 0, "it dials")
            assert list(router.poll(0.5)) == []
            # ZeroMQ would have dialled five times, and filled a queue that nobody reads.
            assert relay.connections == 1
        finally:
            dealers.close()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--bind", "tcp://0.0.0.0:0"], "--bind tcp://0.0.0.0:0: other machines can reach it: exp"),
        (["--key", "alpha.secret"], "--key and --clients: expected both, or neither"),
        (["--clients", "office.public"], "--key and --clients: expected both, or neither"),
        (
            ["--key", "alpha.secret", "--clients", "office.public", "--insecure"],
            "--insecure: expected no --key with it, or --key alone",
        ),
        (
            ["--key", "alpha.public", "--clients", "office.public"],
            "alpha.public: expected a secret",
        ),
        (["--key", "alpha.secret", "--clients", "office.secret"], "office.secret: expected a pub"),
    ],
)
def test_refused_options(fleet: Fleet, keys: Keys, options: list[str], expected: str) -> None:
    keys.pair("office")
    paths = [
        keys.folder / option if option.endswith((".secret", ".public")) else option
        for option in options
    ]
    where = ["--bundle", fleet.bundle, "--device", "alpha"]
    done = run_here(agent_main, "mdp-agent", "run", *where, *paths)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("mdp-agent: ")
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1


def test_plain_text_off_loopback_needs_insecure(fleet: Fleet, tmp_path: Path) -> None:
    with Fleet(tmp_path, fleet.bundle) as own:
        agent = own.start("alpha", "--insecure", bind="tcp://0.0.0.0:0")
        assert f"WARNING: {agent.address} is plain text" in agent.stderr
        # This address leads to loopback, but does not look so.
        path = write(own, tmp_path, {})
        code, out, err = here("status", "--fleet", path, "--json")
        assert (code, out) == (2, "")
        assert "is not on this machine: expected the agent's public key" in err
        code, out, err = here("status", "--fleet", path, "--json", "--insecure", "--allow-partial")
        assert code == 0
        assert json.loads(out)["devices"][0]["reason"] == "plain text over the network"
        assert err == (
            f"mdp: WARNING: device 'alpha' at {agent.address} is plain text: anyone on the network "
            "path can read and forge messages\n"
        )
        code, out, err = here("doctor", "--fleet", path, "--insecure")
        assert code == 3
        assert f"PROBLEM alpha: {agent.address} is plain text: anyone" in out
        with (
            pytest.warns(
                UserWarning, match=r"device 'alpha' at tcp://0\.0\.0\.0:\d+ is plain text"
            ),
            Client.connect(path, insecure=True, timeout_s=PATIENCE_S) as client,
        ):
            assert client.classify(RED, deadline_ms=PLENTY_MS).used == ("alpha",)


def test_the_commands_from_keys_to_a_fleet(fleet: Fleet, tmp_path: Path) -> None:
    folder, out = tmp_path / "keys", tmp_path / "sub" / "fleet.toml"
    for name in ("alpha", "gamma-attic", "client"):
        code, said, err = here("keys", "new", "--out", folder, "--name", name, "--json")
        assert (code, err) == (0, "")
        assert len(json.loads(said)["public"]) == 40
    assert_refusal(
        here("keys", "new", "--out", folder, "--name", "alpha"), "secret: exists already"
    )
    new = ["fleet", "new", "--bundle", fleet.bundle, "--out", out, "--keys", folder]
    new += ["--device", "alpha=tcp://10.0.0.7:7500", "--device", "gamma/attic=tcp://h:1"]
    assert_refusal(here(*new), "--keys and --key: expected both")
    new += ["--key", folder / "client.secret"]
    code, said, err = here(*new, "--json")
    assert (code, err) == (0, "")
    content = out.read_text()
    assert 'key = "../keys/client.secret"' in content
    assert all(entry["key"] in content for entry in json.loads(said)["devices"])
    with Client(out) as client:
        assert client.fleet.key == "../keys/client.secret"
    (folder / "alpha.public").unlink()
    assert_refusal(here(*new), r"alpha\.public: cannot be read: No such file")


def test_a_link_to_an_agent_with_keys_is_measured(alpha: AgentProcess, keys: Keys) -> None:
    for name in ("office", "stranger", "beta"):
        keys.pair(name)
    known = peer_keys(keys.secret("office"), keys.folder / "alpha.public")
    assert measure_link(alpha.address, known).request_bytes == 256 * 256 * 3
    for wrong, expected in (
        (peer_keys(keys.secret("stranger"), keys.folder / "alpha.public"), NOT_ACCEPTED),
        (peer_keys(keys.secret("office"), keys.folder / "beta.public"), "the agent's key is anoth"),
        (None, "the agent has a key: expected --peer-key, its public key file, and --key"),
    ):
        with pytest.raises(InputError, match=rf"^--peer {alpha.address}: {expected}") as raised:
            measure_link(alpha.address, wrong)
        assert "fleet file" not in str(raised.value)
