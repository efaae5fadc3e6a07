"""Real agent processes on this machine: one, or a fleet of them with its fleet file."""

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from mdp.client.sync import Client
from mdp.closing import Closing
from mdp.errors import InputError
from mdp.extras import install
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import new_fleet
from mdp.formats.keys import new_keys
from mdp.fusion.fuse import Fusion
from mdp.testing.processes import PATIENCE_S, LineProcess
from mdp.transport import new_pair

#: Loopback, and a port that the kernel chooses.
ANY_PORT = "tcp://127.0.0.1:0"


def agent_command(bundle: Path, device: str, *options: object, bind: str = ANY_PORT) -> list[str]:
    """`mdp-agent run --json` for one device of `bundle`; raises InputError if it is not installed.

    `options` are more of the command's own, such as `"--threads", 1`.
    """
    beside = Path(sys.executable).parent / "mdp-agent"
    program = str(beside) if beside.exists() else shutil.which("mdp-agent")
    if program is None:
        raise InputError(f"mdp-agent: not installed: expected the agent extra: {install('agent')}")
    where = ["--bundle", str(bundle), "--device", device, "--bind", bind]
    return [program, "run", "--json", *where, *map(str, options)]


class AgentProcess(LineProcess):
    """An agent process, or another that writes events as `mdp-agent run --json` does.

    Each line of its standard output is a JSON object with `event`, `device` and `address`.
    """

    def __init__(
        self,
        device: str,
        command: Sequence[object],
        log: Path | None = None,
        *,
        environment: Mapping[str, str] = MappingProxyType({}),
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Start `command`; it may have written nothing yet when this returns."""
        super().__init__(device, command, log, environment=environment, patience_s=patience_s)
        self.device = device
        #: What has been read of its output so far.
        self.events: list[dict[str, Any]] = []

    @property
    def address(self) -> str:
        """Address that the agent listens on, from its first event; for after `wait_for`."""
        address: str = self.events[0]["address"]
        return address

    def wait_for(self, event: str | re.Pattern[str], count: int = 1) -> Self:
        """Read events until `event`, or one that a pattern matches, has come `count` times."""
        wanted = event if isinstance(event, re.Pattern) else re.compile(re.escape(event))
        until_s = time.monotonic() + self.patience_s
        while sum(wanted.fullmatch(seen["event"]) is not None for seen in self.events) < count:
            left_s = max(0.0, until_s - time.monotonic())
            said = self.line(event if isinstance(event, str) else event.pattern, left_s)
            self.events.append(json.loads(said))
        return self

    def _quote(self) -> str:
        return f"{self.events} {self.stderr}"


class AgentFleet(Closing):
    """Agents by their fleet entry's name: a device, or `device/label` for a replica.

    Ends all of them at the end of its `with` block.
    """

    def __init__(
        self, folder: Path, bundle: Path, *, keys: bool = False, patience_s: float = PATIENCE_S
    ) -> None:
        """Logs and `fleet.toml` go to `folder`; agents serve `bundle` unless told otherwise.

        With `keys`, clients and each agent have a key of their own, in `folder` as well.
        """
        self.folder = folder
        self.bundle = bundle
        self.patience_s = patience_s
        self.agents: dict[str, AgentProcess] = {}
        self.public_keys: dict[str, str] = {}
        #: The clients' secret key file; None without keys.
        self.key = folder / "client.secret" if keys else None
        if keys:
            new_keys(folder, "client", new_pair)
        self._retired: list[AgentProcess] = []

    def start(
        self,
        name: str,
        *options: object,
        bind: str = ANY_PORT,
        bundle: Path | None = None,
        program: Sequence[str] = (),
        wait_for: str | None = "READY",
    ) -> AgentProcess:
        """Start an agent, and wait for the event `wait_for`, if any.

        `options` are those of `mdp-agent run`; `program` is another one that takes its options.
        """
        device, file = name.partition("/")[0], name.replace("/", "-")
        if self.key is not None:
            if name not in self.public_keys:
                self.public_keys[name] = new_keys(self.folder, file, new_pair).public
            own, clients = self.folder / f"{file}.secret", self.folder / "client.public"
            options = ("--key", own, "--clients", clients, *options)
        command = agent_command(bundle or self.bundle, device, *options, bind=bind)
        if program:
            command[: command.index("--bundle")] = program
        log = self.folder / f"{file}.log"
        agent = AgentProcess(device, command, log, patience_s=self.patience_s)
        if name in self.agents:
            self._retired.append(self.agents[name])
        self.agents[name] = agent
        return agent if wait_for is None else agent.wait_for(wait_for)

    def start_all(self, *names: str) -> Self:
        """Start agents side by side, one for every device of the bundle if none are named."""
        plan = Bundle.open(self.bundle).manifest.plan
        wanted = names or [assignment.device for assignment in plan.assignments]
        try:
            for agent in [self.start(name, wait_for=None) for name in wanted]:
                agent.wait_for("READY")
        except BaseException:
            # In `with fleet.start_all()` nobody else would end those that have started.
            self.close()
            raise
        return self

    def restart(self, name: str, *options: object, program: Sequence[str] = ()) -> AgentProcess:
        """Start again where it listened before."""
        return self.start(name, *options, bind=self.agents[name].address, program=program)

    def write(self, **addresses: str) -> Path:
        """Write fleet.toml for all agents, with other addresses for the names given."""
        entries = {name: agent.address for name, agent in self.agents.items()} | addresses
        path = self.folder / "fleet.toml"
        devices = [f"{name}={address}" for name, address in entries.items()]
        opened, public_key = Bundle.open(self.bundle), self.public_keys.get
        new_fleet(opened, devices, path, public_key=public_key, key=self.key)
        return path

    @contextmanager
    def client(self, fusion: Fusion = "stacked", **addresses: str) -> Iterator[Client]:
        """A client to which every agent is connected."""
        path = self.write(**addresses)
        with Client.connect(path, fusion=fusion, timeout_s=self.patience_s) as client:
            yield client

    def close(self) -> None:
        """End every agent."""
        for agent in [*self.agents.values(), *self._retired]:
            agent.close()
