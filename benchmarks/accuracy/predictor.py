"""Gather the recorded runs that accuracy is predicted from, and fit the law to them.

    python -m benchmarks.accuracy.predictor            (print the law and its errors)
    python -m benchmarks.accuracy.predictor --write    (rewrite what ships with the package)

Sources: our own runs of accuracy.json and shapes.json, the evaluated bundle in examples/, and
published-vits.csv.
"""

import argparse
import csv
from pathlib import Path

from benchmarks.accuracy.more_shapes import REGIONS
from benchmarks.accuracy.results import Results
from mdp.files import read_json, write_json
from mdp.formats.bundle import Bundle
from mdp.formats.plan import Region, SubModelSpec
from partitioner.estimates.accuracy import FittedLaw, fit
from partitioner.estimates.accuracy_law import FEATURES
from partitioner.estimates.accuracy_records import (
    RecordedMember,
    RecordedRun,
    Records,
    recorded,
    run_of_bundle,
)
from partitioner.estimates.macs import macs

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
RECORDS = ROOT / "partitioner" / "accuracy_records.json"
LAW = ROOT / "partitioner" / "accuracy_law.json"
BUNDLE = ROOT / "tests" / "support" / "plain_vits"
ABOUT = "made by benchmarks/accuracy/predictor.py from benchmarks/results and examples/bundles"
_IMAGENET_PICTURES = 50_000


def main() -> None:
    """Print, and write if asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy.predictor", description=__doc__
    )
    parser.add_argument("--write", action="store_true", help="rewrite the package's files")
    asked = parser.parse_args()
    runs = gather()
    fitted = fit(runs)
    show(fitted)
    if asked.write:
        write_json(RECORDS, Records(about=ABOUT, runs=runs))
        write_json(LAW, fitted)


def gather() -> list[RecordedRun]:
    """Every run, in a fixed order."""
    runs = of_benchmark("accuracy.json", ("ours",))
    if (RESULTS / "shapes.json").is_file():
        runs += of_benchmark("shapes.json", None)
    runs.append(run_of_bundle(BUNDLE, Bundle.open(BUNDLE).manifest))
    return runs + published()


def of_benchmark(name: str, methods: tuple[str, ...] | None) -> list[RecordedRun]:
    """Runs of some methods, or of all; subsets under the rule that answers use."""
    results = read_json(RESULTS / name, Results)
    teacher = results.configuration["teacher"]["args"]
    assert results.teacher is not None
    data = results.configuration["data"]
    source = f"{data['source']}, {data['limit_train']:,} pictures"
    found = []
    for run in results.runs:
        if methods is not None and run.method not in methods:
            continue
        rule = run.headline
        regions = REGIONS.get(run.method, (Region(),) * len(run.members))
        together = [(s.members, s.accuracy[rule]) for s in run.subsets]
        alone = [((k,), accuracy) for k, accuracy in enumerate(run.alone)]
        # Students without a boost head are fused in another way than ours.
        ours = "boosted" in run.subsets[-1].accuracy
        found.append(
            RecordedRun(
                name=f"{Path(name).stem}: {run.method}, seed {run.seed}",
                source=source,
                teacher=_plain(
                    teacher["img_size"], teacher["patch_size"], teacher["embed_dim"],
                    teacher["depth"], teacher["num_heads"],
                ),
                teacher_accuracy=results.teacher.accuracy,
                members=[
                    RecordedMember(submodel=spec, region=region)
                    for spec, region in zip(run.members, regions, strict=True)
                ],
                subsets=recorded(together if ours else alone),
                pictures=10_000,
            )
        )  # fmt: skip
    return sorted(found, key=lambda run: run.name)


def published() -> list[RecordedRun]:
    """One run per published model, with the largest of its family as teacher."""
    lines = (RESULTS / "published-vits.csv").read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    rows.sort(key=lambda row: macs(_shape(row), 0))
    teachers = {row["family"]: row for row in rows}
    runs = []
    for row in rows:
        teacher = teachers[row["family"]]
        if row is teacher:
            continue
        runs.append(
            RecordedRun(
                name=row["model"],
                source=f"ImageNet-1k, {row['family']}",
                teacher=_shape(teacher),
                teacher_accuracy=round(float(teacher["top1"]) / 100, 5),
                members=[RecordedMember(submodel=_shape(row))],
                subsets=recorded([((0,), round(float(row["top1"]) / 100, 5))]),
                pictures=_IMAGENET_PICTURES,
            )
        )
    return runs


def _sizes(row: dict[str, str]) -> tuple[int, int, int]:
    return (int(row["image_size"]), int(row["patch_size"]), int(row["embed_dim"]))


def _shape(row: dict[str, str]) -> SubModelSpec:
    return _plain(*(_sizes(row)), int(row["depth"]), int(row["num_heads"]))


def _plain(
    image_size: int, patch_size: int, embed_dim: int, depth: int, heads: int
) -> SubModelSpec:
    return SubModelSpec(
        image_size=image_size,
        patch_size=patch_size,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=heads,
        mlp_ratio=4.0,
    )


def show(fitted: FittedLaw) -> None:
    """The law's constants and errors, for people."""
    law, errors = fitted.law, fitted.errors
    for name, value in zip(FEATURES, law.exponents, strict=True):
        print(f"{name:16} {value:.4f}")
    print(f"{'sharpness':16} {law.sharpness:.1f}")
    print(f"{'same view':16} {law.same_view:.2f}")
    print(f"{'same model':16} {law.same_model:.2f}")
    print(f"{'same region':16} {law.same_region:.2f}")
    print(f"{fitted.runs} runs with {fitted.members} members, from {'; '.join(fitted.sources)}")
    print(f"a member alone, its shape left out: {100 * errors.shape_left_out:.2f} points off")
    print(f"any subset, its run left out:       {100 * errors.run_left_out:.2f} points off")
    print(f"any subset, its source left out:    {100 * errors.source_left_out:.2f} points off")


if __name__ == "__main__":
    main()
