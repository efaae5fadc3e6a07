"""Output and files of `mdp watch` for a look."""

import json
import resource
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from mdp.cli.answer_file import answer_writer
from mdp.cli.answers import describe
from mdp.cli.watch import COLUMNS, LookLines, Seen, Table, facts, have_no_camera, rows
from mdp.client.status import DeviceStatus
from mdp.errors import InputError, QuorumNotMet
from mdp.requests.prediction import MemberTiming, Prediction

NOW = "2026-01-02T03:04:05.678+00:00"
DEVICES = ["alpha", "beta", "beta/attic"]
SEEN = Prediction(
    label="red",
    probability=0.93,
    top=(("red", 0.93),),
    mode="single",
    used=("alpha",),
    missing={"beta": "no_frame: [odd]"},
    expected_accuracy=0.5,
    expected_accuracy_pictures=10,
    latency_ms=12.5,
    deadline_ms=80.0,
    members=(
        MemberTiming(
            device="alpha", k=0, queue_ms=1.0, compute_ms=2.0, network_ms=3.0, frame=7,
            frame_age_ms=41.6,
        ),
    ),
    frame_spread_ms=0.0,
)  # fmt: skip
NOBODY = QuorumNotMet("no device can answer", dict.fromkeys(DEVICES, "unreachable"))


def test_every_device_has_a_row() -> None:
    assert rows(DEVICES, SEEN) == [
        ["alpha", "yes", "7", "42", "6.0", ""],
        ["beta", "no", "", "", "", "no_frame: [odd]"],
        ["beta/attic", "", "", "", "", ""],
    ]
    doubted = replace(SEEN, suspects={"alpha": "disagrees"})
    assert rows(DEVICES, doubted)[0][-1] == describe("look", doubted).splitlines()[2][9:]
    assert [row[1] + row[-1] for row in rows(DEVICES, NOBODY)] == ["nounreachable"] * 3


def render(table: Table, seen: Seen) -> str:
    out = Console(width=120)
    with out.capture() as captured:
        out.print(table.after(NOW, seen))
    return captured.get()


def test_the_table_goes_on_without_an_answer() -> None:
    table = Table(DEVICES)
    text = render(table, SEEN)
    assert "03:04:05 UTC  red (93%), single from alpha, 50.0% accurate" in text
    assert "no_frame: [odd]" in text
    render(table, SEEN)
    text = render(table, NOBODY)
    assert "3 looks, 1 without an answer" in text
    assert text.splitlines()[-2:] == ["  03:04:05  no answer", "  03:04:05  red"]


def test_unknown_items_are_a_change_of_the_label() -> None:
    table, strange = Table(DEVICES), replace(SEEN, known=False, novelty=0.25)
    render(table, SEEN)
    text = render(table, strange)
    assert "03:04:05 UTC  unknown, nearest red (93%), single from alpha, 12.5 ms" in text
    assert text.splitlines()[-2:] == ["  03:04:05  unknown", "  03:04:05  red"]


def test_a_repeated_failure_is_one_line_and_a_count(capsys: pytest.CaptureFixture[str]) -> None:
    lines = LookLines()
    other = QuorumNotMet("no camera", {})
    for seen in (NOBODY, NOBODY, NOBODY, SEEN, SEEN, NOBODY, other, other):
        lines.show(NOW, seen)
    lines.end()
    answer = describe(NOW, SEEN)
    assert capsys.readouterr().out.splitlines() == [
        f"{NOW}: no device can answer",
        "  looks with the same outcome: 2",
        *answer.splitlines(),
        *answer.splitlines(),
        f"{NOW}: no device can answer",
        f"{NOW}: no camera",
        "  looks with the same outcome: 1",
    ]


def test_a_device_that_has_not_answered_may_have_a_camera() -> None:
    without = DeviceStatus(device="alpha", address="", state="READY", bundle="b")
    unknown = DeviceStatus(device="beta", address="", state="UNREACHABLE")
    assert have_no_camera([without, without])
    assert not have_no_camera([without, unknown])
    assert not have_no_camera(
        [
            DeviceStatus(
                device="beta",
                address="",
                state="READY",
                bundle="b",
                source="camera:0: no frame yet",
            )
        ]
    )


def test_a_csv_file_is_appended_to(tmp_path: Path) -> None:
    file = tmp_path / "seen.csv"
    strange = replace(SEEN, suspects={"alpha": "frozen"}, known=False, novelty=0.25)
    for seen in (strange, NOBODY):
        with answer_writer(file, COLUMNS) as write:
            write(facts(NOW, seen))
    assert file.read_text().splitlines() == [
        ",".join(COLUMNS),
        f"{NOW},red,0.93,single,alpha,beta,0.5,12.5,0.0,alpha,,False,0.25",
        f"{NOW},,,,,alpha beta beta/attic,,,,,no device can answer,,",
    ]


def test_json_lines_hold_whole_answers(tmp_path: Path) -> None:
    file = tmp_path / "seen.jsonl"
    with answer_writer(file, COLUMNS) as write:
        write(facts(NOW, SEEN))
        write(facts(NOW, NOBODY))
    answer, failed = map(json.loads, file.read_text().splitlines())
    assert answer == {"time": NOW, **SEEN.to_dict()}
    assert (failed["error"], failed["outcomes"]["beta"]) == ("no device can answer", "unreachable")


def test_a_line_that_a_killed_command_tore_spoils_no_other(tmp_path: Path) -> None:
    file = tmp_path / "seen.jsonl"
    file.write_bytes(b'{"time":')
    with answer_writer(file, COLUMNS) as write:
        write(facts(NOW, NOBODY))
    torn, whole = file.read_text().splitlines()
    assert torn == '{"time":'
    assert json.loads(whole)["error"] == "no device can answer"


def test_a_line_that_fits_in_part_is_not_written(tmp_path: Path) -> None:
    """Some file systems write what still fits on a full disk."""
    file = tmp_path / "seen.jsonl"
    with answer_writer(file, COLUMNS) as write:
        write(facts(NOW, NOBODY))
    size = file.stat().st_size
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 9, limits[1]))
    try:
        with answer_writer(file, COLUMNS) as write, pytest.raises(InputError, match="No space"):
            write(facts(NOW, NOBODY))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert file.stat().st_size == size


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("a,b\n")
    (tmp_path / "full.csv").symlink_to("/dev/full")
    for path, expected in (
        (tmp_path / "seen.txt", "expected a file that ends in .csv or .jsonl"),
        (other, "expected an empty file, or columns time,label,"),
        (tmp_path / "none" / "seen.csv", "cannot be written: No such file or directory"),
    ):
        with pytest.raises(InputError, match=expected), answer_writer(path, COLUMNS):
            raise AssertionError("it was taken")
    assert other.read_text() == "a,b\n"
