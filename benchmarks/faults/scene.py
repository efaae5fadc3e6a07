"""A fleet of real agents in which one device can have a fault."""

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Literal, Self

import numpy as np
import zmq

from benchmarks.faults import faulty_agent
from benchmarks.faults.device import FaultyDevice
from benchmarks.faults.promises import SETTINGS, Kind
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import new_fleet
from mdp.testing.agents import ANY_PORT, AgentFleet, AgentProcess, agent_command
from mdp.testing.bundles import CHANNELS, LABELS, write_bundle
from mdp.testing.machine_faults import another_clock
from mdp.testing.processes import PATIENCE_S, until
from mdp.testing.relay import Relay
from mdp.testing.wires import Wire

#: How the client reaches the faulty device, or what is special about all processes.
Where = Literal["loopback", "relay", "wire", "clock", "name"]
#: PYTHONPATH of agents.
ROOT = Path(__file__).parents[2]
#: The faulty device's host name.
HOST = "pi.fleet.example"
#: A crop of 27,648 bytes for every device, so that a slow link is equally slow for all.
SIDE = 96
PICTURES = 12


def picture(number: int) -> tuple[np.ndarray, str]:
    """One of PICTURES different pictures, uint8 `[H, W, 3]`, and its label."""
    label = LABELS[number % len(LABELS)]
    noise = np.random.default_rng(number).integers(0, 80, size=(120, 120, 3), dtype=np.uint8)
    return noise + (CHANNELS[LABELS.index(label)] * 120).astype(np.uint8), label


class Scene(FaultyDevice):
    """Agents of one kind of fleet; that of `faulty` can be made to fail."""

    def __init__(self, folder: Path, kind: Kind, where: Where = "loopback") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.where = folder, where
        self.setting = SETTINGS[kind]
        #: Files: the command for the faulty device's model (faulty_agent), and the wall clock.
        self.word, self.clock = folder / "fault", folder / "clock"
        self.word.write_text("")
        self.clock.write_text("+0")
        #: Held while the client has to stay idle.
        self.idle = threading.Lock()
        #: Connections to a flapping device; the client's own interval between connections.
        self.rounds, self.dial_ms = 0, 0
        #: Host names, and a name server instead of the machine's.
        self.own_names = ExitStack()
        self.name_server: socket.socket
        self._undo = ExitStack()
        #: Contexts that end when the fault is healed.
        self._held = ExitStack()
        members, sizes = self.setting.members, (SIDE,) * len(self.setting.members)
        bundles = {"bundle": {}, "others": {"name": "others", "bag_scale": 9.0},
                   "older": {"bag_scale": 3.0}}  # fmt: skip
        self.bundle, self.others, self.older = (
            write_bundle(folder / file, devices=members, sizes=sizes, **more)  # type: ignore[arg-type]
            for file, more in bundles.items()
        )
        try:
            self.wire = self._undo.enter_context(Wire()) if where == "wire" else None
            fleet = AgentFleet(folder, self.bundle, keys=self.wire is not None)
            super().__init__(self._undo.enter_context(fleet), self.setting.faulty)
            for name in (*members, *filter(None, [self.setting.replica])):
                self.start(name)
            for agent in self.fleet.agents.values():
                agent.wait_for("READY")
            self.relay = self._undo.enter_context(Relay(self.agent.address))
        except BaseException:
            self.close()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """Additional environment of all processes."""
        return another_clock(self.clock) if self.where == "clock" else {}

    def start(
        self,
        name: str,
        *,
        bind: str = ANY_PORT,
        bundle: Path | None = None,
        before: Sequence[str] = (),
    ) -> AgentProcess:
        """Start an agent, without waiting; `before` precedes its command."""
        inside, program = [], agent_command(self.bundle, "")[:3]
        if name == self.faulty:
            program[:1] = [sys.executable, "-m", "benchmarks.faults.faulty_agent"]
            if self.wire is not None:
                inside, bind = self.wire.inside(), f"tcp://{self.wire.address}:7500"
        known = {faulty_agent.VARIABLE: str(self.word), "PYTHONPATH": str(ROOT), **self.environment}
        environment = [f"{key}={value}" for key, value in known.items()]
        command = [*inside, "env", *environment, *before, *program]
        return self.fleet.start(
            name, "--threads", 1, bind=bind, bundle=bundle, program=command, wait_for=None
        )

    def restart(self, *, bundle: Path | None = None, home: Path | None = None) -> None:
        """Start the faulty device's agent at its address, and wait until it serves.

        With `home`, its working folder and log are there.
        """
        self.word.write_text("")
        address = self.agent.address
        if home is None:
            self.start(self.faulty, bind=address, bundle=bundle).wait_for("READY")
            return
        log = home / "agent.log"
        moves = 'cd "$0" && TMPDIR="$0" exec "$@" >>agent.log 2>&1'
        before = ["sh", "-c", moves, str(home)]
        agent = self.start(self.faulty, bind=address, bundle=bundle, before=before)
        until(lambda: log.exists() and "READY" in log.read_text(), "READY in its log")
        agent.events += [json.loads(line) for line in log.read_text().splitlines()]

    def memory_bytes(self, what: str) -> int:
        """Memory of the faulty device's agent; `what` as in /proc/PID/status."""
        status = Path(f"/proc/{self.agent.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith(f"{what}:"))
        return int(line.split()[1]) * 1024

    def send_junk(self) -> None:
        """Send the faulty device's agent an invalid message, which it logs."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.connect(self.agent.address)
            dealer.send(b"junk")
            assert dealer.poll(int(PATIENCE_S * 1e3)), "no reply to an invalid message"

    @property
    def cable(self) -> Wire:
        """The faulty device's."""
        assert self.wire is not None
        return self.wire

    def hold(self, context: AbstractContextManager[object]) -> None:
        """Enter `context` until `release`."""
        self._held.enter_context(context)

    def release(self) -> None:
        """End the contexts of the fault."""
        self._held.close()

    def fleet_file(self, *, alone: bool = False) -> Path:
        """A fleet file with the faulty device reached by `where`; `alone`: as the only one."""
        addresses = {name: agent.address for name, agent in self.fleet.agents.items()}
        if self.where == "relay":
            addresses[self.faulty] = self.relay.address
        if self.where == "name" and not alone:
            addresses[self.faulty] = addresses[self.faulty].replace("127.0.0.1", HOST)
        names = [self.faulty] if alone else addresses
        path = self.folder / f"fleet-{self.where}{'-alone' if alone else ''}.toml"
        public, key = self.fleet.public_keys.get, self.fleet.key
        entries = [f"{name}={addresses[name]}" for name in names]
        new_fleet(Bundle.open(self.bundle), entries, path, public_key=public, key=key)
        return path

    def close(self) -> None:
        """End every process, link and limit."""
        with self._undo, self.own_names, contextlib.suppress(OSError):
            self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
