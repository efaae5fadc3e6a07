"""Exit codes, one line on stderr, lists of values."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from mdp import console, errors


def end_with(
    capsys: pytest.CaptureFixture[str], raised: BaseException | None
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line that raises."""

    def app() -> None:
        if raised is not None:
            raise raised

    with pytest.raises(SystemExit) as end:
        console.run(app, "mdp")
    captured = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, captured.out, captured.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        # Every class's code is in test_errors.
        (errors.InputError("oh"), 2),
        (errors.PlanRefused("oh"), 4),
        (console.Interrupted("oh"), 130),
    ],
)
def test_an_error_is_one_line_and_its_class_s_exit_code(
    capsys: pytest.CaptureFixture[str], error: errors.MDPError, code: int
) -> None:
    assert end_with(capsys, error) == (code, "", "mdp: oh\n")


def test_a_message_of_several_lines_becomes_one(capsys: pytest.CaptureFixture[str]) -> None:
    error = errors.ConfigError("line 1\n   line 2\r\n\tline 3  ")
    assert end_with(capsys, error) == (2, "", "mdp: line 1 line 2 line 3\n")


def test_streams_that_the_caller_has_closed() -> None:
    # The shell closes them; the program would print a traceback, or write into a connection.
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c"]
    program = "import mdp_start; mdp_start._open_closed_streams(); print(input.__name__)"
    program += "; import os, sys; assert sys.stdin.read() == ''; os._exit(sys.stdout.fileno() + 6)"
    assert subprocess.run([*command, program], check=False).returncode == 7


def test_a_ctrl_c_while_a_command_is_imported(tmp_path: Path) -> None:
    swallowing = (
        "import signal\ntry: signal.raise_signal(signal.SIGINT)\nexcept BaseException: pass\n"
    )
    (tmp_path / "command.py").write_text(f"{swallowing}def work() -> None: print('imported')")
    program = "import sys; sys.path.append(sys.argv.pop(1)); from mdp import console; "
    program += "console.run(console.new_app('', 'mdp', {'work': ('command:work', '')}), 'mdp')"
    command = [sys.executable, "-c", program, str(tmp_path), "work"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "mdp: interrupted\n")


HOSTILE = "a\x1b]0;owned\x07b\x9b31mc\u202ed\x7f"


def test_a_message_has_nothing_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    error = errors.PictureError(f"{HOSTILE}.png: no picture")
    assert end_with(capsys, error) == (2, "", "mdp: a?]0;owned?b?31mc?d?.png: no picture\n")


def test_json_is_one_line_that_a_terminal_only_shows(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json({"path": HOSTILE, "label": "\N{FIRE} blå", "numbers": (1, 2.5)})
    line = capsys.readouterr().out
    assert line.removesuffix("\n").isprintable()
    assert json.loads(line) == {"path": HOSTILE, "label": "\N{FIRE} blå", "numbers": [1, 2.5]}
    assert "\N{FIRE} blå" in line


def test_other_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert end_with(capsys, None) == (0, "", "")
    assert end_with(capsys, KeyboardInterrupt()) == (130, "", "mdp: interrupted\n")


def test_a_ctrl_c_during_a_destructor_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    class Odd:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    went_on = False

    def app() -> None:
        nonlocal went_on
        odd = Odd()
        del odd
        went_on = True
        assert not threading.Event().wait(60.0), "nobody was interrupted"

    before = sys.unraisablehook
    with pytest.raises(SystemExit) as end:
        console.run(app, "mdp")
    assert went_on
    assert end.value.code == 130
    assert capsys.readouterr().err == "mdp: interrupted\n"
    assert sys.unraisablehook is before


def test_an_early_timer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    early = [True]

    class Timer(threading.Timer):
        """The first fires while it is still being started, as on a busy machine."""

        def start(self) -> None:
            if early:
                early.clear()
                signal.raise_signal(signal.SIGINT)
            super().start()

    class Odd:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def app() -> None:
        odd = Odd()
        del odd
        assert not threading.Event().wait(10.0), "nobody was interrupted"

    monkeypatch.setattr(threading, "Timer", Timer)
    with pytest.raises(SystemExit) as end:
        console.run(app, "mdp")
    assert (end.value.code, capsys.readouterr().err) == (130, "mdp: interrupted\n")


def test_what_else_is_raised_in_a_destructor_is_shown() -> None:
    shown: list[object] = []

    class Odd:
        def __del__(self) -> None:
            raise ZeroDivisionError

    def app() -> None:
        odd = Odd()
        del odd

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda unraisable: shown.append(unraisable.exc_type))
        with pytest.raises(SystemExit):
            console.run(app, "mdp")
    assert shown == [ZeroDivisionError]


def test_a_mistake_of_ours_keeps_its_traceback() -> None:
    def app() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        console.run(app, "mdp")


NAMES = ("--profiles", "-p")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], []),
        (["--profiles", "a"], ["--profiles", "a"]),
        (["--profiles", "a", "b", "c"], ["--profiles", "a", "--profiles", "b", "--profiles", "c"]),
        (
            ["--profiles", "a", "b", "--out", "x"],
            ["--profiles", "a", "--profiles", "b", "--out", "x"],
        ),
        (["-p", "a", "b"], ["-p", "a", "-p", "b"]),
        (["--profiles", "a", "--profiles", "b"], ["--profiles", "a", "--profiles", "b"]),
        (["--out", "x", "y", "--profiles", "a"], ["--out", "x", "y", "--profiles", "a"]),
        (["x", "--profiles", "a", "--json", "y"], ["x", "--profiles", "a", "--json", "y"]),
        (
            ["--profiles", "a", "--", "b", "--profiles"],
            ["--profiles", "a", "--", "b", "--profiles"],
        ),
    ],
)
def test_spread(args: list[str], expected: list[str]) -> None:
    assert console.spread(args, NAMES) == expected


def test_list_options_in_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    app = console.new_app("Test.")

    @app.command(cls=console.list_options("--profiles"))
    def plan(
        profiles: Annotated[list[str], typer.Option()], out: Annotated[str, typer.Option()] = "here"
    ) -> None:
        console.print_json([profiles, out])

    with pytest.raises(SystemExit) as end:
        app(["--profiles", "a", "b", "--out", "there", "--profiles", "c"])
    assert end.value.code == 0
    assert json.loads(capsys.readouterr().out) == [["a", "b", "c"], "there"]


@pytest.mark.parametrize("cls", [None, console.list_options("--profiles")])
def test_a_second_config_is_refused(cls: Any, capsys: pytest.CaptureFixture[str]) -> None:
    app = console.new_app("An app.", "app")

    @app.command(cls=cls)
    def work(config: str, rest: list[str] | None = None) -> None:
        print(config)

    words = ["work", "--config", "a.toml", "--config=b.toml"]
    with pytest.raises(SystemExit) as ended:
        console.run(lambda: app(words), "app")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "app: --config: expected one file, got 2\n"
