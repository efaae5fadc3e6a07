"""The accuracy law: sensible everywhere, fitted to what is on file, and better for being fitted."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdp.errors import ConfigError, InputError
from mdp.formats.plan import Region, SubModelSpec
from mdp.testing.bundles import write_bundle
from partitioner.estimates.accuracy import Predictor, fit, fit_law, predictor_for, shipped_law
from partitioner.estimates.accuracy_law import (
    WHOLE,
    AccuracyLaw,
    Member,
    capability_of,
    features,
    model_of,
    together,
    view_of,
)
from partitioner.estimates.accuracy_records import (
    RecordedMember,
    RecordedRun,
    read_runs,
    recorded,
    shipped_records,
)

#: The manifest of a bundle that was evaluated.
PLAIN_VITS = Path(__file__).parents[3] / "support" / "plain_vits"
BASE = SubModelSpec(
    image_size=224, patch_size=16, embed_dim=768, depth=12, num_heads=12, mlp_ratio=4.0
)


def shape(**changes: object) -> SubModelSpec:
    return msgspec.structs.replace(BASE, **changes)


def predicted(spec: SubModelSpec, region: Region = WHOLE, accuracy: float = 0.8) -> float:
    known = predictor_for(shipped_law(), BASE, num_classes=1000, teacher_accuracy=accuracy)
    capability = known.of_shapes(features(BASE, [spec], [region]))[0]
    return known.accuracy(float(capability))


def test_the_law_that_ships_is_fitted_to_the_records_that_ship() -> None:
    assert shipped_law().law == fit_law(shipped_records())


def test_the_errors_that_ship_are_those_of_leaving_out() -> None:
    again, shipped = fit(shipped_records()).errors, shipped_law().errors
    for name in ("shape_left_out", "run_left_out", "source_left_out"):
        assert getattr(again, name) == pytest.approx(getattr(shipped, name), abs=1e-4)
    # What is left out is harder to predict than what is fitted; neither is off by much.
    assert 0.001 < shipped.run_left_out <= shipped.source_left_out + 1e-3 < 0.04


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
    tiny = shape(embed_dim=8, num_heads=1, depth=1, image_size=32, patch_size=32)
    assert known.accuracy(float(known.of_shapes(features(BASE, [tiny]))[0])) == 0.5


members = st.builds(
    Member,
    capability=st.floats(0.05, 4),
    view=st.integers(0, 2),
    model=st.integers(0, 2),
)
laws = st.builds(
    AccuracyLaw,
    exponents=st.just((0.06, 0.03, 0.03, 0.03, 0.03)),
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
        capability = known.of_shapes(features(BASE, shapes)).tolist()
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


def test_a_law_is_found_again_in_the_runs_it_made() -> None:
    law = AccuracyLaw(
        exponents=(0.12, 0.05, 0.03, 0.03, 0.03), sharpness=15.0, same_view=0.3, same_model=0.0
    )
    found = fit_law(made_up_runs(law))
    assert found.exponents[0] == pytest.approx(0.12, abs=0.02)
    assert found.exponents[1] == pytest.approx(0.05, abs=0.02)
    assert found.sharpness == pytest.approx(15.0, rel=0.15)


def test_the_user_s_own_runs_pull_the_prediction_toward_them() -> None:
    # Members of this teacher that are worth far more than the law says.
    generous = AccuracyLaw(
        exponents=(0.001, 0.001, 0.001, 0.001, 0.001), sharpness=18.0, same_view=0.0, same_model=0.0
    )
    own = made_up_runs(generous, (0.7,))
    small = features(BASE, [shape(embed_dim=384, num_heads=6)])
    without = predictor_for(shipped_law(), BASE, num_classes=1000, teacher_accuracy=0.7)
    law = fit([*shipped_records(), *own])
    known = predictor_for(law, BASE, num_classes=1000, own=own)
    assert known.teacher_accuracy == 0.7
    assert not known.assumed
    assert known.factor > 1
    truth = own[0].subsets[0].accuracy
    off = abs(known.accuracy(float(known.of_shapes(small)[0])) - truth)
    assert off < abs(without.accuracy(float(without.of_shapes(small)[0])) - truth) / 2


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
    (run,) = read_runs([PLAIN_VITS])
    assert run.teacher_accuracy == pytest.approx(0.5928)
    assert len(run.members) == 3
    assert run.subsets[-1].members == (0, 1, 2)
    assert run.subsets[-1].accuracy == pytest.approx(0.6349)


def test_capability_and_accuracy_are_each_other_s_inverse() -> None:
    for accuracy in (0.1, 0.5, 0.99):
        assert 1 - np.exp(-capability_of(accuracy)) == pytest.approx(accuracy)
