"""Any camera, k of n and fused beside each other on the solids of the benchmark, cameras lost.

    python -m benchmarks.line.rules --scenes solids/test --scratch FOLDER

SCENES has `CLASS/<scene>/<camera>.jpg`, and `unknown/` with items of no class: those that `make
solids` rendered for examples/bundles/parts (its README has the options), or that bundle's own
`scenes`. Each class in turn is the right part: an item of it has to pass, all others have to be
stopped, its near twin above all. The models of the bundle answer for each camera, the answers are
fused and judged as `mdp watch` does. Writes benchmarks/results/line-rules.json.
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.options import arguments
from benchmarks.harness.results import RESULTS
from mdp.client.crops import Cutter
from mdp.files import write_json
from mdp.formats.bundle import Bundle
from mdp.fusion.fuse import Contribution
from mdp.line.rules import LineRules, judge, look_of
from mdp.requests.prediction import AnswerBuilder, Prediction
from mdp.requests.reason import UNREACHABLE
from mdp.requests.session import Arrival, Finish
from mdp.runtimes.base import Execution
from mdp.runtimes.select import open_runtime

RESULT = RESULTS / "line-rules.json"
PARTS = Path(__file__).parents[2] / "examples" / "bundles" / "parts"
UNKNOWN = "unknown"
#: Of benchmarks.scenes.solid_items.
TWINS = (
    ("hex_nut", "square_nut"), ("flange_nut", "cap_nut"), ("socket_screw", "button_screw"),
    ("countersunk_screw", "oval_screw"), ("plain_washer", "lock_washer"),
    ("ball_bearing", "roller_bearing"),
)  # fmt: skip
SURE_FROM = 0.5


def twin_of(label: str) -> str:
    """The class that looks most like it."""
    pair = next(pair for pair in TWINS if label in pair)
    return pair[pair[0] == label]


def rules_for(right: str) -> Mapping[str, LineRules]:
    """Ways to tell the class `right` from all others."""
    passing, twin = frozenset((right,)), twin_of(right)
    ways = {"fused": LineRules(passing=passing, sure_from=SURE_FROM)}
    for votes, name in ((1, "any"), (2, "2 of 4"), (3, "3 of 4"), (4, "4 of 4")):
        ways[f"right part by {name}"] = LineRules(
            needed={right: votes}, passing=passing, sure_from=SURE_FROM
        )
    for votes, name in ((1, "any"), (2, "2 of 4")):
        ways[f"fused, twin stops by {name}"] = LineRules(
            needed={twin: votes}, passing=passing, sure_from=SURE_FROM
        )
    return ways


def answers_of(bundle: Bundle, scenes: Path) -> list[tuple[str, dict[int, Contribution]]]:
    """Class and every member's logits of each scene."""
    assignments = bundle.manifest.plan.assignments
    cutter = Cutter({one.k: one for one in assignments})
    runtimes = {
        one.k: open_runtime(
            bundle.model(one.k), Execution.of(one), num_classes=len(bundle.manifest.labels)
        )
        for one in assignments
    }
    found = []
    for scene in sorted(path for path in scenes.glob("*/*") if path.is_dir()):
        views = cutter.views({one.camera or one.device: scene / f"{one.camera}.jpg"
                              for one in assignments})  # fmt: skip
        told = {}
        for one in assignments:
            view = views[one.k]
            pixels = np.frombuffer(view.pixels, np.uint8).reshape(
                1, view.image_size, view.image_size, 3
            )
            batch = runtimes[one.k].run(pixels)
            told[one.k] = Contribution.of([head[0] for head in batch.heads])
        found.append((scene.parent.name, told))
    return found


def answer(
    bundle: Bundle, builder: AnswerBuilder, told: Mapping[int, Contribution], lost: int | None
) -> Prediction:
    """The fused answer, without the camera of member `lost`."""
    devices = {one.k: one.device for one in bundle.manifest.plan.assignments}
    arrived = {
        k: Arrival(
            device=devices[k], contribution=one, queue_ms=0.0, compute_ms=0.0, network_ms=0.0
        )
        for k, one in told.items()
        if k != lost
    }
    missing = {} if lost is None else {devices[lost]: UNREACHABLE}
    made = builder.build(Finish(arrived=arrived, missing=missing, timed_out=False), 100.0)
    assert isinstance(made, Prediction), made
    return made


def main() -> None:
    options = arguments(__doc__, scenes=str(PARTS / "scenes"))
    machine = describe_machine()
    bundle = Bundle.open(PARTS)
    builder = AnswerBuilder(bundle, "stacked", opinions=True)
    scenes = answers_of(bundle, Path(options.scenes))
    assignments = bundle.manifest.plan.assignments
    labels = bundle.manifest.labels
    kinds = Counter(label for label, _ in scenes)
    rows: list[dict[str, Any]] = []
    for lost in (None, *(one.k for one in assignments)):
        seen = [
            (label, answer(bundle, builder, told, lost))
            for label, told in scenes
            if label in labels or label == UNKNOWN
        ]
        counts: dict[str, Counter[str]] = {}
        for right in labels:
            for way, rules in rules_for(right).items():
                count = counts.setdefault(way, Counter())
                for label, prediction in seen:
                    passed = judge(look_of(prediction, len(assignments)), rules).passed
                    kind = "other"
                    if label == right:
                        kind = "right"
                    elif label == twin_of(right):
                        kind = "twin"
                    elif label == UNKNOWN:
                        kind = "unknown"
                    count[kind] += 1
                    count[f"{kind}_passed"] += passed
        camera = "none" if lost is None else str(assignments[lost].camera)
        rows += [{"lost": camera, "way": way, **count} for way, count in counts.items()]
    told = {
        "machine": machine,
        "scenes": sum(kinds[label] for label in labels),
        "unknown": kinds[UNKNOWN],
        "rows": rows,
    }
    write_json(RESULT, told)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
