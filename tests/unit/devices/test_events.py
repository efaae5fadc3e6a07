"""Events reach whoever listens, and nobody who listens badly can hold an agent up."""

import json
import os
import re
from pathlib import Path

import pytest

from devices.events import Events, for_events_alone

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def test_a_line_for_people_or_for_programs(tmp_path: Path) -> None:
    path = tmp_path / "events"
    with path.open("w") as stream:
        for is_json in (False, True):
            events = Events(stream, "n100", "tcp://127.0.0.1:1", json=is_json, now=lambda: "12:00Z")
            events.emit("WARMING")
            events.ready = lambda: {"bundle": "birds", "sub-model": 1}
            events.emit("READY")
    *people, warming, ready = path.read_text().splitlines()
    assert people == [
        "12:00Z mdp-agent n100: WARMING",
        "12:00Z mdp-agent n100: READY: bundle birds, sub-model 1",
    ]
    fields = {"time": "12:00Z", "device": "n100", "address": "tcp://127.0.0.1:1"}
    assert json.loads(warming) == fields | {"event": "WARMING"}
    assert json.loads(ready) == fields | {"event": "READY", "bundle": "birds", "sub-model": 1}


def test_a_line_of_the_journal_has_its_time_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events"
    with path.open("w") as stream:
        status = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        Events(stream, "n100").emit("READY")
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino + 1}")
        Events(stream, "n100").emit("READY")
    journal, file = path.read_text().splitlines()
    assert journal == "mdp-agent n100: READY"
    assert re.fullmatch(rf"{TIME} mdp-agent n100: READY", file)


def test_a_reader_that_does_not_read_costs_lines_only() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as read, os.fdopen(writer, "w") as stream:
        events = Events(stream, "n100", "tcp://127.0.0.1:1", json=True)
        # A pipe holds 64 KiB; a write that waits would never return.
        for number in range(10_000):
            events.emit(f"event {number}")
        os.set_blocking(reader, False)
        lines = read.read().splitlines()
        assert 0 < len(lines) < 10_000
        assert [json.loads(line)["event"] for line in lines] == [
            f"event {number}" for number in range(len(lines))
        ]
        events.emit("heard again")
        assert json.loads(read.read())["event"] == "heard again"


def test_a_reader_that_has_gone_costs_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        Events(stream, "n100", "tcp://127.0.0.1:1", json=True).emit("READY")


def test_a_full_disk_costs_nothing() -> None:
    with Path("/dev/full").open("w") as stream:
        Events(stream, "n100", "tcp://127.0.0.1:1", json=False).emit("READY")


def test_a_stream_that_was_closed_before_is_nobody() -> None:
    Events(None, "n100", "tcp://127.0.0.1:1", json=False).emit("READY")


def test_a_line_too_long_to_be_written_at_once_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events"
    with path.open("w") as stream:
        events = Events(stream, "n100", "tcp://127.0.0.1:1", json=False)
        events.emit("x" * 100_000)
        events.emit("short")
    assert re.fullmatch(rf"{TIME} mdp-agent n100: short\n", path.read_text())


def test_what_drivers_print_does_not_stand_between_the_events(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        events = for_events_alone(out, err.fileno())
        assert events is not None
        with events:
            os.write(out.fileno(), b"compiling kernels\n")
            Events(events, "n100", "tcp://127.0.0.1:1", json=False).emit("READY")
    assert re.fullmatch(rf"{TIME} mdp-agent n100: READY\n", (tmp_path / "out").read_text())
    assert (tmp_path / "err").read_text() == "compiling kernels\n"


def test_where_an_output_is_closed_the_other_stays_as_it_is(tmp_path: Path) -> None:
    assert for_events_alone(None) is None
    with (tmp_path / "out").open("w") as out:
        closed = os.dup(out.fileno())
        os.close(closed)
        assert for_events_alone(out, closed) is out
