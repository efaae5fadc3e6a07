"""Looks, without sockets: what the devices are asked, and what their frames make of an answer."""

from pathlib import Path

import numpy as np
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from mdp.client.questions import CameraQuestion
from mdp.files import write_json
from mdp.formats.bundle import MANIFEST, Bundle
from mdp.fusion.fuse import Contribution, FusionWeights
from mdp.protocol.messages import Failure, FrameReply, FrameRequest, decode, logits_buffer
from mdp.requests.capture import FrameInAnswer, FrameQuery, frame_query
from mdp.requests.prediction import AnswerBuilder, Prediction
from mdp.requests.reason import Suspicion
from mdp.requests.session import Arrival, Finish
from mdp.testing.bundles import LABELS, write_bundle
from tests.support.bundles import with_anomaly, with_novelty
from tests.support.exchanges import Desk
from tests.support.faults.stage import with_cameras


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    folder = write_bundle(tmp_path / "bundle")
    return Desk(folder, [("alpha", 0), ("beta", 1), ("gamma", 2), ("gamma/attic", 2)])


def of_cameras(bundle: Path) -> Path:
    """The bundle, measured on scenes of a camera for each sub-model."""
    manifest = Bundle.open(bundle).manifest
    parts = [replace(part, camera=part.device) for part in manifest.plan.assignments]
    plan = replace(manifest.plan, assignments=parts)
    write_json(bundle / MANIFEST, replace(manifest, plan=plan))
    return bundle


@pytest.fixture
def cameras(tmp_path: Path) -> Desk:
    """The same devices, each with a camera of its own."""
    folder = of_cameras(write_bundle(tmp_path / "bundle"))
    return Desk(folder, [("alpha", 0), ("beta", 1), ("gamma", 2), ("gamma/attic", 2)])


def look(desk: Desk, query: FrameQuery | None = None, deadline_ms: float = 100.0) -> None:
    desk.ask(CameraQuestion(query or FrameQuery(), desk.dispatcher.disagreeing), deadline_ms)


def looks(desk: Desk) -> dict[str, FrameRequest]:
    """Requests to each device since the last call of this."""
    sent, desk.transport.sent = desk.transport.sent, []
    decoded = {device: decode(frames).message for device, frames in sent}
    return {
        device: message for device, message in decoded.items() if isinstance(message, FrameRequest)
    }


def see(
    desk: Desk,
    device: str,
    frame: int = 1,
    age_ms: float = 10.0,
    request_id: int = 1,
    label: int = 2,
    frozen: bool = False,
    suspected: bool = False,
    anomaly: float | None = None,
    anomaly_map: bytes = b"",
) -> None:
    logits = np.eye(len(LABELS), dtype=np.float32)[label] * 4
    seen = FrameReply(
        request_id=request_id,
        num_classes=len(LABELS),
        queue_ms=1.0,
        compute_ms=5.0,
        frame=frame,
        age_ms=age_ms,
        frozen=frozen,
        suspected=suspected,
        anomaly=anomaly,
        anomaly_map=anomaly_map,
    )
    desk.receive(device, seen, logits_buffer(Contribution(logits, logits)))


def gamma(asked: dict[str, FrameRequest]) -> str:
    """Replica that was asked."""
    return "gamma" if "gamma" in asked else "gamma/attic"


def test_every_member_is_asked_to_look_and_no_picture_is_sent(desk: Desk) -> None:
    look(desk, FrameQuery(within_ms=250.0))
    assert [len(frames) for _, frames in desk.transport.sent] == [1, 1, 1]
    asked = looks(desk)
    assert [ask.k for ask in asked.values()] == [0, 1, 2]
    for ask in asked.values():
        assert ask.digest == desk.bundle.digest
        assert (ask.ago_ms, ask.within_ms) == (0.0, 250.0)
    assert ask.budget_ms == pytest.approx(98.0)


def test_the_answer_tells_every_frame_and_how_far_apart_they_are(desk: Desk) -> None:
    look(desk)
    third = gamma(looks(desk))
    desk.clock.now_s += 0.010
    # Of 10 ms, 6 were the agent's: sent 10 ms ago, arrived 8 ms ago.
    see(desk, "alpha", frame=812, age_ms=40.0)
    desk.clock.now_s += 0.010
    see(desk, "beta", frame=7, age_ms=25.0)
    see(desk, third, frame=9, age_ms=0.0)
    answer = desk.prediction()
    assert [(m.device, m.frame) for m in answer.members] == [
        ("alpha", 812),
        ("beta", 7),
        (third, 9),
    ]
    # 20 ms after it began: alpha's was taken 40 ms before 2 ms, the others' before 7 ms.
    assert [m.frame_age_ms for m in answer.members] == pytest.approx([58.0, 38.0, 13.0])
    assert answer.frame_spread_ms == pytest.approx(45.0)
    shown = answer.to_dict()
    assert shown["frame_spread_ms"] == answer.frame_spread_ms


def test_an_answer_to_a_picture_has_no_frames(desk: Desk) -> None:
    desk.submit()
    for device, _ in desk.take_asked():
        desk.reply(device)
    answer = desk.prediction()
    assert answer.frame_spread_ms is None
    assert {(m.frame, m.frame_age_ms) for m in answer.members} == {(None, None)}


def test_a_replica_that_is_asked_later_is_asked_for_the_same_moment(desk: Desk) -> None:
    moment_s = desk.clock() - 0.3
    look(desk, frame_query(moment_s, within_ms=100.0, now_s=desk.clock()))
    first = looks(desk)
    assert [ask.ago_ms for ask in first.values()] == pytest.approx([300.0] * 3)
    desk.clock.now_s += 0.02
    desk.fail(gamma(first), text="no frame of that moment")
    (second,) = looks(desk).values()
    assert second.k == 2
    assert second.ago_ms == pytest.approx(320.0)


def test_a_device_without_a_frame_is_missing_with_its_own_words(desk: Desk) -> None:
    look(desk)
    third = gamma(looks(desk))
    no_source = Failure(request_id=1, code="no_frame", text="this agent has no source (--source)")
    desk.receive("beta", no_source)
    see(desk, "alpha")
    see(desk, third)
    answer = desk.prediction()
    assert answer.used == ("alpha", third)
    assert answer.missing == {"beta": "no_frame: this agent has no source (--source)"}
    assert answer.frame_spread_ms == pytest.approx(0.0)


def test_no_number_of_looks_without_a_frame_makes_a_device_worse_for_pictures(desk: Desk) -> None:
    for _ in range(10):
        look(desk)
        for device, ask in looks(desk).items():
            if device == "alpha":
                text = "camera:0: cannot be opened"
                gone = Failure(request_id=ask.request_id, code="no_frame", text=text)
                desk.receive(device, gone)
            else:
                see(desk, device, request_id=ask.request_id)
        assert desk.prediction().missing == {"alpha": "no_frame: camera:0: cannot be opened"}
    desk.submit()
    assert [infer.k for _, infer in desk.take_asked()] == [0, 1, 2]


def test_a_result_is_no_answer_to_a_look_nor_the_other_way_round(desk: Desk) -> None:
    look(desk)
    third = gamma(looks(desk))
    desk.reply("alpha")
    see(desk, "beta")
    see(desk, third)
    assert desk.prediction().missing == {"alpha": "bad_output: expected a FrameReply, got a Result"}
    desk.submit()
    logits = logits_buffer(Contribution(*np.zeros((2, len(LABELS)), dtype=np.float32)))
    seen = FrameReply(request_id=2, num_classes=3, queue_ms=0, compute_ms=1, frame=1, age_ms=0)
    desk.receive("alpha", seen, logits)
    for device, _ in desk.take_asked():
        if device != "alpha":
            desk.reply(device, 2)
    assert desk.prediction().missing == {"alpha": "bad_output: expected a Result, got a FrameReply"}


@pytest.mark.parametrize(("known", "normal"), [(True, 20), (False, 80)])
def test_a_camera_that_disagrees_is_a_suspect_in_every_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool, normal: int
) -> None:
    rates = (0.9, 0.9, 0.9) if known else UNSET
    weights = FusionWeights(num_classes=len(LABELS), subsets=[], agreement=rates)
    folder = with_cameras(write_bundle(tmp_path / "bundle"))
    monkeypatch.setattr(Bundle, "fusion_weights", lambda bundle: weights)
    desk = Desk(folder, [("alpha", 0), ("beta", 1), ("gamma", 2)])
    told: list[dict[str, Suspicion]] = []
    said: set[str] = set()
    for turn in range(normal + 30):
        look(desk)
        for device, ask in looks(desk).items():
            # Gamma's camera is covered after a while.
            label = 0 if device == "gamma" and turn >= normal else turn % len(LABELS)
            said |= {device} if ask.suspect else set()
            see(desk, device, request_id=ask.request_id, label=label)
        told.append(desk.prediction().suspects)
    assert not any(told[:normal])
    assert told[-1] == desk.dispatcher.suspects == {"gamma": "disagrees"}
    assert said == {"gamma"}, "its agent is told"


def test_frames_too_far_apart_are_not_fused_and_the_answer_says_it(cameras: Desk) -> None:
    look(cameras)
    third = gamma(looks(cameras))
    see(cameras, "alpha", age_ms=40.0)
    see(cameras, "beta", age_ms=1840.0, label=0)
    see(cameras, third, age_ms=30.0)
    answer = cameras.prediction()
    assert answer.used == ("alpha", third)
    assert answer.missing == {
        "beta": "apart: its frame is 1810 ms older than the newest in the answer: expected at "
        "most 500 ms"
    }
    assert answer.missing_codes == {"beta": "apart"}
    assert answer.expected_accuracy == cameras.bundle.expected_accuracy((0, 2), "stacked")
    assert answer.frame_spread_ms == pytest.approx(10.0)


def test_the_fleet_file_says_how_far_apart_frames_may_be(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "bundle")
    desk = Desk(folder, [("alpha", 0), ("beta", 1)], max_spread_ms=2000.0)
    look(desk)
    see(desk, "alpha", age_ms=40.0)
    see(desk, "beta", age_ms=1840.0)
    assert desk.prediction().used == ("alpha", "beta")


def test_a_first_stage_that_is_left_out_is_not_worth_a_whole_cascade(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "bundle")
    desk = Desk(folder, [("alpha", 0), ("beta", 1)])
    frames = {"alpha": FrameInAnswer(1, 0.0), "beta": FrameInAnswer(1, 900.0)}
    parts = {
        k: Arrival(
            device=device, contribution=Contribution(*np.zeros((2, 3), np.float32)),
            queue_ms=0.0, compute_ms=1.0, network_ms=1.0,
        )
        for k, device in enumerate(("alpha", "beta"))
    }  # fmt: skip
    finish = Finish(arrived=parts, missing={}, timed_out=False, stage="first")
    answer = AnswerBuilder(desk.bundle, "stacked").build(finish, 100.0, frames)
    assert isinstance(answer, Prediction)
    assert answer.used == ("alpha",)
    assert answer.expected_accuracy == desk.bundle.expected_accuracy((0,), "stacked")


@pytest.mark.parametrize("why", ["frozen", "disagrees"])
def test_what_an_agent_says_of_its_camera_is_a_suspicion_as_long_as_it_says_so(
    cameras: Desk, why: str
) -> None:
    whole = cameras.bundle.expected_accuracy((0, 1, 2), "stacked")
    for doubted in (True, True, False):
        look(cameras)
        asked = looks(cameras)
        assert not any(ask.suspect for ask in asked.values()), "it is not said back"
        for device, ask in asked.items():
            said = doubted and device == "beta"
            see(
                cameras, device, request_id=ask.request_id,
                frozen=said and why == "frozen", suspected=said and why == "disagrees",
            )  # fmt: skip
        told = {"beta": why} if doubted else {}
        answer = cameras.prediction()
        assert answer.suspects == cameras.dispatcher.suspects == told
        # It was measured with cameras that see what they should.
        assert (answer.uses_suspect, answer.expected_accuracy) == (
            (True, None) if doubted else (False, whole)
        )


def test_several_views_are_not_worth_what_one_picture_was_measured_to_be(desk: Desk) -> None:
    """A bundle of single pictures was never measured with a view for each device."""
    look(desk)
    third = gamma(looks(desk))
    for device in ("alpha", "beta", third):
        see(desk, device)
    together = desk.prediction()
    assert (together.used, together.expected_accuracy) == (("alpha", "beta", third), None)
    alone = Desk(desk.bundle.path, [("alpha", 0)])
    look(alone)
    see(alone, "alpha")
    expected = desk.bundle.expected_accuracy((0,), "stacked")
    assert expected is not None
    assert alone.prediction().expected_accuracy == expected


def test_rejected_items_were_measured_without_suspects(tmp_path: Path) -> None:
    desk = Desk(
        of_cameras(with_novelty(write_bundle(tmp_path / "bundle"))), [("alpha", 0), ("beta", 1)]
    )
    for doubted in (True, False):
        look(desk)
        for device, ask in looks(desk).items():
            see(desk, device, request_id=ask.request_id, suspected=doubted and device == "beta")
        answer = desk.prediction()
        assert answer.known is not None
        assert answer.known_rejected == (None if doubted else 0.03)


def test_an_answer_without_the_suspect_is_worth_what_was_measured(cameras: Desk) -> None:
    look(cameras)
    third = gamma(looks(cameras))
    see(cameras, "alpha")
    see(cameras, "beta", age_ms=1840.0, frozen=True)
    see(cameras, third)
    answer = cameras.prediction()
    assert answer.used == ("alpha", third)
    assert answer.expected_accuracy == cameras.bundle.expected_accuracy((0, 2), "stacked")


@pytest.fixture
def inspecting(tmp_path: Path) -> Desk:
    folder = of_cameras(with_anomaly(write_bundle(tmp_path / "bundle")))
    return Desk(folder, [("alpha", 0), ("beta", 1), ("gamma", 2)])


def inspected(desk: Desk, number: int, *scores: float | None) -> Prediction:
    """The answer to a look at which each device gives one of `scores`; None: it has none."""
    look(desk)
    looks(desk)
    for device, score in zip(("alpha", "beta", "gamma"), scores, strict=True):
        see(desk, device, frame=number, request_id=number, anomaly=score)
    return desk.prediction()


def test_one_camera_makes_an_item_different(inspecting: Desk) -> None:
    fine = inspected(inspecting, 1, 0.5, 1.2, 0.1)
    assert (fine.normal, fine.blind_sides, fine.suspects) == (True, (), {})
    assert fine.anomaly == pytest.approx(-0.8)
    worn = inspected(inspecting, 2, 0.5, 4.5, 0.1)
    assert (worn.normal, worn.good_rejected, worn.defects_missed) == (False, 0.01, 0.25)
    assert (worn.defects_missed_least, worn.defects_missed_most) == (0.1119, 0.4687)
    assert worn.anomaly == pytest.approx(2.5)
    own = [member.anomaly for member in worn.members]
    assert own[1] == pytest.approx(2.5)
    assert max(one for one in (own[0], own[2]) if one is not None) < 0
    assert repr(worn).startswith("Prediction(normal=False, ")
    assert worn.verdict.startswith("different: ")


def test_a_missing_score_is_no_answer_of_this_bundle(inspecting: Desk) -> None:
    answer = inspected(inspecting, 1, 0.5, None, 3.0)
    assert answer.missing == {
        "beta": "bad_output: expected an anomaly score beside the logits, got none"
    }
    assert (answer.normal, answer.blind_sides) == (False, ("beta",))


def test_blind_sides_are_called_as_in_the_fleet(tmp_path: Path) -> None:
    folder = of_cameras(with_anomaly(write_bundle(tmp_path / "bundle")))
    desk = Desk(folder, [("alpha", 0), ("beta/spare", 1), ("gamma", 2)])
    look(desk)
    looks(desk)
    for device, score in (("alpha", 0.5), ("beta/spare", None), ("gamma", 0.1)):
        see(desk, device, frame=1, request_id=1, anomaly=score)
    answer = desk.prediction()
    assert set(answer.missing) == set(answer.blind_sides) == {"beta/spare"}


def test_a_camera_that_has_moved_is_said_and_does_not_decide(inspecting: Desk) -> None:
    random = np.random.default_rng(0)
    answers = []
    for number in range(1, 25):
        others = [float(random.uniform(0, 1.5)) for _ in range(2)]
        answers.append(inspected(inspecting, number, others[0], 9.0, others[1]))
    first, last = answers[0], answers[-1]
    assert (first.normal, first.suspects) == (False, {})
    assert (last.normal, last.suspects, last.blind_sides) == (True, {"beta": "moved"}, ("beta",))
    # Its label counts, but nobody has measured it from there.
    assert last.used == ("alpha", "beta", "gamma")
    assert first.expected_accuracy is not None
    assert last.expected_accuracy is None


def test_a_map_is_asked_for_and_comes_with_its_member(inspecting: Desk) -> None:
    inspecting.ask(CameraQuestion(FrameQuery(), maps=True))
    assert all(ask.wants_map for ask in looks(inspecting).values())
    for device in ("alpha", "beta", "gamma"):
        see(inspecting, device, anomaly=0.5, anomaly_map=bytes(range(256)))
    answer = inspecting.prediction()
    assert {member.anomaly_map for member in answer.members} == {bytes(range(256))}
    assert answer.to_dict()["members"][0]["anomaly_map"].startswith("AAECAwQF")


def test_a_map_of_another_size_is_no_answer(inspecting: Desk) -> None:
    look(inspecting)
    looks(inspecting)
    see(inspecting, "alpha", anomaly=0.5, anomaly_map=b"abc")
    see(inspecting, "beta", anomaly=0.5)
    see(inspecting, "gamma", anomaly=float("nan"))
    answer = inspecting.prediction()
    assert answer.used == ("beta",)
    assert answer.missing["alpha"] == "bad_output: expected a map of 256 bytes, got 3"
    assert answer.missing["gamma"] == "bad_output: an anomaly score that is not finite"
