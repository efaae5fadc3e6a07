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
from tests.support.fleet import BIN
from tests.support.serving import Held, replies, request, serving
from tests.support.serving import ask_status as told_by

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


def assert_refusal(done: subprocess.CompletedProcess[str], expected: str) -> None:
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
    assert_refusal(uninstall(), "there is none")


def test_a_service_may_write_what_it_keeps(tmp_path: Path) -> None:
    new_keys(tmp_path, "alpha", new_pair)
    new_keys(tmp_path, "client", new_pair)
    keys = ["--key", "alpha.secret", "--clients", "client.public"]
    state = "/var/lib/mdp-agent-alpha"
    masked = ["--allow-mask", "--mask", f"{state}/mask.toml", "--source", "folder:."]
    for options in (["--source", "phone:8443"], [*keys, *masked]):
        before = sorted(tmp_path.rglob("*"))
        done = install("--dry-run", *options)
        assert done.returncode == 0, done.stderr
        # Nor is a phone's token made yet, which is of another user's.
        assert sorted(tmp_path.rglob("*")) == before
        for line in ("StateDirectory=mdp-agent-alpha", f"Environment=XDG_STATE_HOME={state}"):
            assert f"\n{line}\n" in done.stdout
    elsewhere = [*keys, "--allow-mask", "--mask", "mask.toml", "--source", "folder:."]
    assert_refusal(
        install("--dry-run", *elsewhere), f"--mask mask.toml: expected a file in {state}/"
    )
    assert_refusal(install("--dry-run", "--source", "phone:443"), "expected a port from 1024")


def test_another_mask_is_another_unit(tmp_path: Path) -> None:
    (tmp_path / "mask.toml").write_text("width = 640\nheight = 480\n")
    words = ("--source", "folder:.", "--mask", "mask.toml")
    assert install(*words).returncode == 0
    assert "as before" in install(*words).stderr
    (tmp_path / "mask.toml").write_text("width = 640\nheight = 480\nregion = {right = 0.5}\n")
    assert "written" in install(*words).stderr


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
    assert_refusal(
        install("--root", "/"), re.escape(shown.stderr.partition("installed: ")[2].strip())
    )
    assert not Path("/", UNIT).exists()


def test_another_unit_stays_unless_replaced() -> None:
    UNIT.parent.mkdir(parents=True)
    UNIT.write_text("[Service]\n")
    assert_refusal(install(), "another unit exists: expected --replace")
    assert_refusal(uninstall(), "did not write it: it stays")
    assert UNIT.read_text() == "[Service]\n"
    assert install("--replace").returncode == 0
    assert UNIT.read_text().startswith(MARK)
    assert_refusal(install("--threads", 1), "another unit exists")
    UNIT.unlink()
    UNIT.symlink_to("/dev/null")
    assert_refusal(install(), "expected a regular file")


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
    assert_refusal(install(*options), expected)
    assert_refusal(install(device="gamma-none"), "gamma-none")
    assert not Path("etc").exists()


def test_without_a_bundle_it_waits_for_the_first_push(tmp_path: Path) -> None:
    new_keys(tmp_path, "alpha", new_pair)
    new_keys(tmp_path, "client", new_pair)
    words = ["--device", "alpha", "--root", ".", "--key", "alpha.secret"]
    words += ["--clients", "client.public"]
    done = run_here(main, "mdp-agent", "install", *words)
    assert_refusal(done, "--bundle: expected a bundle folder, or --allow-push for a first one")
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


#: As systemd does: keeps which units run, and fails to start one where a file says so.
SYSTEMCTL = """#!/bin/sh
echo "$@" >> log
case $1 in
is-active) test -e runs ;;
start | restart) if test -e broken; then echo Job failed >&2; exit 1; fi; touch runs ;;
disable) rm -f runs ;;
esac
"""
JOURNALCTL = """#!/bin/sh
case $* in
*json*) echo '{"__CURSOR": "'$(wc -l < log)'", "MESSAGE": "mdp-agent: the port is taken"}' ;;
esac
"""


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The programs of a machine that runs systemd, and whose units are here; their folder."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, script in (("systemctl", SYSTEMCTL), ("journalctl", JOURNALCTL)):
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setattr("devices.cli.install._BOOTED", tmp_path)
    monkeypatch.setattr("devices.cli.install._STATE", (tmp_path / "var/lib", tmp_path / "var/log"))
    monkeypatch.setattr("devices.service.UNITS", tmp_path / UNIT.parent)
    monkeypatch.setattr("devices.service.check_readable", lambda paths: None)
    return programs


def done_by_systemctl() -> list[str]:
    """Its commands since the last call, without questions."""
    log = Path("log")
    lines = log.read_text().splitlines()
    log.unlink()
    return [line for line in lines if not line.startswith(("is-active", "reset-failed"))]


def test_systemctl_starts_and_stops_it(
    systemd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = UNIT.stem
    begin = ["daemon-reload", f"enable {name}"]
    done = install("--root", "/")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, f"mdp-agent: {name}: started")
    assert done_by_systemctl() == [*begin, f"restart {name}"]
    # Nothing has changed: a service that runs is left alone, and one that was stopped is started.
    assert f"{name}: runs as before" in install("--root", "/").stderr
    assert done_by_systemctl() == [*begin, f"start {name}"]
    Path("runs").unlink()
    assert f"{name}: started" in install("--root", "/").stderr
    assert done_by_systemctl() == [*begin, f"start {name}"]
    # What it reads has changed: no other unit, but a new start.
    Path("bundle").rename("former")
    write_bundle(tmp_path / "bundle", name="others")
    assert f"{name}: restarted" in install("--root", "/").stderr
    assert done_by_systemctl() == [*begin, f"stop {name}", f"restart {name}"]
    (systemd / "systemctl").write_text("#!/bin/sh\necho Access denied >&2; exit 4\n")
    assert_refusal(uninstall("/"), f"systemctl disable --now {name}: Access denied")
    assert UNIT.exists()
    (systemd / "systemctl").unlink()
    monkeypatch.setenv("PATH", str(systemd))
    ended = uninstall("/")
    assert ended.returncode == 0
    assert f"run: systemctl disable --now {name}\n" in ended.stderr
    assert not UNIT.exists()


@pytest.mark.usefixtures("systemd")
def test_a_service_that_does_not_start_leaves_all_as_before() -> None:
    name = UNIT.stem
    Path("broken").touch()
    done = install("--root", "/")
    expected = f"mdp-agent: {name} does not start: the port is taken; the unit is removed"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, expected)
    assert not UNIT.exists()
    assert done_by_systemctl()[-2:] == [f"disable --now {name}", "daemon-reload"]
    Path("broken").unlink()
    assert install("--root", "/").returncode == 0
    before = UNIT.read_text()
    Path("broken").touch()
    done = install("--root", "/", "--replace", "--threads", 1)
    assert done.returncode == 2
    assert done.stderr.endswith("the port is taken; the former unit is back\n")
    assert UNIT.read_text() == before


@pytest.mark.usefixtures("systemd")
def test_uninstall_says_what_stays(tmp_path: Path) -> None:
    assert install("--root", "/").returncode == 0
    name = UNIT.stem
    (tmp_path / f"var/log/private/{name}").mkdir(parents=True)
    (tmp_path / f"var/log/private/{name}/audit.jsonl").touch()
    (tmp_path / f"var/log/{name}").symlink_to(f"private/{name}")
    done = uninstall("/")
    assert done.returncode == 0
    for place in (f"var/log/{name}", f"var/log/private/{name}"):
        assert f"mdp-agent: {tmp_path}/{place}: stays\n" in done.stderr
    assert done.stderr.endswith("mdp-agent: --purge removes what stays\n")
    assert_refusal(uninstall("/"), "there is none")
    words = ["uninstall", "--device", "alpha", "--root", "/", "--purge"]
    done = run_here(main, "mdp-agent", *words)
    assert done.returncode == 0
    assert f"mdp-agent: {tmp_path}/var/log/{name}: removed\n" in done.stderr
    assert list((tmp_path / "var/log").rglob("*")) == [tmp_path / "var/log/private"]
    assert_refusal(run_here(main, "mdp-agent", *words), "there is none")


def test_health_is_told_without_a_key(bundle: Path, tmp_path: Path) -> None:
    def asked(agent: AgentProcess, *words: str) -> tuple[int, str]:
        port = agent.address.rpartition(":")[2]
        command = [str(BIN / "mdp-agent"), "health", "--port", port, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        return done.returncode, done.stdout + done.stderr

    with AgentProcess("alpha", agent_command(bundle, "alpha"), tmp_path / "log") as agent:
        agent.wait_for("READY")
        assert asked(agent) == asked(agent, "--live") == (0, "READY alpha\n")
        agent.signal(signal.SIGSTOP)
        code, said = asked(agent, "--live")
        assert (code, "says nothing within 2 s" in said) == (3, True)
        agent.signal(signal.SIGCONT)
        assert agent.terminate() == 0
        port = agent.address.rpartition(":")[2]
        assert asked(agent) == (3, f"mdp-agent: no agent is on port {port} of this machine\n")


def test_an_agent_whose_name_is_taken_serves_and_says_so(bundle: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = agent_command(bundle, "alpha", bind=f"tcp://127.0.0.1:{port}")
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(f"\0mdp-agent:{port}")
        with AgentProcess("alpha", command, tmp_path / "log") as agent:
            agent.wait_for("READY")
            agent.wait_for("`mdp-agent health` is not answered: Address already in use")
            assert agent.terminate() == 0


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
