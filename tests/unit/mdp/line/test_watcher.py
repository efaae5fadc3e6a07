"""A line that is driven with a client, clock and triggers of a test: records, and what is kept."""

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mdp.client.scenes import Scene
from mdp.errors import ConfigError, InferenceError, InputError, QuorumNotMet
from mdp.line.connection import RenewedConnection
from mdp.line.file import RecordFile
from mdp.line.items import Book, ItemBook, ItemOutcome, ItemTiming, StateBook
from mdp.line.keeper import KeptFolder
from mdp.line.keeping import MOST_WAITING, ItemKeeper, pictures_of_item
from mdp.line.kept import list_kept
from mdp.line.record import ItemRecord, TriggerKind, to_json
from mdp.line.rests import RestWatch
from mdp.line.rules import LineRules
from mdp.line.triggers import LineEndedError, TriggerQueue
from mdp.line.watcher import LineWatcher
from mdp.protocol.rest import RestReply
from mdp.requests.capture import Moment
from mdp.requests.prediction import MemberTiming, Prediction
from mdp.testing.processes import until
from tests.support.clock import Clock

CAMERAS = ("a", "b", "c")
NOT_ALLOWED = "no_frame: this agent's camera is not recorded (--allow-record)"
JPEG = b"\xff\xd8\xff"


def answer(label: str = "nut", probability: float = 0.9, **more: Any) -> Prediction:
    own = more.pop("own", dict.fromkeys(CAMERAS, label))
    members = tuple(
        MemberTiming(
            device=device, k=k, queue_ms=0.0, compute_ms=1.0, network_ms=1.0, label=one,
            probability=0.8, frame=7, frame_age_ms=20.04,
        )
        for k, (device, one) in enumerate(own.items())
    )  # fmt: skip
    missing = {device: "late" for device in CAMERAS if device not in own}
    return Prediction(
        label=label, probability=probability, top=((label, probability),), mode="stacked",
        used=tuple(own), missing=missing, expected_accuracy=0.8, latency_ms=5.0, deadline_ms=80.0,
        members=members, **more,
    )  # fmt: skip


class PlayedClient:
    """Gives answers in their order, each after 10 ms; the last one again and again."""

    def __init__(self, clock: Clock, *answers: Prediction | InferenceError) -> None:
        self.clock, self.answers = clock, list(answers)
        self.looks: list[tuple[float, Moment]] = []

    def look(self, *, deadline_ms: float, at: Moment, within_ms: float) -> Prediction:
        self.looks.append((round(deadline_ms, 3), at))
        self.clock.now_s += 0.01
        told = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(told, InferenceError):
            raise told
        return told


class PlayedLine:
    """A watcher, and the records that it publishes."""

    def __init__(
        self,
        *answers: Prediction | InferenceError,
        book: Callable[[ItemTiming], Book] = ItemBook,
        timing: ItemTiming | None = None,
        rules: LineRules | None = None,
        kind: TriggerKind = "mqtt",
    ) -> None:
        self.clock = Clock()
        self.triggers = TriggerQueue()
        self.client = PlayedClient(self.clock, *answers)
        self.records: list[ItemRecord] = []
        timing = timing or ItemTiming(verdict_s=1.0)
        self.watcher = LineWatcher(
            self.client, book(timing), self.triggers, rules or LineRules(), kind=kind,
            timing=timing, deadline_ms=80.0, within_ms=250.0, cameras=lambda: len(CAMERAS),
            prefix="run-", publish=lambda record, outcome: self.records.append(record),
            utc=lambda: f"at {self.clock.now_s:.2f}", clock=self.clock,
        )  # fmt: skip

    def come(self, *items: str | None) -> None:
        for item in items:
            self.triggers.add(item, self.clock.now_s, f"at {self.clock.now_s:.2f}")

    def drive(self, turns: int = 50) -> list[ItemRecord]:
        for _ in range(turns):
            self.watcher.turn(0.0)
        return self.records


def test_each_item_has_one_record_with_all_of_its_answer() -> None:
    own = {"a": "nut", "b": "washer"}
    line = PlayedLine(
        answer(own=own, suspects={"b": "frozen"}, known=True, novelty=-1.5),
        rules=LineRules(needed={"washer": 2}),
    )
    line.come("17", None)
    first, second = line.drive()
    assert (first.item, first.number, first.trigger) == ("17", 1, "mqtt")
    assert (second.item, second.number) == ("run-2", 2)
    assert line.client.looks == [(80.0, 100.0), (80.0, 100.0)]
    told = json.loads(to_json(first))
    assert told["class"] == "nut"
    assert told["answer"]["devices"]["b"] == {
        "class": "washer", "probability": 0.8, "frame": 7, "frame_age_ms": 20.0,
        "anomaly": None,
    }  # fmt: skip
    assert told["answer"]["missing"] == {"c": "late"}
    assert told["answer"]["suspects"] == {"b": "frozen"}
    assert told["rules"] == {
        "washer": {"needed": 2, "of": 3, "seen": [], "missing": 2, "state": "open"}
    }
    assert told["verdict"] == first.verdict
    assert told["passed"] is first.passed
    assert (told["latency_ms"], told["deadline_ms"]) == (10.0, 1000.0)
    assert (told["looks"], told["equal"], told["why_kept"]) == (1, 1, "disagreement")


def test_a_look_has_no_more_time_than_its_item() -> None:
    nobody = QuorumNotMet("no device can answer", dict.fromkeys(CAMERAS, "unreachable"))
    line = PlayedLine(nobody, timing=ItemTiming(verdict_s=0.05))
    line.come("a")
    (record,) = line.drive()
    assert line.client.looks == [(45.0, 100.0)]
    assert (record.decision, record.answer.error) == ("no_answer", "no device can answer")
    assert record.answer.missing == dict.fromkeys(CAMERAS, "unreachable")
    line.come("b")
    line.clock.now_s += 0.2
    _, missed = line.drive()
    assert (missed.decision, missed.answer.label, missed.looks) == ("missed", None, 0)


def test_states_are_looked_at_without_triggers() -> None:
    line = PlayedLine(
        answer("open"), answer("open"), answer("shut"), answer("open"), answer("shut"),
        answer("shut"), book=lambda timing: StateBook(timing, 100.0),
        timing=ItemTiming(equal=2, every_s=1.0), kind="interval",
    )  # fmt: skip
    for _ in range(8):
        line.drive(3)
        line.clock.now_s += 1.0
    assert [(one.label, one.item) for one in line.records] == [("open", "run-1"), ("shut", "run-2")]
    assert {at for _, at in line.client.looks} == {"latest"}


def test_pictures_of_before_and_after_an_item_are_none_of_it() -> None:
    pictures = dict.fromkeys("abcd", JPEG)
    taken_s = {"a": 9.9, "b": 9.0, "c": 10.3, "d": 10.6}
    scene = Scene(pictures=pictures, missing={"e": "no answer"}, taken_s=taken_s)
    taken, missing = pictures_of_item(scene, 10.0, 10.5, 0.25)
    assert set(taken) == {"a", "c"}
    assert missing == {
        "b": "its newest picture is of before the item",
        "d": "the next item was there already",
        "e": "no answer",
    }
    assert set(pictures_of_item(scene, 10.0, math.inf, 0.25)[0]) == {"a", "c", "d"}


class PlayedCameras:
    """Gives pictures, or errors, once it may."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.closed = 0
        self.missing: dict[str, str] = {}

    def take(self) -> Scene:
        assert self.free.wait(60)
        pictures = {one: JPEG for one in CAMERAS if one not in self.missing}
        return Scene(pictures=pictures, missing=self.missing)

    def wait(self, until_s: float) -> None:
        """Nothing to tend."""

    def close(self) -> None:
        self.closed += 1


def kept_record(item: str) -> ItemRecord:
    line = PlayedLine(answer(probability=0.3))
    line.come(item)
    (record,) = line.drive()
    assert record.why_kept == "unsure"
    return record


def test_unsure_items_are_kept_as_published(tmp_path: Path) -> None:
    cameras, said = PlayedCameras(), list[str]()
    cameras.missing = {"b": NOT_ALLOWED}
    folder = KeptFolder(tmp_path / "kept", 1_000_000)
    with ItemKeeper(
        folder, lambda: cameras, lambda _: math.inf, said.append, within_s=0.25
    ) as keeper:
        for item in ("1", "2"):
            keeper.put(kept_record(item), 0.0)
            until(lambda wanted=int(item): keeper.kept == wanted, "it is kept")  # type: ignore[misc]
        keeper.renew()
        cameras.missing = dict.fromkeys(CAMERAS, "no answer")
        keeper.put(kept_record("3"), 0.0)
        until(lambda: keeper.left_out == 1, "it is left out")
        assert cameras.closed == 1
    kept = list_kept(tmp_path / "kept", order="oldest")
    assert [one.record.item for one in kept] == ["1", "2"]
    assert set(kept[0].pictures) == {"a", "c"}
    stored = json.loads((kept[0].folder / "record.json").read_bytes())
    assert stored.pop("no_picture") == {"b": NOT_ALLOWED}
    assert stored.pop("picture_offset_ms") == {}
    assert stored == json.loads(to_json(kept_record("1")))
    # Each is said once.
    assert sum("no picture of b" in text for text in said) == 2
    assert len(said) == 4


def test_a_disk_that_is_full_for_a_while_is_said_once(tmp_path: Path) -> None:
    blocked, said = tmp_path / "kept", list[str]()
    folder = KeptFolder(blocked, 1_000_000)
    blocked.rmdir()
    blocked.touch()
    cameras = PlayedCameras()
    with ItemKeeper(
        folder, lambda: cameras, lambda _: math.inf, said.append, within_s=0.25
    ) as keeper:
        for number in (1, 2):
            keeper.put(kept_record(str(number)), 0.0)
            until(lambda wanted=number: keeper.left_out == wanted, "left out")  # type: ignore[misc]
        blocked.unlink()
        keeper.put(kept_record("3"), 0.0)
        until(lambda: keeper.kept == 1, "it is kept")
    assert len(said) == 2
    assert said[0].endswith("; going on without keeping")
    assert said[1] == f"{blocked}: items are kept again"


def test_a_folder_that_cannot_be_asked_for_a_while_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    folder, cameras = KeptFolder(tmp_path / "kept", 1_000_000), PlayedCameras()
    real, broken = Path.exists, threading.Event()

    def exists(path: Path) -> bool:
        if broken.is_set() and path.parent == folder.path:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "exists", exists)
    with ItemKeeper(
        folder, lambda: cameras, lambda _: math.inf, said.append, within_s=0.25
    ) as keeper:
        broken.set()
        keeper.put(kept_record("1"), 0.0)
        until(lambda: keeper.left_out == 1, "the item that cannot be kept")
        broken.clear()
        keeper.put(kept_record("2"), 0.0)
        until(lambda: keeper.kept == 1, "the next one")
    assert "Permission denied" in said[0]
    assert said[1].endswith("items are kept again")


def test_items_do_not_wait_for_slow_cameras(tmp_path: Path) -> None:
    cameras, said = PlayedCameras(), list[str]()
    cameras.free.clear()
    folder = KeptFolder(tmp_path / "kept", 1_000_000)
    with ItemKeeper(
        folder, lambda: cameras, lambda _: math.inf, said.append, within_s=0.25
    ) as keeper:
        for number in range(2 * MOST_WAITING + 1):
            keeper.put(kept_record(str(number)), 0.0)
        assert keeper.left_out >= MOST_WAITING
        cameras.free.set()
    assert keeper.kept + keeper.left_out == 2 * MOST_WAITING + 1
    assert said[0].startswith("items come faster than pictures can be kept: ")


class PlayedRests:
    """Tells rests in their order, the last one again and again."""

    def __init__(self, *told: tuple[dict[str, RestReply], dict[str, str]]) -> None:
        self.told, self.closed = list(told), 0
        self.last = told[0]

    @property
    def outdated(self) -> set[str]:
        return {device for device, reason in self.last[1].items() if reason == TOO_OLD}

    def ask(self) -> tuple[dict[str, RestReply], dict[str, str]]:
        self.last = self.told.pop(0) if len(self.told) > 1 else self.told[0]
        return self.last

    def wait(self, until_s: float) -> None:
        """At once."""

    def close(self) -> None:
        self.closed += 1


def rests(changes: int, still_ms: float) -> dict[str, RestReply]:
    reply = RestReply(request_id=1, frame=1, age_ms=1.0, still_ms=still_ms, changes=changes)
    return dict.fromkeys(CAMERAS, reply)


TOO_OLD = "its mdp-agent cannot tell whether its picture rests: expected a newer one (bad)"


def test_a_scene_that_rests_triggers_once() -> None:
    found, said = list[float](), list[str]()
    old = {"c": TOO_OLD}
    source = PlayedRests(
        (rests(0, 1000), old), (rests(3, 0), old), (rests(3, 200), old), (rests(3, 300), old),
        (rests(3, 400), old), (rests(5, 500), {"c": "no answer within 0.25 s"}),
    )  # fmt: skip
    with RestWatch(lambda: source, 300.0, found.append, said.append, Clock()):
        until(lambda: len(found) == 2 and len(source.told) == 1, "both items")
    assert source.closed == 1
    assert said == [f"c: {TOO_OLD}"]
    # Where the newest frames are a millisecond old.
    assert found == [pytest.approx(99.999)] * 2


def test_items_that_may_have_been_missed_are_said_now_and_then() -> None:
    said, clock = list[str](), Clock()

    class SlowRests(PlayedRests):
        def wait(self, until_s: float) -> None:
            # Held up in two of three turns.
            clock.now_s += 0.05 if len(self.told) % 3 == 0 else 1.5

    source = SlowRests(*[(rests(0, 1000), dict[str, str]())] * 12)
    with RestWatch(lambda: source, 300.0, lambda moment_s: None, said.append, clock):
        until(lambda: len(source.told) == 1 and len(said) >= 2, "two lines")
    assert said[0] == (
        "most cameras gave no new frame 1 time, for up to 1.5 s: items may have been missed"
    )
    assert all(", for up to 1.5 s: items" in text for text in said)


def test_boards_that_were_replaced_do_not_count_as_blind() -> None:
    """All have other names now, and then there is a time without frames."""
    said, clock = list[str](), Clock()
    new = dict.fromkeys(("d", "e", "f"), rests(0, 1000)["a"])

    class Away(PlayedRests):
        def wait(self, until_s: float) -> None:
            clock.now_s += 60.0 if len(self.told) == 2 else 0.01

    connect = iter([PlayedRests((rests(0, 1000), {})), Away((new, {}), (new, {}), (new, {}))])
    with RestWatch(
        lambda: next(connect), 300.0, lambda moment_s: None, said.append, clock
    ) as watch:
        watch.renew()
        until(lambda: bool(said), "that items may have been missed")
    assert said[0] == (
        "most cameras gave no new frame 1 time, for up to 60.0 s: items may have been missed"
    )


def test_agents_that_are_all_too_old_are_one_line() -> None:
    source = PlayedRests(({}, dict.fromkeys(CAMERAS, TOO_OLD)))
    with pytest.raises(ConfigError, match=r"--trigger still: a: its mdp-agent cannot tell"):
        RestWatch(lambda: source, 300.0, lambda moment_s: None, lambda text: None)
    assert source.closed == 1


def test_records_are_whole_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    with RecordFile(path) as file:
        file.append(b'{"item":"1"}')
    # A watcher that was killed in the middle of a line.
    with path.open("ab") as torn:
        torn.write(b'{"item":')
    with RecordFile(path) as file:
        file.append(b'{"item":"2"}')
        file.append(b'{"item":"3"}')
    assert path.read_bytes().splitlines() == [
        b'{"item":"1"}', b'{"item":', b'{"item":"2"}', b'{"item":"3"}',
    ]  # fmt: skip
    with pytest.raises(InputError, match=r"expected a file that ends in \.jsonl, for records"):
        RecordFile(tmp_path / "items.csv")
    with pytest.raises(InputError, match="cannot be written: No such file"):
        RecordFile(tmp_path / "none" / "items.jsonl")
    (tmp_path / "full.jsonl").symlink_to("/dev/full")
    with (
        RecordFile(tmp_path / "full.jsonl") as file,
        pytest.raises(InputError, match="cannot be written: No space left on device"),
    ):
        file.append(b"{}")


def test_items_that_have_come_have_a_record_when_the_watcher_ends() -> None:
    line = PlayedLine(answer())
    line.come("a", "b")
    line.watcher.finish()
    assert [one.item for one in line.records] == ["a", "b"]
    with pytest.raises(LineEndedError, match="the watcher is ending"):
        line.come("c")
    states = PlayedLine(answer(), book=lambda timing: StateBook(timing, 100.0), kind="interval")
    states.watcher.finish()
    assert states.records == []
    # One that the last look has settled is not lost.
    states.watcher.turn(0.0)
    states.watcher.finish()
    assert [one.label for one in states.records] == ["nut"]
    assert len(states.client.looks) == 1


def test_a_fleet_with_agents_too_old_and_others_away_is_watched() -> None:
    away = {"a": TOO_OLD, "b": "no connection"}
    found = list[float]()
    source = PlayedRests(({}, away), (rests(0, 1000), {}), (rests(3, 400), {}))
    with RestWatch(lambda: source, 300.0, found.append, lambda text: None, Clock()):
        until(lambda: len(found) == 1, "what came back tells")


class ClosableConnection:
    """A connection, and whether it is closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


def test_a_connection_that_cannot_be_made_anew_stays_until_it_can() -> None:
    outcomes: list[ClosableConnection | ConfigError] = [
        first := ClosableConnection(),
        ConfigError("x"),
        ClosableConnection(),
    ]

    def connect() -> ClosableConnection:
        outcome = outcomes.pop(0)
        if isinstance(outcome, ConfigError):
            raise outcome
        return outcome

    connection = RenewedConnection(connect)
    assert connection.latest() is first
    connection.renew()
    with pytest.raises(ConfigError):
        connection.latest()
    assert (connection.current, first.closed) == (first, False)
    second = connection.latest()
    assert (second is first, first.closed, second.closed) == (False, True, False)
    assert connection.latest() is second
    connection.close()
    assert second.closed


def test_outcomes_are_handed_on_with_their_records() -> None:
    outcomes: list[ItemOutcome] = []
    line = PlayedLine(answer())
    line.watcher._publish = lambda record, outcome: outcomes.append(outcome)
    ticket = line.triggers.add("a", 0.0, "").ticket
    line.drive()
    assert [one.trigger.ticket for one in outcomes] == [ticket]
