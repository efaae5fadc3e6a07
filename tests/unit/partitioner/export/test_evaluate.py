"""Worth of an arrival subset: its accuracy and how well its probabilities can be trusted."""

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdp.formats.bundle import (
    CascadeAccuracy,
    Confusion,
    Evaluation,
    MemberAccuracy,
    Rejection,
    SubsetRejection,
)
from mdp.formats.plan import PredictedAccuracy
from mdp.fusion.fuse import (
    Contribution,
    FusionWeights,
    SizeWeights,
    SubsetWeights,
    Temperatures,
    list_subsets,
    sizes_not_listed,
)
from mdp.fusion.novelty import NoveltyScore
from mdp.testing.bundles import colour_plan, size_accuracy, subset_accuracy
from partitioner.cli.tables import print_report
from partitioner.export.evaluate import (
    Report,
    expected_calibration_error,
    measure_rejection,
    measure_subset,
    size_accuracies,
    subset_accuracies,
)
from partitioner.fusion.novelty_fit import area_under_curve, fit_novelty
from partitioner.fusion.stacking import fit_fusion, sample_subsets
from tests.support.bundles import A_QUARTER, CASCADE_ACCURACY


def top(*confidences: float) -> np.ndarray:
    """Probabilities `[N, 2]` whose first class has these."""
    values = np.array(confidences, dtype=np.float64)
    return np.stack([values, 1 - values], axis=1)


def test_the_calibration_error_of_a_worked_example() -> None:
    # Bins (0.5, 0.6], (0.6, 0.7], (0.9, 1.0] of ten: |1/2 - 0.57|, |0 - 0.64| and |1 - 0.95|.
    scores = top(0.56, 0.58, 0.64, 0.92, 0.96, 0.97)
    targets = np.array([0, 1, 1, 0, 0, 0])
    expected = (2 * 0.07 + 1 * 0.64 + 3 * 0.05) / 6
    assert expected_calibration_error(scores, targets, bins=10) == pytest.approx(expected)
    # In one bin only the overall distance counts: accuracy 4/6, mean confidence 4.63/6.
    assert expected_calibration_error(scores, targets, bins=1) == pytest.approx(0.63 / 6)


def test_bins_are_open_below_and_closed_above() -> None:
    scores, targets = top(0.6, 0.61), np.array([0, 1])
    assert expected_calibration_error(scores, targets, bins=5) == pytest.approx((0.4 + 0.61) / 2)
    assert expected_calibration_error(top(1.0, 1.0), np.array([0, 0])) == 0.0
    assert expected_calibration_error(top(1.0, 1.0), np.array([1, 1])) == 1.0


def test_fifteen_bins_unless_told_otherwise() -> None:
    scores, targets = top(0.61, 0.68), np.array([0, 1])
    by_default = expected_calibration_error(scores, targets)
    assert by_default == expected_calibration_error(scores, targets, bins=15)
    assert by_default != expected_calibration_error(scores, targets, bins=10)


@given(st.integers(0, 2**32), st.integers(2, 6), st.integers(1, 30))
def test_the_calibration_error_is_bounded(seed: int, classes: int, bins: int) -> None:
    random = np.random.default_rng(seed)
    scores = random.dirichlet(np.ones(classes), size=50).astype(np.float32)
    targets = random.integers(classes, size=50)
    found = expected_calibration_error(scores, targets, bins)
    right = scores.argmax(axis=1) == targets
    assert abs(right.mean() - scores.max(axis=1).mean(dtype=np.float64)) - 1e-9 <= found <= 1.0


def test_probabilities_that_say_the_truth_have_no_calibration_error() -> None:
    random = np.random.default_rng(1)
    scores = random.dirichlet(np.ones(3), size=200_000).astype(np.float32)
    targets = (random.random((200_000, 1)) > scores.cumsum(axis=1)).sum(axis=1)
    assert expected_calibration_error(scores, targets) < 0.005
    assert expected_calibration_error(scores**3 / (scores**3).sum(1, keepdims=True), targets) > 0.1


def contributions(count: int) -> tuple[dict[int, Contribution], np.ndarray]:
    random = np.random.default_rng(2)
    targets = random.integers(3, size=40)

    def head() -> np.ndarray:
        return (np.eye(3)[targets] + random.normal(size=(40, 3))).astype(np.float32)

    return {k: Contribution(head(), head()) for k in range(count)}, targets


def weights(count: int) -> FusionWeights:
    warm = Temperatures(boosted=5.0, bagged=0.2)
    return FusionWeights(
        num_classes=3,
        subsets=[
            SubsetWeights(members=m, a=(0.5,) * len(m), b=(0.5,) * len(m), temperatures=warm)
            for m in list_subsets(range(count))
        ],
        by_size=tuple(
            SizeWeights(size=size, a=(0.1,) * count, b=(0.9,) * count, temperatures=warm)
            for size in sizes_not_listed(count)
        ),
    )


def test_every_rule_is_measured_with_its_temperature() -> None:
    given_, targets = contributions(2)
    measured = measure_subset(given_, (0, 1), weights(2), targets)
    both = [given_[k] for k in (0, 1)]
    assert measured.ece is not None
    logits = {
        "boosted": sum(part.heads[0] for part in both) / 5,
        "stacked": sum(0.5 * (part.heads[0] + part.bag) for part in both),
        "bagged": sum(part.bag for part in both) / 2 / 0.2,
    }
    for rule, values in logits.items():
        scores = np.exp(values) / np.exp(values).sum(axis=1, keepdims=True)
        assert getattr(measured, rule) == (scores.argmax(axis=1) == targets).mean()
        expected = expected_calibration_error(scores, targets)
        assert getattr(measured.ece, rule) == pytest.approx(expected, abs=1e-5)
    assert len({measured.ece.boosted, measured.ece.stacked, measured.ece.bagged}) == 3


def test_without_boost_heads_no_boosted_accuracy_is_measured() -> None:
    one_head, targets = contributions(10)
    one_head = {k: Contribution(None, part.bag) for k, part in one_head.items()}
    fusion = fit_fusion(one_head, targets)
    measured, sizes = (
        measure_subset(one_head, (0, 1), fusion, targets),
        size_accuracies(one_head, fusion, targets),
    )
    for found in (measured, measured.ece, *(entry.mean for entry in sizes)):
        assert found is not None
        assert found.boosted is None
        assert found.under("boosted") == found.bagged


def test_many_members_are_measured_by_size_where_not_by_subset() -> None:
    given_, targets = contributions(10)
    fusion = weights(10)
    listed = subset_accuracies(given_, fusion, targets)
    assert [subset.members for subset in listed] == list_subsets(range(10))
    sizes = size_accuracies(given_, fusion, targets)
    assert [entry.size for entry in sizes] == sizes_not_listed(10)
    sample = sample_subsets(10, sizes[0].size, 48, seed=1)
    alone = [measure_subset(given_, members, fusion, targets) for members in sample]
    assert sizes[0].sampled == len(sample)
    assert sizes[0].mean.bagged == pytest.approx(np.mean([one.bagged for one in alone]))
    assert sizes[0].lowest.stacked == min(one.stacked for one in alone)
    errors = [one.ece.bagged for one in alone if one.ece is not None]
    assert len(errors) == len(alone)
    assert sizes[0].ece is not None
    assert sizes[0].ece.bagged == pytest.approx(np.mean(errors))


def test_rejected_items_of_every_subset() -> None:
    random = np.random.default_rng(0)
    targets = random.integers(0, 3, 400)

    def seen(signal: float, count: int) -> dict[int, Contribution]:
        return {
            k: Contribution(
                None, (signal * np.eye(3)[targets] + random.normal(size=(400, 3))).astype("f4")
            )
            for k in range(count)
        }

    known = seen(5.0, 2)
    fusion = fit_fusion(known, targets)
    novelty = fit_novelty(known, fusion)
    others, strange = seen(5.0, 2), seen(0.5, 2)
    alone = measure_rejection(others, fusion, novelty)
    both = measure_rejection(others, fusion, novelty, strange)
    assert (alone.rate, alone.unknown_pictures, both.unknown_pictures) == (0.019950, 0, 400)
    assert [one.members for one in both.subsets] == [(0,), (1,), (0, 1)]
    for one, other in zip(alone.subsets, both.subsets, strict=True):
        assert (one.unknown, one.auc) == (None, None)
        assert one.known == other.known
        fitted = novelty.of(one.members)
        assert fitted is not None
        scores = [
            NoveltyScore(one.members, fusion).of(parts, fitted.weights)
            for parts in (others, strange)
        ]
        threshold = fitted.thresholds[novelty.place(None)]
        assert other.known == (scores[0] > threshold).mean()
        assert other.unknown == (scores[1] > threshold).mean()
        assert other.auc == area_under_curve(*scores)
        assert 0 <= other.known < 0.06
        assert other.unknown is not None
        assert other.unknown > other.known


def test_rejected_items_of_sizes_that_are_not_listed() -> None:
    given_, _ = contributions(10)
    fusion = weights(10)
    measured = measure_rejection(given_, fusion, fit_novelty(given_, fusion), given_)
    sizes = {one.size: one for one in measured.subsets if not one.members}
    assert sorted(sizes) == sizes_not_listed(10)
    assert all(one.auc == pytest.approx(0.5) for one in sizes.values())


def report(count: int) -> Report:
    evaluation = Evaluation(
        data="colours",
        data_digest="0" * 64,
        pictures=100,
        teacher=None,
        members=[MemberAccuracy(k=k, device=f"d{k}", accuracy=0.5) for k in range(count)],
        subsets=[subset_accuracy(members) for members in list_subsets(range(count))],
        sizes=tuple(size_accuracy(size) for size in sizes_not_listed(count)),
    )
    return Report(evaluation, [1.0] * count, None)


def test_the_table_shows_calibration_errors(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report(2), colour_plan(("alpha", "beta"), (8, 8)))
    printed = capsys.readouterr().out
    assert "stacked ECE" in printed
    row = next(line for line in printed.splitlines() if "alpha + beta" in line)
    assert [w for w in row.split() if w.endswith("%")] == ["79.00%", "89.00%", "84.00%", "10.00%"]


def test_the_table_shows_rejected_items(capsys: pytest.CaptureFixture[str]) -> None:
    plan = colour_plan(("alpha", "beta"), (8, 8))
    subsets = [
        SubsetRejection(size=len(s), known=0.02 + 0.01 * len(s), members=s)
        for s in list_subsets(range(2))
    ]
    found, plain = Rejection(rate=0.02, subsets=subsets), report(2)
    told = dataclasses.replace(
        plain, evaluation=msgspec.structs.replace(plain.evaluation, rejection=found)
    )
    print_report(told, plan)
    printed = " ".join(capsys.readouterr().out.split())
    assert "called unknown: 3.0% to 4.0%, with thresholds for 2.0%; how many of no" in printed
    assert "AUC" not in printed
    measured = [msgspec.structs.replace(one, unknown=0.9, auc=0.987) for one in subsets]
    found = Rejection(rate=0.02, subsets=measured, unknown_pictures=50)
    told = dataclasses.replace(
        plain, evaluation=msgspec.structs.replace(plain.evaluation, rejection=found)
    )
    print_report(told, plan)
    printed = capsys.readouterr().out
    assert "50 pictures of no class" in printed
    rows = [line for line in printed.splitlines() if "alpha + beta" in line]
    assert rows[-1].split()[-4:-1] == ["90.0%", "\u2502", "0.987"]


def test_times_beside_other_load_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    plan = colour_plan(("alpha", "beta"), (8, 8))
    for cores, marked in ((None, 0), (0.1, 0), (0.8, 2)):
        print_report(dataclasses.replace(report(2), others_cores=cores), plan)
        printed = capsys.readouterr().out
        assert printed.count("1.00*") == marked
        assert printed.count("1.00") == 2
        said = " ".join(printed.split())
        assert ("* while other processes kept 0.8 cores busy" in said) == bool(marked)


@pytest.mark.parametrize(
    ("accuracy", "said"),
    [
        (None, None),
        (PredictedAccuracy(unknown="no teacher"), "not predicted (no teacher), measured 89.0%"),
        (
            PredictedAccuracy(all_in=0.751, expected=0.7, typical_error=0.01),
            "predicted 75.1%, measured 89.0%",
        ),
    ],
)
def test_the_prediction_stands_beside_what_was_measured(
    accuracy: PredictedAccuracy | None, said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = msgspec.structs.replace(colour_plan(("alpha", "beta"), (8, 8)), accuracy=accuracy)
    print_report(report(2), plan)
    printed = capsys.readouterr().out
    assert ("measured" in printed) == (said is not None)
    if said is not None:
        assert f"accuracy with all in: {said}\n" in printed


def test_a_member_as_good_alone_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    plan = colour_plan(("alpha", "beta"), (8, 8))
    print_report(report(2), plan)
    assert "alone" not in capsys.readouterr().out
    plain = report(2)
    # Stacked alone as well, as all together are; the bag head alone may be better than either.
    subsets = [
        msgspec.structs.replace(s, stacked=0.9) if s.members == (1,) else s
        for s in plain.evaluation.subsets
    ]
    bag = msgspec.structs.replace(plain.evaluation.members[0], accuracy=0.99)
    members = [bag, msgspec.structs.replace(plain.evaluation.members[1], device="beta")]
    evaluation = msgspec.structs.replace(plain.evaluation, members=members, subsets=subsets)
    print_report(dataclasses.replace(plain, evaluation=evaluation), plan)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "beta alone is right on 90.00% of these 100 pictures, all 2 members together on 89.00%"
    ) in said


def test_classes_that_are_taken_for_each_other_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan, plain = colour_plan(("alpha", "beta"), (8, 8)), report(2)
    print_report(plain, plan)
    assert "taken for each other" not in capsys.readouterr().out
    pairs = [(("nut", "cap nut"), 50, 24)] + [(("a", str(n)), 40, 4) for n in range(3)]
    evaluation = msgspec.structs.replace(
        plain.evaluation, confusions=tuple(Confusion(*pair) for pair in pairs)
    )
    print_report(dataclasses.replace(plain, evaluation=evaluation), plan)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "taken for each other: nut and cap nut (24 of 50 pictures of the two); a and 0 (4 " in said
    )
    assert "; and 1 more pair. More or closer pictures of both help where" in said


def test_the_table_compares_a_cascade(capsys: pytest.CaptureFixture[str]) -> None:
    plan, plain = colour_plan(("alpha", "beta"), (8, 8)), report(2)
    measured = CascadeAccuracy(first=(1,), escalated=A_QUARTER, accuracy=CASCADE_ACCURACY)
    evaluation = msgspec.structs.replace(plain.evaluation, cascade=measured)
    print_report(dataclasses.replace(plain, evaluation=evaluation), plan)
    printed = capsys.readouterr().out
    assert "beta first and the others for 25.0%" in " ".join(printed.split())
    rows = [" ".join(line.replace("│", " ").split()) for line in printed.splitlines()]
    ms = [a.predicted_ms for a in plan.assignments]
    slowest_ms = max(one.total for one in ms)
    assert any(row.startswith(f"all at once 89.00% {slowest_ms:.2f} ") for row in rows)
    mean_ms = ms[1].total + ms[0].total / 4
    assert any(row.startswith(f"cascade 87.50% {mean_ms:.2f} ") for row in rows)


def test_the_table_shows_sizes_with_mean_and_lowest(capsys: pytest.CaptureFixture[str]) -> None:
    devices = tuple(f"d{k}" for k in range(9))
    print_report(report(9), colour_plan(devices, (8,) * 9))
    printed = capsys.readouterr().out
    assert sizes_not_listed(9) == [4, 5]
    mean = next(line for line in printed.splitlines() if "mean 4 of 9" in line)
    assert "54.00%" in mean
    lowest = next(line for line in printed.splitlines() if "lowest 5 of 9" in line)
    assert "3.00%" in lowest


def test_json_keeps_its_keys_and_adds_the_calibration_errors() -> None:
    value = msgspec.to_builtins(report(2).evaluation)
    assert value["subsets"][2] == {
        "members": (0, 1), "boosted": 0.79, "stacked": 0.89, "bagged": 0.84,
        "ece": {"boosted": 0.3, "stacked": 0.1, "bagged": 0.2},
    }  # fmt: skip
    assert value["sizes"] == ()
