"""Gather the recorded runs that accuracy is predicted from, and fit the law to them.

    python -m benchmarks.accuracy.predictor            (print the law and its errors)
    python -m benchmarks.accuracy.predictor --check    (what it was not fitted to, predicted)
    python -m benchmarks.accuracy.predictor --write    (rewrite what ships with the package)

Sources: our own runs of accuracy.json and shapes.json, an evaluated bundle, families that an
accelerator trained (family-subsets.json), untouched networks that see parts of the picture
(part-subsets.json), members of a real teacher (REAL_TEACHER), and published-vits.csv.
"""

import argparse
import csv
from pathlib import Path

import numpy as np

from benchmarks.law.errors import Checked, check_run, cross_validate, fit, on_file, spread_of
from benchmarks.law.fit import fit_law
from mdp.files import read_json, write_json
from mdp.formats.bundle import Bundle
from mdp.formats.plan import SubModelSpec
from partitioner.estimates.accuracy import FittedLaw
from partitioner.estimates.accuracy_law import AccuracyLaw, Training
from partitioner.estimates.accuracy_records import (
    RecordedMember,
    RecordedRun,
    Records,
    record_subsets,
    run_of_bundle,
)
from partitioner.estimates.macs import macs

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LAW = ROOT / "partitioner" / "estimates" / "accuracy_law.json"
BUNDLE = ROOT / "tests" / "support" / "plain_vits"
_IMAGENET_PICTURES = 50_000
#: ViT-S/16 at 224 px, rounded up.
_VIT_S_MACS = 4.7e9
#: Recipes in which larger models gain nothing, for want of pictures or augmentation, and whose
#: level no larger model tells: predicted, and not fitted to.
NOT_FITTED = ("augreg_in1k", "sam_in1k", "orig_in21k_ft_in1k", "test_vit r160_in1k")


def main() -> None:
    """Print, and write if asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy.predictor", description=__doc__
    )
    parser.add_argument("--write", action="store_true", help="rewrite the package's law")
    parser.add_argument(
        "--check", action="store_true", help="predict what the law was not fitted to"
    )
    asked = parser.parse_args()
    runs = gather()
    if asked.check:
        check(runs)
        return
    fitted = fit(runs)
    show(fitted)
    if asked.write:
        write_json(LAW, fitted)


def gather() -> list[RecordedRun]:
    """Every run, in a fixed order."""
    runs = read_json(RESULTS / "small-vit-subsets.json", Records).runs
    runs.append(run_of_bundle(BUNDLE, Bundle.open(BUNDLE).manifest))
    runs += [*read_json(RESULTS / "family-subsets.json", Records).runs, real_teacher()]
    runs += read_json(RESULTS / "part-subsets.json", Records).runs
    return runs + [run for run in published_runs() if not run.source.endswith(NOT_FITTED)]


def real_teacher() -> RecordedRun:
    """Imagenette: 4,000 training pictures, 6 epochs, 1,500 test pictures, a ViT-Ti/16 of
    ImageNet-1k at 160 px; three members of `build --latency-ms 8`, by their own and all three.
    """
    epochs = (6.0, 4.2, 4.2)
    shapes = ((128, 192, 6), (128, 160, 5), (160, 192, 7))
    return RecordedRun(
        name="real teacher",
        source="imagenette, 4,000 pictures",
        teacher=_plain(160, 16, 192, 12, 3),
        teacher_accuracy=0.973,
        members=[
            RecordedMember(
                submodel=_plain(size, 16, width, depth, width // 32),
                training=Training(pictures=4000, epochs=epochs[k]),
            )
            for k, (size, width, depth) in enumerate(shapes)
        ],
        subsets=record_subsets([((0,), 0.741), ((1,), 0.709), ((2,), 0.76), ((0, 1, 2), 0.787)]),
        pictures=1500,
        num_classes=10,
    )


def published_runs() -> list[RecordedRun]:
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
                subsets=record_subsets([((0,), round(float(row["top1"]) / 100, 5))]),
                pictures=_IMAGENET_PICTURES,
            )
        )
    return runs


def _sizes(row: dict[str, str]) -> tuple[int, int, int]:
    return (int(row["image_size"]), int(row["patch_size"]), int(row["embed_dim"]))


def _shape(row: dict[str, str]) -> SubModelSpec:
    ratio = int(row["mlp_dim"]) / int(row["embed_dim"])
    return _plain(*(_sizes(row)), int(row["depth"]), int(row["num_heads"]), ratio)


def _plain(
    image_size: int, patch_size: int, embed_dim: int, depth: int, heads: int, ratio: float = 4.0
) -> SubModelSpec:
    return SubModelSpec(
        image_size=image_size,
        patch_size=patch_size,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=heads,
        mlp_ratio=ratio,
    )


def check(runs: list[RecordedRun]) -> None:
    """Predicted against measured, each source left out: published models of at most ViT-S/16's
    cost, and our trainings: every member alone, and the largest subset of each run.
    """
    rest = [run for run in published_runs() if run.source.endswith(NOT_FITTED)]
    law = fit_law(runs)
    checked = cross_validate(runs, lambda run: run.source)
    others = [one for run in rest for one in check_foreign(law, run)]
    small = [
        one
        for one in [*checked, *others]
        if one.how == "published" and macs(one.run.members[0].spec, 0) <= _VIT_S_MACS
    ]
    print(
        "| published model, its recipe left out | published | predicted | off |\n|---|---|---|---|"
    )
    for one in small:
        print(f"| {one.run.name} | {_percent(one.measured)} | {_format_check(one)} |")
    fitted = [one.off for one in small if one in checked]
    print(
        f"\nsigned mean of the {len(fitted)} whose recipes are fitted to otherwise: "
        f"{100 * np.mean(fitted):+.2f} points\n"
    )
    print("| training, its source left out | measured | predicted | off | interval | inside |")
    print("|---|---|---|---|---|---|")
    offs, inside = [], []
    for one in checked:
        whole = one.members == one.run.subsets[-1].members
        if one.how == "published" or not (whole or len(one.members) == 1):
            continue
        wide = spread_of([o for o in checked if o.run.source != one.run.source], one.how)
        low, high = (-np.expm1(-one.predicted * np.exp(sign * wide)) for sign in (-1, 1))
        holds = low <= one.measured <= high
        offs.append(abs(one.off))
        inside.append(holds)
        names = " + ".join(one.run.members[k].spec.words for k in one.members)
        print(
            f"| {one.run.name}: {names} | {_percent(one.measured)} | {_format_check(one)} "
            f"| {_percent(low)} to {_percent(high)}{', unknown' * (one.how == 'unknown')} "
            f"| {'yes' if holds else 'no'} |"
        )
    print(
        f"\nmedian error {100 * np.median(offs):.1f} points, {sum(inside)} of {len(inside)} inside"
    )


def check_foreign(law: AccuracyLaw, run: RecordedRun) -> list[Checked]:
    """A run that is no part of the fit."""
    return check_run(law, on_file([]), run)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _format_check(one: Checked) -> str:
    return f"{_percent(one.measured + one.off)} | {100 * one.off:+.1f}"


def show(fitted: FittedLaw) -> None:
    """The law's constants and errors, for people."""
    law, alone, errors = fitted.law, fitted.law.alone, fitted.errors
    for name, value in zip(("width", "depth", "tokens"), alone.exponents, strict=True):
        print(f"{name:16} {value:.3f}")
    for name in (
        "scale", "level", "blur", "classes", "pixels", "cut", "pretrained", "scratch", "area",
        "untouched_area",
    ):  # fmt: skip
        print(f"{name:16} {getattr(alone, name):.3f}")
    print(f"{'sharpness':16} {law.sharpness:.1f}")
    print(f"{'same view':16} {law.same_view:.2f}")
    print(f"{'same family':16} {law.same_model:.2f}")
    print(f"{fitted.runs} runs with {fitted.members} members of {len(fitted.sources)} sources")
    print(f"any subset, its run left out:       {100 * errors.run_left_out:.2f} points off")
    print(f"any subset, its source left out:    {100 * errors.source_left_out:.2f} points off")
    print(f"any subset of an unknown training:  {100 * errors.unknown_left_out:.2f} points off")
    for name, spread in (
        ("taught", errors.taught), ("scratch", errors.scratch), ("unknown", errors.unknown),
    ):  # fmt: skip
        print(f"nine of ten {name}: capability within a factor of {np.exp(spread):.2f}")
    print(f"best subset over its teacher, as capability: {fitted.beyond:.3f}")


if __name__ == "__main__":
    main()
