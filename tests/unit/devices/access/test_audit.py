"""The audit log: no event hides another, and refusals without end are a line and a count."""

import json
from collections import Counter
from pathlib import Path

import pytest

from devices.access.audit import (
    AT_ONCE,
    COUNTED_S,
    MOST_COUNTED,
    MOST_NOISE,
    AuditLines,
    AuditLog,
    Line,
    host_of,
)
from mdp.errors import InputError
from mdp.logs import BackgroundWriter


def line(event: str, client: str = "office", reason: str = "", address: str = "10.0.0.9:1") -> Line:
    key = f"key of {client}" if client else ""
    return {"event": event, "client": client, "key": key, "address": address, "reason": reason}


def stranger(number: int, reason: str = "unknown key") -> Line:
    return line("refuse", "", reason) | {"key": f"stranger {number}"}


@pytest.mark.parametrize("event", ["push", "rollback", "record", "revoke"])
def test_no_refusal_or_connection_hides_what_is_rare(event: str) -> None:
    lines = AuditLines()
    for number in range(5 * AT_ONCE):
        lines.take_in(line("refuse", reason=f"bundle: {number}"), 0.0)
        lines.take_in(stranger(number), 0.0)
        lines.take_in(line("connect"), 0.0)
    assert lines.take_in(line(event), 0.0) == [line(event)]
    # Not even while the disk is slow.
    assert lines.take_in(line("connect"), 100.0, crowded=True) == []
    assert lines.take_in(line("refuse", reason="new"), 100.0, crowded=True) == []
    assert lines.take_in(line(event), 100.0, crowded=True) == [line(event)]


def test_strangers_hide_no_client_s_refusals() -> None:
    lines = AuditLines()
    written = [lines.take_in(stranger(number), 0.0) for number in range(2 * AT_ONCE)]
    assert AT_ONCE - 1 <= sum(map(len, written)) <= AT_ONCE
    assert lines.take_in(line("refuse", reason="bundle"), 0.0) == [line("refuse", reason="bundle")]


def test_the_same_refusals_are_one_line_and_a_count() -> None:
    lines, refused = AuditLines(), line("refuse", reason="bundle")
    assert lines.take_in(refused, 0.0) == [refused]
    for number in range(500):
        assert lines.take_in(refused, number / 10) == []
    other = line("refuse", reason="record")
    assert lines.take_in(other, 50.0) == [other], "another reason"
    assert lines.end_due(COUNTED_S - 1) == []
    assert lines.end_due(COUNTED_S) == [refused | {"count": 500}]
    assert lines.take_in(refused, COUNTED_S + 1) == [refused], "a new minute"
    assert lines.end_due(float("inf")) == [], "one alone is not counted again"


def test_without_a_key_the_address_counts() -> None:
    lines = AuditLines()
    first = line("refuse", "", "host connecting too often", "[fe80::1%eth0]:7")
    assert lines.take_in(first, 0.0) == [first]
    assert lines.take_in(first | {"address": "fe80::1%eth0"}, 0.0) == []
    other = first | {"address": "10.0.0.9"}
    assert lines.take_in(other, 0.0) == [other]
    assert [host_of(each) for each in ("10.0.0.9:80", "::1", "", "[::1]:80")] == [
        "10.0.0.9", "::1", "", "::1",
    ]  # fmt: skip


def test_more_than_are_counted_end_the_oldest_count_and_stay_within_the_rate() -> None:
    lines, written = AuditLines(), []
    for number in range(3 * MOST_COUNTED):
        written += lines.take_in(stranger(number), 0.0) + lines.take_in(stranger(number), 0.0)
    assert AT_ONCE - 1 <= len(written) <= AT_ONCE
    assert len(lines._refusals) == MOST_COUNTED
    (later, _) = lines.take_in(stranger(-1), 1.0)
    # A line each, and a count of each whose counting has ended.
    assert later["left_out"] == 5 * MOST_COUNTED - len(written)


def test_what_is_left_out_is_counted() -> None:
    lines = AuditLines()
    written = sum([len(lines.take_in(line("connect"), 0.0)) for _ in range(AT_ONCE + 7)])
    assert lines.take_in(line("push"), 0.0) == [line("push")]
    left_out = AT_ONCE + 7 - written
    assert lines.take_in(line("connect"), 1.0) == [line("connect") | {"left_out": left_out}]
    assert lines.take_in(line("connect"), 1.0) == [line("connect")]


def test_a_push_is_written_though_a_client_is_refused_without_end(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with AuditLog(path, lambda key: key) as log:
        for number in range(2 * AT_ONCE):
            log.record("refuse", "office", "10.0.0.9:1", f"bundle: {number}")
        log.record("push", "desk", "10.0.0.8:1", "switched")
    events = Counter(json.loads(each)["event"] for each in path.read_text().splitlines())
    assert events["push"] == 1
    assert 0 < events["refuse"] < 2 * AT_ONCE


def test_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    path = tmp_path / "audit.jsonl"
    with AuditLog(path, lambda key: {"k1": "office"}.get(key, ""), lambda: now_s) as log:
        for _ in range(3):
            log.record("refuse", "k1", "10.0.0.9:1", "bundle")
        now_s += COUNTED_S
        log.tend()
        for _ in range(2):
            log.record("refuse", "", "10.0.0.9", "too often")
        monkeypatch.setattr(BackgroundWriter, "waiting", MOST_NOISE)
        log.record("connect", "k1", "10.0.0.9:1", "")
        log.record("push", "k1", "10.0.0.9:1", "switched")
    written = [json.loads(each) for each in path.read_text().splitlines()]
    assert [(each["event"], each["client"], each.get("count")) for each in written] == [
        ("refuse", "office", None),
        ("refuse", "office", 2),
        ("refuse", "", None),
        ("push", "office", None),
        ("refuse", "", 1),
    ]
    assert Counter(len(each["key"]) > 0 for each in written) == {True: 3, False: 2}
    assert list(written[0]) == ["time", "event", "client", "key", "address", "reason"]
    with pytest.raises(InputError, match=r"--audit .*none/audit: No such file or directory"):
        AuditLog(tmp_path / "none" / "audit", str)
