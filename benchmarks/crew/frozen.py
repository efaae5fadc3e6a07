"""Frozen passes shared out: trainers of unequal pace on slow cables, and one of them killed.

    python -m benchmarks.crew.frozen          # needs Linux and root

The coordinator and each trainer are in network namespaces on one switch; `tc tbf` holds every cable
to BPS in both directions. Computing is played by sleeping. Writes benchmarks/results/frozen.json.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from mdp.files import write_json
from mdp.testing.wires import Namespace

RESULT = RESULTS / "frozen.json"
BPS = 20_000_000
PACES = (400, 200, 100)
PICTURES, CLASSES, VARIANTS = 20_000, 1_000, (0, 1)
COORDINATOR = "198.18.0.100"


def frozen(pace: float) -> Any:
    """Answers of CLASSES classes, `pace` pictures a second."""
    import torch
    from torch import Tensor

    from partitioner.crew.jobs.answers import FrozenPass

    def outputs_of(variant: int) -> Callable[[Any], Sequence[Tensor]]:
        classes = torch.arange(CLASSES)

        def of(index: Any) -> list[Tensor]:
            time.sleep(len(index) / pace)
            return [torch.sin(torch.from_numpy(index)[:, None] * 0.1 + classes + variant)]

        return of

    return FrozenPass(
        name="answers",
        pictures=PICTURES,
        variants=VARIANTS,
        outputs_of=outputs_of,
        outputs=("logits",),
        arithmetic="fp32",
    )


def train(rank: int, pace: float, port: int) -> None:
    """One trainer."""
    import torch

    from partitioner.crew.bus.control import CoordinatorClient
    from partitioner.crew.bus.store import connect
    from partitioner.crew.jobs.answers import contribute

    torch.set_num_threads(1)
    client = CoordinatorClient(connect(COORDINATOR, port, ""))
    client.join(str(rank), "")
    contribute(client, frozen(pace))
    client.close()


def keep(folder: Path, port: int) -> None:
    """The coordinator: prints when pictures are done, then who did how many in how many seconds."""
    import torch

    from partitioner.crew.bus.control import Coordinator
    from partitioner.crew.bus.store import serve_store
    from partitioner.crew.coordinator.membership import MembershipMachine
    from partitioner.crew.coordinator.watch import Watch
    from partitioner.crew.jobs.answers import share_out
    from partitioner.data.memmaps import load

    torch.set_num_threads(1)
    store = serve_store(COORDINATOR, port, "")
    names = tuple(map(str, range(len(PACES))))
    machine = MembershipMachine("", {"answers": names}, {})
    coordinator = Coordinator(store, machine, Watch(20.0), folder / "log.jsonl")
    while len(coordinator.states) < len(PACES):
        time.sleep(0.01)
    of_rank = {rank: int(name) for rank, name in machine.living.items()}
    done, started_s = 0, time.monotonic()

    def advance(more: int, said: str) -> None:
        nonlocal done
        done += more
        print(json.dumps({"done": done}), flush=True)

    paths = {variant: [folder / f"{variant}.npy"] for variant in VARIANTS}
    found = share_out(coordinator, frozen(float("inf")), paths, advance)
    seconds = time.monotonic() - started_s
    for variant, (path,) in paths.items():
        rows = np.arange(PICTURES)
        wanted = frozen(float("inf")).outputs_of(variant)(rows)[0].numpy().astype(np.float16)
        assert np.array_equal(load(path), wanted)
    pictures = {of_rank[rank]: count for rank, count in found.pictures.items()}
    while coordinator.states:  # they read that the pass is over
        time.sleep(0.01)
    coordinator.close()
    outcome = {
        "seconds": seconds,
        "pictures": [pictures.get(rank, 0) for rank in range(len(PACES))],
        "row_bytes": found.row_bytes,
        "repeated": found.repeated,
        "unequal": found.unequal,
    }
    print(json.dumps(outcome), flush=True)


def network(stack: contextlib.ExitStack) -> list[Namespace]:
    """The coordinator's namespace and one for each trainer, on one switch."""
    switch = stack.enter_context(contextlib.closing(Namespace()))
    switch.run("ip", "link", "add", "switch", "type", "bridge")
    switch.run("ip", "link", "set", "switch", "up")
    made = []
    for number in range(1 + len(PACES)):
        machine = stack.enter_context(contextlib.closing(Namespace()))
        port = f"port{number}"
        machine.run("ip", "link", "set", "lo", "up")
        switch.run("ip", "link", "add", port, "type", "veth",
                   "peer", "name", "cable", "netns", machine.pid)  # fmt: skip
        address = COORDINATOR if number == 0 else f"198.18.0.{number}"
        machine.run("ip", "address", "add", f"{address}/24", "dev", "cable")
        switch.run("ip", "link", "set", port, "master", "switch")
        for end, name in ((machine, "cable"), (switch, port)):
            end.run("ip", "link", "set", name, "up")
            end.run("tc", "qdisc", "replace", "dev", name, "root", "tbf", "rate", f"{BPS}bit",
                    "burst", BPS // 2000, "latency", "100ms")  # fmt: skip
        made.append(machine)
    return made


def measure_run(killed: int | None) -> dict[str, Any]:
    """One run; the trainer `killed` is killed when half of the pictures are done."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        coordinator, *machines = network(stack)

        def start(machine: Namespace, *what: object, **options: Any) -> Any:
            command = [sys.executable, "-m", "benchmarks.crew.frozen", *map(str, what)]
            started = subprocess.Popen([*machine.inside(), *command], env=environment, **options)
            stack.callback(started.wait)
            stack.callback(started.kill)
            return started

        port = 29_400
        owner = start(coordinator, "coordinator", folder, port, stdout=subprocess.PIPE, text=True)
        trainers = [
            start(machine, "trainer", rank, PACES[rank], port)
            for rank, machine in enumerate(machines)
        ]
        outcome: dict[str, Any] = {}
        for line in owner.stdout:
            outcome = json.loads(line)
            if killed is not None and outcome.get("done", 0) >= len(VARIANTS) * PICTURES / 2:
                trainers[killed].kill()
        for rank, trainer in enumerate(trainers):
            assert trainer.wait(60) == (-9 if rank == killed else 0)
    before = after = sum(PACES)
    if killed is not None:
        after -= PACES[killed]
    count = len(VARIANTS) * PICTURES
    ideal_s = count / 2 / before + count / 2 / after
    return {
        "killed": killed,
        "ideal_s": ideal_s,
        "reached": ideal_s / outcome["seconds"],
        **outcome,
    }


def figures() -> str:
    result = read_result(RESULT.stem)

    def format_killed(row: Mapping[str, Any]) -> str:
        paces = result["paces"]
        return "-" if row["killed"] is None else f"that of {paces[row['killed']]}, at half"

    return table(
        result["rows"],
        ("killed", format_killed),
        ("seconds", "{seconds:.1f}"),
        ("reached", "{reached:.2f}"),
        ("pictures by trainer", lambda row: " : ".join(map(str, row["pictures"]))),
        ("MB", lambda row: f"{row['row_bytes'] / 1e6:.1f}"),
    )


PAGE = Page("benchmarks.crew.frozen", figures)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crew.frozen", description=__doc__)
    parser.add_argument("role", nargs="*")
    role, *rest = parser.parse_args().role or [""]
    if role == "trainer":
        train(int(rest[0]), float(rest[1]), int(rest[2]))
    elif role == "coordinator":
        keep(Path(rest[0]), int(rest[1]))
    else:
        rows = [measure_run(killed) for killed in (None, 1)]
        write_json(
            RESULT,
            {
                "machine": describe_machine(),
                "bps": BPS,
                "paces": PACES,
                "pictures": len(VARIANTS) * PICTURES,
                "classes": CLASSES,
                "rows": rows,
            },
        )
        PAGE.write()


if __name__ == "__main__":
    main()
