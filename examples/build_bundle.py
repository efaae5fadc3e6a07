"""Build a bundle from Python: plan, look at the plan, then train, export and measure.

python examples/build_bundle.py run.toml bundle/

run.toml is the file of `mdp-partition build --config`, with profiles and data in it; the same
command goes on with a build that was stopped. Needs pip install '.[partition]'.
"""

import sys

import mdp
from partitioner import api


def main(settings: str, out: str) -> None:
    """Print who would run what, build, and print what each combination is worth."""
    config = api.read_config(settings)
    asked, epochs = config.options, config.schedule.epochs
    try:
        planned = api.plan(config.plan, data=asked.data, epochs=epochs, weights=asked.weights)
    except mdp.PlanRefused as refused:
        sys.exit(str(refused))
    for seat in planned.plan.assignments:
        print(f"{seat.device}: sub-model {seat.k}, {seat.predicted_ms.total:.1f} ms")
    report = api.build(config, out, progress=api.Progress())
    for subset in report.evaluation.subsets:
        print(f"members {subset.members}: {subset.stacked:.1%}")
    bundle = mdp.Bundle.open(out)
    print(f"{bundle.path}: {len(bundle.manifest.labels)} classes, digest {bundle.digest[:12]}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: build_bundle.py SETTINGS BUNDLE")
    main(*sys.argv[1:])
