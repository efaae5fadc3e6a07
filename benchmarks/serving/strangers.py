"""What a crowd of strangers at an agent's door costs those who are let in.

    python -m benchmarks.serving.strangers

Agents on loopback serve 224x224 crops with a model that takes next to no time, in plain text and
with keys. Their client is measured alone and beside a crowd, in turns, a block each, so that drift
of the machine meets both. The crowd is a process of its own that keeps `--visitors` connections at
one agent's door, and comes again as soon as one of them is cut off:

    silent     says nothing
    greeting   sends half of a greeting
    knocking   does the whole handshake with a key that is not allowed, over and over

Reported are a call's latency alone and beside the crowd, the ratio of both with the interval in
which it lies when the blocks are drawn anew, and how many connections the crowd made in a second.
Of p99 also the median of all blocks' own: the crowd comes anew in each, and what else happens on
the machine is mostly in few of them.
The crowd computes where nobody else wants the processor (SCHED_IDLE), as it has machines of its
own; what the kernel does for its packets is on the same cores, and a part of the ratio.
"""

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.resampling import ratio_interval
from mdp import Client
from mdp.cli.bench import noise_picture, percentiles
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import new_fleet
from mdp.formats.keys import load_public, new_keys
from mdp.testing.agents import AgentFleet
from mdp.testing.bundles import write_bundle
from mdp.testing.processes import LineProcess
from mdp.transport import new_pair
from mdp.transport.greeting import QUESTION

RESULTS = Path(__file__).parents[1] / "results" / "strangers.json"
SIDE = 224
DEADLINE_MS = 2000.0
POINTS = (50, 99)
SILENT, GREETING, KNOCKING = "silent", "greeting", "knocking"
#: Where the crowd comes from: another machine, as far as the agent can tell.
ELSEWHERE = "127.0.0.2"
#: What a crowd begins with.
ASIDE = """
import os
if hasattr(os, "SCHED_IDLE"):
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
"""
#: argv: port, connections, bytes to say, and from where. Prints how many connections it has made,
#: when it is asked.
CROWD = """
import selectors, socket, sys, threading
port, count, words = int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3])
made, both = 0, selectors.DefaultSelector()
def come():
    visitor = socket.socket()
    visitor.bind((sys.argv[4], 0))
    visitor.setblocking(False)
    visitor.connect_ex(("127.0.0.1", port))
    both.register(visitor, selectors.EVENT_WRITE)
def talk(visitor):
    global made
    visitor.getpeername()
    visitor.sendall(words)
    both.modify(visitor, selectors.EVENT_READ)
    made += 1
for _ in range(count):
    come()
print("there", flush=True)
def tell():
    for line in sys.stdin:
        print(made, flush=True)
threading.Thread(target=tell, daemon=True).start()
while True:
    for key, events in both.select():
        try:
            wrote = events & selectors.EVENT_WRITE
            gone = talk(key.fileobj) if wrote else not key.fileobj.recv(4096)
        except OSError:
            gone = True
        if gone:
            both.unregister(key.fileobj)
            key.fileobj.close()
            come()
"""
#: argv: address, connections, the agent's public key. Every socket has a key of its own.
KNOCKERS = """
import contextlib, sys, threading, zmq
from zmq.utils.monitor import recv_monitor_message
address, count, server = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
context, poller, made = zmq.Context(), zmq.Poller(), 0
context.max_sockets = 4 * count + 100
dealers = {}
for _ in range(count):
    dealer = context.socket(zmq.DEALER)
    dealer.linger, dealer.reconnect_ivl, dealer.curve_serverkey = 0, 1, server
    dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
    monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    dealers[monitor] = dealer
    poller.register(monitor, zmq.POLLIN)
    dealer.connect(address)
print("there", flush=True)
def tell():
    for line in sys.stdin:
        print(made, flush=True)
threading.Thread(target=tell, daemon=True).start()
while True:
    for monitor, _ in poller.poll():
        recv_monitor_message(monitor)
        made += 1
        # After such a failure libzmq does not come again by itself.
        with contextlib.suppress(zmq.ZMQError):
            dealers[monitor].disconnect(address)
        dealers[monitor].connect(address)
"""


class Crowd(LineProcess):
    """Strangers in a process of their own, stopped while nobody is to be disturbed."""

    def __init__(self, kind: str, address: str, count: int, public: str) -> None:
        port = address.rpartition(":")[2]
        words = (QUESTION + bytes(20)).hex() if kind == GREETING else ""
        arguments = [ASIDE + KNOCKERS, f"tcp://{ELSEWHERE}:0;127.0.0.1:{port}", str(count), public]
        if kind != KNOCKING:
            arguments = [ASIDE + CROWD, port, str(count), words, ELSEWHERE]
        super().__init__("the crowd", [sys.executable, "-c", *arguments])
        self.line("that it is there")

    def made(self) -> int:
        """How many connections it has made so far."""
        return int(self.ask(""))


def served(stack: ExitStack, folder: Path, devices: int, *, keys: bool) -> tuple[Path, str, str]:
    """A fleet file, the address of its first agent and that agent's public key."""
    names = tuple(f"device-{number}" for number in range(devices))
    bundle = Bundle.open(write_bundle(folder / "b", devices=names, sizes=(SIDE,) * devices))
    known: dict[str, str] = {}
    options: dict[str, list[object]] = {name: [] for name in names}
    if keys:
        new_keys(folder, "client", new_pair)
        for name in names:
            known[name] = new_keys(folder, name, new_pair).public
            allowed = folder / "client.public"
            options[name] = ["--key", folder / f"{name}.secret", "--clients", allowed]
    agents = stack.enter_context(AgentFleet(folder, bundle.path))
    addresses = [agents.start(name, "--threads", 1, *options[name]).address for name in names]
    fleet, key = folder / "fleet.toml", folder / "client.secret" if keys else None
    entries = [f"{name}={address}" for name, address in zip(names, addresses, strict=True)]
    new_fleet(bundle, entries, fleet, public_key=known.get, key=key)
    public = load_public(folder / f"{names[0]}.public") if keys else ""
    return fleet, addresses[0], public


def calls(client: Client, seconds: float) -> list[float]:
    """Latencies in ms of calls for so long, and of one at least, every one with all members."""
    picture, until_s = noise_picture(SIDE), time.monotonic() + seconds
    latencies: list[float] = []
    while not latencies or time.monotonic() < until_s:
        answer = client.classify(picture, deadline_ms=DEADLINE_MS)
        assert not answer.partial, answer
        latencies.append(answer.latency_ms)
    return latencies


def typical(blocks: list[list[float]], point: float) -> float:
    """The median of the blocks' own percentiles."""
    return float(np.median([np.percentile(block, point) for block in blocks]))


def measure(options: argparse.Namespace, *, keys: bool, kind: str) -> dict[str, Any]:
    """Calls alone and beside a crowd, in turns."""
    alone: list[list[float]] = []
    beside: list[list[float]] = []
    rates: list[float] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        fleet, address, public = served(stack, Path(name), options.agents, keys=keys)
        client = stack.enter_context(Client.connect(fleet, timeout_s=30.0))
        calls(client, options.block_s)  # warms up
        for _ in range(options.blocks):
            alone.append(calls(client, options.block_s))
            with Crowd(kind, address, options.visitors, public) as crowd:
                before, started_s = crowd.made(), time.perf_counter()
                beside.append(calls(client, options.block_s))
                # Whoever comes new has to get in as well.
                with Client.connect(fleet, timeout_s=30.0) as late:
                    calls(late, 0.0)
                rates.append((crowd.made() - before) / (time.perf_counter() - started_s))
    quiet, busy = (percentiles([*chain(*blocks)], POINTS) for blocks in (alone, beside))
    return {
        "keys": keys,
        "crowd": kind,
        "visitors": options.visitors,
        "agents": options.agents,
        "requests": sum(map(len, alone)),
        "alone_ms": quiet,
        "beside_ms": busy,
        "ratio": {point: busy[point] / quiet[point] for point in quiet},
        "ratio_95": {f"p{point}": ratio_interval(beside, alone, point) for point in POINTS},
        "typical_p99": {
            "alone_ms": typical(alone, 99),
            "beside_ms": typical(beside, 99),
            "ratio": typical(beside, 99) / typical(alone, 99),
        },
        "connections_per_s": float(np.median(rates)),
    }


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description="Latency beside a crowd of strangers.")
    parser.add_argument("--agents", type=int, default=3)
    parser.add_argument("--visitors", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=10)
    # Longer than a silent connection may last, so that the crowd has to come again in each.
    parser.add_argument("--block-s", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    machine = describe_machine()
    cases = [(False, SILENT), (True, SILENT), (True, GREETING), (True, KNOCKING)]
    rows = [measure(options, keys=keys, kind=kind) for keys, kind in cases]
    print(f"{'':5} {'crowd':9} {'alone p50':>9} {'p99':>7} {'beside p50':>10} {'p99':>7} "
          f"{'ratio p50':>9} {'p99':>6} {'(95 %)':>13} {'typical':>7} {'made/s':>7}")  # fmt: skip
    for row in rows:
        alone, beside, ratio = row["alone_ms"], row["beside_ms"], row["ratio"]
        low, high = row["ratio_95"]["p99"]
        sure = f"({low:.2f}-{high:.2f})"
        print(
            f"{'keys' if row['keys'] else 'plain':5} {row['crowd']:9} {alone['p50']:>9.2f} "
            f"{alone['p99']:>7.2f} {beside['p50']:>10.2f} {beside['p99']:>7.2f} "
            f"{ratio['p50']:>9.2f} {ratio['p99']:>6.2f} {sure:>13} "
            f"{row['typical_p99']['ratio']:>7.2f} "
            f"{row['connections_per_s']:>7.0f}"
        )
    options.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
