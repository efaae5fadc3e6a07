"""Training together over links of 20 Mbit/s, measured beside what is predicted.

    sudo python -m benchmarks.crew.net

Four trainers, each in a network namespace of its own, on one switch; every cable has 20 Mbit/s in
each direction (`tc tbf`). Needs root and iproute2. Computing is played by sleeping: a tenth of a
ViT of 384 x 3 on two cores at 27 GFLOP/s, a network of 23 MB as one of 2.3 MB, so that computing
and bytes keep their proportion. Two-tier plans take two sites of two, though no trunk is slower
here. Writes benchmarks/results/crew-net.json.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.crew.played import FORWARD, Case, Cases, seconds
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.results import RESULTS
from mdp.files import write_json

RESULT = RESULTS / "crew-net.json"
TRAINERS, MBIT, PORT = 4, 20, 29400
#: Payload of an Ethernet frame, as tbf counts it.
PAYLOAD = 1448 / 1514
BYTES_PER_S = MBIT * 1e6 / 8 * PAYLOAD
LAYERS, WIDTH, PICTURES = 4, 380, 16
SIZE = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
#: 226 GFLOP for 64 pictures at 27 GFLOP/s, a tenth of it.
STEP_S = 226 / 27 / 10 / 4
RATIO = {"fp32": 1.0, "fp16": 0.5, "int8": (1 + 4 / 256) / 4}
#: What goes through a cable at once, and what may wait in front of it: no packet is lost.
_BURST_BYTES, _QUEUE_BYTES = 3_100, 8_000_000


def ran(*command: str) -> None:
    """Run a command of iproute2."""
    subprocess.run(command, check=True)


@contextmanager
def namespaces(count: int) -> Iterator[list[str]]:
    """Namespaces of trainers on one switch, which have 10.77.0.1 and so on; removed at the end."""
    mark = f"mdp-crew-{os.getpid()}-"
    switch, names = mark + "switch", [f"{mark}{n}" for n in range(count)]
    tbf = ["tbf", "rate", f"{MBIT}mbit", "burst", str(_BURST_BYTES), "limit", str(_QUEUE_BYTES)]
    try:
        ran("ip", "netns", "add", switch)
        ran("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        ran("ip", "-n", switch, "link", "set", "br0", "up")
        for number, name in enumerate(names):
            port = f"port{number}"
            ran("ip", "netns", "add", name)
            ran("ip", "link", "add", "eth0", "netns", name, "type", "veth",
                "peer", "name", port, "netns", switch)  # fmt: skip
            ran("ip", "-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            ran("ip", "-n", switch, "link", "set", port, "master", "br0")
            for where, interface in ((name, "eth0"), (switch, port)):
                ran("ip", "-n", where, "link", "set", interface, "up")
                ran("tc", "-n", where, "qdisc", "replace", "dev", interface, "root", *tbf)
            ran("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in [*names, switch]:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def base(**more: Any) -> Case:
    """Four equal trainers."""
    case = Case(
        name="", how="gradients", picture_s=(STEP_S / PICTURES,) * TRAINERS, pictures=PICTURES,
        steps=6, layers=LAYERS, width=WIDTH, uplink=(4.0, 2.0, 3.0, 1.0),
        sites=("a", "a", "b", "b"),
    )  # fmt: skip
    return msgspec.structs.replace(case, **more)


def headline() -> list[Case]:
    """The rival, and rounds; one trainer alone is known: it sleeps."""
    return [
        base(name="one trainer alone", how="alone", steps=8),
        base(name="DDP: gradients, ring, fp32", steps=8, bucket_bytes=SIZE // LAYERS),
        base(
            name="rounds of 16 steps, two_phase, int8", how="rounds", steps=96,
            every=16 * PICTURES * TRAINERS, route="two_phase", codec="int8",
        ),
    ]  # fmt: skip


def plans() -> list[Case]:
    """What predictions are compared on."""
    routes = (("ring", "fp32"), ("ring", "fp16"), ("two_phase", "fp32"), ("two_phase", "int8"),
              ("two_tier", "int8"))  # fmt: skip
    found = []
    for (route, codec), buckets in [(routes[0], 1), *((route, LAYERS) for route in routes)]:
        found.append(
            base(
                name=f"gradients, {route}, {codec}, {buckets} buckets", route=route, codec=codec,
                bucket_bytes=SIZE // buckets + 1,
            )
        )  # fmt: skip
    for (route, codec), every in product(routes, (4, 16)):
        found.append(
            base(
                name=f"parameters, {route}, {codec}, every {every} steps", how="rounds",
                steps=16, every=every * PICTURES * TRAINERS, route=route, codec=codec,
            )
        )  # fmt: skip
    return found


def mean_s(route: str, codec: str, vectors: float = 1.0) -> float:
    """Seconds of a mean of `vectors` of the network, of equal trainers at one switch.

    TODO: replace by partitioner.crew.planning.flows.
    """
    size = SIZE * RATIO[codec] * vectors
    # Two tiers: up, between two leaders, and down.
    sent = 3 * size if route == "two_tier" else 2 * (TRAINERS - 1) / TRAINERS * size
    return sent / BYTES_PER_S


def predicted_s(case: Case) -> float:
    """Seconds of a step, those at the end of the epoch included."""
    mean = mean_s(case.route, case.codec)
    if case.how == "gradients":
        forward = FORWARD * STEP_S
        exposed = mean / max(1, round(SIZE / case.bucket_bytes))
        return forward + max(STEP_S - forward, mean - exposed) + exposed
    steps = case.every / PICTURES / TRAINERS
    settling = mean_s(case.route, "fp32", vectors=2.0) / case.steps
    return STEP_S + (mean + STEP_S / 2) / steps + settling


def main() -> None:
    """Measure and write."""
    cases = [*headline(), *plans()]
    asked = Cases(
        trainers=TRAINERS, hosts=tuple(f"10.77.0.{n + 1}" for n in range(TRAINERS)), port=PORT,
        cases=tuple(cases),
    )  # fmt: skip
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder, namespaces(TRAINERS) as names:
        Path(folder, "cases.json").write_bytes(msgspec.json.encode(asked))
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
            "GLOO_SOCKET_IFNAME": "eth0",
        }  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.crew.played", folder]
        started = [
            subprocess.Popen(["ip", "netns", "exec", name, *command, str(rank)], env=environment)
            for rank, name in enumerate(names)
        ]
        if sum(process.wait() for process in started):
            raise SystemExit("a trainer failed")
        said = [
            msgspec.json.decode(Path(folder, f"said-{rank}.json").read_bytes())
            for rank in range(TRAINERS)
        ]
    measured = {case.name: seconds(case.name, said) / case.steps for case in cases}
    # One trainer takes a step of all four's pictures.
    one = measured["one trainer alone"]
    result: dict[str, Any] = {
        "machine": machine,
        "computing": "played by sleeping",
        "link_mbit_per_s": MBIT,
        "network_bytes": SIZE,
    }
    result["speed of four over one"] = {
        case.name: round(one / measured[case.name], 2) for case in headline()[1:]
    }
    rows = []
    for case in plans():
        ratio = predicted_s(case) / measured[case.name]
        sent = [trainer[case.name]["sent_bytes"] for trainer in said]
        rows.append(
            {
                "plan": case.name,
                "measured_s": round(measured[case.name], 3),
                "predicted_s": round(predicted_s(case), 3),
                "error": round(ratio - 1, 3),
                "sent_bytes": sent,
            }
        )
    errors = [abs(predicted_s(case) / measured[case.name] - 1) for case in plans()]
    result["seconds of a step"] = rows
    result["median error"] = round(median(errors), 3)
    write_json(RESULT, result)
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
