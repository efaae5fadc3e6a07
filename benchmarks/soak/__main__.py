"""A fleet under load for a long time, among kills, stops and restarts.

    python -m benchmarks.soak --minutes 30 --keep
    python -m benchmarks.soak --minutes 30 --keep --calm --share 0.9

Three members and a replica of the second are agents with keys. A synchronous and an asynchronous
client call them, and two clients call a gateway over HTTP, one by its own route and one by the Open
Inference Protocol, all at a `--share` (80 %) of what they managed together just before. Every
agent, and the gateway, is killed, stopped or restarted every few seconds, by a seeded schedule. One
agent is only stopped, and the gateway after a third of the run, so that their memory is watched for
long. With `--calm` nothing is, and all are watched for the whole run.

Ends with 1 unless
- every call ended, once, and with its own picture's label (a picture has one colour of a grid, and
  the logits state each crop's distance from it), and names each member as used or missing;
- every call ended by its deadline, plus OVERDUE_S for a busy machine;
- the gateway answered with an answer or 503, and logged no error that it had not foreseen;
- no process holds more files, sockets or threads than before the load;
- no process that lived for half of the run has grown by more than GROWTH_MIB over it, by the upper
  end of the 95 % interval of its trend;
- all agents answer again after the last fault, and all end with 0 on SIGTERM;
- with `--calm`, every answer was in time, and of all members.
"""

import math
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.faults.device import FaultyDevice
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.options import arguments
from benchmarks.harness.results import RESULTS
from benchmarks.soak.clients import PATIENCE_S, Clients, find_broken, truth_file
from benchmarks.soak.faults import Faults, count_faults, schedule
from benchmarks.soak.gateway import FaultyGateway
from benchmarks.soak.page import CALM, PAGE
from benchmarks.soak.pictures import DEVICES, write_colour_bundle
from benchmarks.soak.watch import Watch, as_rows, find_growth, trends
from mdp.files import write_json
from mdp.testing.agents import AgentFleet

REPLICA = f"{DEVICES[1]}/second"
GATEWAY = "gateway"
#: Style of asking -> threads; 0: any number of calls at once.
STYLES = {"sync": 1, "async": 0, "classify": 2, "infer": 2}
#: The share of the run in which each is killed and restarted; after it, it is only stopped.
ENDED_UNTIL = dict.fromkeys((*DEVICES[:2], REPLICA), 1.0) | {DEVICES[2]: 0.0, GATEWAY: 1 / 3}
LOAD = 0.8
#: Seconds after its deadline from which a call counts as hung.
OVERDUE_S = 30.0
GROWTH_MIB = 16.0


class Soak:
    """One run: the fleet, its gateway, its clients, and its result."""

    def __init__(self, folder: Path, stack: ExitStack, seed: int, deadline_ms: float) -> None:
        self._seed = seed
        bundle = write_colour_bundle(folder / "bundle")
        self._fleet = AgentFleet(folder, bundle.path, keys=True, patience_s=PATIENCE_S)
        stack.enter_context(self._fleet).start_all(*DEVICES, REPLICA)
        fleet = self._fleet.write()
        self._gateway = FaultyGateway(fleet, folder / "gateway.log", patience_s=PATIENCE_S)
        stack.enter_context(self._gateway)
        devices = {name: FaultyDevice(self._fleet, name) for name in self._fleet.agents}
        self._faults = Faults({**devices, GATEWAY: self._gateway})
        stack.callback(self._faults.abort)
        truth = truth_file(folder / "truth.json", {bundle.digest: ""})
        options = ("--fleet", fleet, "--gateway", self._gateway.host, "--truth", truth)
        self._clients = Clients(stack, STYLES, seed, *options, "--deadline-ms", deadline_ms)

    def _pids(self) -> dict[str, int]:
        """The processes that are watched."""
        clients = {f"{style} client": each for style, each in self._clients.processes.items()}
        watched = {**clients, **self._fleet.agents, GATEWAY: self._gateway.process}
        return {name: process.process.pid for name, process in watched.items()}

    def run(self, seconds: float, share: float, *, calm: bool) -> dict[str, Any]:
        """Measure the fleet's capacity, load it to a share, and compare what processes hold."""
        clients = self._clients
        with Watch(self._pids) as watch:
            capacity = clients.capacity()
            assert clients.heal(), "answers lack members before any fault"
            before = watch.now()
            faults = schedule(self._seed, seconds, {} if calm else ENDED_UNTIL)
            began_s = time.monotonic()
            clients.begin(seconds, [share * rate for rate in capacity])
            self._faults.begin(faults)
            done = clients.results(seconds)
            self._faults.finish()
            ended_s = time.monotonic()
            healed = clients.heal()
            # Descriptors and threads are released with a delay.
            settled_s = time.monotonic() + PATIENCE_S / 10
            while find_growth(before, after := watch.now()) and time.monotonic() < settled_s:
                time.sleep(0.5)
        samples = [sample for sample in watch.samples if began_s < sample.at_s < ended_s]
        return {
            "capacity_per_s": [round(rate, 1) for rate in capacity],
            "rate_per_s": [round(share * rate, 1) for rate in capacity],
            "faults": count_faults(faults),
            "clients": [{"style": s, **d} for s, d in zip(STYLES, done, strict=True)],
            "healed": healed,
            "before": as_rows(before),
            "after": as_rows(after),
            "grown": find_growth(before, after),
            "trends": trends(samples, ended_s - began_s),
        }

    def finish(self) -> list[str]:
        """End all processes; returns every unexpected event of the run."""
        ended = self._clients.finish()
        self._faults.stop_all()
        return [*self._faults.complaints, *self._gateway.complaints(), *ended]


def failures(result: Mapping[str, Any]) -> list[str]:
    """The promises that were broken."""
    found = list(result["complaints"])
    for client in result["clients"]:
        found += find_broken(client["style"], client)
        if client["overshoot_ms"] > OVERDUE_S * 1e3:
            late = f"a call ended {client['overshoot_ms']:.0f} ms after its deadline"
            found.append(f"the {client['style']} client: {late}")
        elif result["calm"]:
            found += find_missed(client)
    if not result["healed"]:
        found.append("after the last fault, calls still lack members")
    found += [f"more than before the load: {text}" for text in result["grown"]]
    for row in result["trends"]:
        most = (row["mib_per_hour"] + row["mib_per_hour_margin"]) * row["seconds"] / 3600
        if most > GROWTH_MIB:
            found.append(f"{row['process']}: may have grown by {most:.1f} MiB over the run")
    return found


def find_missed(client: Mapping[str, Any]) -> list[str]:
    """Calls that had no whole answer in time, of a client whose fleet was well."""
    counts, who = client["counts"], f"the {client['style']} client"
    found = []
    if late := counts.get("late", 0):
        worst = f"by {client['overshoot_ms']:.1f} ms at most"
        found.append(f"{who}: {late} of {counts['ended']} calls late, {worst}")
    if missed := counts.get("partial", 0) + counts.get("error", 0):
        found.append(f"{who}: {missed} of {counts['ended']} calls without a whole answer")
    return found


def main() -> int:
    """Run, print, keep; 1 if a promise was broken."""
    asked = arguments(
        __doc__, "keep", "calm", minutes=2.0, share=LOAD, seed=1, deadline_ms=300.0,
        out=Path("runs/soak.json"),
    )  # fmt: skip
    if not 0 < asked.share <= 1:
        sys.exit(f"--share: expected a number above 0 and up to 1, got {asked.share:g}")
    if not 0 < asked.minutes < math.inf:
        sys.exit(f"--minutes: expected a number above 0, got {asked.minutes:g}")
    # A terminated run ends its agents and clients too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    result: dict[str, Any] = {
        "machine": describe_machine(), "minutes": asked.minutes, "seed": asked.seed,
        "deadline_ms": asked.deadline_ms, "share": asked.share, "calm": asked.calm,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        soak = Soak(Path(name), stack, asked.seed, asked.deadline_ms)
        result |= soak.run(asked.minutes * 60, asked.share, calm=asked.calm)
        result["complaints"] = soak.finish()
    result["failures"] = failures(result)
    kept = RESULTS / f"{CALM if asked.calm else 'soak'}.json"
    write_json(kept if asked.keep else asked.out, result)
    if asked.keep:
        PAGE.write()
    for client in result["clients"]:
        print(f"{client['style']} client: {client['counts']}, {client['reasons']}")
    print(*result["trends"], sep="\n")
    print("\n".join(result["failures"]) or "every promise held")
    return int(bool(result["failures"]))


if __name__ == "__main__":
    sys.exit(main())
