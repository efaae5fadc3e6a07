"""The fitted weights: exact derivatives, the optimum, kept only where it is sure to be better."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

import mdp.fusion.fuse as fusion_module
from mdp.errors import InputError
from mdp.fusion.fuse import (
    MAX_WEIGHT,
    Contribution,
    Fusion,
    FusionWeights,
    SizeWeights,
    SubsetWeights,
    fuse,
    list_subsets,
    sizes_not_listed,
    weights_for,
)
from partitioner.fusion import stacking
from partitioner.fusion.stacking import (
    Calibration,
    StackingTask,
    Term,
    cross_entropy,
    fit_fusion,
    fit_size,
    fit_subset,
    sample_subsets,
    shrink,
    start_weights,
)


def logits(
    seed: int, count: int, classes: int, members: int, noise: float = 1.0
) -> tuple[dict[int, Contribution], np.ndarray]:
    """Noisy contributions `[count, classes]`, on unlike scales, and their targets."""
    random = np.random.default_rng(seed)
    targets = random.integers(classes, size=count)
    truth = np.eye(classes)[targets]

    def head(scale: float) -> np.ndarray:
        return ((truth + noise * random.normal(size=truth.shape)) * scale).astype(np.float32)

    contributions = {
        k: Contribution(boost=head(10.0 ** -(k % 4)), bag=head(3.0 * (k + 1)))
        for k in range(members)
    }
    return contributions, targets


def one_term(parts: np.ndarray, targets: np.ndarray) -> StackingTask:
    """All of `parts` `[P, N, C]`, each with a scalar of its own."""
    every = np.arange(len(parts))
    return StackingTask(turn(parts), targets, [Term(every, every)])


def turn(parts: np.ndarray) -> np.ndarray:
    centred = parts - parts.mean(axis=2, keepdims=True)
    return np.ascontiguousarray(centred.transpose(0, 2, 1), np.float32)


def loss_of(contributions: Any, weights: SubsetWeights, targets: np.ndarray) -> float:
    fused = fuse(contributions, weights)
    return cross_entropy(one_term(fused[np.newaxis], targets), np.ones(1))


@pytest.fixture(params=[2**18, 50], ids=["at once", "in slices"])
def _at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacking, "_AT_ONCE", request.param)


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize(
    "rows", [[[0, 1, 2, 3]], [[0, 2], [1, 3], [0, 3]]], ids=["a subset", "several at once"]
)
def test_derivatives_match_finite_differences(rows: list[list[int]]) -> None:
    contributions, targets = logits(0, 40, 5, 2)
    parts = np.concatenate([c.heads for c in contributions.values()])
    terms = [Term(np.array(r), np.array(r)) for r in rows]
    task = StackingTask(turn(parts), targets, terms)
    theta, step = np.array([0.3, 0.7, -0.2, 0.1]), 1e-3
    gradients, hessian = stacking._derivatives(task, theta)
    assert gradients.shape == (4, 40)
    for axis in range(4):
        move = step * np.eye(4)[axis]
        up, down = theta + move, theta - move
        slope = (stacking._losses(task, up) - stacking._losses(task, down)) / 2 / step
        np.testing.assert_allclose(gradients[axis], slope, rtol=1e-3, atol=1e-5)
        bend = stacking._derivatives(task, up)[0] - stacking._derivatives(task, down)[0]
        np.testing.assert_allclose(
            hessian[axis], bend.mean(axis=1) / 2 / step, rtol=1e-2, atol=1e-4
        )


def test_the_leave_one_out_loss_is_that_of_fits_without_the_picture() -> None:
    contributions, targets = logits(5, 150, 3, 2, noise=1.5)
    heads = [head for part in contributions.values() for head in part.heads]
    task = one_term(np.stack(heads) / np.stack(heads).std(axis=(1, 2), keepdims=True), targets)
    start = np.full(4, 0.5)
    pull = stacking._pull(np.diag(stacking._derivatives(task, start)[1]), 1e-2)
    least, guessed = stacking._newton(task, start, start, pull)
    fitted = stacking._losses(task, least)
    exact = np.zeros(150)
    for i in range(150):
        rest = np.arange(150) != i
        others = StackingTask(task.parts[:, :, rest], targets[rest], task.terms)
        theta, _ = stacking._newton(others, start, start, pull)
        exact[i] = stacking._losses(task, theta)[i]
    penalty = exact.mean() - fitted.mean()
    assert penalty > 0.01
    assert guessed.mean() - fitted.mean() == pytest.approx(penalty, rel=0.15)


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(2, 6), st.floats(0, 3), st.booleans())
def test_never_worse_than_the_better_plain_rule(
    seed: int, members: int, classes: int, noise: float, two_heads: bool
) -> None:
    contributions, targets = logits(seed, 60, classes, members, noise)
    contributions = {
        k: Contribution.of(c.heads[-1 - two_heads :]) for k, c in contributions.items()
    }
    for subset in list_subsets(contributions):
        fitted = fit_subset(contributions, subset, targets)
        for kept in ([fitted], []):
            stacking_weights = FusionWeights(num_classes=classes, subsets=kept)
            rules: list[Fusion] = ["boosted", "bagged"] if two_heads else ["bagged"]
            plain = [weights_for(subset, rule, stacking_weights) for rule in rules]
            best = min(loss_of(contributions, weights, targets) for weights in plain)
            # What leaves a picture out may prefer the other one by a little.
            assert loss_of(contributions, fitted, targets) <= best + 2e-2


def test_a_useless_member_gets_little_weight() -> None:
    contributions, targets = logits(1, 400, 4, 2, noise=0.5)
    random = np.random.default_rng(2)
    blind = random.normal(size=(400, 4)).astype(np.float32)
    contributions[1] = Contribution(boost=blind, bag=blind[::-1].copy())
    fitted = fit_subset(contributions, (0, 1), targets)
    boost, bag = contributions[0].heads
    useful = abs(fitted.a[0]) * boost.std() + abs(fitted.b[0]) * bag.std()
    assert abs(fitted.a[1]) + abs(fitted.b[1]) < 0.1 * useful


def test_unsure_scalars_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    # All heads alike: a plain mean is the best there is, and a fit could only find noise.
    random = np.random.default_rng(6)
    targets = random.integers(5, size=300)
    heads = (np.eye(5)[targets] + random.normal(size=(6, 300, 5))).astype(np.float32)
    contributions = {k: Contribution(heads[0] * 0, heads[k]) for k in range(6)}
    kept = fit_subset(contributions, range(6), targets)
    assert max(kept.b) < 1.15 * min(kept.b)
    monkeypatch.setattr(stacking, "STANDARD_ERRORS", -np.inf)
    free = fit_subset(contributions, range(6), targets)
    assert max(free.b) > 1.3 * min(free.b)


def test_weights_stay_finite_where_calibration_has_no_mistake() -> None:
    contributions, targets = logits(3, 50, 3, 2, noise=0.0)
    for subset in fit_fusion(contributions, targets).subsets:
        assert np.isfinite([*subset.a, *subset.b]).all()
        assert max(map(abs, (*subset.a, *subset.b))) < 1e4


def test_equal_heads_share_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacking, "RIDGES", (1e3,))
    random, targets = np.random.default_rng(13), np.arange(400) % 4
    truth = np.eye(4)[targets]
    boost, bag = ((truth + random.normal(size=(400, 4))).astype(np.float32) for _ in range(2))
    alike = fit_subset({0: Contribution(boost, bag)}, (0,), targets)
    assert alike.a[0] == pytest.approx(alike.b[0], rel=0.2)
    blind = random.normal(size=(400, 4)).astype(np.float32)
    better = fit_subset({0: Contribution(blind, bag)}, (0,), targets)
    assert better.a == (0.0,)
    assert better.b[0] > 0.5


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-12, 1e-7, 1e-5, 1e-3, 1e6, 1e12])
def test_logits_of_any_size_are_no_trouble(scale: float) -> None:
    random, targets = np.random.default_rng(7), np.arange(60) % 3
    noise = random.normal(size=(60, 3)).astype(np.float32)
    odd = Contribution(noise * np.float32(scale), noise[::-1] * np.float32(scale) + 5)
    good = logits(8, 60, 3, 1)[0][0]
    for subset in fit_fusion({0: odd, 1: good}, targets).subsets:
        assert np.abs([*subset.a, *subset.b]).max() <= MAX_WEIGHT


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_refused(value: float) -> None:
    contributions, targets = logits(9, 20, 3, 2)
    contributions[1].bag[4, 2] = value
    with pytest.raises(InputError, match="sub-model 1: expected finite calibration logits"):
        fit_fusion(contributions, targets)


@pytest.mark.parametrize("rule", ["boosted", "bagged"])
def test_temperatures_keep_every_label_and_give_the_least_loss(rule: Fusion) -> None:
    contributions, targets = logits(10, 300, 4, 3)
    fitted = fit_subset(contributions, (0, 2), targets)
    assert getattr(fitted.temperatures, rule) != pytest.approx(1.0, rel=0.1)
    nothing, own = (FusionWeights(num_classes=4, subsets=kept) for kept in ([], [fitted]))
    plain = fuse(contributions, weights_for((0, 2), rule, nothing))
    weights = weights_for((0, 2), rule, own)
    fused = fuse(contributions, weights)
    assert (fused.argmax(axis=1) == plain.argmax(axis=1)).all()
    best = loss_of(contributions, weights, targets)
    task = one_term(fused[np.newaxis], targets)
    assert best < cross_entropy(task, np.array([0.9]))
    assert best < cross_entropy(task, np.array([1.1]))


@pytest.mark.parametrize("count", range(9, 17))
def test_samples_are_balanced_different_and_the_same_again(count: int) -> None:
    for size in sizes_not_listed(count):
        sample = sample_subsets(count, size, 48, seed=0)
        assert 48 - count < len(sample) == len(set(sample)) <= 48
        assert {len(set(members)) for members in sample} == {size}
        often = np.bincount(np.concatenate([np.array(members) for members in sample]))
        assert set(often.tolist()) == {len(sample) * size // count}
        assert sample == sample_subsets(count, size, 48, seed=0)
        assert sample != sample_subsets(count, size, 48, seed=1)


def test_shared_weights_minimise_their_samples_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacking, "RIDGES", (1e-6,))
    monkeypatch.setattr(stacking, "START_PICTURES", 0)
    monkeypatch.setattr(stacking, "STANDARD_ERRORS", -np.inf)
    contributions, targets = logits(11, 60, 3, 10, noise=2.0)
    shared = fit_size(contributions, 4, targets)
    sample = sample_subsets(10, 4, stacking.SAMPLED, seed=0)

    def loss(weights: SizeWeights) -> float:
        return float(np.mean([loss_of(contributions, weights.of(m), targets) for m in sample]))

    least = loss(shared)
    for k in range(10):
        for factor in (0.5, 1.5):
            b = tuple(b * (factor if j == k else 1.0) for j, b in enumerate(shared.b))
            assert loss(structs.replace(shared, b=b)) > least
    own = fit_subset(contributions, (1, 4, 6, 9), targets)
    alike = loss_of(contributions, shared.of((1, 4, 6, 9)), targets)
    assert loss_of(contributions, own, targets) < alike + 0.02
    assert alike < np.log(3)


@pytest.mark.parametrize("heads", [1, 2])
def test_large_sizes_share_weights(monkeypatch: pytest.MonkeyPatch, heads: int) -> None:
    # Five members stand for more than eight: of these the sizes 2 and 3 are not listed.
    monkeypatch.setattr(fusion_module, "MAX_LISTED", 5)
    monkeypatch.setattr(stacking, "SAMPLED", 5)
    contributions, targets = logits(12, 60, 3, 5, noise=2.0)
    contributions = {k: Contribution.of(c.heads[-heads:]) for k, c in contributions.items()}
    fusion = fit_fusion(contributions, targets)
    sizes = [1] * 5 + [2, 3] + [4] * 5 + [5]
    assert [len(subset.members) for subset in fusion.subsets] == sizes
    assert [subset.members for subset in fusion.subsets] == list_subsets(range(5))
    assert [entry.size for entry in fusion.by_size] == [2, 3]
    assert fusion == fit_fusion(contributions, targets)
    odd = (1, 3, 4)
    weights = weights_for(odd, "stacked", fusion)
    assert weights == fusion.by_size[1].of(odd)
    assert len(weights.a) == 3 * (heads - 1)
    assert (fuse(contributions, weights).argmax(axis=1) == targets).mean() > 0.5


def test_a_head_that_points_the_wrong_way_is_not_taken_for_its_opposite() -> None:
    random = np.random.default_rng(0)
    targets = random.integers(0, 4, 2000)
    right = np.eye(4, dtype=np.float32)[targets]
    noise = [random.normal(size=(2000, 4)).astype(np.float32) for _ in range(2)]
    backwards = Contribution(boost=-right + 0.3 * noise[0], bag=right + noise[1])
    fitted = fit_subset({0: backwards}, (0,), targets)
    bagged = (backwards.bag.argmax(axis=1) == targets).mean()
    stacked = fuse({0: backwards}, fitted).argmax(axis=1) == targets
    assert stacked.mean() >= bagged


FEW = 8


def bag_members(
    kind: str, count: int, seed: int, asked: int = 2000
) -> tuple[dict[int, Contribution], np.ndarray]:
    """Bag logits `[count + asked, FEW]` of three members of a kind, and the targets.

    The first `count` have the same number of each class.
    """
    random = np.random.default_rng(seed)
    targets = np.append(np.arange(count) % FEW, random.integers(0, FEW, asked))

    def member(noise: float, size: float = 1.0) -> np.ndarray:
        return size * (np.eye(FEW)[targets] + noise * random.normal(size=(len(targets), FEW)))

    first = member(0.5)
    heads = {
        "alike": [first, member(0.5), member(0.5)],
        "alike, of unlike sizes": [first, member(0.5, 4.0), member(0.5, 0.3)],
        "weak": [member(0.4), member(0.9), member(0.9)],
        "weak and loud": [member(0.4), member(0.9, 3.0), member(0.9)],
        "by chance": [first, random.normal(size=first.shape), member(0.5)],
        "the same": [first, first, first],
        "the same and another": [first, first, member(0.5)],
        "constant": [first, np.full_like(first, 3.0), member(0.5)],
        "strong and two the same": [member(0.4), *[member(0.9)] * 2],
    }[kind]
    return {k: Contribution(None, head.astype(np.float32)) for k, head in enumerate(heads)}, targets


def cut(contributions: dict[int, Contribution], rows: slice) -> dict[int, Contribution]:
    return {k: Contribution(None, part.bag[rows]) for k, part in contributions.items()}


def over_the_best(kind: str, count: int, seed: int) -> float:
    """Points of all three members, fitted to `count` pictures, over the best one alone."""
    contributions, targets = bag_members(kind, count, seed)
    fitted = fit_subset(cut(contributions, slice(count)), (0, 1, 2), targets[:count])
    asked, right = cut(contributions, slice(count, None)), targets[count:]
    best = max((part.bag.argmax(axis=1) == right).mean() for part in asked.values())
    return 100 * float((fuse(asked, fitted).argmax(axis=1) == right).mean() - best)


KINDS = (
    "alike", "alike, of unlike sizes", "weak", "weak and loud", "by chance", "the same",
    "the same and another", "constant", "strong and two the same",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_together_they_are_never_worse_than_the_best_alone_but_for_noise(kind: str) -> None:
    """Four pictures of a class; on 2,000 others half a point is two standard errors or less."""
    points = [over_the_best(kind, 4 * FEW, seed) for seed in range(6)]
    assert np.mean(points) >= -0.1
    assert min(points) > -2


@pytest.mark.parametrize("kind", ["alike", "by chance", "the same", "constant"])
def test_one_picture_of_a_class_is_enough_where_no_member_misleads(kind: str) -> None:
    points = [over_the_best(kind, FEW, seed) for seed in range(6)]
    assert np.mean(points) >= -0.1
    assert min(points) > -4


@pytest.mark.parametrize("count", [FEW, 2 * FEW])
def test_few_pictures_give_members_alike_nearly_equal_weights(count: int) -> None:
    ratios = []
    for seed in range(10):
        contributions, targets = bag_members("alike", count, seed, asked=0)
        weights = fit_subset(contributions, (0, 1, 2), targets).b
        ratios.append(max(weights) / min(weights))
    assert np.median(ratios) < 1.2
    assert max(ratios) < 2.5


def test_unlike_sizes_of_logits_are_evened_out() -> None:
    contributions, targets = bag_members("alike, of unlike sizes", 2 * FEW, 0, asked=0)
    weights = fit_subset(contributions, (0, 1, 2), targets).b
    evened = np.array(weights) * [1.0, 4.0, 0.3]
    assert evened.max() / evened.min() < 2


@pytest.mark.parametrize("kind", ["alike", "weak and loud", "the same and another"])
def test_many_pictures_decide_whatever_the_start(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    contributions, targets = bag_members(kind, 600, 1)
    known, asked = (cut(contributions, rows) for rows in (slice(600), slice(600, None)))

    def share() -> float:
        fitted = fit_subset(known, (0, 1, 2), targets[:600])
        return float((fuse(asked, fitted).argmax(axis=1) == targets[600:]).mean())

    shrunk = share()
    monkeypatch.setattr(stacking, "start_weights", lambda members: np.ones(len(members)))
    assert shrunk == pytest.approx(share(), abs=0.01)


def test_one_member_keeps_its_labels_and_gets_its_temperature() -> None:
    contributions, targets = bag_members("alike", FEW, 0, asked=0)
    alone = fit_subset(contributions, (1,), targets)
    assert alone.b[0] > 0
    assert alone.b[0] == pytest.approx(1 / alone.temperatures.bagged, rel=0.5)


@pytest.mark.parametrize(
    ("factors", "variances", "expected"),
    [
        ((2.0,), (9.0,), (2.0,)),
        ((1.0, 1.2, 0.8), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)),
        ((1.0, 5.0), (1e-9, 1e-9), (1.0, 5.0)),
        # The spread is 8 of which 4 is uncertainty: half of the way.
        ((1.0, 5.0), (4.0, 4.0), (2.0, 4.0)),
        # What is sure stays, what is not follows.
        ((1.0, 1.1, 9.0), (1e-4, 1e-4, 1e3), (1.05, 1.05, 1.05)),
    ],
)
def test_factors_are_shrunk_by_as_much_as_they_are_uncertain(
    factors: tuple[float, ...], variances: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    assert shrink(np.array(factors), np.array(variances)) == pytest.approx(expected, rel=1e-3)


def test_a_member_counts_less_by_its_cross_entropy_as_far_as_that_is_sure() -> None:
    """Pictures differ in how hard they are, which says nothing of the members."""
    random = np.random.default_rng(0)
    hard, count = random.normal(2.0, 1.0, 60), 60

    def ratio(excess: float, noise: float) -> float:
        worse = hard + excess + noise * random.normal(size=count)
        calibrations = [Calibration(1.0, 0.1, losses) for losses in (hard, worse)]
        best, other = start_weights(calibrations)
        return float(other / best)

    assert ratio(0.0, 0.0) == pytest.approx(1.0)
    # All but sure: exp(-EXCESS * 0.5), less as 30 more pictures are taken to see no excess.
    assert ratio(0.5, 0.01) == pytest.approx(np.exp(-4 / 3), rel=0.01)
    assert ratio(0.1, 3.0) > 0.7


@pytest.mark.parametrize(("members", "most"), [(2, 0.11), (3, 0.08), (4, 0.06)])
def test_members_that_are_alike_seldom_count_unequally(members: int, most: float) -> None:
    random, draws = np.random.default_rng(0), 1000
    unequal = 0
    for _ in range(draws):
        losses = random.normal(1.0, 1.0, 60) + random.normal(0.0, 0.5, (members, 60))
        weights = start_weights([Calibration(1.0, 0.1, one) for one in losses])
        unequal += not np.allclose(weights, weights[0])
    assert unequal / draws < most


def test_any_number_of_members_that_are_the_same_count_the_same() -> None:
    losses = np.random.default_rng(0).normal(1.0, 1.0, 60)
    for members in range(1, 9):
        same = [Calibration(1.5, 0.1, losses)] * members
        np.testing.assert_allclose(start_weights(same), 1.5)
