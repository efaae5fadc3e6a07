"""Scores of unknown items, and the thresholds that a bundle keeps of them."""

from typing import get_args

import msgspec
import numpy as np
import pytest

from mdp.fusion.fuse import Contribution, FusionWeights, SubsetWeights
from mdp.fusion.novelty import NoveltyScore, disagreement, doubt, energy, shares
from mdp.fusion.novelty_table import Novelty, Signal, SubsetNovelty


def weights(members: tuple[int, ...], *b: float) -> SubsetWeights:
    return SubsetWeights(members=members, a=(), b=b)


FUSION = FusionWeights(
    num_classes=3, subsets=[weights((0,), 2.0), weights((1,), 20.0), weights((0, 1), 1.5, 5.0)]
)


def both(first: list[float], second: list[float]) -> dict[int, Contribution]:
    return {
        k: Contribution(None, np.array(logits, np.float32))
        for k, logits in enumerate((first, second))
    }


def table(**changes: object) -> Novelty:
    subset = SubsetNovelty(size=1, weights={"energy": 1.0}, thresholds=(3.0, 2.0), members=(0,))
    facts = {"rates": (0.01, 0.02), "default": 0.02, "pictures": 99, "subsets": [subset]}
    return Novelty(**{**facts, **changes})  # type: ignore[arg-type]


def test_signals_are_those_of_their_formulas() -> None:
    logits = np.array([[2.0, 1.0, -1.0], [0.0, 0.0, 0.0]])
    shares_of = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert energy(logits) == pytest.approx(-np.log(np.exp(logits).sum(axis=1)))
    assert doubt(logits) == pytest.approx(np.log(1 - shares_of.max(axis=1)))
    # Far apart, none of them overflows or loses its sign.
    far = np.array([[1e4, 0.0, 0.0]])
    assert energy(far) == pytest.approx([-1e4])
    assert np.isfinite(doubt(far)).all()


def test_disagreement_is_none_among_equals_and_most_among_opposites() -> None:
    equal = np.array([[5.0, 0.0, 0.0]] * 2)
    opposite = np.array([[50.0, 0.0, 0.0], [0.0, 50.0, 0.0]])
    assert disagreement(equal, [0.5, 0.5]) == pytest.approx(0.0)
    assert disagreement(opposite, [0.5, 0.5]) == pytest.approx(np.log(2))
    # Neither one without a share disagrees, nor one that knows nothing.
    unsure = np.array([[5.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert disagreement(unsure, [0.5, 0.5]) == pytest.approx(0.0)
    assert disagreement(opposite, [1.0, 0.0]) == pytest.approx(0.0)


def test_shares_do_not_depend_on_the_size_of_logits() -> None:
    alone = [FUSION.subsets[0], FUSION.subsets[1]]
    assert shares(FUSION.subsets[2], alone) == pytest.approx([0.75, 0.25])
    # One that is subtracted has none, and of nothing all have equal ones.
    assert shares(weights((0, 1), 1.0, -2.0), alone) == pytest.approx([1.0, 0.0])
    assert shares(weights((0, 1), 0.0, 0.0), alone) == pytest.approx([0.5, 0.5])


def test_a_score_is_the_weighted_sum_of_its_signals() -> None:
    parts, scored = both([3.0, 0.0, 0.0], [0.2, 0.1, 0.0]), NoveltyScore((0, 1), FUSION)
    fused = 1.5 * parts[0].bag + 5.0 * parts[1].bag
    fused -= fused.mean()
    apart = np.stack([2.0 * parts[0].bag, 20.0 * parts[1].bag])
    wanted = 0.5 * energy(fused) + 2.0 * doubt(fused) + 3.0 * disagreement(apart, [0.75, 0.25])
    found = scored.of(parts, {"energy": 0.5, "doubt": 2.0, "disagreement": 3.0})
    assert found == pytest.approx(wanted)


def test_what_all_classes_have_in_common_is_the_distance_and_nothing_else() -> None:
    parts, scored = both([3.0, 0.0, 0.0], [0.2, 0.1, 0.0]), NoveltyScore((0, 1), FUSION)
    far = {k: Contribution(None, part.bag - 0.1 * (k + 1)) for k, part in parts.items()}
    for signal in get_args(Signal):
        further = float(scored.of(far, {signal: 1.0}) - scored.of(parts, {signal: 1.0}))
        # Each member's counts by its weight in the fused logits, the farthest one as far as the
        # second farthest, which member 0 is.
        wanted = (1.5 + 5.0) * 0.1 if signal == "distance" else 0.0
        assert further == pytest.approx(wanted, abs=1e-5)


def test_one_member_to_which_an_item_looks_unknown_does_not_decide() -> None:
    sure, unsure = [4.0, 0.0, 0.0], [0.0, 0.0, 0.0]
    known, doubted, strange = both(sure, [0.5, 0.0, 0.0]), both(sure, unsure), both(unsure, unsure)
    scored = NoveltyScore((0, 1), FUSION)
    signals: tuple[Signal, ...] = ("energy", "doubt")
    for signal in signals:
        values = [float(scored.of(one, {signal: 1.0})) for one in (known, doubted, strange)]
        assert values == sorted(values)
        # The one that sees more counts more: its loss is the larger step.
        assert values[2] - values[1] > values[1] - values[0]


def test_one_member_that_is_far_from_what_it_was_taught_does_not_decide() -> None:
    fusion = FusionWeights(
        num_classes=3, subsets=[weights((k,), 1.0) for k in range(3)] + [
            weights((0, 1), 0.5, 0.5), weights((0, 2), 0.5, 0.5), weights((1, 2), 0.5, 0.5),
            weights((0, 1, 2), 0.5, 0.25, 0.25),
        ],
    )  # fmt: skip

    def score(*distances: float) -> float:
        """Of members whose features are so far, with the same opinion."""
        logits = np.array([2.0, -1.0, -1.0], np.float32)
        parts = {k: Contribution(None, logits - np.float32(far)) for k, far in enumerate(distances)}
        scored = NoveltyScore(tuple(range(len(distances))), fusion)
        return float(scored.of(parts, {"distance": 1.0}))

    for usual in (0.9, 1.1):
        assert score(usual, usual, usual) == pytest.approx(usual)
        # Covered, it is as far as the farther of the others, and no more.
        assert score(4.0, usual, 0.8) == pytest.approx(0.75 * usual + 0.25 * 0.8)
        assert score(4.0, usual) == pytest.approx(usual)
        # Of two, both are: an item that several see to be strange.
        assert score(4.0, 3.0, usual) == pytest.approx(0.75 * 3.0 + 0.25 * usual)
        # Nobody else is there to say so.
        assert score(4.0) == pytest.approx(4.0)


def test_the_threshold_of_a_rate_is_that_of_the_next_lower_one() -> None:
    assert table().place(None) == 1
    assert table(default=0.01).place(None) == 0
    assert [table().place(rate) for rate in (0.01, 0.015, 0.02)] == [0, 0, 1]
    with pytest.raises(ValueError, match=r"at least 0\.01, .* that 99 calibration .*, got 0\.005"):
        table().place(0.005)
    with pytest.raises(ValueError, match=r"at most 0\.02, got 0\.3"):
        table().place(0.3)


def test_a_subset_has_its_own_score_or_that_of_its_size() -> None:
    own = SubsetNovelty(size=1, weights={"energy": 1.0}, thresholds=(3.0, 2.0), members=(0,))
    shared = SubsetNovelty(size=1, weights={"doubt": 1.0}, thresholds=(3.0, 2.0))
    found = table(subsets=[own, shared])
    assert found.of((0,)) == own
    assert found.of((7,)) == shared
    assert found.of((0, 7)) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rates": (0.02, 0.01)}, "`rates` have to be distinct and ascending"),
        ({"default": 0.05}, "`default` has to be one of `rates`"),
        ({"subsets": [{"size": 1, "weights": {}, "thresholds": [1, 1]}]}, "at least one signal"),
        ({"subsets": [{"size": 1, "weights": {"age": 1.0}, "thresholds": [1, 1]}]}, "'age'"),
        (
            {"subsets": [{"size": 1, "weights": {"energy": 1.0}, "thresholds": [1]}]},
            "`thresholds` need a number for each of `rates`",
        ),
        (
            {"subsets": [{"size": 1, "weights": {"energy": 1.0}, "thresholds": [1, 2]}]},
            "`thresholds` must not rise with the rate",
        ),
        (
            {"subsets": [{"size": 1, "weights": {"energy": 1e99}, "thresholds": [2, 1]}]},
            "finite and at most",
        ),
        (
            {
                "subsets": [
                    {"size": 1, "weights": {"energy": 1.0}, "thresholds": [2, 1], "members": [0, 1]}
                ]
            },
            "`size` has to be the number of `members`",
        ),
        ({"subsets": table().subsets * 2}, "the same members or size twice"),
    ],
)
def test_tables_that_mean_nothing_are_refused(change: dict[str, object], reason: str) -> None:
    content = {**msgspec.to_builtins(table()), **msgspec.to_builtins(change)}
    with pytest.raises(msgspec.ValidationError, match=reason):
        msgspec.convert(content, Novelty)


def test_scores_of_members_without_weights_are_refused() -> None:
    subset = SubsetNovelty(size=1, weights={"energy": 1.0}, thresholds=(3.0, 2.0), members=(7,))
    with pytest.raises(ValueError, match=r"`novelty` has members \[7\] without weights"):
        msgspec.structs.replace(FUSION, novelty=table(subsets=[subset]))
