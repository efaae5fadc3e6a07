"""An agent as a systemd service: its unit as systemd reads it, and what a real agent reports."""

import errno
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from devices.agent.server import HUNG_S
from devices.cli.main import main
from devices.service import MARK
from mdp.formats.bundle import Bundle
from mdp.formats.keys import new_keys
from mdp.testing.agents import AgentProcess, agent_command
from mdp.testing.bundles import write_bundle
from mdp.testing.processes import PATIENCE_S, until
from mdp.transport import new_pair
from tests.support import only_families
from tests.support.command_lines import run_here
from tests.support.fakes import StrangePeer
from tests.support.serving import Held, replies, request, serving
from tests.support.serving import told as told_by

pytestmark = pytest.mark.usefixtures("no_leaks")

UNIT = Path("etc/systemd/system/mdp-agent-alpha.service")
#: As MemoryDenyWriteExecute does (PR_SET_MDWE); kernels before 6.3 refuse, and run the rest alone.
NO_WRITTEN_CODE = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(65, 1, 0, 0, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
ONLY_FAMILIES = [sys.executable, only_families.__file__]
#: Of `systemd-analyze security`, from 0 to 100; an ordinary service has 96.
MOST_EXPOSED = 20


@pytest.fixture(autouse=True)
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle in the current folder."""
    monkeypatch.chdir(tmp_path)
    return write_bundle(tmp_path / "bundle")


def install(*options: object, device: str = "alpha") -> subprocess.CompletedProcess[str]:
    words = ("--bundle", "bundle", "--device", device, "--root", ".", *options)
    return run_here(main, "mdp-agent", "install", *words)


def uninstall(root: str = ".") -> subprocess.CompletedProcess[str]:
    return run_here(main, "mdp-agent", "uninstall", "--device", "alpha", "--root", root)


def refused(done: subprocess.CompletedProcess[str], expected: str) -> None:
    assert done.returncode == 2, done.stderr
    assert re.match(rf"mdp-agent: .*{expected}", done.stderr), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_systemd_accepts_and_confines_each_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    help_text = subprocess.run(
        ["systemd-analyze", "--help"], capture_output=True, text=True, check=True
    ).stdout
    new_keys(tmp_path, "alpha", new_pair)
    new_keys(tmp_path, "client", new_pair)
    keys = ["--key", "alpha.secret", "--clients", "client.public"]
    audit = ["--audit", "/var/log/mdp-agent-alpha/audit.jsonl"]
    push = ["--allow-push", "/var/lib/mdp-agent-alpha"]
    for options in ([], ["--source", "camera:0", "--spin"], [*keys, *audit, *push, "--announce"]):
        done = install("--replace", *options)
        assert done.returncode == 0, done.stderr
        verified = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", UNIT], capture_output=True, text=True
        )
        said = [line for line in verified.stderr.splitlines() if UNIT.name in line]
        assert (verified.returncode, said) == (0, [])
        if "--offline" in help_text:
            rate = ["systemd-analyze", "security", "--offline=yes", "--no-pager"]
            rated = subprocess.run(
                [*rate, f"--threshold={MOST_EXPOSED}", UNIT], capture_output=True, text=True
            )
            assert rated.returncode == 0, rated.stdout[-300:] + rated.stderr


def test_installed_and_removed_without_a_trace(tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    shown = install("--dry-run", "--no-spin")
    assert shown.returncode == 0
    assert sorted(tmp_path.rglob("*")) == before
    assert install("--no-spin").returncode == 0
    assert UNIT.read_text() == shown.stdout
    assert f"run --device alpha --bundle {tmp_path}/bundle --no-spin\n" in shown.stdout
    done = install("--no-spin")
    assert done.returncode == 0
    assert "as before" in done.stderr
    assert "run: systemctl --root=. enable mdp-agent-alpha\n" in done.stderr
    assert uninstall().returncode == 0
    assert {path for path in tmp_path.rglob("*") if not path.is_dir()} == {
        path for path in before if not path.is_dir()
    }
    refused(uninstall(), "there is none")


def test_a_dry_run_shows_a_unit_that_could_not_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle is below /tmp, or the folders of tests are this user's own."""
    tmp_path.chmod(0o700)
    shown = install("--dry-run", "--root", "/")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(MARK)
    assert shown.stderr.startswith("mdp-agent: WARNING: to be installed: ")
    assert shown.stderr.count("\n") == 1
    refused(install("--root", "/"), re.escape(shown.stderr.partition("installed: ")[2].strip()))
    assert not Path("/", UNIT).exists()


def test_another_unit_stays_unless_replaced() -> None:
    UNIT.parent.mkdir(parents=True)
    UNIT.write_text("[Service]\n")
    refused(install(), "another unit exists: expected --replace")
    refused(uninstall(), "did not write it: it stays")
    assert UNIT.read_text() == "[Service]\n"
    assert install("--replace").returncode == 0
    assert UNIT.read_text().startswith(MARK)
    refused(install("--threads", 1), "another unit exists")
    UNIT.unlink()
    UNIT.symlink_to("/dev/null")
    refused(install(), "expected a regular file")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--bind", "tcp://0.0.0.0:7500"], "--bind tcp://0.0.0.0:7500: other machines"),
        (["--bind", "tcp://127.0.0.1:80"], "--bind tcp://127.0.0.1:80: expected a port from 1024"),
        (["--bundle", "none"], "none"),
        (["--cpus", "x"], "--cpus: expected numbers"),
        (["--key", "alpha.secret"], "--key and --clients: expected both"),
        (["--source", "folder:none"], "none"),
        (["--source", "rtsp://me:s3cret@cam/1"], "--source rtsp://cam/1: everybody can read"),
        (["--allow-push", "kept"], "--allow-push: expected --key and --clients: "),
        (["--audit", "audit.jsonl"], "--audit audit.jsonl: expected a file in /var/log/mdp-agent-"),
    ],
)
def test_nothing_is_written_for_what_run_refuses(options: list[str], expected: str) -> None:
    refused(install(*options), expected)
    refused(install(device="gamma-none"), "gamma-none")
    assert not Path("etc").exists()


def test_without_a_bundle_it_waits_for_the_first_push(tmp_path: Path) -> None:
    new_keys(tmp_path, "alpha", new_pair)
    new_keys(tmp_path, "client", new_pair)
    words = ["--device", "alpha", "--root", ".", "--key", "alpha.secret"]
    words += ["--clients", "client.public"]
    done = run_here(main, "mdp-agent", "install", *words)
    refused(done, "--bundle: expected a bundle folder, or --allow-push for a first one")
    assert not UNIT.exists()
    push = ["--allow-push", "/var/lib/mdp-agent-alpha"]
    done = run_here(main, "mdp-agent", "install", *words, *push)
    assert done.returncode == 0, done.stderr
    unit = UNIT.read_text()
    assert "--allow-push /var/lib/mdp-agent-alpha" in unit
    assert "--bundle" not in unit
    # A pushed one may need an accelerator.
    assert "PrivateDevices=no" in unit


def test_a_password_in_the_environment_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDP_SOURCE", "rtsp://me:s3cret@cam/1")
    done = install()
    assert done.returncode == 0, done.stderr
    assert "MDP_SOURCE: copy it to /etc/default/mdp-agent-alpha" in done.stderr
    assert "s3cret" not in UNIT.read_text() + done.stderr


def test_systemctl_starts_and_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, log = tmp_path / "bin/systemctl", tmp_path / "log"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    # A machine that runs systemd, and whose units are here.
    monkeypatch.setattr("devices.cli.install._BOOTED", tmp_path)
    monkeypatch.setattr("devices.service.UNITS", tmp_path / UNIT.parent)
    monkeypatch.setattr("devices.service.check_readable", lambda paths: None)
    assert install("--root", "/").returncode == 0
    name = UNIT.stem
    done = ["daemon-reload", f"enable {name}", f"restart {name}"]
    assert log.read_text().splitlines() == done
    program.write_text("#!/bin/sh\necho Access denied >&2; exit 4\n")
    refused(uninstall("/"), f"systemctl disable --now {name}: Access denied")
    assert UNIT.exists()
    program.unlink()
    monkeypatch.setenv("PATH", str(program.parent))
    ended = uninstall("/")
    assert ended.returncode == 0
    assert f"run: systemctl disable --now {name}\n" in ended.stderr
    assert not UNIT.exists()


@pytest.fixture
def told(tmp_path: Path) -> Iterator[socket.socket]:
    """The service manager's socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"{tmp_path}/notify")
        receiver.settimeout(PATIENCE_S)
        yield receiver


def test_a_real_agent_notifies_systemd(bundle: Path, told: socket.socket, tmp_path: Path) -> None:
    def hear(message: str, count: int = 1) -> list[str]:
        """Messages up to the one that is `message`, or begins with it, for the `count`th time."""
        seen: list[str] = []
        while sum(each.startswith(message) for each in seen) < count:
            seen.append(told.recv(200).decode())
        return seen

    environment = {"NOTIFY_SOCKET": f"{tmp_path}/notify", "WATCHDOG_USEC": "60000000"}
    command = [sys.executable, "-c", NO_WRITTEN_CODE, *agent_command(bundle, "alpha")]
    with AgentProcess("alpha", command, tmp_path / "log", environment=environment) as agent:
        agent.wait_for("LISTENING")
        assert "STOPPING=1" not in hear("READY=1")
        agent.wait_for("READY")
        hear("WATCHDOG=1", count=2)
        agent.signal(signal.SIGHUP)
        hear("RELOADING=1\nMONOTONIC_USEC=")
        hear("READY=1")
        assert agent.terminate() == 0
        hear("STOPPING=1")
    assert agent.stderr == ""


def test_sockets_of_the_unit_s_families_are_all_that_an_agent_needs(
    bundle: Path, tmp_path: Path
) -> None:
    if platform.machine() not in only_families.SOCKET:
        pytest.skip(f"the number of socket(2) on {platform.machine()} is not known")
    opening = "import socket; socket.socket(socket.AF_UNIX)"
    tried = [*ONLY_FAMILIES, "AF_INET", sys.executable, "-c", opening]
    probe = subprocess.run(tried, capture_output=True, text=True)
    if probe.stderr.startswith("prctl: "):
        pytest.skip(f"this kernel takes no filter of system calls: {probe.stderr.strip()}")
    assert f"[Errno {errno.EAFNOSUPPORT}]" in probe.stderr, "the filter works"
    unit = install("--dry-run").stdout
    (families,) = re.findall("^RestrictAddressFamilies=(.+)$", unit, flags=re.MULTILINE)
    # As the addresses that ZeroMQ looks up among the network's interfaces.
    command = [*ONLY_FAMILIES, families, *agent_command(bundle, "alpha")]
    with AgentProcess("alpha", command, tmp_path / "log") as agent:
        agent.wait_for("READY")
        with StrangePeer(agent.address) as peer:
            peer.send(request(Bundle.open(bundle), 1))
            assert replies(peer, 1) == {1: "answered"}


def test_a_computation_that_hangs_keeps_the_watchdog_waiting(bundle: Path) -> None:
    opened, runtime, now_s = Bundle.open(bundle), Held(), [0.0]
    with (
        serving(opened, runtime, clock=lambda: now_s[0]) as (agent, address),
        StrangePeer(address) as peer,
    ):
        runtime.hold()
        peer.send(request(opened, 1))
        assert runtime.waiting.wait(PATIENCE_S)
        until(agent.is_alive, "a long computation is no failure")
        now_s[0] += HUNG_S
        for _ in range(2):
            assert not agent.is_alive()
            # The socket is attended to all the same.
            assert told_by(peer).state == "READY"
        runtime.free.set()
        assert replies(peer, 1) == {1: "answered"}
        until(agent.is_alive, "it has ended")
