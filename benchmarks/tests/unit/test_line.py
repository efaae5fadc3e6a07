"""The tally of a played line finds what is lost, twice, late or of another item."""

from argparse import Namespace
from typing import Any

import pytest

from benchmarks.line import played
from benchmarks.line.played import PARTS, scenes, share_of, tally
from benchmarks.line.rules import TWINS, rules_for, twin_of
from mdp.formats.bundle import Bundle

TRUTHS = ["nut", "washer", "unknown", "nut"]
ALONE = ["nut", "nut", "nut", "nut"]


def record(item: str, label: str | None, **more: Any) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "class": label, "missing": {}, "suspects": {}, "known": True, "used": ["a"],
    }  # fmt: skip
    return {
        "item": item, "latency_ms": 20.0, "deadline_ms": 100.0, "decision": "fused",
        "passed": True, "why_kept": None, "answer": {**answer, **more.pop("answer", {})}, **more,
    }  # fmt: skip


def count(trigger: str, *records: dict[str, Any]) -> dict[str, Any]:
    options = Namespace(trigger=trigger, items=len(TRUTHS), every=1.0)
    return tally(options, records, TRUTHS, ALONE)


def test_a_whole_run() -> None:
    found = count("mqtt", *(record(str(number), "nut") for number in range(4)))
    assert (found["records"], found["lost"], found["twice"]) == (4, 0, 0)
    expected = {
        "in_time": 4, "right": 2, "whole_as_alone": 4, "of_no_class": 1, "called_unknown": 0,
    }  # fmt: skip
    for key, value in expected.items():
        assert sum(part.get(key, 0) for part in found["parts"].values()) == value, key


def test_what_is_lost_twice_late_or_of_another_item() -> None:
    found = count(
        "mqtt",
        record("0", "washer"),
        record("0", "nut", latency_ms=200.0),
        record("3", None, answer={"used": []}, decision="missed"),
    )
    assert (found["records"], found["lost"], found["twice"]) == (3, 2, 1)
    first = found["parts"]["well"]
    assert (first["in_time"], first["whole_as_alone"], first["records"]) == (1, 1, 2)
    last = found["parts"]["killed"]
    assert (last["missed"], last["whole"]) == (1, 0)


def test_what_rests_is_told_by_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(played, "TIMED", 2)

    def at(second: float) -> dict[str, Any]:
        return record("a", "nut", time=f"2026-11-25T23:00:{second:06.3f}+00:00")

    found = count("still", at(0.4), at(1.39), at(3.6))
    assert (found["records"], found["lost"], found["twice"]) == (3, 1, 0)
    found = count("still", at(0.4), at(1.5), at(1.9), at(2.45), at(3.5), at(9.0))
    assert (found["lost"], found["twice"]) == (0, 2)


def test_every_part_of_a_run_has_its_items() -> None:
    parts = [share_of(number, 100) for number in range(100)]
    assert [parts.count(name) for name in ("well", "stragglers", "covered", "killed", "back")] == [
        20, 15, 25, 20, 20,
    ]  # fmt: skip


def test_scenes_and_twins_are_those_of_the_bundle() -> None:
    labels = Bundle.open(PARTS).manifest.labels
    assert sorted(label for pair in TWINS for label in pair) == sorted(labels)
    assert all(twin_of(twin_of(label)) == label != twin_of(label) for label in labels)
    found = scenes()
    assert len(found) == 60
    assert {label for label, _ in found} == {*labels, "unknown"}
    assert all(len(pictures) == 4 for _, pictures in found)
    for rules in rules_for("hex_nut").values():
        rules.check(labels, 4)
