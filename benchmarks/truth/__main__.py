"""Answers under chaos, each compared with the truth of the bundle that it names.

    python -m benchmarks.truth --answers 300000 --keep              # an idle machine
    python -m benchmarks.truth --answers 300000 --keep --label "load 6"

Three agents with keys. Threads of one client, streams of another, an asyncio client, and a gateway
by its own route and by the Open Inference Protocol ask at once, at 80 % of what they managed
together before. Agents are killed and started again, and stopped, every few seconds; meanwhile
two bundles with other labels, of which one has its classes in the opposite order, are pushed in
turns or gone back to by a rollback.

An answer is wrong if its label is not its picture's in the bundle that it names, mixed if another
picture's or bundle's part is in it, and has an unaccounted device if one is neither used nor
missing. A call is late if it ends after its deadline, by the clock of whoever called. Ends with 1
if any answer was wrong, mixed or had an unaccounted device, a call did not end, or not all answer
again at the end. Late calls are counted only.
"""

import json
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.faults.device import FaultyDevice
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.options import arguments
from benchmarks.harness.results import RESULTS
from benchmarks.soak.clients import PATIENCE_S, Clients, find_broken, truth_file
from benchmarks.soak.faults import KINDS, Fault, Faults, count_faults, schedule
from benchmarks.soak.gateway import FaultyGateway
from benchmarks.soak.pictures import DEVICES, write_colour_bundle
from benchmarks.truth.changes import HELD, Changes, point
from benchmarks.truth.page import PAGE
from mdp.files import write_json
from mdp.testing.agents import AgentFleet, AgentProcess

#: Style of asking -> threads; 0: any number of calls at once.
STYLES = {"sync": 3, "stream": 1, "async": 0, "classify": 2, "infer": 2}
LOAD = 0.8
#: Mean seconds between the faults of one agent.
FAULT_EVERY_S = 8.0
#: Seconds of load between two looks at how many answers there are.
LEAST_S, MOST_S = 20.0, 180.0
#: How long agents serve a replaced bundle after its last request: clients follow sooner.
GRACE_S = 2.0
#: What the labels of the second bundle begin with.
SECOND = "second:"


class PushedFleet(AgentFleet):
    """Agents that take pushed bundles, each into a folder of its own, also once started again."""

    def start(self, name: str, *options: object, **more: Any) -> AgentProcess:
        kept = self.folder / f"{name}-kept"
        return super().start(name, "--allow-push", kept, "--grace-s", GRACE_S, *options, **more)


class Chaos:
    """One run: the fleet, its gateway, its clients, and its result."""

    def __init__(self, folder: Path, stack: ExitStack, seed: int, deadline_ms: float) -> None:
        self._seed = seed
        first = write_colour_bundle(folder / "first")
        second = write_colour_bundle(folder / "second", name="second", begin=SECOND, opposite=True)
        (folder / "client.limits").write_text("push = true\n")
        point(folder, first.path)
        self._fleet = PushedFleet(folder, folder / HELD, keys=True, patience_s=PATIENCE_S)
        stack.enter_context(self._fleet).start_all(*DEVICES)
        fleet = self._fleet.write()
        # It names what the link leads to.
        fleet.write_text(fleet.read_text().replace(f'"{first.path.name}"', f'"{HELD}"'))
        assert f'"{HELD}"' in fleet.read_text()
        self._gateway = FaultyGateway(fleet, folder / "gateway.log", patience_s=PATIENCE_S)
        stack.enter_context(self._gateway)
        self._faults = Faults({name: FaultyDevice(self._fleet, name) for name in DEVICES})
        stack.callback(self._faults.abort)
        self._changes = Changes(fleet, (first.path, second.path), seed)
        stack.callback(self._changes.finish)
        truth = truth_file(folder / "truth.json", {first.digest: "", second.digest: SECOND})
        options = ("--fleet", fleet, "--gateway", self._gateway.host, "--truth", truth, "--follow")
        self._clients = Clients(stack, STYLES, seed, *options, "--deadline-ms", deadline_ms)

    def run(self, answers: int) -> dict[str, Any]:
        """Load the fleet until so many answers have been compared."""
        clients, began_s = self._clients, time.monotonic()
        faults: list[Fault] = []
        capacity = clients.capacity()
        assert clients.heal(), "answers lack members before any fault"
        rates = [LOAD * rate for rate in capacity]
        done: Sequence[Mapping[str, Any]] = ()
        while (left := answers - count_compared(done)) > 0:
            seconds = min(max(left / sum(rates), LEAST_S), MOST_S)
            ending = dict.fromkeys(DEVICES, 1.0)
            more = schedule(self._seed + len(faults), seconds, ending, FAULT_EVERY_S)
            clients.begin(seconds, rates, goes_on=bool(done))
            self._faults.begin(more)
            self._changes.begin()
            done = clients.results(seconds)
            self._faults.finish()
            self._changes.finish()
            faults += more
            print(
                f"{count_compared(done):,} answers after {time.monotonic() - began_s:.0f} s",
                flush=True,
            )
        return {
            "seconds": round(time.monotonic() - began_s),
            "capacity_per_s": [round(rate, 1) for rate in capacity],
            "answers": count_compared(done),
            "faults": {k: sum(kinds[k] for kinds in count_faults(faults).values()) for k in KINDS},
            "changes": dict(self._changes.counts),
            "clients": [{"style": s, **d} for s, d in zip(STYLES, done, strict=True)],
            "healed": clients.heal(),
        }

    def finish(self) -> list[str]:
        """End all processes; returns every unexpected event of the run."""
        ended = self._clients.finish()
        self._faults.stop_all()
        found = [*self._faults.complaints, *self._changes.complaints, *self._gateway.complaints()]
        return [*found, *ended]


def count_compared(clients: Sequence[Mapping[str, Any]]) -> int:
    """The number of answers of these clients that were compared with the truth."""
    counts = [client["counts"] for client in clients]
    return sum(count.get("complete", 0) + count.get("partial", 0) for count in counts)


def failures(result: Mapping[str, Any]) -> list[str]:
    """The promises that were broken."""
    found = list(result["complaints"])
    for client in result["clients"]:
        found += find_broken(client["style"], client)
        found += [
            f"the {client['style']} client: no answer of the {name} bundle"
            for name, begin in (("first", ""), ("second", SECOND))
            if not client["begins"].get(begin)
        ]
    if not result["changes"].get("changes"):
        found.append("the bundle was never changed")
    if not result["healed"]:
        found.append("after the last fault, calls still lack members")
    return found


def main() -> int:
    """Run, print, keep; 1 if a promise was broken."""
    asked = arguments(
        __doc__, "keep", answers=30_000, seed=1, deadline_ms=300.0, label="idle",
        out=Path("runs/truth.json"),
    )  # fmt: skip
    # A terminated run ends its agents and clients too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    result: dict[str, Any] = {
        "machine": describe_machine(), "label": asked.label, "seed": asked.seed,
        "deadline_ms": asked.deadline_ms,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        chaos = Chaos(Path(name), stack, asked.seed, asked.deadline_ms)
        result |= chaos.run(asked.answers)
        result["complaints"] = chaos.finish()
    result["failures"] = failures(result)
    path = RESULTS / "truth.json" if asked.keep else asked.out
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    runs = [*(run for run in runs if run["label"] != asked.label), result]
    write_json(path, {"runs": runs})
    if asked.keep:
        PAGE.write()
    for client in result["clients"]:
        late = f"late by {client['late_p50_ms']:.1f} ms (p50), {client['late_p99_ms']:.1f} (p99)"
        most = f"{client['overshoot_ms']:.1f} at most"
        print(f"{client['style']}: {client['counts']}, {client['reasons']}; {late}, {most}")
    print(result["faults"], result["changes"], f"{result['answers']:,} answers", sep="\n")
    print("\n".join(result["failures"]) or "every promise held")
    return int(bool(result["failures"]))


if __name__ == "__main__":
    sys.exit(main())
