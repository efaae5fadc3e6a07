"""The plain parts of the command lines, and their help."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from devices.cli.main import app as agent_app
from mdp.cli.answers import describe, failure, path_keys, picture_files
from mdp.cli.bench import flat
from mdp.cli.doctor import fits, status_line, status_table
from mdp.cli.main import COMMANDS, app
from mdp.client.status import DeviceStatus
from mdp.errors import InputError
from mdp.requests.prediction import MemberTiming, Prediction

PREDICTION = Prediction(
    label="red",
    probability=0.934,
    top=(("red", 0.934), ("blue", 0.066)),
    mode="stacked",
    used=("alpha", "gamma"),
    missing={"beta": "late"},
    expected_accuracy=0.912,
    expected_accuracy_pictures=160,
    latency_ms=12.34,
    deadline_ms=80.0,
    members=(),
)


def test_files_and_folders_of_pictures(tmp_path: Path) -> None:
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    names = ["folder/b.png", "folder/a.png", "folder/deep/c.png", "single.png"]
    for name in names:
        (tmp_path / name).touch()
    found = picture_files([tmp_path / "single.png", tmp_path / "folder"])
    wanted = ["single.png", "folder/a.png", "folder/b.png", "folder/deep/c.png"]
    assert [(str(path.relative_to(tmp_path)), error) for path, error in found] == [
        (name, None) for name in wanted
    ]


def test_paths_without_pictures_are_named_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "empty" / "below").mkdir(parents=True)
    (tmp_path / "last.png").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "dangling").symlink_to("nothing")
    os.mkfifo(tmp_path / "inside" / "pipe")
    long = "x" * 300
    asked = ["empty", "gone.png", long, "loop", "inside", "last.png"]
    found = list(picture_files([tmp_path / name for name in asked]))
    said = [(str(path.relative_to(tmp_path)), error and str(error)) for path, error in found]
    assert said == [
        ("empty", f"{tmp_path}/empty: expected a folder with pictures, it holds no file"),
        ("gone.png", f"{tmp_path}/gone.png: no such file"),
        (long, f"{tmp_path}/{long}: File name too long"),
        ("loop", f"{tmp_path}/loop: no such file"),
        ("inside/dangling", f"{tmp_path}/inside/dangling: no such file"),
        ("inside/pipe", f"{tmp_path}/inside/pipe: expected a file"),
        ("last.png", None),
    ]


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = InputError("reached")

    def connect(*_: object, **__: object) -> None:
        raise reached

    (tmp_path / "picture.png").touch()
    monkeypatch.setattr("os.access", lambda *_, **__: False)
    monkeypatch.setattr("mdp.client.sync.Client.connect", connect)
    result = CliRunner().invoke(app, ["classify", str(tmp_path / "picture.png"), "--fleet", "f"])
    assert result.exception is reached, result.output


def test_an_error_about_a_name_that_is_no_utf_8_can_be_printed() -> None:
    path = Path(os.fsdecode(b"caf\xe9.png"))
    assert failure(InputError(f"{path}: gone")) == {"error": "caf?.png: gone"}
    assert path_keys(Path("café.png")) == {"path": "café.png"}


def test_an_answer_in_words() -> None:
    assert describe("cat.jpg", PREDICTION).splitlines() == [
        "cat.jpg: red (93%), stacked from alpha + gamma, "
        "91.2% accurate on 160 test pictures, 12.3 ms",
        "  without beta: late",
    ]


def test_an_answer_of_a_bundle_that_was_never_evaluated() -> None:
    never = msgspec.structs.replace(PREDICTION, expected_accuracy=None, missing={})
    assert describe("cat.jpg", never) == (
        "cat.jpg: red (93%), stacked from alpha + gamma, accuracy never measured, 12.3 ms"
    )


def test_an_answer_of_rungs_that_were_not_measured_together() -> None:
    lower = MemberTiming(device="alpha", k=0, queue_ms=0, compute_ms=1, network_ms=1, rung=1)
    mixed = msgspec.structs.replace(PREDICTION, expected_accuracy=None, members=(lower,))
    assert "gamma, accuracy never measured at these rungs, 12.3 ms" in describe("cat.jpg", mixed)


def test_an_unknown_item_in_words() -> None:
    strange = msgspec.structs.replace(PREDICTION, known=False, novelty=0.5, missing={})
    assert describe("cat.jpg", strange) == (
        "cat.jpg: unknown, nearest red (93%), stacked from alpha + gamma, 12.3 ms"
    )
    measured = msgspec.structs.replace(strange, known_rejected=0.025)
    assert "gamma, as are 2.5% of 160 test pictures of its classes, 12.3" in describe("x", measured)


def test_a_camera_that_does_not_count_is_not_where_an_item_differs_most() -> None:
    members = tuple(
        MemberTiming(device=name, k=k, queue_ms=0, compute_ms=1, network_ms=1, anomaly=score)
        for k, (name, score) in enumerate((("alpha", 0.5), ("gamma", 9.0), ("delta", 0.1)))
    )
    differs = msgspec.structs.replace(
        PREDICTION,
        used=("alpha", "gamma", "delta"),
        members=members,
        missing={},
        normal=False,
        anomaly=0.5,
        good_rejected=0.01,
        defects_missed=0.25,
        defects_missed_least=0.14,
        defects_missed_most=0.4,
        suspects={"gamma": "moved"},
        blind_sides=("gamma",),
    )
    assert describe("look", differs).splitlines()[1] == (
        "  differs from the good ones (+0.50 decades, most at alpha; 1.00% of good ones do); "
        "blind to gamma: 14% to 40% of defects like the measured ones pass"
    )
    # A share that was measured on nobody knows how many defects is not shown.
    old = msgspec.structs.replace(differs, defects_missed_least=None, defects_missed_most=None)
    assert describe("look", old).splitlines()[1].endswith("; blind to gamma")
    sides = ("alpha", "gamma", "delta")
    nobody = msgspec.structs.replace(differs, normal=None, anomaly=None, blind_sides=sides)
    assert describe("look", nobody).splitlines()[1] == (
        "  nobody can tell if it differs from the good ones: blind to alpha, gamma, delta"
    )


def test_an_answer_with_a_suspected_camera_has_no_measured_accuracy() -> None:
    for suspect, worth in (("gamma", "accuracy unknown with a suspected camera"), ("beta", "")):
        doubted = msgspec.structs.replace(
            PREDICTION,
            expected_accuracy=None if worth else PREDICTION.expected_accuracy,
            suspects={suspect: "disagrees"},
        )
        line, suspicion, _ = describe("look", doubted).splitlines()
        assert (worth or "91.2% accurate on 160 test pictures") in line
        assert suspicion.startswith(f"  {suspect}: disagrees with the others")
    unknown = msgspec.structs.replace(PREDICTION, known=False, suspects={"gamma": "frozen"})
    line, *_ = describe("look", unknown).splitlines()
    assert line.startswith("look: unknown, nearest red (93%), stacked from ")
    assert "accuracy unknown with a suspected camera, " in line


def test_a_status_table_shows_what_stands_in_brackets() -> None:
    reason = "Fail: [ONNXRuntimeError] : 1 : FAIL [/b]"
    status = DeviceStatus(
        device="alpha", address="tcp://[fe80::1]:7500", state="FAILED", reason=reason
    )
    console = Console(width=200, markup=False)
    with console.capture() as capture:
        console.print(status_table([status]))
    assert "tcp://[fe80::1]:7500" in capture.get()
    assert reason in capture.get()


def test_a_status_table_shows_temperatures_where_there_are_any() -> None:
    cold = DeviceStatus(device="alpha", address="tcp://10.0.0.1:7500", state="READY")
    warm = replace(cold, device="beta", temperature_c=61.5)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(status_table([cold, warm]))
    assert "°C" in capture.get()
    assert "62" in capture.get()
    with console.capture() as capture:
        console.print(status_table([cold]))
    assert "°C" not in capture.get()


READY = DeviceStatus(
    device="alpha",
    address="tcp://127.0.0.1:44483",
    state="READY",
    bundle="colours",
    provider="CPUExecutionProvider",
    counts={"answered": 12},
    temperature_c=61.5,
)
GONE = DeviceStatus(
    device="beta", address="tcp://[::1]:7", state="UNREACHABLE", reason="no connection"
)


@pytest.mark.parametrize(("columns", "is_table"), [(101, True), (100, False)])
def test_a_terminal_has_a_table_where_nothing_is_folded(columns: int, is_table: bool) -> None:
    out = Console(width=columns, force_terminal=True)
    table = status_table([READY, GONE])
    assert fits(table, out) == is_table
    with out.capture() as capture:
        out.print(table)
    assert ("tcp://127.0.0.1:44483 │" in capture.get()) == is_table
    assert "ExecutionProvider" not in capture.get()


def test_a_status_in_a_line() -> None:
    assert status_line(READY) == (
        "alpha: READY at tcp://127.0.0.1:44483, colours on CPU, answered 12, 62 °C"
    )
    assert status_line(GONE) == "beta: UNREACHABLE at tcp://[::1]:7: no connection"


def test_nested_figures_one_a_line() -> None:
    outcome: dict[str, object] = {"a": 1, "b": {"p50": 1.234, "max": None, "deep": {"x": "y"}}}
    assert list(flat(outcome)) == [("a", "1"), ("b.p50", "1.23"), ("b.max", "-"), ("b.deep.x", "y")]


def test_summaries_are_those_of_the_commands() -> None:
    group: Any = typer.main.get_command(app)
    for name, (_, summary) in COMMANDS.items():
        assert " ".join(group.commands[name].help.split("\n\n")[0].split()) == summary


@pytest.mark.parametrize("command_line", [app, agent_app], ids=["mdp", "mdp-agent"])
def test_every_command_has_an_example_and_its_exit_codes(command_line: typer.Typer) -> None:
    runner = CliRunner()
    group: Any = typer.main.get_command(command_line)
    commands = [
        [name] for name in group.list_commands(None) if name not in ("bundle", "fleet", "keys")
    ]
    if command_line is app:
        commands += [["fleet", "new"], ["fleet", "discover"], ["keys", "new"]]
        commands += [["bundle", name] for name in ("key", "sign", "verify")]
        assert len(commands) == 16
    for command in commands:
        result = runner.invoke(command_line, [*command, "--help"])
        assert result.exit_code == 0
        text = " ".join(result.output.split())
        assert "Example: mdp" in text, command
        assert "Exit codes: 0" in text, command


@pytest.mark.parametrize("command", [["classify", "{picture}"], ["look"], ["bench"]])
@pytest.mark.parametrize("cascade", [True, False])
def test_a_cascade_reaches_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], cascade: bool
) -> None:
    seen: list[object] = []

    def connect(fleet: Path, **options: object) -> None:
        seen.append(options["cascade"])
        raise InputError("seen enough")

    monkeypatch.setattr("mdp.client.sync.Client.connect", connect)
    picture = tmp_path / "picture.png"
    picture.touch()
    arguments = [part.format(picture=picture) for part in command]
    flag = ["--cascade"] if cascade else []
    result = CliRunner().invoke(app, [*arguments, "--fleet", str(tmp_path / "fleet.toml"), *flag])
    assert isinstance(result.exception, InputError)
    assert seen == [cascade]


@pytest.mark.parametrize("command", ["classify", "look", "status", "doctor", "bench"])
def test_the_environment_may_name_the_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("home.toml", "other.toml"):
        Path(name).write_text(
            'bundle = "b"\ndevices = [{ device = "a", address = "tcp://127.0.0.1:1", k = 0 }]'
        )
    seen: list[Path] = []

    def connect(fleet: Path, **_: object) -> None:
        seen.append(fleet)
        raise InputError("seen enough")

    monkeypatch.setattr("mdp.client.sync.Client.connect", connect)
    arguments = [command, *(["picture.png"] if command == "classify" else [])]
    for options in ([], ["--fleet", "other.toml"]):
        CliRunner().invoke(app, [*arguments, *options], env={"MDP_FLEET": "home.toml"})
    assert seen == [Path("home.toml"), Path("other.toml")]
