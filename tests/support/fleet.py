"""A fleet of real agent processes on loopback, and what may happen to them."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mdp.client.sync import Client
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import new_fleet
from mdp.requests.prediction import Prediction
from tests.support.bundles import DEVICES

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
ANY_PORT = "tcp://127.0.0.1:0"
#: Long enough for a busy machine; nothing waits so long unless it fails.
PATIENCE_S = 60.0
#: A deadline that is never meant to be reached.
PLENTY_MS = 20_000.0


def until(reached: Callable[[], bool], what: str) -> None:
    """Wait until `reached`, in a bounded loop."""
    until_s = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < until_s, f"waited in vain: {what}"
        time.sleep(0.005)


def answers_until(
    client: Client, picture: Any, wanted: Callable[[Prediction], bool], deadline_ms: float
) -> list[Prediction]:
    """Answers to the same picture, the last of which is the first that is as wanted."""
    until_s = time.monotonic() + PATIENCE_S
    answers: list[Prediction] = []
    while not answers or not wanted(answers[-1]):
        assert time.monotonic() < until_s, f"waited in vain, got {answers[-1:]}"
        answers.append(client.classify(picture, deadline_ms=deadline_ms))
    return answers


class AgentProcess:
    """One agent process; its events are read from its stdout."""

    def __init__(self, device: str, command: Sequence[str], log: Path) -> None:
        self.device = device
        self.events: list[dict[str, Any]] = []
        self._log = log
        self._unread = b""
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=stderr,
                bufsize=0,
                # Unbuffered output hides what buffering does when the reader goes away.
                env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"},
            )

    @property
    def address(self) -> str:
        """Where it listens."""
        address: str = self.events[0]["address"]
        return address

    @property
    def stderr(self) -> str:
        """What it has said to people so far."""
        return self._log.read_text()

    def wait_for(self, event: str | re.Pattern[str]) -> Self:
        """Read events until `event`, or one that a pattern matches."""
        wanted = event if isinstance(event, re.Pattern) else re.compile(re.escape(event))
        assert self.process.stdout is not None
        until_s = time.monotonic() + PATIENCE_S
        while not any(wanted.fullmatch(seen["event"]) for seen in self.events):
            left_s = until_s - time.monotonic()
            readable, _, _ = select.select([self.process.stdout], [], [], max(0.0, left_s))
            assert readable, f"{self.device} never said {event}: {self.events} {self.stderr}"
            data = os.read(self.process.stdout.fileno(), 65536)
            assert data, f"{self.device} ended without {event}: {self.events} {self.stderr}"
            *lines, self._unread = (self._unread + data).split(b"\n")
            self.events += [json.loads(line) for line in lines]
        return self

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and proof that the process is dead."""
        self.signal(signal.SIGKILL)
        assert self.process.wait(PATIENCE_S) == -signal.SIGKILL
        self.close()

    def stop(self) -> None:
        """SIGSTOP, and proof that the process stands still."""
        self.signal(signal.SIGSTOP)
        until(lambda: self.kernel_state() == "T", f"{self.device} stands still")

    def kernel_state(self) -> str:
        """The letter that the kernel shows: R runs, S sleeps, T stopped."""
        content = Path(f"/proc/{self.process.pid}/stat").read_text()
        return content.rpartition(")")[2].split()[0]

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        self.signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """Make sure that nothing of it is left."""
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Fleet:
    """Agents by their fleet entry's name: a device, or `device/label` for a replica."""

    def __init__(self, folder: Path, bundle: Path) -> None:
        self.folder = folder
        self.bundle = bundle
        self.agents: dict[str, AgentProcess] = {}
        self._retired: list[AgentProcess] = []

    def start(
        self,
        name: str,
        *options: object,
        bind: str = ANY_PORT,
        bundle: Path | None = None,
        odd: bool = False,
        wait_for: str | None = "READY",
    ) -> AgentProcess:
        """Start `mdp-agent run` or an odd agent, and wait until it is as far as `wait_for` says."""
        program = [sys.executable, "-m", "tests.support.faults.odd_agent"]
        if not odd:
            program = [str(BIN / "mdp-agent"), "run", "--json"]
        device = name.partition("/")[0]
        where = ["--bundle", str(bundle or self.bundle), "--device", device, "--bind", bind]
        log = self.folder / f"{name.replace('/', '-')}.log"
        agent = AgentProcess(device, [*program, *where, *map(str, options)], log)
        if name in self.agents:
            self._retired.append(self.agents[name])
        self.agents[name] = agent
        return agent if wait_for is None else agent.wait_for(wait_for)

    def start_all(self, *names: str, odd: tuple[object, ...] = ()) -> Self:
        """Start agents side by side; the colour bundle's three devices if none are named.

        `odd` is the name of an odd agent to start beside them, and its options.
        """
        started = []
        if odd:
            started.append(self.start(str(odd[0]), *odd[1:], odd=True, wait_for=None))
        started += [self.start(name, wait_for=None) for name in names or DEVICES]
        for agent in started:
            agent.wait_for("READY")
        return self

    def restart(self, name: str, *options: object, odd: bool = False) -> AgentProcess:
        """Start again where it listened before."""
        return self.start(name, *options, bind=self.agents[name].address, odd=odd)

    def write(self, **addresses: str) -> Path:
        """Write fleet.toml for all agents, with other addresses for the names given."""
        entries = {name: agent.address for name, agent in self.agents.items()} | addresses
        path = self.folder / "fleet.toml"
        devices = [f"{name}={address}" for name, address in entries.items()]
        new_fleet(Bundle.open(self.bundle), devices, path)
        return path

    @contextmanager
    def client(self, fusion: Any = "stacked", **addresses: str) -> Iterator[Client]:
        """A client to which every agent is connected."""
        with Client.connect(self.write(**addresses), fusion=fusion, timeout_s=PATIENCE_S) as client:
            yield client

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for agent in [*self.agents.values(), *self._retired]:
            agent.close()
