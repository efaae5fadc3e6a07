"""Calls in flight over a faked transport and a clock that stands still until it is set."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from mdp.client.crops import Cutter
from mdp.client.questions import PictureQuestion
from mdp.errors import InputError, QuorumNotMet
from mdp.formats.plan import Region
from mdp.fusion.fuse import Contribution
from mdp.protocol.messages import (
    Failure,
    FailureCode,
    Result,
    StatusRequest,
    answers_key,
    code_and_text,
    encode,
    failure,
    logits_buffer,
)
from mdp.requests.deadline import MAX_DEADLINE_MS, Deadline, check_deadline_ms, reserve_s
from mdp.requests.health import FIRST_PAUSE_S, TOLERATED_FAILURES
from mdp.requests.hedging import ENOUGH
from mdp.requests.window import FIRST_PAUSE_S as WINDOW_PAUSE_S
from mdp.requests.window import MOST_OUT
from mdp.testing.bundles import (
    LABELS,
    SIZES,
    colour_picture,
    colour_plan,
    subset_accuracy,
    write_bundle,
)
from tests.support.bundles import with_cascade
from tests.support.exchanges import Desk

THREE = (("alpha", 0), ("beta", 1), ("gamma", 2))
REPLICAS = (("alpha", 0), ("alpha/attic", 0), ("beta", 1), ("gamma", 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("exchange") / "bundle")


@pytest.fixture
def desk(folder: Path) -> Desk:
    return Desk(folder, THREE)


def picture_question(desk: Desk) -> PictureQuestion:
    return PictureQuestion(Cutter(desk.dispatcher.assignments).views(colour_picture("red")))


def logits(*values: float) -> bytes:
    array = np.array(values, dtype=np.float32)
    return bytes(logits_buffer(Contribution(array, array)))


def result(request_id: int = 1, num_classes: int = len(LABELS)) -> Result:
    return Result(request_id=request_id, num_classes=num_classes, queue_ms=0.0, compute_ms=1.0)


def test_every_device_gets_its_own_crop_and_what_is_left_of_the_deadline(desk: Desk) -> None:
    desk.submit(deadline_ms=100.0)
    asked = desk.take_asked()
    assert [device for device, _ in asked] == ["alpha", "beta", "gamma"]
    assert [infer.image_size for _, infer in asked] == list(SIZES)
    assert [infer.k for _, infer in asked] == [0, 1, 2]
    assert {infer.digest for _, infer in asked} == {desk.bundle.digest}
    assert {infer.request_id for _, infer in asked} == {1}
    assert [infer.budget_ms for _, infer in asked] == pytest.approx([98.0] * 3)


def test_the_clock_decides(desk: Desk) -> None:
    desk.submit(deadline_ms=100.0)
    assert desk.dispatcher.next_wake_s() == pytest.approx(desk.clock() + 0.098)
    desk.reply("beta")
    desk.pass_s(0.0979)
    assert not desk.answers
    desk.pass_s(0.0002)
    answer = desk.prediction()
    assert answer.mode == "single"
    assert answer.used == ("beta",)
    assert answer.missing == {"alpha": "late", "gamma": "late"}
    assert answer.latency_ms <= answer.deadline_ms


def test_a_disconnection_settles_every_call_that_waits_for_it(desk: Desk) -> None:
    for _ in range(3):
        desk.submit()
    for request_id in (1, 2, 3):
        desk.reply("alpha", request_id)
        desk.reply("gamma", request_id)
    assert not desk.answers
    desk.disconnect("beta")
    assert len(desk.answers) == 3


def test_a_device_that_comes_back_is_asked_again(desk: Desk) -> None:
    desk.disconnect("beta")
    desk.submit()
    assert [device for device, _ in desk.take_asked()] == ["alpha", "gamma"]
    desk.connect("beta")
    desk.submit()
    assert [device for device, _ in desk.take_asked()] == ["alpha", "beta", "gamma"]


def test_a_replica_takes_over_and_nothing_is_missing(folder: Path) -> None:
    desk = Desk(folder, REPLICAS)
    desk.submit()
    assert [device for device, _ in desk.take_asked()] == ["alpha", "beta", "gamma"]
    desk.reply("beta")
    desk.reply("gamma")
    desk.clock.now_s += 0.05
    desk.disconnect("alpha")
    ((device, infer),) = desk.take_asked()
    assert (device, infer.k, infer.image_size) == ("alpha/attic", 0, SIZES[0])
    assert infer.budget_ms == pytest.approx(48.0)
    desk.reply("alpha/attic")
    answer = desk.prediction()
    assert answer.used == ("alpha/attic", "beta", "gamma")
    assert answer.missing == {}
    assert answer.mode == "stacked"


def test_a_send_that_fails_is_a_failure_like_any_other(folder: Path) -> None:
    desk = Desk(folder, REPLICAS)
    desk.transport.full = {"alpha", "gamma"}
    desk.submit()
    assert [device for device, _ in desk.take_asked()] == ["alpha/attic", "beta"]
    desk.reply("alpha/attic")
    desk.reply("beta")
    assert desk.prediction().missing == {"gamma": "backlogged: takes no more requests"}


def test_when_every_send_fails_the_answer_comes_at_once(desk: Desk) -> None:
    desk.transport.full = {"alpha", "beta", "gamma"}
    desk.submit()
    error = desk.error()
    assert isinstance(error, QuorumNotMet)
    assert set(error.outcomes.values()) == {"backlogged: takes no more requests"}


def test_another_number_of_classes_is_a_bad_output(desk: Desk) -> None:
    desk.submit()
    desk.reply("alpha")
    desk.reply("beta")
    desk.receive("gamma", result(num_classes=10), logits(*range(10)))
    reason = "bad_output: expected 3 classes, got 10"
    assert desk.prediction().missing == {"gamma": reason}


@pytest.mark.parametrize(
    ("buffer", "reason"),
    [
        *((logits(0.0, x, 0.0), "not finite") for x in (math.nan, math.inf, -math.inf, 3e38)),
        (logits(0.0, 1.0, 0.0)[:12], "expected logits of 2 heads, got those of 1"),
    ],
)
def test_logits_that_cannot_be_fused(desk: Desk, buffer: bytes, reason: str) -> None:
    desk.submit()
    desk.reply("alpha")
    desk.reply("beta")
    desk.receive("gamma", result(), buffer)
    answer = desk.prediction()
    assert list(answer.missing) == ["gamma"]
    assert answer.missing["gamma"].startswith("bad_output: ")
    assert reason in answer.missing["gamma"]
    assert answer.used == ("alpha", "beta")
    assert math.isfinite(answer.probability)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"garbage"], "begins with 'MDP'"),
        ([], "expected at least 1 frame, got 0"),
        ([b"MDP\x02\x03"], "expected protocol version 1, got 2"),
        (encode(result(), logits(1, 2, 3))[:1], r"Result: expected 1 buffer(s), got 0"),
        (
            [encode(result(), logits(1, 2, 3))[0], b"xyz"],
            "expected 12 bytes of logits, or twice, got 3",
        ),
    ],
)
def test_garbage_names_its_device(desk: Desk, frames: list[bytes], reason: str) -> None:
    desk.submit()
    desk.reply("alpha")
    desk.reply("beta")
    desk.frames("gamma", frames)
    missing = desk.prediction().missing
    assert list(missing) == ["gamma"]
    assert missing["gamma"].startswith("bad_message: ")
    assert reason in missing["gamma"]
    assert desk.dispatcher.counters["malformed"] == 1


def test_garbage_from_somebody_not_waited_for_only_counts(desk: Desk) -> None:
    desk.submit()
    desk.reply("alpha")
    desk.frames("alpha", [b"garbage"])
    desk.frames("alpha", encode(StatusRequest(request_id=1)))
    assert not desk.answers
    desk.reply("beta")
    desk.reply("gamma")
    assert desk.prediction().missing == {}
    assert desk.dispatcher.counters["malformed"] == 2


def test_late_duplicate_and_foreign_replies_are_counted_and_change_nothing(desk: Desk) -> None:
    desk.submit()
    desk.reply("alpha", favourite=2)
    desk.reply("alpha", favourite=0)
    desk.fail("alpha")
    desk.reply("beta", request_id=99, favourite=0)
    desk.reply("beta")
    assert not desk.answers
    desk.reply("gamma")
    answer = desk.prediction()
    assert (answer.label, answer.missing) == ("red", {})
    desk.reply("gamma", favourite=0)
    assert desk.dispatcher.counters == {"late": 2, "duplicate": 2, "malformed": 0}
    assert not desk.answers


def test_a_failure_of_an_unread_message_fails_whatever_waits_for_the_device(desk: Desk) -> None:
    desk.submit()
    desk.submit()
    for request_id in (1, 2):
        desk.reply("alpha", request_id)
        desk.reply("beta", request_id)
    text = "expected protocol version 2, got 1"
    desk.receive("gamma", Failure(request_id=0, code="bad_message", text=text))
    assert len(desk.answers) == 2
    desk.answers.pop()
    assert desk.prediction().missing == {"gamma": f"bad_message: {text}"}


def test_a_member_without_a_device_is_named(folder: Path) -> None:
    desk = Desk(folder, (("alpha", 0), ("gamma", 2)))
    desk.submit()
    assert [device for device, _ in desk.take_asked()] == ["alpha", "gamma"]
    desk.reply("alpha")
    desk.reply("gamma")
    answer = desk.prediction()
    assert answer.missing == {"beta": "not in the fleet"}
    assert answer.expected_accuracy == subset_accuracy((0, 2)).stacked
    desk.disconnect("alpha")
    desk.disconnect("gamma")
    desk.submit()
    outcomes = {"alpha": "unreachable", "gamma": "unreachable", "beta": "not in the fleet"}
    assert desk.error().outcomes == outcomes


def silence(desk: Desk, device: str, times: int) -> None:
    """`device` lets `times` requests go unanswered, the others answer."""
    for _ in range(times):
        desk.submit()
        asked = desk.take_asked()
        for other, infer in asked:
            if other != device:
                desk.reply(other, infer.request_id)
        desk.pass_s(0.1)
        assert desk.prediction().missing == {device: "late"}


def well(desk: Desk, *devices: str) -> list[str]:
    """`devices` answer a call; returns who was asked."""
    desk.submit()
    asked = desk.take_asked()
    for device, infer in asked:
        if device in devices:
            desk.reply(device, infer.request_id)
    return [device for device, _ in asked]


def test_a_silent_device_is_readmitted(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mdp")
    silence(desk, "gamma", TOLERATED_FAILURES)
    assert well(desk, "alpha", "beta") == ["alpha", "beta"]
    assert desk.prediction().missing == {"gamma": "silent: 3 requests unanswered"}
    desk.pass_s(FIRST_PAUSE_S)
    # No call is spent on finding out whether it lives: it is asked how it is, beside one.
    desk.submit()
    assert desk.asks() == ["gamma"]
    for device in ("alpha", "beta"):
        desk.reply(device, desk.last_id)
    assert desk.prediction().latency_ms == 0.0
    desk.pass_s(FIRST_PAUSE_S)
    desk.submit()
    assert desk.asks() == [], "the rest has doubled"
    desk.tell("gamma")
    assert desk.dispatcher.statuses["gamma"].state == "READY"
    for device in ("alpha", "beta"):
        desk.reply(device, desk.last_id)
    assert desk.prediction().missing == {"gamma": "silent: 3 requests unanswered"}
    # On probation it is asked, and not waited for, until it has answered in time.
    assert well(desk, "alpha", "beta") == ["gamma", "alpha", "beta"]
    assert desk.prediction().missing == {"gamma": "on probation: asked, not waited for"}
    assert well(desk, "alpha", "beta") == ["alpha", "beta"], "one test at a time"
    assert desk.prediction().missing == {"gamma": "on probation: asked, not waited for"}
    desk.reply("gamma", desk.last_id - 1)
    assert well(desk, "alpha", "beta") == ["alpha", "beta", "gamma"]
    assert not desk.answers, "it is waited for again"
    assert [record.getMessage() for record in caplog.records if record.name == "mdp"] == [
        "gamma: not waited for: silent: 3 requests unanswered", "gamma: waited for again",
    ]  # fmt: skip


@pytest.mark.parametrize("way", ["answers", "says too_late"])
def test_what_was_never_asked_is_no_sign_of_life(desk: Desk, way: str) -> None:
    for _ in range(TOLERATED_FAILURES):
        desk.submit()
        for other, infer in desk.take_asked():
            if other != "gamma":
                desk.reply(other, infer.request_id)
            elif way == "answers":
                desk.reply(other, infer.request_id + 1_000)
            else:
                desk.fail(other, infer.request_id + 1_000, code="too_late", text="too late")
        desk.pass_s(0.1)
        assert desk.prediction().missing == {"gamma": "late"}
    assert well(desk, "alpha", "beta") == ["alpha", "beta"]
    assert desk.prediction().missing == {"gamma": "silent: 3 requests unanswered"}


def late(desk: Desk, device: str, times: int) -> None:
    """`device` answers `times` requests after their deadline, the others at once."""
    for _ in range(times):
        desk.submit()
        for other, infer in desk.take_asked():
            if other != device:
                desk.reply(other, infer.request_id)
        desk.pass_s(0.1)
        assert desk.prediction().missing == {device: "late"}
        desk.reply(device, desk.last_id)


def test_a_late_reply_is_a_sign_of_life(desk: Desk) -> None:
    late(desk, "gamma", TOLERATED_FAILURES - 1)
    # Else it would be out after the first of these.
    silence(desk, "gamma", TOLERATED_FAILURES - 1)
    assert well(desk, "alpha", "beta") == ["alpha", "beta", "gamma"]


def test_a_call_that_was_turned_away_at_once_is_no_try(desk: Desk) -> None:
    late(desk, "gamma", TOLERATED_FAILURES)
    for _ in range(5):
        assert well(desk, "alpha", "beta") == ["gamma", "alpha", "beta"]
        desk.answers.clear()
        desk.fail("gamma", desk.last_id, code="too_late", text="too late")


def test_to_say_after_the_deadline_that_there_was_no_time_is_late(desk: Desk) -> None:
    for _ in range(TOLERATED_FAILURES):
        silence(desk, "gamma", 1)
        desk.fail("gamma", desk.last_id, code="too_late", text="too late")
    assert well(desk, "alpha", "beta") == ["gamma", "alpha", "beta"]
    assert desk.prediction().missing == {"gamma": "on probation: asked, not waited for"}


def test_where_everybody_is_late_all_are_waited_for(desk: Desk) -> None:
    for _ in range(2 * TOLERATED_FAILURES):
        desk.submit()
        asked = desk.take_asked()
        assert [device for device, _ in asked] == ["alpha", "beta", "gamma"]
        desk.pass_s(0.1)
        assert set(desk.error().outcomes.values()) == {"late"}
        for device, infer in asked:
            desk.reply(device, infer.request_id)


def test_a_reconnection_is_a_sign_of_life(desk: Desk) -> None:
    silence(desk, "gamma", TOLERATED_FAILURES)
    desk.disconnect("gamma")
    desk.connect("gamma")
    assert well(desk, "alpha", "beta") == ["gamma", "alpha", "beta"]
    assert desk.prediction().missing == {"gamma": "on probation: asked, not waited for"}


def test_silent_devices_are_asked_where_nobody_else_is_left(desk: Desk) -> None:
    for _ in range(TOLERATED_FAILURES):
        desk.submit()
        desk.pass_s(0.1)
        assert set(desk.error().outcomes.values()) == {"late"}
    desk.take_asked()
    desk.disconnect("alpha")
    desk.submit()
    assert [device for device, _ in desk.take_asked()] == ["beta", "gamma"]
    # Whoever takes this chance is not kept waiting for the others.
    desk.reply("beta", 4)
    silent = "on probation: asked, not waited for"
    assert desk.prediction().missing == {"alpha": "unreachable", "gamma": silent}


def test_a_client_that_is_slow_itself_blames_no_device(desk: Desk) -> None:
    views = Cutter(desk.dispatcher.assignments).views(colour_picture("red"))
    for _ in range(2 * TOLERATED_FAILURES):
        question = PictureQuestion(views)
        call = desk.dispatcher.submit(question, Deadline(desk.clock() - 0.1, 100.0))
        assert call.answer is not None
        desk.answers.append(call.answer)
        assert set(desk.error().outcomes.values()) == {"not asked: no time left"}
    desk.submit()
    assert [device for device, _ in desk.take_asked()] == ["alpha", "beta", "gamma"]


@pytest.mark.parametrize("fine", [0.001, 1, 80.0, MAX_DEADLINE_MS])
def test_deadlines_that_are_fine(fine: float) -> None:
    assert check_deadline_ms(fine) == fine
    assert 0 < reserve_s(fine) <= fine / 2e3


@pytest.mark.parametrize(
    ("deadline_ms", "reserve_ms"),
    [(1.0, 0.5), (3.0, 1.5), (20.0, 2.0), (80.0, 2.0), (250.0, 5.0), (1000.0, 10.0), (1e6, 10.0)],
)
def test_what_is_kept_back_of_a_deadline(deadline_ms: float, reserve_ms: float) -> None:
    assert reserve_s(deadline_ms) * 1e3 == pytest.approx(reserve_ms)


@pytest.mark.parametrize("bad", [0, -1, -0.0, math.nan, math.inf, -math.inf, MAX_DEADLINE_MS + 1])
def test_deadlines_that_are_refused(bad: float) -> None:
    with pytest.raises(
        InputError, match=r"deadline_ms: expected more than 0 and at most 3,600,000"
    ):
        check_deadline_ms(bad)


def test_equal_views_are_cut_once() -> None:
    plan = colour_plan(("a", "b", "c"), (16, 16, 16))
    assignments = {a.k: a for a in plan.assignments}
    assignments[2] = msgspec.structs.replace(assignments[2], region=Region(right=0.5, bottom=0.5))
    views = Cutter(assignments).views(colour_picture("red"))
    assert views[0] is views[1]
    assert views[2] is not views[0]


def test_a_device_on_a_slow_link_gets_jpeg() -> None:
    plan = colour_plan()
    assignments = {a.k: a for a in plan.assignments}
    assignments[1] = msgspec.structs.replace(assignments[1], encoding="jpeg")
    views = Cutter(assignments).views(colour_picture("red"))
    assert [views[k].encoding for k in range(3)] == ["raw", "jpeg", "raw"]
    assert bytes(views[1].pixels[:2]) == b"\xff\xd8"
    assert len(views[0].pixels) == SIZES[0] ** 2 * 3


def test_each_member_gets_the_picture_of_its_camera() -> None:
    plan = colour_plan()
    assignments = {
        a.k: msgspec.structs.replace(a, camera="side" if a.k else "front") for a in plan.assignments
    }
    cutter = Cutter(assignments)
    red, blue = colour_picture("red"), colour_picture("blue")
    seen = cutter.views({"side": blue, "front": red, "top": red})
    expected = [Cutter({0: plan.assignments[0]}).views(red)[0]]
    expected += [Cutter({a.k: a}).views(blue)[a.k] for a in plan.assignments[1:]]
    assert [bytes(seen[k].pixels) for k in range(3)] == [bytes(view.pixels) for view in expected]
    with pytest.raises(InputError, match=r"a picture of each camera \(front, side\), got one pic"):
        cutter.views(red)
    with pytest.raises(InputError, match="a picture of each camera, got none of side"):
        cutter.views({"front": red})
    with pytest.raises(InputError, match="expected one picture, got one of each camera"):
        Cutter(dict(enumerate(plan.assignments))).views({"front": red})


def answer_all(desk: Desk, colour: int, *devices: str, but: str = "") -> None:
    """`devices` answer the call under way with logits of their own, except `but`."""
    for number, device in enumerate(devices):
        if device != but:
            values = [0.0, 0.1 * colour, 4.0 + number]
            desk.receive(device, result(desk.last_id), logits(*values))


def test_a_device_that_says_the_same_of_everything_is_taken_out(desk: Desk) -> None:
    def picture(number: int) -> np.ndarray:
        return np.full((40, 60, 3), number, dtype=np.uint8)

    reasons = []
    for number in range(12):
        views = Cutter(desk.dispatcher.assignments).views(picture(number))
        desk.ask(PictureQuestion(views))
        answer_all(desk, number, "alpha", "beta")
        if "gamma" in [device for device, _ in desk.take_asked()]:
            desk.receive("gamma", result(desk.last_id), logits(0, 0, 1))
        reasons.append(desk.prediction().missing.get("gamma"))
    constant = "bad_output: the same logits for 4 different crops in a row"
    assert reasons == [None] * 4 + [constant] * 3 + [f"failing: {constant}"] * 5


def test_the_same_picture_may_have_the_same_logits_for_ever(desk: Desk) -> None:
    for _ in range(20):
        desk.submit()
        for device in ("alpha", "beta", "gamma"):
            desk.reply(device, desk.last_id)
        assert desk.prediction().missing == {}


@pytest.mark.parametrize("code", ["not_ready", "draining", "wrong_bundle", "wrong_submodel"])
def test_a_device_that_cannot_serve_until_it_is_ready(desk: Desk, code: FailureCode) -> None:
    desk.submit()
    desk.fail("gamma", code=code, text="so it is")
    for device in ("alpha", "beta"):
        desk.reply(device)
    assert desk.prediction().missing == {"gamma": f"{code}: so it is"}
    desk.take_asked()
    assert well(desk, "alpha", "beta") == ["alpha", "beta"]
    assert desk.prediction().missing == {"gamma": f"{code}: so it is"}
    desk.tell("gamma", state="WARMING")
    assert well(desk, "alpha", "beta") == ["alpha", "beta"]
    assert desk.prediction().missing == {"gamma": "not_ready: WARMING"}
    desk.tell("gamma", digest="0" * 64)
    assert well(desk, "alpha", "beta") == ["alpha", "beta"]
    reason = f"wrong_bundle: serves colours {'0' * 12}, expected colours {desk.bundle.digest[:12]}"
    assert desk.prediction().missing == {"gamma": reason}
    desk.tell("gamma")
    assert well(desk, "gamma", "alpha", "beta") == ["gamma", "alpha", "beta"]
    assert desk.prediction().missing == {}


def test_a_device_that_serves_two_bundles_is_asked_for_its_older_one(desk: Desk) -> None:
    desk.submit()
    desk.fail("gamma", code="draining", text="so it is")
    for device in ("alpha", "beta"):
        desk.reply(device)
    assert desk.prediction().missing == {"gamma": "draining: so it is"}
    desk.take_asked()
    assert well(desk, "alpha", "beta") == ["alpha", "beta"]
    desk.prediction()
    # By now it also serves another bundle, in which it has another part.
    counts = {"answered": 9, answers_key(desk.bundle.digest): 7}
    desk.tell("gamma", digest="0" * 64, k=0, counts=counts)
    assert well(desk, "gamma", "alpha", "beta") == ["gamma", "alpha", "beta"]
    assert desk.prediction().missing == {}


def test_one_that_has_no_time_is_asked_again_at_once(desk: Desk) -> None:
    for _ in range(2 * TOLERATED_FAILURES):
        desk.submit()
        assert [device for device, _ in desk.take_asked()] == ["alpha", "beta", "gamma"]
        for device in ("alpha", "beta"):
            desk.reply(device, desk.last_id)
        desk.fail("gamma", desk.last_id, code="too_late")
        assert desk.prediction().missing == {"gamma": "too_late: full"}


def test_a_request_refused_for_want_of_room_is_sent_again(desk: Desk) -> None:
    desk.submit(deadline_ms=100.0)
    desk.take_asked()
    for device in ("alpha", "beta"):
        desk.reply(device)
    desk.fail("gamma")
    assert not desk.answers
    assert desk.dispatcher.next_wake_s() == pytest.approx(desk.clock() + WINDOW_PAUSE_S)
    desk.pass_s(WINDOW_PAUSE_S)
    ((device, infer),) = desk.take_asked()
    assert (device, infer.request_id) == ("gamma", 1)
    assert infer.budget_ms == pytest.approx(93.0)
    # Its first answer again is not taken for one to the second request.
    desk.fail("gamma")
    desk.reply("gamma")
    assert desk.dispatcher.counters["duplicate"] == 1
    desk.pass_s(10 * WINDOW_PAUSE_S)
    assert [device for device, _ in desk.take_asked()] == ["gamma"]
    desk.reply("gamma")
    answer = desk.prediction()
    assert answer.missing == {}
    assert answer.members[2].held_ms == pytest.approx(55.0)


def test_one_that_refuses_until_the_deadline_is_missing_for_that(desk: Desk) -> None:
    desk.submit(deadline_ms=100.0)
    for device in ("alpha", "beta"):
        desk.reply(device)
    desk.fail("gamma", text="16 requests wait already")
    desk.pass_s(0.1)
    assert desk.prediction().missing == {"gamma": "overloaded: 16 requests wait already"}


def test_a_quota_has_a_code_of_its_own_that_older_clients_can_read(desk: Desk) -> None:
    told = failure(1, "quota", "this client's 5% of the computing time are used up")
    assert told.code == "overloaded"
    assert code_and_text(told) == ("quota", "this client's 5% of the computing time are used up")
    desk.submit()
    for device in ("alpha", "beta"):
        desk.reply(device)
    desk.receive("gamma", told)
    answer = desk.prediction()
    assert answer.missing == {"gamma": "quota: this client's 5% of the computing time are used up"}
    assert answer.missing_codes == {"gamma": "quota"}
    # An older agent's has the code of a full queue: it is asked again.
    desk.submit()
    desk.receive("gamma", Failure(request_id=desk.last_id, code="overloaded", text="used up"))
    for device in ("alpha", "beta"):
        desk.reply(device, desk.last_id)
    assert not desk.answers


def test_calls_beyond_the_window_wait_and_go_as_replies_come(desk: Desk) -> None:
    for _ in range(MOST_OUT + 2):
        desk.submit(deadline_ms=1000.0)
    assert len(desk.take_asked()) == 3 * MOST_OUT
    desk.clock.now_s += 0.1
    desk.reply("beta", request_id=3)
    ((device, infer),) = desk.take_asked()
    assert (device, infer.request_id) == ("beta", MOST_OUT + 1)
    assert infer.budget_ms == pytest.approx(890.0)


def test_nobody_is_asked_for_a_call_whose_caller_has_gone(desk: Desk) -> None:
    for _ in range(MOST_OUT):
        desk.submit(deadline_ms=1000.0)
    gone = desk.ask(picture_question(desk), deadline_ms=1000.0)
    desk.submit(deadline_ms=1000.0)
    desk.take_asked()
    desk.dispatcher.abandon(gone)
    desk.dispatcher.abandon(gone)
    desk.reply("alpha", request_id=1)
    assert [(d, infer.request_id) for d, infer in desk.take_asked()] == [("alpha", MOST_OUT + 2)]
    assert not desk.answers
    # One of which requests are out: their replies are late.
    out = desk.dispatcher._book.calls[2]
    desk.dispatcher.abandon(out)
    desk.reply("alpha", request_id=2)
    assert desk.dispatcher.counters["late"] == 1


def test_a_hedged_over_device_that_stays_silent_is_found_out(folder: Path) -> None:
    desk = Desk(folder, REPLICAS, hedge_after_s=0.020)
    for round_ in range(TOLERATED_FAILURES):
        desk.submit(deadline_ms=100.0)
        asked = [device for device, _ in desk.take_asked()]
        if "alpha" not in asked:
            break
        for device in asked:
            if device != "alpha":
                desk.reply(device, desk.last_id)
        desk.pass_s(0.021)
        assert [device for device, _ in desk.take_asked()] == ["alpha/attic"], round_
        desk.reply("alpha/attic", desk.last_id)
        assert desk.prediction().missing == {}
        desk.pass_s(0.2)
    # Its replica is preferred by now, though it was never missing from an answer.
    desk.submit(deadline_ms=100.0)
    assert next(device for device, _ in desk.take_asked()) == "alpha/attic"


def test_an_idle_replica_is_asked_how_it_is_and_taken_out_if_it_never_says(folder: Path) -> None:
    desk = Desk(folder, REPLICAS)
    asks: list[str] = []
    for _ in range(12):
        desk.submit()
        infers = [device for device, _ in desk.infers()]
        if "alpha/attic" in infers:
            # The slower one of two: it is left for when it is needed.
            desk.clock.now_s += 0.05
        for device in infers:
            desk.reply(device, desk.last_id)
        assert desk.prediction().missing == {}
        asks += desk.asks()
        desk.pass_s(1.5)
    assert asks.count("alpha/attic") >= TOLERATED_FAILURES
    assert set(asks) == {"alpha/attic"}, "the others are heard in every call"
    desk.disconnect("alpha")
    desk.submit()
    assert [device for device, _ in desk.take_asked()] == ["beta", "gamma"]
    for device in ("beta", "gamma"):
        desk.reply(device, desk.last_id)
    silent = f"silent: {TOLERATED_FAILURES} requests unanswered"
    assert desk.prediction().missing == {"alpha": "unreachable", "alpha/attic": silent}


def test_a_device_that_refuses_this_client_is_missing_with_its_reason(desk: Desk) -> None:
    desk.transport.connected.discard("alpha")
    desk.transport.refused["alpha"] = "no such key"
    desk.submit()
    assert [device for device, _ in desk.take_asked()] == ["beta", "gamma"]
    desk.reply("beta")
    desk.reply("gamma")
    assert desk.prediction().missing == {"alpha": "refused: no such key"}


def test_devices_that_are_left_out_are_not_asked(folder: Path) -> None:
    desk = Desk(folder, THREE)
    desk.dispatcher.left_out = frozenset({"beta"})
    desk.submit()
    assert [device for device, _ in desk.take_asked()] == ["alpha", "gamma"]
    desk.reply("alpha")
    desk.reply("gamma")
    answer = desk.prediction()
    assert answer.missing == {"beta": "left out: by this client"}
    assert answer.missing_codes == {"beta": "left out"}
    assert answer.expected_accuracy == subset_accuracy((0, 2)).stacked
    desk.dispatcher.left_out = frozenset()
    desk.submit()
    assert [device for device, _ in desk.take_asked()] == ["alpha", "beta", "gamma"]


@pytest.fixture(scope="module")
def in_turns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose first stage is alpha, sure where it names a favourite at all."""
    return with_cascade(write_bundle(tmp_path_factory.mktemp("cascade") / "bundle"), 0.5)


def unsure(desk: Desk) -> None:
    """Alpha replies to the request sent last that all classes are as likely."""
    desk.receive("alpha", result(desk.last_id), logits(*[0.0] * len(LABELS)))


@pytest.mark.parametrize("cascade", [True, False])
def test_all_are_asked_at_once_without_the_switch(in_turns: Path, cascade: bool) -> None:
    # Nor where the first stage is not in the fleet.
    desk = Desk(in_turns, THREE[1:] if cascade else THREE, cascade=cascade)
    desk.submit()
    asked = [device for device, _ in desk.take_asked()]
    assert len(asked) == (2 if cascade else 3)
    for device in asked:
        desk.reply(device)
    assert desk.prediction().stage == "all"


def test_a_silent_first_stage_leaves_the_others_their_time(in_turns: Path) -> None:
    desk = Desk(in_turns, THREE, cascade=True)
    for _ in range(ENOUGH):
        desk.submit()
        desk.pass_s(0.010)
        unsure(desk)
        desk.pass_s(0.020)
        desk.reply("beta", desk.last_id)
        desk.pass_s(0.010)
        desk.reply("gamma", desk.last_id)
        assert desk.prediction().stage == "escalated"
    desk.take_asked()
    # They need 30 of the 98 ms.
    desk.submit()
    desk.pass_s(0.067)
    assert [device for device, _ in desk.take_asked()] == ["alpha"]
    desk.pass_s(0.002)
    assert [device for device, _ in desk.take_asked()] == ["beta", "gamma"]
    for device in ("beta", "gamma"):
        desk.reply(device, desk.last_id)
    desk.pass_s(0.1)
    answer = desk.prediction()
    assert (answer.stage, answer.missing) == ("escalated", {"alpha": "late"})
    # 10 and 30 do not fit into 35.
    desk.submit(deadline_ms=35.0)
    assert [device for device, _ in desk.take_asked()] == ["alpha", "beta", "gamma"]
    desk.reply("alpha", desk.last_id)
    assert desk.prediction().stage == "first"


def test_replies_of_lower_rungs_are_fused_with_their_factors(tmp_path: Path) -> None:
    """Logits of a rung are half of those above, which its factors make up for."""
    answers = []
    for rungs in ((0, 0, 0), (0, 1, 2)):
        desk = Desk(write_bundle(tmp_path / str(rungs), rungs=3), THREE)
        desk.submit()
        for (device, k), rung in zip(THREE, rungs, strict=True):
            values = np.array([0.0, 1.0 + k, 2.0], np.float32) / np.float32(2**rung)
            told = msgspec.structs.replace(result(), rung=rung)
            desk.receive(device, told, logits_buffer(Contribution(values, values)))
        answers.append(desk.prediction())
    top, mixed = answers
    assert mixed.top == top.top
    assert [member.rung for member in mixed.members] == [0, 1, 2]
    assert top.expected_accuracy is not None
    assert mixed.expected_accuracy is None


def test_a_rung_that_the_bundle_has_not_is_bad_output(tmp_path: Path) -> None:
    desk = Desk(write_bundle(tmp_path / "bundle", rungs=2), THREE)
    desk.submit()
    desk.receive("alpha", msgspec.structs.replace(result(), rung=2), logits(1, 2, 3))
    desk.reply("beta")
    desk.reply("gamma")
    assert desk.prediction().missing_codes == {"alpha": "bad_output"}


def test_a_call_waits_behind_more_than_the_top_rung_could_answer(tmp_path: Path) -> None:
    """A client refuses a whole call only where the lowest rungs would be late, too."""
    desk = Desk(write_bundle(tmp_path / "bundle", rungs=3), THREE)
    for number in range(1, 9):
        desk.submit(deadline_ms=1000.0)
        desk.pass_s(0.1)
        for device, _ in THREE:
            told = msgspec.structs.replace(result(number), compute_ms=100.0)
            desk.receive(device, told, logits(number, 2, 3))
        desk.prediction()
    for _ in range(30):
        desk.submit(deadline_ms=1000.0)
    assert not desk.answers, "30 take 3 s at the top, and 0.75 at the lowest"
