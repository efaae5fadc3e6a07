"""A fleet in which one device can have a fault: real agents, their link, and a client's calls."""

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
import zmq

from benchmarks.faults import faulty_agent
from benchmarks.faults.promises import SETTINGS, Kind
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import new_fleet
from mdp.formats.keys import load_public, new_keys
from mdp.testing.agents import ANY_PORT, AgentProcess, agent_command
from mdp.testing.bundles import CHANNELS, LABELS, write_bundle
from mdp.testing.machine_faults import another_clock
from mdp.testing.processes import PATIENCE_S, until
from mdp.testing.relay import Relay
from mdp.testing.wires import Wire
from mdp.transport import new_pair

#: How the client reaches the faulty device, or what else is special about everyone's processes.
Where = Literal["loopback", "relay", "wire", "clock", "name"]
#: Where the packages lie that agents import.
ROOT = Path(__file__).parents[2]
#: What the faulty device is called where it has a name.
HOST = "pi.fleet.example"
#: A crop of 27,648 bytes, the same for everyone, so that a slow link is as slow for all of them.
SIDE = 96
PICTURES = 12


def picture(number: int) -> tuple[np.ndarray, str]:
    """One of PICTURES different pictures, uint8 `[H, W, 3]`, and its label."""
    label = LABELS[number % len(LABELS)]
    noise = np.random.default_rng(number).integers(0, 80, size=(120, 120, 3), dtype=np.uint8)
    return noise + (CHANNELS[LABELS.index(label)] * 120).astype(np.uint8), label


class Scene:
    """Agents of one kind of fleet; the one of `faulty` can be made to fail."""

    def __init__(self, folder: Path, kind: Kind, where: Where = "loopback") -> None:
        self.setting = SETTINGS[kind]
        self.faulty = self.setting.faulty
        self.where: Where = where
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        #: What the faulty device's model is to do; see faulty_agent.
        self.word = folder / "fault"
        self.word.write_text("")
        #: What the wall clock of a scene of clocks shows.
        self.clock = folder / "clock"
        self.clock.write_text("+0")
        self.agents: dict[str, AgentProcess] = {}
        #: Held while the client is to stay idle.
        self.idle = threading.Lock()
        #: How often a device that flaps has been connected to; what the client's own pace was.
        self.rounds, self.dial_ms = 0, 0
        #: Who is asked for names instead of the machine's name server.
        self.own_names = ExitStack()
        self.name_server: socket.socket
        self._undo = ExitStack()
        #: Left again when the fault is healed.
        self._held = ExitStack()
        members, sizes = self.setting.members, (SIDE,) * len(self.setting.members)
        self.bundle = write_bundle(folder / "bundle", devices=members, sizes=sizes)
        self.others = write_bundle(folder / "others", name="others", devices=members, sizes=sizes,
                                   bag_scale=9.0)  # fmt: skip
        self.older = write_bundle(folder / "older", devices=members, sizes=sizes, bag_scale=3.0)
        try:
            self.wire = self._undo.enter_context(Wire()) if where == "wire" else None
            self._start_all()
            self.relay = self._undo.enter_context(Relay(self.agent.address))
        except BaseException:
            self.close()
            raise

    @property
    def agent(self) -> AgentProcess:
        """The faulty device's process."""
        return self.agents[self.faulty]

    @property
    def environment(self) -> Mapping[str, str]:
        """What is special about the processes of this scene."""
        return another_clock(self.clock) if self.where == "clock" else {}

    def _start_all(self) -> None:
        names = [*self.setting.members, *filter(None, [self.setting.replica])]
        if self.wire is not None:
            for name in ("client", "device"):
                new_keys(self.folder, name, new_pair)
        for name in names:
            self.start(name)
        for name in names:
            self.agents[name].wait_for("READY")

    def start(
        self,
        name: str,
        *,
        bind: str | None = None,
        bundle: Path | None = None,
        before: Sequence[str] = (),
    ) -> AgentProcess:
        """Start an agent, without waiting for it; `before` stands in front of the command."""
        inside: list[str] = []
        options: list[str] = []
        if self.wire is not None and name == self.faulty:
            inside, bind = self.wire.inside(), bind or f"tcp://{self.wire.address}:7500"
            keys = (self.folder / "device.secret", self.folder / "client.public")
            options = ["--key", str(keys[0]), "--clients", str(keys[1])]
        known = {faulty_agent.VARIABLE: str(self.word), "PYTHONPATH": str(ROOT), **self.environment}
        device = name.partition("/")[0]
        command = agent_command(
            bundle or self.bundle, device, "--threads", 1, *options, bind=bind or ANY_PORT
        )
        if name == self.faulty:
            command[:1] = [sys.executable, "-m", "benchmarks.faults.faulty_agent"]
        environment = [f"{key}={value}" for key, value in known.items()]
        log = self.folder / f"{name.replace('/', '-')}.log"
        agent = AgentProcess(name, [*inside, "env", *environment, *before, *command], log)
        self._undo.callback(agent.close)
        self.agents[name] = agent
        return agent

    def restart(self, *, bundle: Path | None = None, home: Path | None = None) -> None:
        """Start the faulty device's agent where it was, and wait until it serves.

        With `home`, that is where it works, and where it writes what it has to say.
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
        until(lambda: log.exists() and "READY" in log.read_text(), "it says READY in its log")
        agent.events += [json.loads(line) for line in log.read_text().splitlines()]

    def stop(self) -> None:
        """SIGTERM to the faulty device's agent, and wait for its end."""
        assert self.agent.terminate() == 0, self.agent.stderr
        self.agent.close()

    def memory_bytes(self, what: str) -> int:
        """How much memory the faulty device's agent has; `what` as in /proc/PID/status."""
        status = Path(f"/proc/{self.agent.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith(f"{what}:"))
        return int(line.split()[1]) * 1024

    def send_junk(self) -> None:
        """Send the faulty device's agent what is no message, of which it then has to tell."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.connect(self.agent.address)
            dealer.send(b"junk")
            assert dealer.poll(int(PATIENCE_S * 1e3)), "nobody complains"

    @property
    def cable(self) -> Wire:
        """The faulty device's own one."""
        assert self.wire is not None
        return self.wire

    def hold(self, context: AbstractContextManager[object]) -> None:
        """Enter `context` until the fault is healed."""
        self._held.enter_context(context)

    def release(self) -> None:
        """Leave what was entered for the fault."""
        self._held.close()

    def fleet_file(self, *, alone: bool = False) -> Path:
        """A fleet file in which the faulty device is reached as `where` says, and `alone` is."""
        addresses = {name: agent.address for name, agent in self.agents.items()}
        if self.where == "relay":
            addresses[self.faulty] = self.relay.address
        if self.where == "name" and not alone:
            addresses[self.faulty] = addresses[self.faulty].replace("127.0.0.1", HOST)
        if alone:
            addresses = {self.faulty: addresses[self.faulty]}
        path = self.folder / f"fleet-{self.where}{'-alone' if alone else ''}.toml"
        public, key = {}, None
        if self.wire is not None:
            device = load_public(self.folder / "device.public")
            public, key = {self.faulty: device}, self.folder / "client.secret"
        devices = [f"{name}={address}" for name, address in addresses.items()]
        new_fleet(Bundle.open(self.bundle), devices, path, public_key=public.get, key=key)
        return path

    def close(self) -> None:
        """End every process, link and limit."""
        with self._undo, self.own_names, contextlib.suppress(OSError):
            self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
