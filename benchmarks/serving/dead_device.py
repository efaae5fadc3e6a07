"""Calls of a fleet that has lost a device, beside those of a healthy one.

    python -m benchmarks.serving --only dead-device      # about 1 minute

Two fleets of three stub agents each compute for some milliseconds. In every cycle one fleet loses
its last device, by SIGKILL or by SIGSTOP, and both are called in turns: first calls
during which its client has to find out, then more. The device comes back before the next
cycle, and calls go on until it takes part again. Reported are

    promise   p99 and the longest of all latencies, over the deadline
    known     p50 of the calls once the device is known to be gone, over the healthy fleet's
    waited    calls per cycle that took longer than half of the deadline
"""

import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.resampling import ratio_interval
from benchmarks.harness.serving_fleet import ServedFleet, stub_fleet
from mdp import Client
from mdp.cli.bench import noise_picture, percentiles
from mdp.errors import InferenceError

NAME = "dead-device"
SIDE = 224
AGENTS = 3
VICTIM = f"device-{AGENTS - 1}"
COMPUTE_MS, DEADLINE_MS = 5.0, 100.0
#: How often a device is lost, and calls each time: until it is known, and after that.
CYCLES, UNKNOWN, KNOWN = 12, 10, 150
KILLED, STOPPED = "SIGKILL", "SIGSTOP"
PATIENCE_S = 60.0


@dataclass(slots=True)
class _Seen:
    unknown: list[list[float]] = field(default_factory=list)
    known: list[list[float]] = field(default_factory=list)
    healthy: list[list[float]] = field(default_factory=list)


def call_ms(client: Client) -> tuple[float, bool]:
    """What a caller waits for an answer or an error, and whether all members were in it."""
    picture = noise_picture(SIDE)
    started_s = time.perf_counter()
    try:
        whole = not client.classify(picture, deadline_ms=DEADLINE_MS).partial
    except InferenceError:
        whole = False
    return (time.perf_counter() - started_s) * 1e3, whole


def lose(fleet: ServedFleet, how: str) -> None:
    process = fleet.processes[VICTIM]
    if how == KILLED:
        process.kill()
    else:
        process.signal(signal.SIGSTOP)


def bring_back(fleet: ServedFleet, how: str, client: Client) -> None:
    """Have the victim serve again, and wait until it takes part."""
    if how == KILLED:
        fleet.restart(VICTIM)
    else:
        fleet.processes[VICTIM].signal(signal.SIGCONT)
    until_s = time.monotonic() + PATIENCE_S
    while not call_ms(client)[1]:
        assert time.monotonic() < until_s, "the device was not taken back"
        time.sleep(0.05)


def measure(how: str) -> dict[str, Any]:
    """Cycles of losing a device and of taking it back, beside a healthy fleet."""
    seen = _Seen()
    compute = ("--compute-ms", COMPUTE_MS)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folders = [Path(name) / which for which in ("whole", "hurt")]
        whole, hurt = (
            stack.enter_context(stub_fleet(folder, AGENTS, *compute, side=SIDE))
            for folder in folders
        )
        healthy, client = (stack.enter_context(fleet.client()) for fleet in (whole, hurt))

        def calls(count: int, of: Client) -> list[float]:
            return [call_ms(of)[0] for _ in range(count)]

        calls(KNOWN, healthy), calls(KNOWN, client)  # warm up
        for _ in range(CYCLES):
            lose(hurt, how)
            seen.unknown.append(calls(UNKNOWN, client))
            # In turns, and both as often.
            pairs = [(calls(1, client)[0], calls(1, healthy)[0]) for _ in range(KNOWN)]
            seen.known.append([hurt_ms for hurt_ms, _ in pairs])
            seen.healthy.append([whole_ms for _, whole_ms in pairs])
            bring_back(hurt, how, client)
    return summary(how, seen)


def summary(how: str, seen: _Seen) -> dict[str, Any]:
    """The figures of one way to lose a device."""
    everything = [ms for block in (*seen.unknown, *seen.known) for ms in block]
    known, healthy = (
        [ms for block in blocks for ms in block] for blocks in (seen.known, seen.healthy)
    )
    waited = sum(ms > DEADLINE_MS / 2 for ms in everything)
    known_p50, healthy_p50 = (percentiles(values, (50,))["p50"] for values in (known, healthy))
    return {
        "device": how,
        "deadline_ms": DEADLINE_MS,
        "cycles": len(seen.known),
        "calls": len(everything),
        "latency_ms": {**percentiles(everything, (50, 99)), "max": max(everything)},
        "promise": {
            "p99": percentiles(everything, (99,))["p99"] / DEADLINE_MS,
            "max": max(everything) / DEADLINE_MS,
        },
        "waited_per_cycle": waited / len(seen.known),
        "known_ms": percentiles(known, (50, 99)),
        "healthy_ms": percentiles(healthy, (50, 99)),
        "known_over_healthy": known_p50 / healthy_p50,
        "known_over_healthy_95": ratio_interval(seen.known, seen.healthy, 50),
    }


def run() -> Iterator[dict[str, Any]]:
    for how in (KILLED, STOPPED):
        yield measure(how)


COLUMNS = (
    ("device lost by", "{device}"),
    ("losses", "{cycles}"),
    ("calls", "{calls}"),
    ("p99 over the deadline", "{promise[p99]:.3f}"),
    ("longest", "{promise[max]:.3f}"),
    ("calls that waited, per loss", "{waited_per_cycle:.1f}"),
    ("p50 ms once known", "{known_ms[p50]:.2f}"),
    ("healthy fleet's", "{healthy_ms[p50]:.2f}"),
    ("ratio (95 %)", "{known_over_healthy:.2f} "
     "({known_over_healthy_95[0]:.2f}-{known_over_healthy_95[1]:.2f})"),
)  # fmt: skip
