"""What early termination does: how often answers end early, and whether labels change.

    python -m benchmarks.fusion.early --bundle examples/bundles/cifar10 --data cifar10

Runs the members once on the test pictures (and the calibration pictures, to compare rules), then
plays every picture through a real session in every order of arrival. Nothing is timed but by the
plan's own predictions, so a busy machine is as good as an idle one: half a minute for 10,000
pictures and three members. Writes benchmarks/results/early.json and the figures of its page.
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, kept
from benchmarks.harness.tables import table
from mdp.errors import InputError
from mdp.files import write_json
from mdp.formats.bundle import Bundle
from mdp.fusion.early_exit import early_pairs, lead, part_of
from mdp.fusion.fuse import Contribution, fuse, weights_for
from mdp.requests.prediction import Judge, Prediction
from mdp.requests.session import Finish, Replied, Session
from partitioner.data.datasets import open_dataset
from partitioner.export.evaluate import run_on
from partitioner.run.progress import Progress

Parts = Mapping[int, Contribution]
Labels = NDArray[np.int64]


def play(judge: Judge, parts: Parts, order: Sequence[int], times_ms: Sequence[float]) -> Prediction:
    """The answer to one picture whose members arrive in this order, at these times."""
    session = Session({k: [str(k)] for k in order}, deadline_s=1e6, enough=judge.enough)
    session.start(now_s=0.0, unavailable={})
    for k, at_ms in zip(order, times_ms, strict=True):
        came = Replied(
            device=str(k), contribution=parts[k], queue_ms=0.0, compute_ms=0.0, now_s=at_ms / 1e3
        )
        for action in session.handle(came):
            assert isinstance(action, Finish)
            answer = judge.conclude(action, latency_ms=partial(float, at_ms), deadline_ms=1e9)
            assert isinstance(answer, Prediction)
            return answer
    raise AssertionError("every member has arrived")


def measure_order(
    bundle: Bundle, parts: Parts, targets: Labels, order: Sequence[int], times_ms: Sequence[float]
) -> dict[str, Any]:
    """What becomes of all pictures `[N]` whose members arrive in one order."""
    judge, labels = Judge(bundle, "stacked"), bundle.manifest.labels
    whole = fuse(parts, weights_for(sorted(order), "stacked", bundle.fusion_weights())).argmax(1)
    ended = np.zeros(len(order), dtype=int)
    changed = right = 0
    latency_ms = 0.0
    for at, target in enumerate(targets):
        picture = {k: Contribution(part.boost[at], part.bag[at]) for k, part in parts.items()}
        answer = play(judge, picture, order, times_ms)
        ended[len(answer.used) - 1] += 1
        label = labels.index(answer.label)
        changed += bool(label != whole[at])
        right += bool(label == target)
        latency_ms += answer.latency_ms
    count = len(targets)
    return {
        "order": [bundle.manifest.plan.assignments[k].device for k in order],
        "ended_after": (ended / count).tolist(),
        "changed_labels": int(changed),
        "accuracy": right / count,
        "accuracy_of_all": float((whole == targets).mean()),
        "mean_ms": latency_ms / count,
        "mean_ms_of_all": times_ms[-1],
    }


def compare_rules(bundle: Bundle, calibration: Parts, test: Parts) -> list[dict[str, Any]]:
    """For every pair of members possible and arrived: what three bounds on the margin do.

    `span`: the sum of the awaited members' largest spans (largest less smallest logit, weighted);
    `pull`: the rule; `changed`: the largest margin of a calibration picture whose label changed.
    """
    rows = []
    for members, arrived in early_pairs(len(test)):
        weights = weights_for(members, "stacked", bundle.fusion_weights())
        awaited = [k for k in members if k not in arrived]
        seen = []
        for parts in (calibration, test):
            partial = fuse(parts, part_of(weights, arrived, bias=True))
            missing = fuse(parts, part_of(weights, awaited, bias=False))
            leaders, margins = lead(partial)
            pulls = missing.max(1) - missing[np.arange(len(missing)), leaders]
            seen.append((margins, pulls, (partial + missing).argmax(1) != leaders))
        margins, pulls, changed = seen[0]
        spans = [fuse(calibration, part_of(weights, [k], bias=False)) for k in awaited]
        bounds = {
            "span": sum(float((g.max(1) - g.min(1)).max()) for g in spans),
            "pull": max(0.0, float(pulls.max())),
            "changed": float(margins[changed].max(initial=0.0)),
        }
        margins, _, changed = seen[1]
        rows.append(
            {
                "members": members,
                "arrived": arrived,
                "bounds": bounds,
                "ended": {name: float((margins > b).mean()) for name, b in bounds.items()},
                "changed_labels": {
                    name: int(((margins > b) & changed).sum()) for name, b in bounds.items()
                },
            }
        )
    return rows


def figures(content: dict[str, Any]) -> str:
    last = {row["order"][-1]: row for row in content["orders"]}
    orders = table(
        last.values(),
        ("last to arrive", "{order[2]}"),
        ("ends after 1", "{ended_after[0]:.1%}"),
        ("after 2", "{ended_after[1]:.1%}"),
        ("labels changed", "{changed_labels}"),
        ("accuracy", "{accuracy:.2%}"),
        ("waiting for all", "{accuracy_of_all:.2%}"),
        ("mean ms", "{mean_ms:.2f}"),
        ("waiting for all", "{mean_ms_of_all:.2f}"),
    )
    rules = table(
        [rule for rule in content["rules"] if len(rule["arrived"]) + 1 == len(rule["members"])],
        ("possible", lambda rule: "+".join(map(str, rule["members"]))),
        ("arrived", lambda rule: "+".join(map(str, rule["arrived"]))),
        ("ends by span (changed)", "{ended[span]:.1%} ({changed_labels[span]})"),
        ("by pull, the rule", "{ended[pull]:.1%} ({changed_labels[pull]})"),
        ("by margins of changed labels", "{ended[changed]:.1%} ({changed_labels[changed]})"),
    )
    return (
        f"{content['bundle']}, {content['pictures']:,} test pictures of {content['data']}, bounds "
        f"from {content['calibration_pictures']:,} calibration pictures; the plan's predicted "
        f"milliseconds, the shortest for the first to arrive, in either order of the first two."
        f"\n\n{orders}\n\n{rules}"
    )


PAGE = Page("benchmarks.fusion.early", lambda: figures(kept("early")))


def main() -> None:
    parser = argparse.ArgumentParser(description="What early termination does.")
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--keep", action="store_true", help="Write result and page.")
    asked = parser.parse_args()
    bundle, data, progress = Bundle.open(asked.bundle), open_dataset(asked.data), Progress()
    if bundle.manifest.early is None:
        raise InputError(f"{asked.bundle}: has no bounds: run mdp-partition evaluate")
    if bundle.manifest.provenance.get("calibration_digest") != data.calibration.digest:
        raise InputError(f"{asked.data}: expected the pictures of which {asked.bundle} was made")
    with TemporaryDirectory() as cache:
        test, _ = run_on(bundle, data.test, "test", Path(cache), progress)
        calibration, _ = run_on(bundle, data.calibration, "calibration", Path(cache), progress)
    plan = bundle.manifest.plan
    by_time = sorted(a.predicted_ms.total for a in plan.assignments)
    content: dict[str, Any] = {
        "machine": describe_machine(),
        "bundle": bundle.manifest.name,
        "data": Path(data.source).name,
        "pictures": len(data.test),
        "calibration_pictures": bundle.manifest.early.pictures,
        "orders": [
            measure_order(bundle, test, data.test.targets, order, by_time)
            for order in permutations(range(len(test)))
        ],
        "rules": compare_rules(bundle, calibration, test),
    }
    print(figures(content))
    if asked.keep:
        write_json(RESULTS / "early.json", content)
        PAGE.write()


if __name__ == "__main__":
    main()
