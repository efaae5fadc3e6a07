"""A fleet under load for a long time, among kills, stops and restarts.

    python -m benchmarks.soak --minutes 30 --keep

Three members and a replica of the second are agents with keys; a synchronous and an asynchronous
client call them at 80 % of what they managed together with all agents well. Every agent is killed,
stopped or restarted every few seconds, by a seeded schedule; one is only stopped, so that its
memory is watched for the whole time.

Ends with 1 unless
- every call ended, once, and with its own picture's label (a picture has one colour of a grid, and
  the logits state each crop's distance from it);
- every call ended by its deadline, plus OVERDUE_S for a busy machine;
- no process holds more files, sockets or threads than before the load;
- no process that lived for half of the run has grown by more than GROWTH_MIB over it, by the upper
  end of the 95 % interval of its trend;
- all agents answer again after the last fault, and end with 0 on SIGTERM.
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

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.options import arguments
from benchmarks.harness.results import RESULTS
from benchmarks.soak.faults import KINDS, Fault, Faults, schedule
from benchmarks.soak.page import PAGE
from benchmarks.soak.pictures import DEVICES, write_colour_bundle
from benchmarks.soak.watch import Watch, as_rows, grown, trends
from mdp.files import write_json
from mdp.testing.agents import AgentFleet
from mdp.testing.processes import LineProcess

REPLICA = f"{DEVICES[1]}/second"
#: Only stopped, never ended.
SURVIVOR = DEVICES[2]
LOAD = 0.8
CAPACITY_S = 6.0
#: On a machine that is short of everything; nothing waits so long unless it fails.
PATIENCE_S = 300.0
#: Seconds after its deadline from which a call counts as hung.
OVERDUE_S = 30.0
GROWTH_MIB = 16.0
#: Calls under way at once where the asynchronous client goes as fast as it can.
AT_ONCE, MANY = 4, 64


class Soak:
    """One run: the fleet, its clients, and its result."""

    def __init__(self, folder: Path, stack: ExitStack, seed: int, deadline_ms: float) -> None:
        self._seed = seed
        bundle = write_colour_bundle(folder / "bundle").path
        self._fleet = AgentFleet(folder, bundle, keys=True, patience_s=PATIENCE_S)
        stack.enter_context(self._fleet).start_all(*DEVICES, REPLICA)
        self._faults = Faults(self._fleet)
        stack.callback(self._faults.abort)
        self._clients: dict[str, LineProcess] = {}
        for place, style in enumerate(("sync", "async")):
            command = [sys.executable, "-m", "benchmarks.soak.client", "--seed", seed + place,
                       "--fleet", self._fleet.write(), "--style", style,
                       "--deadline-ms", deadline_ms]  # fmt: skip
            client = LineProcess(f"the {style} client", command, patience_s=PATIENCE_S)
            self._clients[style] = stack.enter_context(client)
            client.line_with("connected")

    def _pids(self) -> dict[str, int]:
        """The processes that are watched."""
        clients = {f"{style} client": client for style, client in self._clients.items()}
        watched: dict[str, LineProcess] = {**clients, **self._fleet.agents}
        return {name: process.process.pid for name, process in watched.items()}

    def load(
        self,
        seconds: float,
        rates: Sequence[float | None],
        faults: Sequence[Fault] = (),
        at_once: int = AT_ONCE,
    ) -> list[dict[str, Any]]:
        """Calls and faults for so long; returns each client's result."""
        for client, rate in zip(self._clients.values(), rates, strict=True):
            client.say(json.dumps({"seconds": seconds, "rate": rate, "at_once": at_once}))
        self._faults.begin(faults)
        patience_s = seconds + PATIENCE_S
        done = [json.loads(c.line("a result", patience_s)) for c in self._clients.values()]
        self._faults.finish()
        return done

    def heal(self) -> bool:
        """Whether every call has an answer of all members again, soon."""
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            counts = [done["counts"] for done in self.load(1.0, [10.0, 10.0])]
            if all(count.get("complete", 0) == count["begun"] for count in counts):
                return True
        return False

    def run(self, seconds: float) -> dict[str, Any]:
        """Measure the fleet's capacity, load it, and compare what processes hold."""
        with Watch(self._pids) as watch:
            # Starts every thread that cuts pictures.
            self.load(3.0, [None, None], at_once=MANY)
            capacity = self.load(CAPACITY_S, [None, None])
            rates = [line["counts"]["ended"] / CAPACITY_S for line in capacity]
            assert self.heal(), "answers lack members before any fault"
            before = watch.now()
            faults = schedule(self._seed, seconds, [*DEVICES, REPLICA], SURVIVOR)
            began_s = time.monotonic()
            done = self.load(seconds, [LOAD * rate for rate in rates], faults)
            ended_s = time.monotonic()
            healed = self.heal()
            # Descriptors and threads are released with a delay.
            settled_s = time.monotonic() + PATIENCE_S / 10
            while grown(before, after := watch.now()) and time.monotonic() < settled_s:
                time.sleep(0.5)
        samples = [sample for sample in watch.samples if began_s < sample.at_s < ended_s]
        return {
            "capacity_per_s": [round(rate, 1) for rate in rates],
            "rate_per_s": [round(LOAD * rate, 1) for rate in rates],
            "faults": [sum(f.kind == kind for f in faults) for kind in KINDS],
            "clients": [{"style": s, **d} for s, d in zip(self._clients, done, strict=True)],
            "healed": healed,
            "before": as_rows(before),
            "after": as_rows(after),
            "grown": grown(before, after),
            "trends": trends(samples, ended_s - began_s),
        }

    def finish(self) -> list[str]:
        """End all processes; returns every unexpected event of the run."""
        codes = [(style, client.finish()) for style, client in self._clients.items()]
        self._faults.stop_all()
        ended = [f"the {style} client ended with {code}" for style, code in codes if code]
        return [*self._faults.complaints, *ended]


def failures(result: Mapping[str, Any]) -> list[str]:
    """The promises that were broken."""
    found = list(result["complaints"])
    for client in result["clients"]:
        who, counts = f"the {client['style']} client", client["counts"]
        if client["open"] or counts["begun"] != counts["ended"]:
            found.append(f"{who}: {counts['begun']} calls begun, {counts['ended']} ended")
        found += [f"{who}: {wrong}" for wrong in client["wrong"]]
        if client["overshoot_ms"] > OVERDUE_S * 1e3:
            found.append(f"{who}: a call ended {client['overshoot_ms']:.0f} ms after its deadline")
        if client["counters"]["malformed"]:
            found.append(f"{who}: {client['counters']['malformed']} malformed replies")
        if not counts.get("complete"):
            found.append(f"{who}: no answer of all members in the whole run")
    if not result["healed"]:
        found.append("after the last fault, calls still lack members")
    found += [f"more than before the load: {text}" for text in result["grown"]]
    for row in result["trends"]:
        most = (row["mib_per_hour"] + row["mib_per_hour_margin"]) * row["seconds"] / 3600
        if most > GROWTH_MIB:
            found.append(f"{row['process']}: may have grown by {most:.1f} MiB over the run")
    return found


def main() -> int:
    """Run, print, keep; 1 if a promise was broken."""
    asked = arguments(
        __doc__, "keep", minutes=2.0, seed=1, deadline_ms=300.0, out=Path("runs/soak.json")
    )
    # A terminated run ends its agents and clients too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    result: dict[str, Any] = {
        "machine": describe_machine(), "minutes": asked.minutes, "seed": asked.seed,
        "deadline_ms": asked.deadline_ms,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        soak = Soak(Path(name), stack, asked.seed, asked.deadline_ms)
        result |= soak.run(asked.minutes * 60)
        result["complaints"] = soak.finish()
    result["failures"] = failures(result)
    write_json(RESULTS / "soak.json" if asked.keep else asked.out, result)
    if asked.keep:
        PAGE.write()
    for client in result["clients"]:
        print(f"{client['style']} client: {client['counts']}, {client['reasons']}")
    print(*result["trends"], sep="\n")
    print("\n".join(result["failures"]) or "every promise held")
    return int(bool(result["failures"]))


if __name__ == "__main__":
    sys.exit(main())
