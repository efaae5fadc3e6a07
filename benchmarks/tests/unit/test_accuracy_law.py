"""The accuracy law: what ships is fitted to what the benchmarks have measured."""

import csv
import math

import msgspec
import numpy as np
import pytest

from benchmarks.accuracy import predictor as maker
from benchmarks.law.errors import on_file
from benchmarks.law.fit import BLUR, fit_law
from benchmarks.law.runs import has_untouched
from mdp.errors import InputError
from mdp.formats.plan import SubModelSpec
from partitioner.estimates.accuracy import Predictor, read_shipped_law
from partitioner.estimates.accuracy_law import (
    AccuracyLaw,
    LawMember,
    capability_of,
    model_of,
    together,
    view_of,
)
from partitioner.estimates.accuracy_records import (
    RecordedMember,
    RecordedRun,
    alone_of,
    predict_capabilities,
    record_subsets,
)
from partitioner.estimates.macs import macs

BASE = SubModelSpec(
    image_size=224, patch_size=16, embed_dim=768, depth=12, num_heads=12, mlp_ratio=4.0
)


def shape(**changes: object) -> SubModelSpec:
    return msgspec.structs.replace(BASE, **changes)


def test_what_ships_is_fitted_to_what_is_in_the_results() -> None:
    runs = maker.gather()
    shipped = read_shipped_law()
    assert shipped.law == fit_law(runs)
    assert shipped.on_file == on_file(runs)
    # What is left out is harder to predict than what is fitted; neither is off by much.
    errors = shipped.errors
    assert 0.001 < errors.run_left_out <= errors.source_left_out + 1e-3 < 0.03
    assert errors.unknown > errors.taught > 0


def test_published_vits_of_at_most_vit_s_cost_are_predicted_without_bias() -> None:
    law = read_shipped_law().law
    off = []
    for run in maker.published_runs():
        if run.source.endswith(maker.NOT_FITTED) or macs(run.members[0].spec, 0) > 4.7e9:
            continue
        off.append(-math.expm1(-predict_capabilities(law, run)[0]) - run.subsets[0].accuracy)
    assert len(off) > 12
    assert abs(np.mean(off)) < 0.015
    assert np.mean(np.abs(off)) < 0.015
    width, depth, _ = law.alone.exponents
    assert 0.4 < depth / width < 1.0


def test_what_smaller_pictures_cost_networks_is_much_as_published() -> None:
    lines = (maker.RESULTS / "published-sizes.csv").read_text().splitlines()
    lacks: dict[str, list[tuple[int, float]]] = {}
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        lack = 1 / capability_of(float(row["top1"]) / 100)
        lacks.setdefault(row["model"], []).append((int(row["image_size"]), lack))
    blurs = [(a[1] - b[1]) / (1 - (a[0] / b[0]) ** 2) for a, b in lacks.values()]
    assert np.median(blurs) == pytest.approx(BLUR, abs=0.002)
    # Fitted to networks at up to half of their size; these are nearer to it.
    assert BLUR < read_shipped_law().law.alone.blur < 1.5 * BLUR


def test_untouched_networks_are_predicted_in_parts_and_on_the_whole() -> None:
    law = read_shipped_law().law
    off = [
        -math.expm1(-predict_capabilities(law, run)[k]) - accuracy
        for run in maker.gather()
        if has_untouched(run)
        for k, accuracy in alone_of(run).items()
    ]
    assert len(off) == 49
    assert np.median(np.abs(off)) < 0.015


def made_up_runs(law: AccuracyLaw, accuracies: tuple[float, ...] = (0.6, 0.8)) -> list[RecordedRun]:
    """Runs of exactly this law."""
    shapes = [
        shape(embed_dim=width, num_heads=width // 64, depth=depth, image_size=size)
        for width, depth, size in ((384, 12, 224), (576, 6, 160), (192, 8, 128), (768, 4, 192))
    ]
    runs = []
    for number, accuracy in enumerate(accuracies):
        known = Predictor(
            law=law, teacher=BASE, teacher_accuracy=accuracy, assumed=False, factor=1.0,
            typical_error=0.0, num_classes=1000,
        )  # fmt: skip
        capability = known.of_specs(shapes).tolist()
        subsets = [[k] for k in range(4)] + [[0, 1], [2, 3], [0, 1, 2], [0, 1, 2, 3]]
        seen = [
            LawMember(capability=c, view=view_of(s), model=model_of(s))
            for c, s in zip(capability, shapes, strict=True)
        ]
        measured = [
            (subset, 1 - math.exp(-together(law, [seen[k] for k in subset]))) for subset in subsets
        ]
        runs.append(
            RecordedRun(
                name=f"run {number}", source=f"source {number}", teacher=BASE,
                teacher_accuracy=accuracy, members=[RecordedMember(submodel=s) for s in shapes],
                subsets=record_subsets(measured), pictures=1000,
            )
        )  # fmt: skip
    return runs


def with_shape(exponents: tuple[float, float, float], scale: float) -> AccuracyLaw:
    alone = msgspec.structs.replace(read_shipped_law().law.alone, exponents=exponents, scale=scale)
    return AccuracyLaw(alone=alone, sharpness=15.0, same_view=0.3, same_model=0.0)


def test_a_law_is_found_again_in_the_runs_it_made() -> None:
    runs = [*made_up_runs(with_shape((1.5, 0.9, 0.5), 0.1)), *maker.gather()[-60:]]
    made_up = [run for run in runs if run.name.startswith("run ")]
    # Several members of a run count as taught; alone they are like published models.
    published = [
        msgspec.structs.replace(run, members=[m], subsets=record_subsets([((0,), s.accuracy)]))
        for run in made_up
        for m, s in zip(run.members, run.subsets[:4], strict=True)
    ]
    found = fit_law([*published, *made_up])
    assert found.alone.exponents == pytest.approx((1.5, 0.9, 0.5), abs=0.1)
    assert found.sharpness == pytest.approx(15.0, rel=0.15)


def test_nothing_recorded_is_nothing_to_fit() -> None:
    with pytest.raises(InputError, match="expected recorded runs with members that were measured"):
        fit_law([])
