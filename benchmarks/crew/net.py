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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.crew.played import NETWORK, Case, Cases, seconds
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from mdp.files import write_json
from partitioner.crew.planning.facts import Facts, Line, Trainer
from partitioner.crew.planning.methods import Methods
from partitioner.crew.planning.syncplan import NetworkSync
from partitioner.crew.planning.work import NetworkWork

RESULT = RESULTS / "crew-net.json"
TRAINERS, MBIT, PORT = 4, 20, 29400
LAYERS, WIDTH, PICTURES = 4, 380, 16
SIZE = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
#: 226 GFLOP for 64 pictures at 27 GFLOP/s, a tenth of it.
STEP_S = 226 / 27 / 10 / 4
#: What a late timer of this machine lets through at once, 13 ms, so that a cable loses none of its
#: rate beside other work; and what may wait in front of it: no packet is lost.
_BURST_BYTES, _QUEUE_BYTES = 32_000, 8_000_000
LINES = Case(name="lines", how="lines", picture_s=(), pictures=0, steps=0)


def ran(*command: str) -> None:
    """Run a command of iproute2."""
    subprocess.run(command, check=True)


@contextmanager
def namespaces(count: int, mbit: int = MBIT) -> Iterator[list[str]]:
    """Namespaces of trainers on one switch, which have 10.77.0.1 and so on; removed at the end."""
    mark = f"mdp-crew-{os.getpid()}-"
    switch, names = mark + "switch", [f"{mark}{n}" for n in range(count)]
    tbf = ["tbf", "rate", f"{mbit}mbit", "burst", str(_BURST_BYTES), "limit", str(_QUEUE_BYTES)]
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


def run_in(
    names: Sequence[str], cases: Sequence[Case], port: int, module: str, kind: type[Cases] = Cases
) -> list[dict[str, Any]]:
    """Figures that each trainer, a process of `module` in a namespace, gives of cases, by name."""
    asked = kind(
        trainers=len(names), hosts=tuple(f"10.77.0.{n + 1}" for n in range(len(names))),
        port=port, cases=tuple(cases),
    )  # fmt: skip
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
        "GLOO_SOCKET_IFNAME": "eth0",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "cases.json").write_bytes(msgspec.json.encode(asked))
        command = [sys.executable, "-m", module, folder]
        started = [
            subprocess.Popen(["ip", "netns", "exec", name, *command, str(rank)], env=environment)
            for rank, name in enumerate(names)
        ]
        try:
            if any(process.wait() for process in started):
                raise SystemExit("a trainer failed")
        finally:
            for process in started:
                process.kill()
        return [
            msgspec.json.decode(Path(folder, f"said-{rank}.json").read_bytes())
            for rank in range(len(names))
        ]


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
    """Cases that predictions are compared on."""
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


def facts_of(said: list[dict[str, Any]]) -> Facts:
    """Trainers of known pace, and lines as these trainers measured them."""
    names = [f"t{rank}" for rank in range(TRAINERS)]
    pace = {NETWORK: PICTURES / STEP_S}
    return Facts(
        trainer=tuple(
            Trainer(name=name, address="10.77.0.1", memory_bytes=2**36, pictures_per_s=pace, site=s)
            for name, s in zip(names, base().sites, strict=True)
        ),
        line=tuple(
            Line(
                a=names[a], b=names[int(b)], latency_s=late, bytes_per_s=out, back_bytes_per_s=back
            )
            for a, trainer in enumerate(said)
            for b, (late, out, back) in trainer[LINES.name]["lines"].items()
        ),
    )


def predict_s(case: Case, facts: Facts) -> float:
    """Seconds of a step as the planner has them, and a step's part of the end of the epoch."""
    methods, n = Methods(facts), TRAINERS
    sync = NetworkSync(
        name=NETWORK, by=facts.names, what="gradients" if case.how == "gradients" else "parameters",
        route=case.route, codec=case.codec,
        every_pictures=case.every or None,
        bucket_bytes=case.bucket_bytes if case.how == "gradients" else None,
    )  # fmt: skip
    network = NetworkWork(
        name=NETWORK, size_bytes=SIZE, pictures=case.steps * n * PICTURES, epochs=1,
        batch=n * PICTURES,
    )  # fmt: skip
    method = methods.predict(network, sync)
    assert method
    seconds = network.batch / method.pictures_per_s
    if case.how == "gradients":
        return seconds
    # Moments, two vectors, are averaged as they are.
    return seconds + methods.links.mean(case.route, facts.names).of(2 * SIZE) / case.steps


def figures() -> str:
    result, rows = read_result(RESULT.stem), []
    for what in ("gradients", "parameters", ""):
        found = [row for row in result["seconds of a step"] if row["plan"].startswith(what)]
        wrong = sorted(row["error"] for row in found)
        row = {"least": wrong[0], "most": wrong[-1], "median": median(map(abs, wrong))}
        rows.append(row | {"plans": f"{len(wrong)} {what or 'in all'}"})
    speeds = result["speed of four over one"] | result["rivals"]
    errors = table(
        rows,
        ("plans", "{plans}"),
        ("error of seconds predicted", "{least:+.0%} to {most:+.0%}"),
        ("median", "{median:.0%}"),
    )
    return f"{table(speeds.items(), ('averaged', '{0[0]}'), ('speed', '{0[1]:.2f}'))}\n\n{errors}"


PAGE = Page("benchmarks.crew.net", figures)


def main() -> None:
    """Measure and write."""
    cases = [LINES, *headline(), *plans()]
    machine = describe_machine()
    with namespaces(TRAINERS) as names:
        said = run_in(names, cases, PORT, "benchmarks.crew.played")
    measured = {case.name: seconds(case.name, said) / case.steps for case in cases[1:]}
    facts = facts_of(said)
    # One trainer takes a step of all four's pictures.
    one = measured["one trainer alone"]
    result: dict[str, Any] = {
        "machine": machine,
        "computing": "played by sleeping",
        "link_mbit_per_s": MBIT,
        "network_bytes": SIZE,
        "rivals": read_result(RESULT.stem)["rivals"],  # of benchmarks.crew.rivals
    }
    result["speed of four over one"] = {
        case.name: round(one / measured[case.name], 2) for case in headline()[1:]
    }
    rows: list[dict[str, Any]] = []
    for case in plans():
        predicted = predict_s(case, facts)
        sent = [trainer[case.name]["sent_bytes"] for trainer in said]
        rows.append(
            {
                "plan": case.name,
                "measured_s": round(measured[case.name], 3),
                "predicted_s": round(predicted, 3),
                "error": round(predicted / measured[case.name] - 1, 3),
                "sent_bytes": sent,
            }
        )
    result["seconds of a step"] = rows
    result["median error"] = round(median(abs(row["error"]) for row in rows), 3)
    write_json(RESULT, result)
    PAGE.write()


if __name__ == "__main__":
    main()
