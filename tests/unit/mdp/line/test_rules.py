"""Verdicts on one look at an item: fused, any camera, k of n, and what is missing."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mdp.errors import DeadlineExceeded, InputError
from mdp.line.record import answer_record
from mdp.line.rules import (
    LineRules,
    Look,
    OwnAnswer,
    count_votes,
    disagree,
    judge,
    look_of,
    read_different,
    read_rules,
)
from mdp.requests.prediction import Prediction

CAMERAS = ("a", "b", "c", "d", "e")
LABELS = ("good", "scratch", "dent", "empty")
LINE = LineRules(needed={"scratch": 1, "dent": 2}, passing=frozenset(("good",)), empty="empty")


def look(
    label: str | None = "good",
    own: Mapping[str, str] | None = None,
    probability: float = 0.9,
    known: bool | None = True,
    suspects: tuple[str, ...] = (),
) -> Look:
    """A look of five cameras, of which those without an own label are missing."""
    named = dict.fromkeys(CAMERAS, label) if own is None else own
    answers = {device: OwnAnswer(one, 0.8) for device, one in named.items() if one is not None}
    missing = tuple(device for device in CAMERAS if device not in answers)
    return Look(
        label=label, probability=probability, known=known, own=answers, cameras=len(CAMERAS),
        missing=missing, suspects=frozenset(suspects),
    )  # fmt: skip


def test_without_rules_the_fused_answer_decides() -> None:
    verdict = judge(look(), LineRules())
    assert (verdict.label, verdict.passed, verdict.sure) == ("good", True, True)
    assert verdict.text == "good (90%): passed"
    assert verdict.why_kept is None


def test_any_camera_stops_an_item() -> None:
    own = {**dict.fromkeys(CAMERAS, "good"), "d": "scratch"}
    verdict = judge(look("good", own), LINE)
    assert (verdict.label, verdict.passed, verdict.decision) == ("scratch", False, "rule")
    assert verdict.text == "scratch, seen by 1 of 5, 1 needed: not passed"
    assert judge(look("good", {**own, "d": "dent"}), LINE).passed


def test_a_missing_camera_leaves_a_rule_open() -> None:
    own = {"a": "good", "b": "good", "c": "dent", "d": "good"}
    verdict = judge(look("good", own), LineRules(needed={"dent": 2}, passing=frozenset(["good"])))
    assert (verdict.label, verdict.passed, verdict.sure) == ("good", False, False)
    assert verdict.text == (
        "good (90%), but dent may be there: seen by 1 of 5, 1 missing, 2 needed: not passed"
    )
    assert verdict.decision == "open"
    assert verdict.why_kept == "disagreement"
    # A board that is away all day does not fill the folder.
    away = judge(look("good", dict.fromkeys("abcd", "good")), LINE)
    assert (away.decision, away.passed, away.why_kept) == ("open", False, None)


def test_a_class_that_has_to_be_seen_by_several() -> None:
    rules = LineRules(needed={"good": 3})
    two = {"a": "good", "b": "good", "c": "dent", "d": "dent"}
    verdict = judge(look("good", two), rules)
    assert verdict.text == "good, seen by 2 of 5, 1 missing, 3 needed: not passed"
    assert verdict.decision == "open"
    verdict = judge(look("good", {**two, "e": "dent"}), rules)
    assert (verdict.decision, verdict.passed, verdict.why_kept) == ("unconfirmed", False, "unsure")
    verdict = judge(look("good", {**two, "e": "good"}), rules)
    assert (verdict.decision, verdict.passed) == ("rule", True)
    # The fused label has a rule of its own that it does not fulfil; another class has.
    verdict = judge(look("dent", {**two, "e": "good"}), LineRules(needed={"good": 3, "dent": 3}))
    assert (verdict.label, verdict.passed) == ("good", True)


def test_suspects_have_no_vote() -> None:
    own = {**dict.fromkeys(CAMERAS, "good"), "d": "scratch"}
    verdict = judge(look("good", own, suspects=("d",)), LINE)
    assert verdict.votes["scratch"].seen == ()
    assert (verdict.passed, verdict.decision) == (False, "open")


def test_unknown_unsure_empty_and_no_answer_do_not_pass() -> None:
    for seen, decision, why in (
        (look(known=False), "unknown", "unknown"),
        (look(probability=0.4), "unsure", "unsure"),
        (look("empty"), "empty", None),
        (look_of(DeadlineExceeded("none\nin time", {"a": "late"}), 5), "no_answer", "unsure"),
    ):
        verdict = judge(seen, LINE)
        assert (verdict.passed, verdict.decision, verdict.why_kept) == (False, decision, why)
    assert verdict.text == "no answer (none in time): not passed"
    # What stops an item is said even of one that is unknown.
    assert judge(look("good", dict.fromkeys(CAMERAS, "dent"), known=False), LINE).label == "dent"


def test_two_classes_at_once_are_a_conflict() -> None:
    own = {"a": "good", "b": "good", "c": "dent", "d": "dent", "e": "good"}
    both = LineRules(needed={"good": 2, "dent": 2})
    assert judge(look("good", own), both).decision == "conflict"
    assert judge(look("scratch", own), LineRules(needed={"dent": 2})).decision == "conflict"


def test_an_item_that_its_rule_sees_is_not_empty() -> None:
    own = {"a": "good", "b": "good", "c": "empty", "d": "empty", "e": "empty"}
    rules = LineRules(needed={"good": 2}, empty="empty")
    verdict = judge(look("empty", own), rules)
    assert (verdict.label, verdict.decision, verdict.passed) == (None, "conflict", False)
    assert verdict.text == "empty (90%), but good is seen by 2 of 5, 2 needed: not passed"
    assert (verdict.sure, verdict.why_kept) == (False, "unsure")
    assert judge(look("empty", {**own, "a": "empty"}), rules).decision == "empty"


def test_cameras_disagree_where_both_are_sure() -> None:
    own = {"a": OwnAnswer("good", 0.8), "b": OwnAnswer("dent", 0.4)}
    seen = replace(look(), own=own)
    assert not disagree(seen, 0.5)
    assert disagree(seen, 0.4)
    assert judge(seen, LineRules(sure_from=0.4)).why_kept == "disagreement"


def test_rules_are_read() -> None:
    assert read_rules(["a=any", "b=2", "c=d=3", "e=fused"]) == {"a": 1, "b": 2, "c=d": 3}
    for text in ("a", "=any", "a=", "a=0", "a=-1", "a=some", "a=1.5", "a=1000", "a=²"):
        with pytest.raises(InputError, match="expected CLASS=any, CLASS=fused or CLASS=2"):
            read_rules([text])
    with pytest.raises(InputError, match="expected one rule for a, got two"):
        read_rules(["a=any", "a=2"])


def test_rules_are_held_against_the_bundle() -> None:
    LINE.check(LABELS, 5)
    for rules, text in (
        (LineRules(needed={"x": 1}), "--rule x: expected a class of the bundle: good, scratch"),
        (LineRules(passing=frozenset(["x"])), "--pass x: expected a class"),
        (LineRules(empty="x"), "--empty x: expected a class"),
        (LineRules(needed={"good": 6}), "--rule good=6: expected at most 5, the cameras"),
    ):
        with pytest.raises(InputError, match=text):
            rules.check(LABELS, 5)


def looks() -> st.SearchStrategy[Look]:
    labels = st.sampled_from(LABELS)
    answers = st.builds(OwnAnswer, labels, st.floats(0, 1))
    return st.builds(
        lambda label, probability, known, own, suspects: Look(
            label=label,
            probability=probability,
            known=known,
            own=own,
            cameras=len(CAMERAS),
            missing=tuple(one for one in CAMERAS if one not in own),
            suspects=suspects,
        ),
        st.none() | labels,
        st.floats(0, 1),
        st.sampled_from((True, False, None)),
        st.dictionaries(st.sampled_from(CAMERAS), answers),
        st.frozensets(st.sampled_from(CAMERAS)),
    )


def line_rules() -> st.SearchStrategy[LineRules]:
    return st.builds(
        LineRules,
        needed=st.dictionaries(st.sampled_from(LABELS), st.integers(1, len(CAMERAS))),
        passing=st.none() | st.frozensets(st.sampled_from(LABELS)),
        empty=st.none() | st.just("empty"),
        sure_from=st.floats(0, 1),
    )


@given(looks(), line_rules())
def test_what_passes_is_known_seen_and_stopped_by_nobody(seen: Look, rules: LineRules) -> None:
    verdict = judge(seen, rules)
    assert verdict.text.endswith(": passed") == verdict.passed
    if verdict.passed:
        assert verdict.sure
        assert verdict.label is not None
        assert rules.passes(verdict.label)
        assert seen.known is not False
        own = verdict.votes.get(verdict.label)
        assert own.state == "seen" if own else seen.label == verdict.label
        stopping = [one for label, one in verdict.votes.items() if rules.stops(label)]
        assert all(one.state == "unseen" for one in stopping)
    assert (verdict.why_kept == "unknown") == (verdict.decision == "unknown")


@given(looks(), line_rules(), st.sampled_from(LABELS))
def test_a_camera_that_comes_back_never_makes_a_stopped_item_pass_unseen(
    seen: Look, rules: LineRules, label: str
) -> None:
    if not judge(seen, rules).passed or not seen.missing:
        return
    back = replace(
        seen,
        own={**seen.own, seen.missing[0]: OwnAnswer(label, 0.9)},
        missing=seen.missing[1:],
        suspects=seen.suspects - {seen.missing[0]},
    )
    stopped = judge(back, rules)
    for name, votes in stopped.votes.items():
        if rules.stops(name):
            assert votes.state == "unseen"


@given(looks(), st.sampled_from(LABELS), st.integers(1, 5))
def test_votes_add_up(seen: Look, label: str, needed: int) -> None:
    votes = count_votes(label, needed, seen)
    assert len(votes.seen) + votes.missing <= votes.of
    assert not set(votes.seen) & seen.suspects
    assert (votes.state == "seen") == (len(votes.seen) >= needed)
    assert (votes.state == "unseen") == (len(votes.seen) + votes.missing < needed)


HEADED = LineRules(passing=frozenset(["good"]))


def inspected(normal: bool, *different: str, missing: tuple[str, ...] = ()) -> Look:
    """A look at a good item by four cameras, at which those named find a difference alone."""
    devices = [one for one in "abcd" if one not in missing]
    return Look(
        label="good",
        probability=0.9,
        normal=normal,
        own={one: OwnAnswer("good", 0.9, one in different) for one in devices},
        cameras=4,
        missing=missing,
    )


def test_an_item_that_differs_does_not_pass() -> None:
    assert judge(inspected(True), HEADED).passed
    verdict = judge(inspected(False, "b"), HEADED)
    assert (verdict.label, verdict.passed, verdict.decision) == ("good", False, "different")
    assert verdict.text == "different from the good ones, good (90%): not passed"
    assert (verdict.sure, verdict.why_kept) == (False, "different")
    assert judge(inspected(False, "b"), replace(HEADED, different="off")).passed


def test_cameras_vote_on_a_difference() -> None:
    two = replace(HEADED, different=2)
    assert judge(inspected(False, "b"), two).passed
    verdict = judge(inspected(True, "b", "d"), two)
    assert verdict.decision == "different"
    assert verdict.text.startswith("different from the good ones, seen by 2 of 4, 2 needed")
    assert verdict.different is not None
    assert verdict.different.seen == ("b", "d")
    blind = judge(inspected(True, "b", missing=("d",)), two)
    assert (blind.passed, blind.decision) == (False, "open")
    assert "it may differ from the good ones: seen by 1 of 4, 1 missing, 2 needed" in blind.text


def test_an_empty_scene_is_no_item_that_differs() -> None:
    empty = replace(inspected(False), label="empty")
    assert judge(empty, LineRules(empty="empty")).decision == "empty"
    # Each camera finds that an empty belt is unlike good items.
    every = replace(inspected(False, *"abcd"), label="empty")
    assert judge(every, LineRules(empty="empty", different=1)).decision == "empty"
    assert judge(every, LineRules(different=1)).decision == "different"


def test_an_item_that_no_side_can_judge_does_not_pass() -> None:
    blind = replace(inspected(True), normal=None, uninspected=True)
    verdict = judge(blind, HEADED)
    assert (verdict.passed, verdict.decision) == (False, "open")
    assert "good (90%), but no side can tell if it differs from the good ones" in verdict.text
    assert judge(blind, replace(HEADED, different="off")).passed


def test_a_look_says_whether_heads_could_not_tell() -> None:
    answer = Prediction(
        label="good", probability=0.9, top=(), mode="bagged", used=("a",), missing={},
        expected_accuracy=None, latency_ms=1.0, deadline_ms=2.0, members=(),
    )  # fmt: skip
    assert not look_of(answer, 1).uninspected
    assert look_of(replace(answer, blind_sides=("a",)), 1).uninspected
    assert not look_of(replace(answer, normal=True, blind_sides=("b",)), 2).uninspected


def test_ways_to_see_a_difference_are_read() -> None:
    assert [read_different(one) for one in ("fused", "off", "any", "3")] == ["fused", "off", 1, 3]
    for wrong in ("", "0", "all", "-1", "1000", "2.5"):
        with pytest.raises(InputError, match="--different"):
            read_different(wrong)


def test_votes_on_a_difference_need_heads_and_cameras() -> None:
    rules = LineRules(different=3)
    rules.check(["good"], 4, inspects=True)
    with pytest.raises(InputError, match="--different 3: expected at most 2, the cameras"):
        rules.check(["good"], 2, inspects=True)
    with pytest.raises(InputError, match="--different 3: expected a bundle with anomaly heads"):
        rules.check(["good"], 4)


def held(*labels: str, own: Mapping[str, str] | None = None) -> Look:
    """A look of a bundle of which several labels may hold."""
    found = labels or ("none",)
    return replace(look("+".join(found), own), labels=found)


def test_an_item_of_several_labels_passes_where_each_does() -> None:
    rules = LineRules(passing=frozenset(("none", "dirty")))
    passed = [judge(held(*some), rules).passed for some in ((), ("dirty",), ("dirty", "bent"))]
    assert passed == [True, True, False]
    assert judge(held("bent"), rules).text == "bent (90%): not passed"
    assert judge(held("bent", "dirty"), LineRules()).passed, "all but the empty one"
    empty = judge(held(), LineRules(empty="none"))
    assert (empty.decision, empty.passed) == ("empty", False)


def test_cameras_that_see_different_faults_do_not_disagree() -> None:
    own = {"a": "bent", "b": "dirty", "c": "none"}
    assert judge(held("bent", "dirty", own=own), LineRules()).why_kept is None
    assert judge(look("bent", own), LineRules()).why_kept == "disagreement"


def test_votes_need_one_label_an_item() -> None:
    told = "--rule bent: votes need one label an item, of this bundle several may hold"
    with pytest.raises(InputError, match=told):
        LineRules(needed={"bent": 2}).check(["bent", "dirty"], 5, several=True)
    LineRules(passing=frozenset(("none", "bent"))).check(["bent", "dirty"], 5, several=True)
    with pytest.raises(InputError, match="--pass none: expected a class of the bundle"):
        LineRules(passing=frozenset(("none",))).check(["bent", "dirty"], 5)
    # After a change of the bundle under a watcher that runs, the rule is never seen,
    verdict = judge(held("bent", "dirty"), LineRules(needed={"bent": 2}))
    assert (verdict.label, verdict.decision, verdict.votes) == ("bent+dirty", "fused", {})


def test_what_a_rule_would_stop_does_not_pass_where_nobody_can_count_votes() -> None:
    """A bundle of several labels has come to a line that runs."""
    rules = LineRules(needed={"bent": 1}, passing=frozenset(("none", "dirty")))
    told = "dirty (90%), but votes for bent need one label an item: not passed"
    verdict = judge(held("dirty", own={"a": "bent", "b": "dirty"}), rules)
    assert (verdict.decision, verdict.passed, verdict.text) == ("open", False, told)
    assert judge(held("dirty"), replace(rules, needed={"dirty": 1})).passed, "it stops nothing"


def test_a_look_takes_the_labels_of_an_answer() -> None:
    answer = Prediction(
        label="bent+dirty",
        probability=0.7,
        top=(("bent", 0.9), ("dirty", 0.7)),
        holds=(("bent", 0.9), ("dirty", 0.7)),
        mode="single",
        used=("a",),
        missing={},
        expected_accuracy=None,
        latency_ms=1.0,
        deadline_ms=80.0,
        members=(),
    )
    assert look_of(answer, 1).labels == ("bent", "dirty")
    assert look_of(replace(answer, label="none", holds=()), 1).labels == ("none",)
    assert look_of(replace(answer, label="bent", holds=None), 1).labels == ()
    assert answer_record(answer).holds == (("bent", 0.9), ("dirty", 0.7))
    assert answer_record(replace(answer, holds=None)).holds is None
