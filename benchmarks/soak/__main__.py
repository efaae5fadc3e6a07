"""A fleet under load for a long time, among kills, stops and restarts: does anything get lost?

    python -m benchmarks.soak --minutes 30 --keep

Three members and a replica of the second are real agents with keys of their own; two clients, one
of either kind, call them at 80 % of what they managed together with all agents well. Meanwhile
every agent is killed, stopped or restarted every few seconds, by a seeded schedule, but one that is
only stopped, so that there is one whose memory is watched for the whole time.

It ends with 1 unless
- every call ended, once, and with its own picture's label (a picture is one colour of a grid, and
  the logits say how far from it each crop was);
- every call ended by its deadline, but for what a busy machine may add (OVERDUE_S);
- no process holds more files, sockets or threads than before the load;
- no process that lived for half of the run has grown by more than GROWTH_MIB over it, by the upper
  end of the 95 % interval of its trend;
- all agents answer again after the last fault, and end with 0 on SIGTERM.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.results import RESULTS
from benchmarks.soak.faults import Agents, Fault, Kind, schedule
from benchmarks.soak.page import PAGE
from benchmarks.soak.pictures import DEVICES, write_colour_bundle
from benchmarks.soak.watch import Held, Watch, as_rows, grown, trends
from mdp.files import write_json
from mdp.testing.agents import AgentFleet
from mdp.testing.processes import LineProcess, until

#: Fleet entry -> whether it is never ended, only stopped.
REPLICA = f"{DEVICES[1]}/second"
SURVIVOR = DEVICES[2]
LOAD = 0.8
CAPACITY_S = 6.0
#: On a machine that is short of everything; nothing waits so long unless it fails.
PATIENCE_S = 300.0
#: How much a call may overrun its deadline before it counts as hung.
OVERDUE_S = 30.0
GROWTH_MIB = 16.0
#: Calls under way at once where the asynchronous client goes as fast as it can.
AT_ONCE, MANY = 4, 64
#: Points of each line in the picture, at most.
POINTS = 360


class SoakClient(LineProcess):
    """One client process, what it is told, and what it has written."""

    def __init__(self, style: str, seed: int, fleet: Path, deadline_ms: float) -> None:
        self.style = style
        #: A file, as nobody reads a pipe while the load lasts.
        self._written = fleet.parent / f"{style}.jsonl"
        command = [sys.executable, "-m", "benchmarks.soak.client", "--fleet", fleet,
                   "--style", style, "--seed", seed, "--deadline-ms", deadline_ms,
                   "--log", self._written]  # fmt: skip
        super().__init__(f"the {style} client", command, patience_s=PATIENCE_S)
        self.wait("connected", "")

    def lines(self) -> list[dict[str, Any]]:
        """Everything that it has written so far."""
        text = self._written.read_text() if self._written.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def begin(self, name: str, seconds: float, rate: float | None, at_once: int) -> None:
        """Tell it to call at `rate` a second, or without one keep `at_once` calls under way."""
        load = {"name": name, "seconds": seconds, "rate": rate, "at_once": at_once}
        self.say(json.dumps(load))

    def wait(self, kind: str, load: str, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """The line of `kind` about `load`; raises AssertionError if none comes."""
        found: list[dict[str, Any]] = []

        def said() -> bool:
            assert self.process.poll() is None, f"{self.name} ended: {self.process.returncode}"
            time.sleep(0.1)
            found.extend(x for x in self.lines() if (x["kind"], x["load"]) == (kind, load))
            return bool(found)

        until(said, f"{self.name} says {kind} of {load!r}", patience_s)
        return found[0]


class Soak:
    """One run: the fleet, its clients, and what is found out."""

    def __init__(self, folder: Path, stack: ExitStack, seed: int, deadline_ms: float) -> None:
        self._seed = seed
        bundle = write_colour_bundle(folder / "bundle").path
        fleet = AgentFleet(folder, bundle, keys=True, patience_s=PATIENCE_S)
        stack.enter_context(fleet).start_all(*DEVICES, REPLICA)
        self.agents = Agents(fleet)
        stack.callback(self.agents.leave)
        self.clients = [
            stack.enter_context(SoakClient(style, seed + place, fleet.write(), deadline_ms))
            for place, style in enumerate(("sync", "async"))
        ]

    def pids(self) -> dict[str, int]:
        """Everybody who is watched."""
        clients = {f"{client.style} client": client for client in self.clients}
        watched: dict[str, LineProcess] = {**clients, **self.agents.fleet.agents}
        return {name: process.process.pid for name, process in watched.items()}

    def load(
        self,
        name: str,
        seconds: float,
        rates: Sequence[float | None],
        *,
        faults: Sequence[Fault] = (),
        at_once: int = AT_ONCE,
    ) -> list[dict[str, Any]]:
        """Calls and faults for so long; returns what each client said at the end."""
        for client, rate in zip(self.clients, rates, strict=True):
            client.begin(name, seconds, rate, at_once)
        self.agents.begin(faults)
        done = [client.wait("done", name, seconds + PATIENCE_S) for client in self.clients]
        self.agents.finish()
        return done

    def heal(self) -> bool:
        """Whether every call has an answer of all members again, soon."""
        until_s, turn = time.monotonic() + PATIENCE_S, 0
        while time.monotonic() < until_s:
            turn += 1
            done = self.load(f"after-{turn}", 1.0, [10.0, 10.0])
            if all(line["counts"].get("complete", 0) == line["counts"]["begun"] for line in done):
                return True
        return False

    def run(self, seconds: float) -> dict[str, Any]:
        """Measure what the fleet can do, load it, and look at what is left."""
        with Watch(self.pids) as watch:
            # So many that all threads are there that will ever be wanted to cut pictures.
            self.load("warm-up", 3.0, [None, None], at_once=MANY)
            capacity = self.load("capacity", CAPACITY_S, [None, None])
            rates = [line["counts"]["ended"] / CAPACITY_S for line in capacity]
            assert self.heal(), "the fleet was not well before anything happened to it"
            before = watch.now()
            faults = schedule(self._seed, seconds, [*DEVICES, REPLICA], survivors=[SURVIVOR])
            began_s = time.monotonic()
            done = self.load("soak", seconds, [LOAD * rate for rate in rates], faults=faults)
            ended_s = time.monotonic()
            healed = self.heal()
            # Whatever is given back is given back soon.
            settled_s = time.monotonic() + PATIENCE_S / 10
            while grown(before, after := watch.now()) and time.monotonic() < settled_s:
                time.sleep(0.5)
        samples = [sample for sample in watch.samples if began_s < sample.at_s < ended_s]
        return {
            "capacity_per_s": [round(rate, 1) for rate in rates],
            "rate_per_s": [round(LOAD * rate, 1) for rate in rates],
            "faults": [sum(f.kind == kind for f in faults) for kind in get_args(Kind)],
            "clients": [{"style": c.style, **d} for c, d in zip(self.clients, done, strict=True)],
            "healed": healed,
            "before": as_rows(before),
            "after": as_rows(after),
            "grown": grown(before, after),
            "trends": trends(samples, ended_s - began_s),
            "series": _series(self.clients, watch.samples, began_s),
            "happened": [[round(at - began_s, 2), *who] for at, *who in self.agents.happened],
        }

    def wind_up(self) -> list[str]:
        """End everybody; returns what went wrong on the way, and before."""
        codes = [(client.style, client.finish()) for client in self.clients]
        self.agents.stop_all()
        ended = [f"the {style} client ended with {code}" for style, code in codes if code]
        return [*self.agents.complaints, *ended]


def _series(
    clients: Sequence[SoakClient], samples: Sequence[Held], began_s: float
) -> dict[str, list[list[Any]]]:
    """What the picture shows: per client, running counts; per process, what it held."""
    series: dict[str, list[list[Any]]] = {}
    for client in clients:
        lines = [line for line in client.lines() if line["load"] == "soak"]
        series[f"{client.style} calls"] = [
            [round(line["at_s"] - began_s, 1)]
            + [line["counts"].get(kind, 0) for kind in ("complete", "partial", "error")]
            for line in lines
        ]
    for sample in samples:
        row = [round(sample.at_s - began_s, 1), round(sample.rss_bytes / 2**20, 2)]
        series.setdefault(f"{sample.who} held", []).append([*row, sample.files, sample.threads])
    return {name: rows[:: 1 + len(rows) // POINTS] for name, rows in series.items()}


def failures(result: Mapping[str, Any]) -> list[str]:
    """What was promised and did not hold, in words."""
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
            found.append(f"{row['who']}: may have grown by {most:.1f} MiB over the run")
    return found


def main() -> int:
    """Run, print, keep; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--deadline-ms", type=float, default=300.0)
    parser.add_argument("--out", type=Path, default=Path("runs/soak.json"))
    parser.add_argument("--keep", action="store_true", help="write results, page, picture")
    options = parser.parse_args()
    # Whoever ends this process does not leave agents and clients behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    result: dict[str, Any] = {
        "machine": describe_machine(),
        "minutes": options.minutes,
        "seed": options.seed,
        "deadline_ms": options.deadline_ms,
    }
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        soak = Soak(Path(name), stack, options.seed, options.deadline_ms)
        result |= soak.run(options.minutes * 60)
        result["complaints"] = soak.wind_up()
    result["failures"] = failures(result)
    write_json(RESULTS / "soak.json" if options.keep else options.out, result)
    if options.keep:
        PAGE.write()
    for client in result["clients"]:
        print(f"{client['style']} client: {client['counts']}, {client['reasons']}")
    for row in result["trends"]:
        print(row)
    print("\n".join(result["failures"]) or "every promise held")
    return int(bool(result["failures"]))


if __name__ == "__main__":
    sys.exit(main())
