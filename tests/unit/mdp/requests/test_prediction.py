"""From what a session collected to one labelled answer."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from mdp.errors import ConfigError, DeadlineExceeded, QuorumNotMet, WireError
from mdp.files import write_json
from mdp.formats.bundle import FUSION, MANIFEST, Bundle, file_entry
from mdp.fusion.fuse import FUSIONS, Contribution, Fusion, fuse, probabilities, weights_for
from mdp.requests import prediction
from mdp.requests.capture import FrameInAnswer
from mdp.requests.prediction import (
    TOP_K,
    AnswerBuilder,
    MemberTiming,
    Prediction,
    likeliest,
    no_answer,
)
from mdp.requests.reason import LATE, NOT_NEEDED, UNREACHABLE, Reason
from mdp.requests.session import Arrival, Finish, Replied
from mdp.testing.bundles import DEVICES, LABELS, size_accuracy, subset_accuracy, write_bundle
from tests.support.bundles import CASCADE_ACCURACY, with_cascade, with_novelty


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("prediction") / "bundle")


def arrival(k: int, boost: tuple[float, ...], bag: tuple[float, ...]) -> Arrival:
    return Arrival(
        device=DEVICES[k],
        contribution=Contribution(np.array(boost, np.float32), np.array(bag, np.float32)),
        queue_ms=1.0,
        compute_ms=2.0 + k,
        network_ms=3.0,
    )


ARRIVALS = {
    0: arrival(0, (3.0, 0.0, 0.0), (1.0, 0.0, 0.0)),
    1: arrival(1, (0.0, 1.0, 0.0), (0.0, 5.0, 0.0)),
    2: arrival(2, (0.0, 0.0, 0.5), (0.0, 0.0, 0.25)),
}


def conclude(folder: Path, members: tuple[int, ...], fusion: Fusion = "stacked") -> Prediction:
    finish = Finish(
        arrived={k: ARRIVALS[k] for k in members},
        missing={DEVICES[k]: LATE for k in range(3) if k not in members},
        timed_out=len(members) < 3,
    )
    judge = AnswerBuilder(Bundle.open(folder), fusion)
    answer = judge.build(finish, 80.0)
    # The same again: what was worked out for a subset is kept.
    assert judge.build(finish, 80.0) == answer
    assert isinstance(answer, Prediction)
    return answer


@pytest.mark.parametrize(
    ("fusion", "members", "mode", "rule"),
    [
        ("stacked", (0, 1, 2), "stacked", "stacked"),
        ("stacked", (0, 2), "stacked", "stacked"),
        ("stacked", (1,), "single", "stacked"),
        ("boosted", (0, 1, 2), "boosted", "boosted"),
        ("boosted", (0, 1), "boosted", "boosted"),
        ("boosted", (0,), "single", "boosted"),
        ("boosted", (1, 2), "bagged", "bagged"),
        ("boosted", (2,), "single", "bagged"),
        ("bagged", (0, 1, 2), "bagged", "bagged"),
        ("bagged", (0, 1), "bagged", "bagged"),
    ],
)
def test_mode_and_the_accuracy_that_was_measured_for_just_that(
    folder: Path, fusion: Fusion, members: tuple[int, ...], mode: str, rule: str
) -> None:
    answer = conclude(folder, members, fusion)
    assert answer.mode == mode
    assert answer.expected_accuracy == getattr(subset_accuracy(members), rule)
    assert answer.expected_accuracy_pictures == 100
    assert answer.used == tuple(DEVICES[k] for k in members)
    assert set(answer.used) | set(answer.missing) == set(DEVICES)
    assert answer.partial == (len(members) < 3)


def test_rules_of_bounded_many_sets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "KEPT_RULES", 2)
    judge = AnswerBuilder(Bundle.open(folder), "stacked")
    sets = [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)]
    first = [judge._rule(members) for members in sets]
    assert len(judge._rules) == 2
    assert [judge._rule(members).mode for members in sets] == [rule.mode for rule in first]


@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_first_stage_is_sure_above_its_threshold(tmp_path: Path, fusion: Fusion) -> None:
    folder = write_bundle(tmp_path / "bundle")
    alone = conclude(folder, (1,), fusion).probability
    arrived = {1: ARRIVALS[1].contribution}
    for threshold, sure in ((alone - 1e-6, True), (alone + 1e-6, False), (1.0, False)):
        with_cascade(folder, threshold, first=(1,))
        assert AnswerBuilder(Bundle.open(folder), fusion).is_sure(arrived) == sure


def test_a_first_stage_that_was_sure_is_worth_what_the_cascade_is(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "bundle")
    finish = Finish(
        arrived={0: ARRIVALS[0]},
        missing=dict.fromkeys(DEVICES[1:], NOT_NEEDED),
        timed_out=False,
        stage="first",
    )

    def answer() -> Prediction:
        judge = AnswerBuilder(Bundle.open(folder), "stacked")
        told = judge.build(finish, 80.0)
        assert isinstance(told, Prediction)
        return told

    assert (answer().stage, answer().expected_accuracy) == ("first", None)
    with_cascade(folder, 0.9)
    assert answer().expected_accuracy == CASCADE_ACCURACY.stacked


@pytest.mark.parametrize(
    ("fusion", "label", "logits"),
    [
        ("boosted", "blue", (3.0, 1.0, 0.5)),
        ("bagged", "green", (1 / 3, 5 / 3, 0.25 / 3)),
        # a = 0.5 and b = 1/3 for every member, as the colour bundle was fitted.
        ("stacked", "green", (1.5 + 1 / 3, 0.5 + 5 / 3, 0.25 + 0.25 / 3)),
    ],
)
def test_each_rule(folder: Path, fusion: Fusion, label: str, logits: tuple[float, ...]) -> None:
    answer = conclude(folder, (0, 1, 2), fusion)
    exponentials = np.exp(np.array(logits))
    expected = exponentials / exponentials.sum()
    assert answer.label == label
    assert dict(answer.top) == pytest.approx(dict(zip(LABELS, expected, strict=True)), rel=1e-5)
    assert answer.probability == pytest.approx(expected.max(), rel=1e-5)
    scores = [score for _, score in answer.top]
    assert scores == sorted(scores, reverse=True)


def test_a_subset_without_fitted_weights_is_bagged(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "bundle")
    weights = json.loads((folder / FUSION).read_text())
    weights["subsets"] = [s for s in weights["subsets"] if s["members"] != [0, 2]]
    (folder / FUSION).write_text(json.dumps(weights))
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][FUSION] = msgspec.to_builtins(file_entry(folder / FUSION))
    (folder / MANIFEST).write_text(json.dumps(manifest))
    answer = conclude(folder, (0, 2))
    assert answer.mode == "bagged"
    assert answer.expected_accuracy == subset_accuracy((0, 2)).bagged
    assert conclude(folder, (0, 1)).mode == "stacked"


def test_temperatures_soften_a_plain_answer_and_keep_its_label(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "bundle")
    sharp = conclude(folder, (0, 1, 2), "bagged")
    weights = json.loads((folder / FUSION).read_text())
    for subset in weights["subsets"]:
        subset["temperatures"] = {"boosted": 1.0, "bagged": 4.0}
    (folder / FUSION).write_text(json.dumps(weights))
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][FUSION] = msgspec.to_builtins(file_entry(folder / FUSION))
    (folder / MANIFEST).write_text(json.dumps(manifest))
    soft = conclude(folder, (0, 1, 2), "bagged")
    assert soft.label == sharp.label
    exponentials = np.exp(np.array((1 / 12, 5 / 12, 0.25 / 12)))
    assert soft.probability == pytest.approx((exponentials / exponentials.sum()).max(), rel=1e-5)
    assert conclude(folder, (0, 1, 2), "boosted").probability > 0.5


def test_many_members_take_weights_and_accuracy_of_their_size(tmp_path: Path) -> None:
    devices = tuple(f"d{k}" for k in range(10))
    folder = write_bundle(tmp_path / "bundle", devices=devices, sizes=(8,) * 10)
    members = (1, 3, 5, 8)
    finish = Finish(
        arrived={k: replace(ARRIVALS[1], device=devices[k]) for k in members},
        missing={devices[k]: LATE for k in range(10) if k not in members},
        timed_out=True,
    )
    answer = AnswerBuilder(Bundle.open(folder), "stacked").build(finish, 80.0)
    assert isinstance(answer, Prediction)
    assert (answer.mode, answer.label) == ("stacked", "green")
    assert answer.expected_accuracy == size_accuracy(4).mean.stacked


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("members", [(0,), (1, 2), (0, 1, 2)])
def test_an_item_above_the_threshold_is_none_of_the_classes(
    tmp_path: Path, members: tuple[int, ...], fusion: Fusion
) -> None:
    folder = write_bundle(tmp_path / "bundle")
    # Energy of stacked logits, whatever rule the answer is fused by.
    weights = weights_for(members, "stacked", Bundle.open(folder).fusion_weights())
    z = fuse({k: ARRIVALS[k].contribution for k in members}, weights)
    energy = -float(np.log(np.exp((z - z.mean()).astype(np.float64)).sum()))
    for above, known in ((0.01, False), (-0.01, True)):
        with_novelty(folder, threshold=energy - above)
        answer = conclude(folder, members, fusion)
        assert answer.known == known
        assert (answer.expected_accuracy is None) == (not known)
        assert answer.novelty == pytest.approx(above, abs=1e-4)
        assert answer.known_rejected == pytest.approx(0.04 - 0.01 * (len(members) - 1))
        named = f"{answer.label} ({answer.probability:.0%})"
        assert answer.verdict == (named if known else f"unknown, nearest {named}")


@pytest.mark.parametrize("unknown", [False, True])
def test_an_unknown_item_makes_no_suspects(tmp_path: Path, unknown: bool) -> None:
    folder = write_bundle(tmp_path / "bundle")
    weights = replace(Bundle.open(folder).fusion_weights(), agreement=(0.8,) * 3)
    write_json(folder / FUSION, weights)
    # All answers are unknown ones, or none is.
    judge = AnswerBuilder(Bundle.open(with_novelty(folder, -99.0 if unknown else 99.0)), "stacked")
    frames = {device: FrameInAnswer(1, 0.0) for device in DEVICES}
    zero = (0.0, 0.0, 0.0)
    suspects: set[str] = set()
    for number in range(60):
        # Two agree on one of two labels, the third says another one.
        agreed, odd = tuple(9.0 * (k == number % 2) for k in range(3)), (0.0, 0.0, 9.0)
        parts = {k: arrival(k, zero, odd if k == 2 else agreed) for k in range(3)}
        answer = judge.build(Finish(arrived=parts, missing={}, timed_out=False), 80.0, frames)
        assert isinstance(answer, Prediction)
        assert answer.known is not unknown
        suspects |= answer.suspects.keys()
    assert suspects == (set() if unknown else {DEVICES[2]})


def test_a_bundle_without_thresholds_answers_and_cannot_say(folder: Path) -> None:
    answer = conclude(folder, (0, 1))
    assert (answer.known, answer.novelty, answer.known_rejected) == (None, None, None)
    assert answer.verdict == f"{answer.label} ({answer.probability:.0%})"
    with pytest.raises(
        ConfigError, match=r"fusion\.json: key `novelty`: expected thresholds for `reject` 0"
    ):
        AnswerBuilder(Bundle.open(folder), "stacked", reject=0.02)


def test_another_rate_has_another_threshold_that_was_not_measured(tmp_path: Path) -> None:
    folder = with_novelty(write_bundle(tmp_path / "bundle"))
    finish = Finish(arrived=ARRIVALS, missing={}, timed_out=False)
    default = AnswerBuilder(Bundle.open(folder), "stacked").build(finish, 80.0)
    rarer = AnswerBuilder(Bundle.open(folder), "stacked", reject=0.01).build(finish, 80.0)
    assert isinstance(default, Prediction)
    assert isinstance(rarer, Prediction)
    assert default.novelty is not None
    assert rarer.novelty == pytest.approx(default.novelty - 1.0)
    assert (default.known_rejected, rarer.known_rejected) == (0.02, None)
    for rate, wanted in ((0.001, "expected at least 0.01"), (0.5, "expected at most 0.05")):
        with pytest.raises(ConfigError, match=rf"`reject` of the fleet file: {wanted}"):
            AnswerBuilder(Bundle.open(folder), "stacked", reject=rate)


def test_no_item_of_several_labels_is_unknown(tmp_path: Path) -> None:
    bundle = Bundle.open(write_bundle(tmp_path / "bundle", several=True))
    with pytest.raises(ConfigError, match=r"`reject` 0\.02 .* is unknown: remove `reject`$"):
        AnswerBuilder(bundle, "stacked", reject=0.02)


def test_thresholds_that_were_never_measured(tmp_path: Path) -> None:
    folder = with_novelty(write_bundle(tmp_path / "bundle"), rejected=None)
    answer = conclude(folder, (0, 1, 2))
    assert answer.known is not None
    assert answer.known_rejected is None


def test_where_the_milliseconds_of_every_member_went(folder: Path) -> None:
    answer = conclude(folder, (0, 2))
    assert [(m.device, m.k, m.compute_ms) for m in answer.members] == [
        ("alpha", 0, 2.0),
        ("gamma", 2, 4.0),
    ]
    assert {m.queue_ms for m in answer.members} == {1.0}
    assert {m.network_ms for m in answer.members} == {3.0}


@pytest.mark.parametrize("fusion", FUSIONS)
def test_what_each_member_would_have_answered_alone(folder: Path, fusion: Fusion) -> None:
    finish = Finish(arrived=ARRIVALS, missing={}, timed_out=False)
    judge = AnswerBuilder(Bundle.open(folder), fusion, opinions=True)
    answer = judge.build(finish, 80.0)
    assert isinstance(answer, Prediction)
    alone = [conclude(folder, (k,), fusion) for k in ARRIVALS]
    said = [(member.label, member.probability) for member in answer.members]
    assert said == [(each.label, each.probability) for each in alone]
    assert {member.label for member in conclude(folder, (0, 1), fusion).members} == {None}


def at_rungs(folder: Path, *rungs: int, **changes: Any) -> Prediction:
    builder = AnswerBuilder(Bundle.open(folder), "stacked")
    finish = Finish(
        arrived={k: replace(ARRIVALS[k], rung=rung) for k, rung in enumerate(rungs)},
        missing={},
        timed_out=False,
        **changes,
    )
    answer = builder.build(finish, 80.0)
    assert isinstance(answer, Prediction)
    return answer


def test_an_answer_says_its_rungs_and_what_they_cost(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "bundle", rungs=3)
    top = subset_accuracy((0, 1, 2)).stacked
    for rungs, expected in (((0, 0, 0), top), ((2, 2, 2), 0.5 * top), ((1, 1, 1), None)):
        answer = at_rungs(folder, *rungs)
        assert answer.expected_accuracy == (expected and pytest.approx(expected))
        assert tuple(member.rung for member in answer.members) == rungs


def test_what_was_measured_at_the_top_alone_is_not_told_of_lower_rungs(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "bundle", rungs=2)
    with_cascade(folder, 0.5, first=(0,))
    assert at_rungs(folder, 0, stage="first").expected_accuracy == CASCADE_ACCURACY.stacked
    assert at_rungs(folder, 1, stage="first").expected_accuracy is None
    with_novelty(folder)
    assert at_rungs(folder, 0, 0).known_rejected is not None
    assert at_rungs(folder, 0, 1).known_rejected is None


def test_logits_of_a_rung_are_made_ready_for_the_weights_of_the_top(tmp_path: Path) -> None:
    builder = AnswerBuilder(Bundle.open(write_bundle(tmp_path / "bundle", rungs=3)), "stacked")
    own = ARRIVALS[1].contribution
    assert builder.scale_rung(1, 0, own) is own
    lower = builder.scale_rung(1, 2, own)
    assert lower.boost is not None
    np.testing.assert_array_equal(lower.bag, 4 * own.bag)
    np.testing.assert_array_equal(
        builder.scale_rung(1, 1, Contribution(None, own.bag)).bag, 2 * own.bag
    )
    with pytest.raises(WireError, match="expected a rung up to 2, got 3"):
        builder.scale_rung(1, 3, own)


def test_json_has_the_documented_keys(folder: Path) -> None:
    answer = conclude(folder, (0, 2))
    content = answer.to_dict()
    assert json.loads(answer.to_json()) == content
    assert content["missing"] == {"beta": "late"}
    assert content["used"] == ["alpha", "gamma"]
    assert content["members"][1]["device"] == "gamma"
    page = (Path(__file__).parents[4] / "docs/reference/client.md").read_text()
    answers = page[page.index("## The answer") : page.index("## Classes")]
    documented = re.findall(r"^\| `(\w+)` \|", answers, re.MULTILINE)
    assert documented == [*content, *content["members"][0]]


def test_print_shows_what_the_answer_is_and_lacks(folder: Path) -> None:
    answer = replace(conclude(folder, (0, 2)), label="red", probability=0.98765)
    shown = (
        "Prediction(label='red', probability=0.988, mode='stacked', used=('alpha', 'gamma'), "
        "missing={'beta': 'late'}"
    )
    assert str(answer) == f"{shown})"
    doubted = replace(answer, suspects={"gamma": "frozen"})
    assert repr(doubted) == f"{shown}, suspects={{'gamma': 'frozen'}})"
    unknown = repr(replace(answer, known=False))
    assert unknown == f"{shown})".replace("label", "known=False, label", 1)


def test_at_most_five_labels_best_first(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "bundle")
    manifest = json.loads((folder / MANIFEST).read_text())
    weights = json.loads((folder / FUSION).read_text())
    manifest["labels"] = [f"class {n}" for n in range(9)]
    weights["num_classes"] = 9
    (folder / FUSION).write_text(json.dumps(weights))
    manifest["files"][FUSION] = msgspec.to_builtins(file_entry(folder / FUSION))
    (folder / MANIFEST).write_text(json.dumps(manifest))
    logits = tuple(float(n) for n in (0, 8, 1, 7, 2, 6, 3, 5, 4))
    finish = Finish(arrived={0: arrival(0, logits, logits)}, missing={}, timed_out=False)
    judge = AnswerBuilder(Bundle.open(folder), "bagged")
    answer = judge.build(finish, 2.0)
    assert isinstance(answer, Prediction)
    best = ["class 1", "class 3", "class 5", "class 7", "class 8"]
    assert [label for label, _ in answer.top] == best
    assert (answer.label, answer.probability) == answer.top[0]


def test_no_answer_says_why_for_every_device() -> None:
    missing = {"alpha": LATE, "beta": Reason("overloaded", "16 requests wait already")}
    late = no_answer(missing, timed_out=True, deadline_ms=80.0)
    assert isinstance(late, DeadlineExceeded)
    assert str(late) == (
        "no answer within 80 ms (alpha: late; beta: overloaded: 16 requests wait already)"
    )
    # In the order in which devices were found missing, which the text does not depend on.
    missing = {"gamma": UNREACHABLE, "beta": LATE, "alpha": UNREACHABLE}
    late = no_answer(missing, timed_out=True, deadline_ms=80.0)
    assert str(late) == "no answer within 80 ms (alpha, gamma: unreachable; beta: late)"
    none = no_answer({"alpha": UNREACHABLE}, timed_out=False, deadline_ms=80.0)
    assert isinstance(none, QuorumNotMet)
    assert str(none) == "no device can answer (alpha: unreachable)"
    assert none.outcomes == none.codes == {"alpha": "unreachable"}


@pytest.mark.parametrize("num_classes", [2, 5, 6, 16, 17, 1000])
def test_the_likeliest_classes_are_those_of_a_whole_sort(num_classes: int) -> None:
    # Few different values, so that many are equal.
    logits = np.random.default_rng(num_classes).integers(0, 4, num_classes).astype(np.float32)
    whole = np.argsort(-logits, kind="stable")[:TOP_K].tolist()
    classes, shares = likeliest(logits)
    assert classes == whole
    assert shares == pytest.approx(probabilities(logits)[whole].tolist())


TIMING = MemberTiming(device="a", k=0, queue_ms=1.0, compute_ms=2.0, network_ms=3.0)
REPLIED = Replied(
    device="a", contribution=ARRIVALS[0].contribution, queue_ms=1.0, compute_ms=2.0, now_s=0.0
)


@pytest.mark.parametrize("record", [TIMING, REPLIED])
def test_events_and_timings_cannot_be_changed(record: MemberTiming | Replied) -> None:
    with pytest.raises(AttributeError, match="immutable"):
        setattr(record, "device", "b")  # noqa: B010


@pytest.mark.parametrize("kind", [MemberTiming, Replied])
def test_events_and_timings_take_keywords_alone(kind: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match="positional"):
        kind("a")
