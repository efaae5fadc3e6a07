"""Announcements over multicast DNS, on loopback only: heard, bounded, and made a proposal of."""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from mdp.cli.main import main
from mdp.client.sync import Client
from mdp.discovery.announcements import texts_of
from mdp.discovery.mdns import MAX_FOUND, SERVICE, Announcer, listen
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import read_fleet
from mdp.formats.keys import PUBLIC, SECRET, fingerprint, load_public, new_keys
from mdp.testing.agents import AgentProcess
from mdp.testing.bundles import colour_picture, write_bundle
from mdp.testing.processes import PATIENCE_S, until
from mdp.testing.wires import NEAR, Namespace
from mdp.transport import new_pair
from tests.support.command_lines import run_here
from tests.support.fleet import BIN, PLENTY_MS, Fleet

pytest.importorskip("zeroconf", reason="needs the discover extra")
pytestmark = pytest.mark.usefixtures("no_leaks")

LOOPBACK = "127.0.0.1"
#: At the other end of a cable.
OTHER = "198.18.0.3"
#: What was announced a moment ago is not repeated for a second (RFC 6762, section 6).
LISTEN_S = 1.5


@pytest.fixture(autouse=True)
def _alone_on_loopback() -> Iterator[None]:
    """Wait for tests of another checkout on this machine: what one announces the other hears."""
    path = Path(tempfile.gettempdir()) / f"mdp-multicast-{os.getuid()}.lock"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return Bundle.open(write_bundle(tmp_path / "bundle"))


@pytest.fixture
def announced() -> Iterator[ExitStack]:
    """Announcers that are to be closed at the end."""
    with ExitStack() as stack:
        yield stack


def discover(bundle: Bundle, *options: object) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "mdp"), "fleet", "discover", "--bundle", str(bundle.path)]
    where = ["--interface", LOOPBACK, "--seconds", str(LISTEN_S)]
    return subprocess.run(
        [*command, *where, *map(str, options)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def run_discover(bundle: Bundle, count: int, *options: object) -> subprocess.CompletedProcess[str]:
    """The first time that so many are heard: on a busy machine, an answer may come too late."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        done = discover(bundle, *options)
        if done.stdout.count("tcp://") == count:
            return done
        assert time.monotonic() < until_s, done.stdout + done.stderr
        if "--out" in options:
            Path(str(options[-1])).unlink(missing_ok=True)


def announce(
    stack: ExitStack, bundle: Bundle, device: str, k: int, port: int, key: str | None = None
) -> None:
    texts = texts_of(device=device, digest=bundle.digest, k=k, public_key=key)
    stack.enter_context(Announcer(f"tcp://{LOOPBACK}:{port}", texts))


def test_a_proposal_has_the_users_keys(
    tmp_path: Path, bundle: Bundle, announced: ExitStack
) -> None:
    keys, elsewhere = tmp_path / "keys", tmp_path / "elsewhere"
    for name in ("alpha", "beta", "client"):
        new_keys(keys, name, new_pair)
    changed = new_keys(elsewhere, "beta", new_pair).public
    unknown = new_keys(elsewhere, "gamma", new_pair).public
    alpha, beta = (load_public(keys / f"{name}{PUBLIC}") for name in ("alpha", "beta"))
    announce(announced, bundle, "alpha", 0, 7501, alpha)
    announce(announced, bundle, "beta", 1, 7502, changed)
    announce(announced, bundle, "gamma", 2, 7503, unknown)
    out = tmp_path / "fleet.toml"
    client = keys / f"client{SECRET}"
    done = run_discover(bundle, 3, "--keys", keys, "--key", client, "--out", out)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"agents of bundle colours {bundle.digest[:16]}:"
    assert lines[1] == "  alpha = tcp://127.0.0.1:7501, sub-model 0, its key is in --keys"
    assert sorted(lines[2:4]) == [
        f"  left out: beta at tcp://127.0.0.1:7502: announces key {fingerprint(changed)}, "
        f"beta.public has {fingerprint(beta)}: another device, or its key was changed",
        f"  left out: gamma at tcp://127.0.0.1:7503: announces key {fingerprint(unknown)}, which "
        "no file in --keys has",
    ]
    assert lines[4:] == [
        "  not in the proposal: beta, gamma",
        f"{out}: proposed, 1 device; check the addresses",
    ]
    fleet, _ = read_fleet(out)
    assert [(e.device, e.address, e.key) for e in fleet.devices] == [
        ("alpha", "tcp://127.0.0.1:7501", alpha)
    ]
    assert fleet.key == "keys/client.secret"
    text = out.read_text()
    assert "# Left out: beta at tcp://127.0.0.1:7502" in text
    assert changed not in text
    assert unknown not in text
    again = run_discover(bundle, 0, "--keys", keys, "--key", client, "--out", out)
    assert (again.returncode, out.read_text()) == (2, text)
    assert again.stderr.startswith(f"mdp: {out}: exists already: expected another name")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--keys", "."], "--keys and --key: expected both, or neither for plain text on loopback"),
        (["--interface", "nonsense"], "--interface nonsense: expected an IPv4 address"),
    ],
)
def test_bad_input(bundle: Bundle, options: list[str], expected: str) -> None:
    done = run_here(main, "mdp", "fleet", "discover", "--bundle", bundle.path, *options)
    assert done.returncode == 2
    assert done.stderr.startswith(f"mdp: {expected}")
    assert done.stderr.count("\n") == 1


def test_an_interface_that_is_not_this_machine_s(bundle: Bundle) -> None:
    done = discover(bundle, "--interface", "10.255.255.1")
    assert done.returncode == 2
    expected = "mdp: --interface 10.255.255.1: multicast DNS does not work: "
    assert done.stderr.startswith(expected), done.stderr
    assert done.stderr.count("\n") == 1


def test_an_agent_announces_its_bundle_and_withdraws_at_its_end(tmp_path: Path) -> None:
    first, second = (
        write_bundle(tmp_path / name, bag_scale=scale) for name, scale in (("1", 4.0), ("2", 5.0))
    )
    link = tmp_path / "bundle"
    link.symlink_to(first)
    with Fleet(tmp_path, link) as fleet:
        agent = fleet.start("alpha", "--announce", bundle=link)
        out = tmp_path / "fleet.toml"
        done = run_discover(Bundle.open(first), 1, "--out", out)
        assert done.returncode == 0, done.stdout + done.stderr
        with Client.connect(out, timeout_s=PATIENCE_S) as client:
            answer = client.classify(colour_picture("red"), deadline_ms=PLENTY_MS)
        assert (answer.label, answer.used) == ("red", ("alpha",))
        link.unlink()
        link.symlink_to(second)
        agent.signal(signal.SIGHUP)
        mine = Bundle.open(second).digest[:16]

        def announced() -> list[bytes | None]:
            found, _ = listen(LOOPBACK, seconds=LISTEN_S)
            return [one.texts[b"bundle"] for one in found]

        until(lambda: announced() == [mine.encode()], "the other bundle is announced")
        assert agent.terminate() == 0
    out.unlink()
    done = discover(Bundle.open(second), "--out", out, "--json")
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout) == {
        "path": None,
        "devices": [],
        "left_out": [],
        "absent": ["alpha", "beta", "gamma"],
        "not_looked_at": 0,
    }
    assert not out.exists()


@pytest.fixture
def cable() -> Iterator[tuple[Namespace, Namespace]]:
    """Two machines at the ends of a cable, the near one at NEAR and the other one at OTHER."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for network namespaces")
    with ExitStack() as stack:
        try:
            near = stack.enter_context(closing(Namespace()))
            far = stack.enter_context(closing(Namespace()))
            near.run("ip", "link", "add", "near", "type", "veth", "peer", "far", "netns", far.pid)
        except OSError as error:
            pytest.skip(f"no cable can be laid: {error}")
        for space, name, address in ((near, "near", NEAR), (far, "far", OTHER)):
            space.run("ip", "address", "add", f"{address}/24", "dev", name)
            space.run("ip", "link", "set", name, "up")
        yield near, far


def test_an_agent_on_another_machine_is_found_and_spoken_to_with_keys(
    tmp_path: Path, bundle: Bundle, cable: tuple[Namespace, Namespace], announced: ExitStack
) -> None:
    near, far = cable
    keys, clients = tmp_path / "keys", tmp_path / "clients"
    new_keys(keys, "alpha", new_pair)
    new_keys(keys, "client", new_pair)
    clients.mkdir()
    shutil.copy(keys / f"client{PUBLIC}", clients)
    fleet, agent_log = tmp_path / "fleet.toml", tmp_path / "agent.log"
    run = [str(BIN / "mdp-agent"), "run", "--bundle", str(bundle.path), "--device", "alpha"]
    run += ["--bind", "tcp://0.0.0.0:7500", "--key", str(keys / f"alpha{SECRET}")]
    run += ["--clients", str(clients), "--announce", "--json"]
    find = [str(BIN / "mdp"), "fleet", "discover", "--bundle", str(bundle.path)]
    find += ["--seconds", str(LISTEN_S), "--json", "--out", str(fleet)]
    find += ["--keys", str(keys), "--key", str(keys / f"client{SECRET}")]
    agent = AgentProcess("alpha", [*far.inside(), *run], agent_log)
    announced.callback(agent.close)
    agent.wait_for("READY")
    found: list[Any] = []

    def heard() -> bool:
        done = subprocess.run([*near.inside(), *find], capture_output=True, check=False)
        found[:] = json.loads(done.stdout)["devices"]
        return done.returncode == 0

    until(heard, "the announcement is heard")
    (entry,) = found
    public = load_public(keys / f"alpha{PUBLIC}")
    assert (entry["address"], entry["key"]) == (f"tcp://{OTHER}:7500", public)
    ask = [str(BIN / "mdp"), "status", "--fleet", str(fleet), "--json", "--allow-partial"]
    said = subprocess.run([*near.inside(), *ask], capture_output=True, check=False)
    assert said.returncode == 0, said.stderr
    (status,) = json.loads(said.stdout)["devices"]
    assert (status["state"], status["encrypted"]) == ("READY", True)


def flood(count: int) -> list[bytes]:
    """Answers that name `count` services and tell nothing more of any of them."""
    from zeroconf import _dns, const
    from zeroconf._protocol.outgoing import DNSOutgoing

    packets = DNSOutgoing(const._FLAGS_QR_RESPONSE | const._FLAGS_AA)
    for number in range(count):
        # Names as long as they may be, with what a terminal would obey.
        name = f"\x1b[2J{number:059d}.{SERVICE}"
        record = _dns.DNSPointer(SERVICE, const._TYPE_PTR, const._CLASS_IN, 4500, name)
        packets.add_answer_at_time(record, 0)
    return packets.packets()


def test_a_flood_of_names_is_bounded(bundle: Bundle) -> None:
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(LOOPBACK))
    packets = flood(MAX_FOUND + 50)
    with sender, ThreadPoolExecutor() as pool:
        discovering = pool.submit(discover, bundle, "--json")
        while not wait([discovering], timeout=0.2).done:
            for packet in packets:
                sender.sendto(packet, ("224.0.0.251", 5353))
    done = discovering.result()
    assert done.returncode == 3, done.stderr
    said = json.loads(done.stdout)
    assert len(said["left_out"]) == MAX_FOUND
    assert said["not_looked_at"] == 50
    for left in said["left_out"]:
        assert left["reason"] == "malformed: Object missing required field `v`"
        assert left["device"].startswith("?[2J0000")
