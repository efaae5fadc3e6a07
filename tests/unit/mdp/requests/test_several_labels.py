"""Answers of labels that do not exclude each other, from contributions to lines for people."""

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from mdp.cli.answers import summary
from mdp.files import write_json
from mdp.formats.bundle import FUSION, Bundle
from mdp.fusion.fuse import Contribution
from mdp.requests.capture import FrameInAnswer
from mdp.requests.prediction import AnswerBuilder, Prediction
from mdp.requests.reason import LATE
from mdp.requests.session import Arrival, Finish
from mdp.testing.bundles import DEVICES, LABELS, subset_accuracy, write_bundle
from tests.support.bundles import relist, with_anomaly

#: Log-odds that weights of `write_bundle` make of a label's logits: 1.8 less.
LESS = 1.8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("several") / "bundle", several=True)


def finish(*members: tuple[float, float, float]) -> Finish:
    """The first members answer so: logits of blue, green and red."""
    arrived = {
        k: Arrival(
            device=DEVICES[k],
            contribution=Contribution(None, np.array(logits, np.float32)),
            queue_ms=1.0,
            compute_ms=2.0,
            network_ms=3.0,
        )
        for k, logits in enumerate(members)
    }
    missing = {DEVICES[k]: LATE for k in range(len(members), 3)}
    return Finish(arrived=arrived, missing=missing, timed_out=bool(missing))


def answer_of(folder: Path, *members: tuple[float, float, float]) -> Prediction:
    found = AnswerBuilder(Bundle.open(folder), "stacked", opinions=True).build(
        finish(*members), 80.0
    )
    assert isinstance(found, Prediction)
    return found


def test_every_label_that_holds_is_told_with_its_own_probability(folder: Path) -> None:
    answer = answer_of(folder, (LESS + 2, LESS - 3, LESS + 1), (LESS + 3, LESS - 3, LESS + 3))
    assert answer.label == "blue+red"
    assert answer.holds is not None
    assert [label for label, _ in answer.holds] == ["blue", "red"], "likeliest first"
    shares = [1 / (1 + np.exp(-z)) for z in (2.5, 2.0)]
    assert [share for _, share in answer.holds] == pytest.approx(shares)
    assert answer.probability == pytest.approx(1 / (1 + np.exp(-2))), "of the least certain"
    assert [label for label, _ in answer.top] == ["blue", "red", "green"]
    assert sum(share for _, share in answer.top) > 1, "each by itself"
    assert answer.verdict == "blue (92%) + red (88%)"
    assert answer.expected_accuracy == subset_accuracy((0, 1)).stacked
    assert (answer.known, answer.novelty, answer.suspects) == (None, None, {})


def test_an_item_without_any_label(folder: Path) -> None:
    answer = answer_of(folder, (LESS - 2, LESS - 1, LESS - 4))
    assert (answer.label, answer.holds) == ("none", ())
    assert answer.probability == pytest.approx(1 / (1 + np.exp(-1)))
    assert answer.verdict == "none (73%)"
    assert json.loads(answer.to_json())["holds"] == []


def test_each_devices_own_labels(folder: Path) -> None:
    answer = answer_of(folder, (LESS + 2, LESS - 3, LESS - 2), (LESS - 5, LESS + 2, LESS + 2))
    assert [member.label for member in answer.members] == ["blue", "green+red"]


def test_a_threshold_of_its_own_decides(folder: Path, tmp_path: Path) -> None:
    other = write_bundle(tmp_path / "bundle", several=True)
    weights = Bundle.open(other).fusion_weights()
    moved = [
        replace(one, thresholds=(0.9, 0.2, 0.5)) if one.members == (0,) else one
        for one in weights.subsets
    ]
    write_json(other / FUSION, replace(weights, subsets=moved))
    relist(other, FUSION)
    logits = (LESS + 1, LESS - 1, LESS + 1)
    assert answer_of(folder, logits).label == "blue+red"
    assert answer_of(other, logits).label == "green+red"


def test_a_line_for_people_says_what_the_accuracy_is_of(folder: Path) -> None:
    answer = answer_of(folder, (LESS + 2, LESS - 3, LESS + 1))
    share = subset_accuracy((0,)).stacked
    assert f"every label right on {share:.1%} of 100 test pictures" in summary(answer)


def test_looks_suspect_no_camera_for_seeing_other_labels(folder: Path) -> None:
    """Faults on one side are the rule here: cameras that disagree are not covered."""
    judge = AnswerBuilder(Bundle.open(folder), "stacked")
    frames = {device: FrameInAnswer(1, 5.0) for device in DEVICES}
    seen = finish((LESS + 3, LESS - 3, LESS - 3), (LESS - 3, LESS + 3, LESS - 3))
    for _ in range(300):
        answer = judge.build(seen, 80.0, frames)
        assert isinstance(answer, Prediction)
        assert answer.suspects == {}
    assert judge.disagreeing == frozenset()


def test_answers_of_one_label_have_none(tmp_path: Path) -> None:
    plain = Bundle.open(write_bundle(tmp_path / "bundle"))
    heads = np.zeros(3, np.float32), np.array([3, 0, 0], np.float32)
    arrived = {0: replace_contribution(finish((0, 0, 0)).arrived[0], Contribution(*heads))}
    answer = AnswerBuilder(plain, "stacked").build(
        Finish(arrived=arrived, missing={}, timed_out=False), 80.0
    )
    assert isinstance(answer, Prediction)
    assert (answer.label, answer.holds) == (LABELS[0], None)


def replace_contribution(arrival: Arrival, contribution: Contribution) -> Arrival:
    return Arrival(
        device=arrival.device,
        contribution=contribution,
        queue_ms=arrival.queue_ms,
        compute_ms=arrival.compute_ms,
        network_ms=arrival.network_ms,
    )


def test_an_item_with_labels_may_differ_from_good_ones_too(tmp_path: Path) -> None:
    other = with_anomaly(write_bundle(tmp_path / "bundle", several=True))
    judge = AnswerBuilder(Bundle.open(other), "stacked")
    seen = finish((LESS + 2, LESS - 3, LESS + 1))
    strange = replace(seen.arrived[0].contribution, anomaly=1e6)
    arrived = {0: replace_contribution(seen.arrived[0], strange)}
    answer = judge.build(Finish(arrived=arrived, missing={}, timed_out=False), 80.0)
    assert isinstance(answer, Prediction)
    assert (answer.label, answer.normal) == ("blue+red", False)
    assert answer.verdict == "different: blue (88%) + red (73%)"
