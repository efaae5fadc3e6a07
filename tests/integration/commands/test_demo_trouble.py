"""`mdp demo` where something is lacking or taken, and Ctrl-C at any moment."""

import json
import os
import pty
import signal
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from mdp import extras
from mdp.cli.main import main
from mdp.testing.bundles import DEVICES, write_bundle
from mdp.testing.processes import PATIENCE_S, LineProcess, Lines, until
from tests.support.command_lines import run_here
from tests.support.demo import agents_of, asked, write_scenes
from tests.support.faults.stage import with_cameras
from tests.support.fleet import BIN
from tests.support.pages import own_network

pytestmark = pytest.mark.usefixtures("no_leaks")
LAST_LINE = "Ctrl-C ends everything"


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """The demo of a small bundle of cameras, without a browser."""
    bundle = with_cameras(write_bundle(tmp_path / "bundle"), 0.8)
    scenes = write_scenes(tmp_path / "scenes")
    options = ["--bundle", bundle, "--pictures", scenes, "--deadline-ms", 10_000]
    return [str(BIN / "mdp"), "demo", *map(str, options)]


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """The folder that the demo makes its own in."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


def url_of(line: str) -> str:
    return line.partition(" ")[0]


def started(command: list[str], temporary: Path) -> LineProcess:
    environment = {"TMPDIR": str(temporary)}
    return LineProcess("demo", command, environment=environment, own_session=True)


def interrupted(demo: LineProcess) -> None:
    """Ctrl-C in a terminal: all processes are told."""
    os.killpg(demo.process.pid, signal.SIGINT)
    assert demo.process.wait(PATIENCE_S) in (0, 130, -signal.SIGINT)


def test_a_wheel_without_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        extras, "find_spec", lambda name: None if name == "starlette" else find_spec(name)
    )
    done = run_here(main, "mdp", "demo")
    assert done.returncode == 2
    assert done.stderr.startswith("mdp: starlette is not installed; the demo needs it: pip install")
    assert "[demo]" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_report_without_a_folder_is_refused_at_once(tmp_path: Path, command: list[str]) -> None:
    report = tmp_path / "gone/seen.json"
    done = run_here(main, *command, "--text", "--report", report)
    assert done.returncode == 2
    assert done.stderr == f"mdp: {report}: expected a file in a folder that is there (--report)\n"
    assert done.stdout == ""


def test_no_network(command: list[str]) -> None:
    if not own_network():
        pytest.skip("no network of its own can be made here (unshare, ip)")
    alone = [*own_network(), "bash", "-c", 'ip link set lo up && exec "$@"', "bash"]
    done = subprocess.run([*alone, *command, "--text"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT SEEN" not in done.stdout


def test_no_browser(command: list[str], temporary: Path) -> None:
    """On a terminal, where one would be opened."""
    shown, terminal = pty.openpty()
    lacking = ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")
    environment = {k: v for k, v in os.environ.items() if k not in lacking}
    environment |= {"PATH": str(BIN), "TMPDIR": str(temporary)}
    demo = subprocess.Popen(
        command, stdout=terminal, stderr=subprocess.PIPE, env=environment, start_new_session=True
    )
    try:
        lines = Lines(shown)
        line = ""
        while LAST_LINE not in line:
            line = lines.next(PATIENCE_S) or ""
        status, content = asked(f"{url_of(line)}/state")
        assert status == 200
        assert len(json.loads(content)["cameras"]) == len(DEVICES)
        os.killpg(demo.pid, signal.SIGINT)
        assert demo.wait(PATIENCE_S) in (0, 130, -signal.SIGINT)
    finally:
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGKILL)
            demo.wait()
        assert demo.stderr is not None
        demo.stderr.close()
        os.close(terminal)
        os.close(shown)
    assert list(temporary.iterdir()) == []


def test_two_demos_at_once(command: list[str], temporary: Path) -> None:
    with started(command, temporary) as one, started(command, temporary) as other:
        first, second = (url_of(demo.line_with(LAST_LINE)) for demo in (one, other))
        assert first != second
        for url in (first, second):
            until(lambda u=url: tally(u) > 0, "items")  # type: ignore[misc]
        interrupted(one)
        assert asked(f"{second}/state")[0] == 200
        interrupted(other)
    assert list(temporary.iterdir()) == []


def tally(url: str) -> int:
    """Items that were answered."""
    return int(json.loads(asked(f"{url}/state")[1])["tally"]["items"])


def at_once(demo: LineProcess, bundle: Path) -> None:
    """Before it has said anything."""


def first_line(demo: LineProcess, bundle: Path) -> None:
    demo.line_with("starting 3 agents")


def first_agent(demo: LineProcess, bundle: Path) -> None:
    until(lambda: bool(agents_of(bundle)), "an agent")


def all_agents(demo: LineProcess, bundle: Path) -> None:
    until(lambda: len(agents_of(bundle)) == len(DEVICES), "all agents")


def page(demo: LineProcess, bundle: Path) -> None:
    demo.line_with(LAST_LINE)


def answers(demo: LineProcess, bundle: Path) -> None:
    url = url_of(demo.line_with(LAST_LINE))
    until(lambda: tally(url) > 1, "items")


def unplugged(demo: LineProcess, bundle: Path) -> None:
    url = url_of(demo.line_with(LAST_LINE))
    asked(f"{url}/change", b'{"do": "plug", "device": "alpha", "on": false}')


@pytest.mark.parametrize(
    "moment", [at_once, first_line, first_agent, all_agents, page, answers, unplugged]
)
def test_ctrl_c_at_any_moment_leaves_nothing_behind(
    tmp_path: Path, command: list[str], temporary: Path, moment: Callable[[LineProcess, Path], None]
) -> None:
    bundle = tmp_path / "bundle"
    with started([*command, "--no-browser"], temporary) as demo:
        moment(demo, bundle)
        interrupted(demo)
    until(lambda: not agents_of(bundle), "no agents")
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("claim", ["$ mdp-agent run", "$ mdp status", "$ kill -KILL"])
def test_ctrl_c_in_text_leaves_nothing_behind(
    tmp_path: Path, command: list[str], temporary: Path, claim: str
) -> None:
    with started([*command, "--text"], temporary) as demo:
        demo.line_with(claim)
        interrupted(demo)
    until(lambda: not agents_of(tmp_path / "bundle"), "no agents")
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(("mode", "moment"), [("--text", "$ mdp status"), ("", "starting 3")])
def test_sigterm_leaves_nothing_behind(
    tmp_path: Path, command: list[str], temporary: Path, mode: str, moment: str
) -> None:
    """As of `timeout`, which tells its child and then its group, or a session that ends."""
    with started([*command, *filter(None, [mode])], temporary) as demo:
        demo.line_with(moment)
        demo.process.terminate()
        demo.process.terminate()
        assert demo.process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    until(lambda: not agents_of(tmp_path / "bundle"), "no agents")
    assert list(temporary.iterdir()) == []
