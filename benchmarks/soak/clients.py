"""The client processes of a run: load, capacity, and whether the fleet is well again."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mdp.testing.processes import LineProcess

#: On a machine that is short of everything; nothing waits so long unless it fails.
PATIENCE_S = 300.0
CAPACITY_S = 6.0
#: Calls under way at once where a client goes as fast as it can.
AT_ONCE, MANY = 4, 64


class Clients:
    """A process for each style of asking (`benchmarks.soak.client`)."""

    def __init__(
        self, stack: ExitStack, styles: Mapping[str, int], seed: int, *options: object
    ) -> None:
        """Start them, each style with so many threads; `options` are more of the command's own."""
        self.processes: dict[str, LineProcess] = {}
        for place, (style, threads) in enumerate(styles.items()):
            command = [sys.executable, "-m", "benchmarks.soak.client", "--seed", seed + place,
                       "--style", style, "--threads", threads, *options]  # fmt: skip
            client = LineProcess(f"the {style} client", command, patience_s=PATIENCE_S)
            self.processes[style] = stack.enter_context(client)
        for client in self.processes.values():
            client.line_with("connected")

    def begin(
        self,
        seconds: float,
        rates: Sequence[float | None],
        *,
        at_once: int = AT_ONCE,
        goes_on: bool = False,
    ) -> None:
        """Have each call at its rate, in pictures a second, or as fast as it can without one.

        With `goes_on`, its next result counts on from its last one.
        """
        for client, rate in zip(self.processes.values(), rates, strict=True):
            load = {"seconds": seconds, "rate": rate, "at_once": at_once, "goes_on": goes_on}
            client.say(json.dumps(load))

    def results(self, seconds: float) -> list[dict[str, Any]]:
        """Each one's result of the load of so many seconds that has begun."""
        patience_s = seconds + PATIENCE_S
        return [json.loads(c.line("a result", patience_s)) for c in self.processes.values()]

    def capacity(self) -> list[float]:
        """Pictures a second that each manages while all go as fast as they can."""
        # Starts every thread that cuts pictures.
        everything = [None] * len(self.processes)
        self.begin(3.0, everything, at_once=MANY)
        self.results(3.0)
        self.begin(CAPACITY_S, everything)
        return [done["counts"]["ended"] / CAPACITY_S for done in self.results(CAPACITY_S)]

    def heal(self) -> bool:
        """Wait until every call has an answer of all members again; False if it takes too long."""
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            self.begin(1.0, [10.0] * len(self.processes))
            counts = [done["counts"] for done in self.results(1.0)]
            if all(0 < count["begun"] == count.get("complete", 0) for count in counts):
                return True
        return False

    def finish(self) -> list[str]:
        """End them; returns what was wrong with that."""
        codes = [(style, client.finish()) for style, client in self.processes.items()]
        return [f"the {style} client ended with {code}" for style, code in codes if code]


def find_broken(style: str, client: Mapping[str, Any]) -> list[str]:
    """The promises about every call that one client's result shows as broken."""
    who, counts, found = f"the {style} client", client["counts"], []
    if client["open"] or counts["begun"] != counts["ended"]:
        found.append(f"{who}: {counts['begun']} calls begun, {counts['ended']} ended")
    found += [f"{who}: {wrong}" for wrong in client["wrong"]]
    if client["counters"].get("malformed"):
        found.append(f"{who}: {client['counters']['malformed']} malformed replies")
    if not counts.get("complete"):
        found.append(f"{who}: no answer of all members in the whole run")
    unforeseen = {
        reason: count
        for reason, count in client["reasons"].items()
        if reason.startswith("HTTP") and reason != "HTTP 503"
    }
    return found + [f"{who}: {count} times {reason}" for reason, count in unforeseen.items()]


def truth_file(path: Path, truth: Mapping[str, str]) -> Path:
    """Write what the labels of each bundle begin with, by its digest."""
    path.write_text(json.dumps(dict(truth)))
    return path
