"""All members at once, a cascade, and the best member alone: every test picture, real agents.

    python -m benchmarks.serving.cascade --keep examples/bundles/cifar10=cifar10 \
        examples/bundles/imagenette=imagenette                                   # about 6 minutes

Each bundle is served by `mdp-agent run --threads 1`, an agent a member, on this machine, and its
test pictures are asked for as files, in blocks that take turns. Device milliseconds are what the
agents say that they computed. Members share this machine's cores, so those that compute at once
are in each other's way: the same is simulated with each member on the device of its plan, one
request at a time and as many at random times as keep the busiest device half busy where all are
asked at once. Writes benchmarks/results/cascade.json and the tables of its page.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, kept, measured_on
from benchmarks.harness.tables import table
from mdp.client.sync import Client
from mdp.errors import InputError
from mdp.files import write_json
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import new_fleet
from mdp.formats.profile import read_profile
from mdp.pictures.crop import Picture
from mdp.requests.prediction import Prediction
from mdp.testing.agents import AgentFleet
from partitioner.data.datasets import open_dataset
from partitioner.simulation.answer_accuracy import MeasuredSubsets
from partitioner.simulation.models import Load, Scenario
from partitioner.simulation.outcome import run_scenario
from partitioner.simulation.setup import Assumptions, device_models
from partitioner.simulation.what_ifs import in_stages

#: Pictures that one way is asked for before the next one's turn.
BLOCK = 250
WARM_UP = 20
#: Simulated ones.
REQUESTS = 20_000
#: Nobody is to be late, whatever else runs here.
DEADLINE_MS = 5_000.0
AT_ONCE, CASCADE, ALONE = "all at once", "cascade", "best member alone"


def ask(client: Client, pictures: Sequence[Picture]) -> list[Prediction]:
    return [client.classify(picture, deadline_ms=DEADLINE_MS) for picture in pictures]


def measure(bundle: Bundle, source: str) -> Iterator[dict[str, Any]]:
    """What each way does to the test pictures of `source`; raises InputError."""
    evaluation, plan = bundle.manifest.evaluation, bundle.manifest.plan
    test = open_dataset(source).test
    if evaluation is None or evaluation.data_digest != test.digest:
        raise InputError(f"{source}: expected the test pictures that {bundle.path} was measured on")
    pictures = test.sources
    labels = [bundle.manifest.labels[target] for target in test.targets]
    best = max(evaluation.members, key=lambda member: member.accuracy).device
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        fleet = stack.enter_context(AgentFleet(folder, bundle.path))
        for assignment in plan.assignments:
            fleet.start(assignment.device, "--threads", 1)
        path, alone = fleet.write(), folder / "alone.toml"
        new_fleet(bundle, [f"{best}={fleet.agents[best].address}"], alone)
        clients = {
            AT_ONCE: stack.enter_context(Client.connect(path)),
            CASCADE: stack.enter_context(Client.connect(path, cascade=True)),
            ALONE: stack.enter_context(Client.connect(alone)),
        }
        answers: dict[str, list[Prediction]] = {way: [] for way in clients}
        for client in clients.values():
            ask(client, pictures[:WARM_UP])
        for at in range(0, len(pictures), BLOCK):
            for way, client in clients.items():
                answers[way] += ask(client, pictures[at : at + BLOCK])
    for way, given in answers.items():
        ms = [answer.latency_ms for answer in given]
        yield {
            "bundle": bundle.manifest.name,
            "way": f"{way}: {best}" if way == ALONE else way,
            "pictures": len(given),
            "accuracy": sum(a.label == label for a, label in zip(given, labels, strict=True))
            / len(given),
            "expected": float(np.mean([answer.expected_accuracy or 0.0 for answer in given])),
            "escalated": sum(answer.stage == "escalated" for answer in given) / len(given),
            "late": sum("late" in answer.missing.values() for answer in given),
            "device_ms": sum(m.compute_ms for a in given for m in a.members) / len(given),
            "mean_ms": float(np.mean(ms)),
            "ms": {f"p{point}": float(np.percentile(ms, point)) for point in (50, 99)},
        }


def simulate(bundle: Bundle) -> Iterator[dict[str, Any]]:
    """What each way does where each member has its own device, as the shipped profiles have it."""
    manifest = bundle.manifest
    evaluation, plan = manifest.evaluation, manifest.plan
    assert evaluation is not None
    assert evaluation.cascade is not None
    profiles = {a.device: read_profile(a.device) for a in plan.assignments}
    half_busy = 500.0 / max(a.predicted_ms.compute for a in plan.assignments)
    first, escalated = evaluation.cascade.first, evaluation.cascade.escalated.stacked
    for rate_per_s in (None, half_busy):
        base = Scenario(
            devices=device_models(plan, profiles, len(manifest.labels), Assumptions()),
            load=Load(
                requests=REQUESTS, clients=1 if rate_per_s is None else 4, rate_per_s=rate_per_s
            ),
            deadline_ms=DEADLINE_MS,
        )
        turns = in_stages(frozenset(first), CASCADE, escalated).change(base)
        for way, scenario in ((AT_ONCE, base), (CASCADE, turns)):
            outcome = run_scenario(scenario, MeasuredSubsets(bundle))
            yield {
                "bundle": manifest.name,
                "way": way,
                "rate_per_s": rate_per_s,
                "requests": REQUESTS,
                "busiest": max(device.utilisation for device in outcome.devices.values()),
                "ms": {"p50": outcome.latency_ms.p50, "p99": outcome.latency_ms.p99},
            }


def figures(content: dict[str, Any]) -> str:
    rows = table(
        content["rows"],
        ("bundle", "{bundle}"),
        ("asked", "{way}"),
        ("accuracy", "{accuracy:.2%}"),
        ("said to be", "{expected:.2%}"),
        ("escalated", lambda row: f"{row['escalated']:.1%}" if row["way"] == CASCADE else ""),
        ("device ms", "{device_ms:.2f}"),
        ("mean ms", "{mean_ms:.2f}"),
        ("p50", "{ms[p50]:.2f}"),
        ("p99", "{ms[p99]:.2f}"),
    )
    simulated = table(
        content["simulated"],
        ("bundle", "{bundle}"),
        (
            "requests a second",
            lambda row: f"{row['rate_per_s'] or 0:.0f}" if row["rate_per_s"] else "one at a time",
        ),
        ("asked", "{way}"),
        ("p50 ms", "{ms[p50]:.2f}"),
        ("p99", "{ms[p99]:.2f}"),
        ("busiest device", "{busiest:.0%}"),
    )
    count = content["simulated"][0]["requests"]
    return (
        f"Measured ({measured_on(content['machine'])}):\n\n{rows}\n\n"
        f"Simulated, each member on the device of its plan, {count:,} requests:\n\n{simulated}"
    )


PAGE = Page("benchmarks.serving.cascade", lambda: figures(kept("cascade")))


def main() -> None:
    parser = argparse.ArgumentParser(description="A cascade beside asking all members at once.")
    parser.add_argument("served", nargs="+", metavar="BUNDLE=DATA")
    parser.add_argument("--keep", action="store_true", help="Write result and page.")
    asked = parser.parse_args()
    content: dict[str, Any] = {"machine": describe_machine(), "rows": [], "simulated": []}
    for text in asked.served:
        path, _, source = text.partition("=")
        content["rows"] += measure(Bundle.open(path), source)
        content["simulated"] += simulate(Bundle.open(path))
    print(figures(content))
    if asked.keep:
        write_json(RESULTS / "cascade.json", content)
        PAGE.write()


if __name__ == "__main__":
    main()
