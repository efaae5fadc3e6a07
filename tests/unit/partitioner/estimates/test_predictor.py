"""The accuracy law: sensible everywhere, fitted to what is on file, and better for being fitted."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.accuracy import predictor as maker
from benchmarks.law.errors import on_file
from benchmarks.law.fit import BLUR, fit_law
from mdp.errors import ConfigError, InputError
from mdp.formats.plan import NetworkSpec, Region, Spec, SubModelSpec
from partitioner.estimates.accuracy import Predictor, predictor_for, shipped_law
from partitioner.estimates.accuracy_law import (
    WHOLE,
    AccuracyLaw,
    Member,
    Start,
    Training,
    capability_of,
    model_of,
    together,
    view_of,
)
from partitioner.estimates.accuracy_records import (
    RecordedMember,
    RecordedRun,
    predicted_of,
    read_runs,
    recorded,
)
from partitioner.estimates.catalogue import catalogue
from partitioner.estimates.macs import macs
from tests.support.bundles import write_bundle

BASE = SubModelSpec(
    image_size=224, patch_size=16, embed_dim=768, depth=12, num_heads=12, mlp_ratio=4.0
)


def shape(**changes: object) -> SubModelSpec:
    return msgspec.structs.replace(BASE, **changes)


def predicted(spec: SubModelSpec, region: Region = WHOLE, accuracy: float = 0.8) -> float:
    known = predictor_for(shipped_law(), BASE, num_classes=1000, teacher_accuracy=accuracy)
    return known.accuracy(float(known.of_specs([spec], [region])[0]))


def network(name: str, image_size: int) -> NetworkSpec:
    return catalogue()[name].spec(image_size, 1000)


def test_what_ships_is_fitted_to_what_is_in_the_results() -> None:
    runs = maker.gather()
    shipped = shipped_law()
    assert shipped.law == fit_law(runs)
    assert shipped.on_file == on_file(runs)
    # What is left out is harder to predict than what is fitted; neither is off by much.
    errors = shipped.errors
    assert 0.001 < errors.run_left_out <= errors.source_left_out + 1e-3 < 0.03
    assert errors.unknown > errors.taught > 0


def test_published_vits_of_at_most_vit_s_cost_are_predicted_without_bias() -> None:
    law = shipped_law().law
    off = []
    for run in maker.published():
        if run.source.endswith(maker.NOT_FITTED) or macs(run.members[0].spec, 0) > 4.7e9:
            continue
        off.append(-math.expm1(-predicted_of(law, run)[0]) - run.subsets[0].accuracy)
    assert len(off) > 12
    assert abs(np.mean(off)) < 0.015
    assert np.mean(np.abs(off)) < 0.015
    width, depth, _ = law.alone.exponents
    assert 0.4 < depth / width < 1.0


def test_what_smaller_pictures_cost_networks_is_as_published() -> None:
    lines = (maker.RESULTS / "published-sizes.csv").read_text().splitlines()
    lacks: dict[str, list[tuple[int, float]]] = {}
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        lack = 1 / capability_of(float(row["top1"]) / 100)
        lacks.setdefault(row["model"], []).append((int(row["image_size"]), lack))
    blurs = [(a[1] - b[1]) / (1 - (a[0] / b[0]) ** 2) for a, b in lacks.values()]
    assert np.median(blurs) == pytest.approx(BLUR, abs=0.002)


def test_networks_and_vits_are_predicted_in_one_list() -> None:
    known = predictor_for(shipped_law(), BASE, num_classes=1000, teacher_accuracy=0.845)
    small = network("tf_efficientnet_lite0", 128)
    own = network("tf_efficientnet_lite0", 224)
    specs: list[Spec] = [shape(embed_dim=192, num_heads=3), small, own]
    vit, blurred, published = (known.accuracy(c) for c in known.of_specs(specs, [WHOLE] * 3))
    assert vit == pytest.approx(0.755, abs=0.03)
    assert published == pytest.approx(0.748, abs=0.02)
    assert blurred < published
    assert model_of(small) == model_of(own) != model_of(specs[0])
    assert view_of(small) != view_of(own)
    with pytest.raises(InputError, match="expected a network of the catalogue, got 'mine'"):
        known.of_specs([msgspec.structs.replace(own, name="mine")], [WHOLE])


def test_no_vit_is_predicted_above_the_best_network_of_its_cost() -> None:
    known = predictor_for(shipped_law(), BASE, num_classes=1000, teacher_accuracy=0.845)
    generous = msgspec.structs.replace(known.law.alone, scale=0.0001)
    law = msgspec.structs.replace(known.law, alone=generous)
    spec = shape(embed_dim=192, num_heads=3)
    [value] = replace(known, law=law).of_specs([spec], [WHOLE])
    best = max(n.top1 for n in catalogue().values() if n.costs[n.image_size].macs <= 1.3e9)
    assert known.accuracy(value) <= best / 100 + 0.02 < 0.845


def test_a_short_training_and_a_start_from_nothing_cost_accuracy() -> None:
    def taught(epochs: float, start: Start = "cut") -> float:
        training = Training(pictures=4000, epochs=epochs, start=start)
        known = predictor_for(
            shipped_law(), BASE, num_classes=10, teacher_accuracy=0.97, training=training
        )
        return known.accuracy(float(known.of_specs([shape(depth=6)], [WHOLE])[0]))

    assert taught(100, "scratch") < taught(6) < taught(100) < 0.97


@pytest.mark.parametrize(
    ("training", "classes", "why"),
    [
        (None, 10, "how long members will be trained was not said"),
        (Training(pictures=100, epochs=1), 10, "no training on file saw about 100 pictures"),
        (Training(pictures=50_000, epochs=8), 1000, "no training on file had more than 40 classes"),
        (Training(pictures=50_000, epochs=8), 10, ""),
    ],
)
def test_what_nothing_on_file_is_like_is_unknown_and_has_a_wide_interval(
    training: Training | None, classes: int, why: str
) -> None:
    known = predictor_for(shipped_law(), BASE, num_classes=classes, training=training)
    assert known.unknown == why
    low, high = known.interval(0.75)
    assert low < 0.75 <= high
    assert (high - low > 0.25) == bool(why)


def test_the_teacher_s_own_shape_is_as_accurate_as_the_teacher() -> None:
    assert predicted(BASE) == pytest.approx(0.8)


@pytest.mark.parametrize(
    "smaller",
    [
        {"embed_dim": 384, "num_heads": 6},
        {"depth": 6},
        {"image_size": 112},
        {"patch_size": 32},
        {"mlp_ratio": 2.0},
        {"image_size": 112, "patch_size": 8},
    ],
)
def test_whatever_is_smaller_is_less_accurate(smaller: dict[str, object]) -> None:
    assert 0.3 < predicted(shape(**smaller)) < 0.8


def test_a_part_of_the_square_costs_accuracy() -> None:
    half = Region(left=0.25, right=0.75, top=0.25, bottom=0.75)
    assert predicted(shape(image_size=112), half) < predicted(shape(image_size=112))


def test_a_weaker_teacher_loses_less_by_being_made_smaller() -> None:
    small = shape(embed_dim=384, num_heads=6)
    assert 0.5 - predicted(small, accuracy=0.5) < 0.9 - predicted(small, accuracy=0.9)


def test_guessing_is_the_least() -> None:
    known = predictor_for(shipped_law(), BASE, num_classes=2, teacher_accuracy=0.6)
    assert known.accuracy(0.01) == 0.5


members = st.builds(
    Member,
    capability=st.floats(0.05, 4),
    view=st.integers(0, 2),
    model=st.integers(0, 2),
)
laws = st.builds(
    AccuracyLaw,
    alone=st.just(shipped_law().law.alone),
    sharpness=st.floats(4, 60),
    same_view=st.floats(0, 0.45),
    same_model=st.floats(0, 0.45),
)


@settings(max_examples=200, deadline=None)
@given(law=laws, several=st.lists(members, min_size=1, max_size=6), more=st.floats(0, 1))
def test_capability_together_only_ever_grows(
    law: AccuracyLaw, several: list[Member], more: float
) -> None:
    whole = together(law, several)
    assert together(law, several[:-1]) <= whole * (1 + 1e-9)
    assert whole >= max(member.capability for member in several) * (1 - 1e-9)
    last = several[-1]
    better = Member(capability=last.capability + more, view=last.view, model=last.model)
    assert together(law, [*several[:-1], better]) >= whole * (1 - 1e-9)


def test_members_that_see_the_same_add_less() -> None:
    law = shipped_law().law
    assert law.same_view > 0
    unlike = [Member(capability=1.0, view=v, model=v) for v in (0, 1)]
    alike = [Member(capability=1.0, view=0, model=v) for v in (0, 1)]
    assert 1.0 < together(law, alike) < together(law, unlike)


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
        capability = known.of_specs(shapes, [WHOLE] * len(shapes)).tolist()
        subsets = [[k] for k in range(4)] + [[0, 1], [2, 3], [0, 1, 2], [0, 1, 2, 3]]
        seen = [
            Member(capability=c, view=view_of(s), model=model_of(s))
            for c, s in zip(capability, shapes, strict=True)
        ]
        measured = [
            (subset, 1 - math.exp(-together(law, [seen[k] for k in subset]))) for subset in subsets
        ]
        runs.append(
            RecordedRun(
                name=f"run {number}", source=f"source {number}", teacher=BASE,
                teacher_accuracy=accuracy, members=[RecordedMember(submodel=s) for s in shapes],
                subsets=recorded(measured), pictures=1000,
            )
        )  # fmt: skip
    return runs


def with_shape(exponents: tuple[float, float, float], scale: float) -> AccuracyLaw:
    alone = msgspec.structs.replace(shipped_law().law.alone, exponents=exponents, scale=scale)
    return AccuracyLaw(alone=alone, sharpness=15.0, same_view=0.3, same_model=0.0)


def test_a_law_is_found_again_in_the_runs_it_made() -> None:
    runs = [*made_up_runs(with_shape((1.5, 0.9, 0.5), 0.1)), *maker.gather()[-60:]]
    made_up = [run for run in runs if run.name.startswith("run ")]
    # Several members of a run count as taught; alone they are like published models.
    published = [
        msgspec.structs.replace(run, members=[m], subsets=recorded([((0,), s.accuracy)]))
        for run in made_up
        for m, s in zip(run.members, run.subsets[:4], strict=True)
    ]
    found = fit_law([*published, *made_up])
    assert found.alone.exponents == pytest.approx((1.5, 0.9, 0.5), abs=0.1)
    assert found.sharpness == pytest.approx(15.0, rel=0.15)


def test_the_user_s_own_runs_pull_the_prediction_toward_them() -> None:
    # Members of this teacher that are worth far less than the law says.
    own = made_up_runs(with_shape((1.2, 0.8, 0.6), 0.9), (0.7,))
    small = [shape(embed_dim=384, num_heads=6)]
    without = predictor_for(shipped_law(), BASE, num_classes=1000, teacher_accuracy=0.7)
    known = predictor_for(shipped_law(), BASE, num_classes=1000, own=own)
    assert known.teacher_accuracy == 0.7
    assert not known.assumed
    assert known.factor < 1
    assert not known.unknown
    truth = own[0].subsets[0].accuracy
    off = abs(known.accuracy(float(known.of_specs(small, [WHOLE])[0])) - truth)
    assert off < abs(without.accuracy(float(without.of_specs(small, [WHOLE])[0])) - truth) / 2


def test_an_unknown_teacher_is_assumed_and_said_to_be() -> None:
    known = predictor_for(shipped_law(), BASE, num_classes=1000)
    assert (known.teacher_accuracy, known.assumed) == (0.8, True)
    assert known.typical_error == shipped_law().errors.source_left_out


def test_a_teacher_cannot_be_always_right() -> None:
    with pytest.raises(InputError, match="teacher's accuracy above 0 and below 1, got 1"):
        predictor_for(shipped_law(), BASE, num_classes=10, teacher_accuracy=1.0)


def test_nothing_recorded_is_nothing_to_fit() -> None:
    with pytest.raises(InputError, match="expected recorded runs with members that were measured"):
        fit_law([])


def test_a_bundle_that_was_never_evaluated_is_named(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", evaluated=False)
    with pytest.raises(ConfigError, match=r"manifest.json: key `evaluation`: expected a measured"):
        read_runs([tmp_path / "b"])


def test_an_evaluated_bundle_is_read_as_a_run() -> None:
    (run,) = read_runs([maker.BUNDLE])
    assert run.teacher_accuracy == pytest.approx(0.5928)
    assert len(run.members) == 3
    assert run.subsets[-1].members == (0, 1, 2)
    assert run.subsets[-1].accuracy == pytest.approx(0.6349)


def test_capability_and_accuracy_are_each_other_s_inverse() -> None:
    for accuracy in (0.1, 0.5, 0.99):
        assert 1 - np.exp(-capability_of(accuracy)) == pytest.approx(accuracy)
