"""A hundred agents in ten fleets behind three gateways: `make growing`, not `make test`.

Agents are simulated, ten in a process, and speak the real protocol; gateways are real processes,
each with all ten fleets. What grows is the number of gateways: they share the fleet files, which
they only read, and nothing else.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from mdp.testing.processes import LineProcess, until
from tests.support.figures import Figures
from tests.support.pictures import encode_picture, four_corners
from tests.support.web.gateway import Gateway, gateway
from tools.engine import ROOT

pytestmark = pytest.mark.timeout(900)
FLEETS, MEMBERS, GATEWAYS = 10, 10, 3
NAMES = tuple(f"shelf-{number}" for number in range(FLEETS))
#: Plenty, as all of it shares this machine's cores.
DEADLINE_MS = 20_000


class SimulatedShelf(NamedTuple):
    """A fleet's process, its fleet file and the ports of its agents."""

    process: LineProcess
    fleet: Path
    ports: frozenset[int]

    def change(self, action: str, k: int) -> None:
        """Stop or start an agent."""
        assert self.process.ask(f"{action} {k}") == "done"


class GrownSite(NamedTuple):
    """All of it."""

    shelves: dict[str, SimulatedShelf]
    gateways: list[Gateway]
    picture: bytes

    def ask(self, to: Gateway, name: str) -> dict[str, Any]:
        """An answer of a fleet through a gateway."""
        place = f"/v2/models/{name}/classify?deadline_ms={DEADLINE_MS}"
        reply = to.ask(place, self.picture)
        assert reply.status == 200, reply.body
        answer: dict[str, Any] = reply.json
        assert answer["label"] == name, "another fleet has answered"
        return answer

    def refuses(self, to: Gateway, name: str) -> None:
        """Wait until a gateway says that no agent of a fleet can be reached."""
        place = f"/v2/models/{name}/classify?deadline_ms={DEADLINE_MS}"
        until(lambda: to.ask(place, self.picture).status == 503, f"503 for {name}")

    def counts(self, to: Gateway, name: str, used: int) -> None:
        """Wait until so many of a fleet's agents answer."""
        until(lambda: len(self.ask(to, name)["used"]) == used, f"{used} of {name} by {to.url}")


@pytest.fixture(scope="module")
def site() -> Iterator[GrownSite]:
    with ExitStack() as stack:
        shelves = {}
        for name in NAMES:
            command = [sys.executable, "-m", "tests.deploy.simulated", name, str(MEMBERS)]
            process = stack.enter_context(LineProcess(name, command, environment={
                "PYTHONPATH": str(ROOT),
            }))  # fmt: skip
            said = json.loads(process.line("a fleet"))
            ports = frozenset(int(one.rpartition(":")[2]) for one in said["addresses"])
            shelves[name] = SimulatedShelf(process, Path(said["fleet"]), ports)
        assert len(frozenset.union(*(each.ports for each in shelves.values()))) == FLEETS * MEMBERS
        fleets = [f"--fleet={name}={shelf.fleet}" for name, shelf in shelves.items()]
        gateways = [stack.enter_context(gateway(*fleets)) for _ in range(GATEWAYS)]
        yield GrownSite(shelves, gateways, encode_picture(four_corners(), "PNG"))


def test_every_gateway_answers_for_every_fleet(site: GrownSite) -> None:
    for to in site.gateways:
        for name in NAMES:
            site.counts(to, name, MEMBERS)
    begun_s = time.monotonic()
    for to in site.gateways:
        for name in NAMES:
            assert len(site.ask(to, name)["used"]) == MEMBERS
    each_ms = (time.monotonic() - begun_s) / (GATEWAYS * FLEETS) * 1e3
    resident = [psutil.Process(to.pid).memory_info().rss / 1e6 for to in site.gateways]
    with Figures("growing") as figures:
        figures.put(
            agents=FLEETS * MEMBERS, fleets=FLEETS, gateways=GATEWAYS,
            answer_ms=each_ms, gateway_resident_mb=max(resident),
        )  # fmt: skip


def test_gateways_share_nothing(site: GrownSite) -> None:
    """No connection among them, no memory, and no file that one of them may write."""
    agents = frozenset.union(*(shelf.ports for shelf in site.shelves.values()))
    for to in site.gateways:
        remote = {port for _, port in to.peers()}
        assert len(remote & agents) == FLEETS * MEMBERS, "one connection to each agent"
        assert not remote & {other.address[1] for other in site.gateways}
    # What this process prints into, they have from it.
    own = written_files(os.getpid())
    written = [written_files(to.pid) - own for to in site.gateways]
    assert not set.intersection(*written)


def written_files(pid: int) -> set[str]:
    """Files that a process has open for writing, and memory that it shares with others."""
    found = {one.path for one in psutil.Process(pid).open_files() if one.mode != "r"}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if "s" in words[1] and "w" in words[1] and len(words) == 6:
            found.add(words[5])
    return found


def test_a_fleet_that_has_lost_agents_disturbs_no_other(site: GrownSite) -> None:
    hurt = site.shelves["shelf-4"]
    for k in range(3):
        hurt.change("stop", k)
    for to in site.gateways:
        site.counts(to, "shelf-4", MEMBERS - 3)
        for name in NAMES:
            assert len(site.ask(to, name)["used"]) == MEMBERS - 3 * (name == "shelf-4")
    for k in range(3):
        hurt.change("start", k)
    for to in site.gateways:
        site.counts(to, "shelf-4", MEMBERS)


def test_a_gateway_that_is_killed_takes_nothing_along(site: GrownSite) -> None:
    gone, *others = site.gateways
    gone.signal(signal.SIGKILL)
    gone.wait()
    with pytest.raises(ConnectionError):
        gone.ask("/v2/health/live")
    for to in others:
        for name in NAMES:
            assert len(site.ask(to, name)["used"]) == MEMBERS


def test_a_fleet_that_is_gone_is_missed_by_its_own_callers_alone(site: GrownSite) -> None:
    site.shelves["shelf-9"].process.kill()
    _, *others = site.gateways
    for to in others:
        site.refuses(to, "shelf-9")
        for name in NAMES[:-1]:
            assert len(site.ask(to, name)["used"]) == MEMBERS
