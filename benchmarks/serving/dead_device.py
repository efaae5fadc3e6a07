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
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any

from benchmarks.harness.resampling import ratio_interval
from benchmarks.harness.serving_fleet import STUB, client_of, stub_fleet
from mdp import Client
from mdp.cli.bench import noise_picture, percentiles
from mdp.errors import InferenceError
from mdp.testing.agents import AgentFleet
from mdp.testing.processes import until

NAME = "dead-device"
SIDE = 224
AGENTS = 3
VICTIM = f"device-{AGENTS - 1}"
COMPUTE_MS, DEADLINE_MS = 5.0, 100.0
#: How often a device is lost, and calls each time: until it is known, and after that.
CYCLES, UNKNOWN, KNOWN = 12, 10, 150
KILLED, STOPPED = "SIGKILL", "SIGSTOP"


def call_ms(client: Client) -> tuple[float, bool]:
    """What a caller waits for an answer or an error, and whether all members were in it."""
    picture = noise_picture(SIDE)
    started_s = time.perf_counter()
    try:
        whole = not client.classify(picture, deadline_ms=DEADLINE_MS).partial
    except InferenceError:
        whole = False
    return (time.perf_counter() - started_s) * 1e3, whole


def lose(fleet: AgentFleet, how: str) -> None:
    if how == KILLED:
        fleet.agents[VICTIM].kill()
    else:
        fleet.agents[VICTIM].stop()


def bring_back(fleet: AgentFleet, how: str, client: Client) -> None:
    """Have the victim serve again, and wait until it takes part."""
    if how == KILLED:
        fleet.restart(VICTIM, "--compute-ms", COMPUTE_MS, program=STUB)
    else:
        fleet.agents[VICTIM].signal(signal.SIGCONT)
    until(lambda: call_ms(client)[1], "the device is taken back")


def measure(how: str) -> dict[str, Any]:
    """Cycles of losing a device and of taking it back, beside a healthy fleet."""
    unknown, known, healthy = [], [], []
    with ExitStack() as stack:
        fleets = [
            stack.enter_context(stub_fleet(AGENTS, "--compute-ms", COMPUTE_MS, side=SIDE))
            for _ in range(2)
        ]
        whole, hurt = (stack.enter_context(client_of(fleet)) for fleet in fleets)
        for client in (whole, hurt) * KNOWN:  # warm up
            call_ms(client)
        for _ in range(CYCLES):
            lose(fleets[1], how)
            unknown.append([call_ms(hurt)[0] for _ in range(UNKNOWN)])
            pairs = [(call_ms(hurt)[0], call_ms(whole)[0]) for _ in range(KNOWN)]
            known.append([hurt_ms for hurt_ms, _ in pairs])
            healthy.append([whole_ms for _, whole_ms in pairs])
            bring_back(fleets[1], how, hurt)
    everything = [*chain(*unknown, *known)]
    known_ms, healthy_ms = (percentiles([*chain(*ms)], (50, 99)) for ms in (known, healthy))
    latency_ms = {**percentiles(everything, (50, 99)), "max": max(everything)}
    return {
        "device": how,
        "deadline_ms": DEADLINE_MS,
        "cycles": CYCLES,
        "calls": len(everything),
        "latency_ms": latency_ms,
        "promise": {point: latency_ms[point] / DEADLINE_MS for point in ("p99", "max")},
        "waited_per_cycle": sum(ms > DEADLINE_MS / 2 for ms in everything) / CYCLES,
        "known_ms": known_ms,
        "healthy_ms": healthy_ms,
        "known_over_healthy": known_ms["p50"] / healthy_ms["p50"],
        "known_over_healthy_95": ratio_interval(known, healthy, 50),
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
