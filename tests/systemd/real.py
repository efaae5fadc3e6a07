"""Units under a real systemd: `make systemd`. Not collected by `make test`.

PID 1 of a container is systemd, whose Debian has the wheel of this checkout in /opt/mdp. Units are
installed by the documented commands, and asked by clients with keys. Skipped, with what the engine
says, where no such container can be run.
"""

import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.figures import Figures
from tests.support.patience import PATIENT_S
from tests.systemd.boards import Board, boot_board, engines_of
from tools.engine import ROOT
from tools.prepare import MissingError
from tools.systemd import Prepared, prepare

# Not of fixtures: a Debian is made as quickly as network and machine allow.
pytestmark = pytest.mark.timeout(3 * PATIENT_S, func_only=True)
BUNDLES = ROOT / "examples" / "bundles"
DEVICE, OTHER = "n100", "laptop-cpu"
NAME = f"mdp-agent-{DEVICE}"
UNIT = f"/etc/systemd/system/{NAME}.service"
DROP_IN = f"{UNIT}.d/test.conf"
#: Tenths, of `systemd-analyze security`.
MOST_EXPOSED = 15
#: Of users that exist while their services run (systemd.exec(5)).
DYNAMIC_USERS = range(61184, 65520)
#: As a board's root would.
INSTALL = (
    f"mdp-agent install --bundle /srv/bundle --device {DEVICE} --bind tcp://127.0.0.1:7500 "
    f"--key /etc/mdp/{DEVICE}.secret --clients /etc/mdp/clients"
)


class AgentBoard(Board):
    """A board on which an agent is installed."""

    def install(self, options: str = "", command: str = INSTALL) -> str:
        """Run `mdp-agent install`, and return what it printed."""
        return self.run(f"{command} {options} 2>&1")

    def refuses(self, script: str, expected: str) -> None:
        """Assert exit code 2 and a line that has `expected`."""
        done = self.try_script(script)
        assert done.returncode == 2, f"{done.returncode}: {done.stdout}{done.stderr}"
        assert re.search(expected, done.stderr.splitlines()[-1]), done.stderr

    def journal(self, unit: str = NAME) -> str:
        """Lines of a unit, and of systemd about it, since the last `forget`."""
        return self.run(f"journalctl --sync; journalctl --unit={unit} --output=cat --quiet")

    def forget(self) -> None:
        """Empty the journal."""
        self.run("journalctl --sync --rotate --quiet; journalctl --vacuum-time=1us --quiet")

    def until_ready(self, port: int = 7500) -> None:
        self.until(f"mdp-agent health --port {port}")

    def drop_in(self, text: str) -> None:
        """Replace the service's settings by some of `text`."""
        self.run(f"mkdir -p {UNIT}.d && printf '[Service]\\n{text}\\n' > {DROP_IN}")
        self.run("systemctl daemon-reload")

    def answers(self, bind: str = "tcp://127.0.0.1:7500") -> None:
        """Assert that a client with a key gets an answer of the bundle's."""
        self.run(
            "rm -f /root/fleet.toml; mdp fleet new --bundle /srv/bundle --keys /etc/mdp "
            f"--key /etc/mdp/client.secret --device {DEVICE}={bind} --out /root/fleet.toml"
        )
        said = self.run(
            "mdp classify --fleet /root/fleet.toml --deadline-ms 20000 --json /srv/p.png"
        )
        assert json.loads(said)["used"] == [DEVICE]


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    try:
        return prepare()
    except MissingError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def booted(prepared: Prepared) -> Iterator[AgentBoard]:
    mounts = [f"{BUNDLES}:/bundles", f"{ROOT / 'deploy' / 'systemd'}:/deploy"]
    with ExitStack() as stack:
        try:
            plain = stack.enter_context(boot_board(prepared, mounts))
        except MissingError as error:
            pytest.skip(str(error))
        board = AgentBoard(plain.podman, plain.name)
        board.run("pip install --quiet --no-index --no-deps --force-reinstall /now/*.whl")
        board.run(
            "cp -r /bundles/cifar10 /srv/first; cp -r /bundles/imagenette /srv/second; "
            f"mkdir -p /etc/mdp/clients; for n in {DEVICE} {OTHER} client; do "
            "mdp keys new --out /etc/mdp --name $n; done; "
            "cp /etc/mdp/client.public /etc/mdp/clients; "
            'python3 -c \'from PIL import Image; Image.new("RGB", (64, 64)).save("/srv/p.png")\''
        )
        yield board


@pytest.fixture(scope="module")
def figures(booted: AgentBoard) -> Iterator[Figures]:
    with Figures("systemd", engines_of(booted)) as made:
        yield made


@pytest.fixture
def board(booted: AgentBoard) -> Iterator[AgentBoard]:
    """The container without a unit, and with an empty journal."""
    booted.run("ln -sfn first /srv/next && mv -T /srv/next /srv/bundle")
    booted.run("printf 'push = true\\n' > /etc/mdp/clients/client.limits")
    booted.forget()
    yield booted
    booted.try_script(f"mdp-agent uninstall --purge --device {DEVICE}")


@pytest.mark.parametrize(
    "bind",
    [
        "tcp://127.0.0.1:7500",
        "tcp://0.0.0.0:7500",
        "tcp://*:7500",
        "tcp://localhost:7500",
        "tcp://[::1]:7500",
        "tcp://[::]:7500",
        "tcp://lo:7500",
    ],
)
def test_every_form_of_bind(board: AgentBoard, figures: Figures, bind: str) -> None:
    command = INSTALL.replace("tcp://127.0.0.1:7500", f"'{bind}'")
    begun_s = time.monotonic()
    said = board.install(command=command)
    figures.put(installed_s=time.monotonic() - begun_s)
    assert f"{NAME}: started" in said
    assert board.run("mdp-agent health") == f"READY {DEVICE}"
    # Any user may ask.
    assert board.run("setpriv --reuid=nobody mdp-agent health --live") == f"READY {DEVICE}"
    board.answers("tcp://[::1]:7500" if "::" in bind else "tcp://127.0.0.1:7500")
    assert board.property_of("StatusText", NAME) == "READY"


def test_an_unchanged_agent_is_left_alone(board: AgentBoard) -> None:
    board.install()
    first = board.property_of("MainPID", NAME)

    def next_pid(expected: str) -> str:
        assert f"{NAME}: {expected}" in board.install()
        return board.property_of("MainPID", NAME)

    assert next_pid("runs as before") == first
    # Its clients' keys it reads again by itself.
    board.run("touch /etc/mdp/clients/client.public")
    assert next_pid("runs as before") == first
    board.run(f"systemctl stop {NAME}")
    second = next_pid("started")
    assert second != first
    board.run("ln -sfn second /srv/next && mv -T /srv/next /srv/bundle")
    third = next_pid("restarted")
    assert third != second
    assert "bundle imagenette" in board.journal()
    board.run(f"rm /etc/mdp/{DEVICE}.*; mdp keys new --out /etc/mdp --name {DEVICE}")
    fourth = next_pid("restarted")
    assert fourth != third
    board.refuses(f"{INSTALL} --threads 1", "another unit exists: expected --replace")
    assert board.property_of("MainPID", NAME) == fourth
    assert "restarted" in board.install("--threads 1 --replace")


def test_it_comes_back_when_killed(board: AgentBoard, figures: Figures) -> None:
    board.install()
    board.drop_in("RestartSec=100ms")
    killed = board.property_of("MainPID", NAME)
    begun_s = time.monotonic()
    board.run(f"kill -9 {killed}")
    board.until(f"test $(systemctl show -p NRestarts --value {NAME}) = 1")
    board.until_ready()
    figures.put(back_s=time.monotonic() - begun_s)
    assert board.property_of("MainPID", NAME) != killed
    board.answers()


def test_it_comes_back_when_it_hangs(board: AgentBoard, figures: Figures) -> None:
    board.install()
    hung = board.property_of("MainPID", NAME)
    board.run(f"kill -STOP {hung}")
    done = board.try_script("mdp-agent health --live")
    assert done.returncode == 3
    assert "says nothing within 2 s" in done.stderr
    board.run(f"kill -CONT {hung}")
    board.until_ready()
    board.drop_in("WatchdogSec=3\\nRestartSec=100ms")
    board.run(f"systemctl restart {NAME}")
    begun_s = time.monotonic()
    board.run(f"kill -STOP {board.property_of('MainPID', NAME)}")
    board.until(f"test $(systemctl show -p NRestarts --value {NAME}) = 1")
    board.until_ready()
    figures.put(hung_s=time.monotonic() - begun_s)
    assert "Watchdog timeout" in board.journal()
    board.answers()


def test_reload_and_stop(board: AgentBoard, figures: Figures) -> None:
    board.install()
    before = board.property_of("MainPID", NAME)
    board.run("ln -sfn second /srv/next && mv -T /srv/next /srv/bundle")
    begun_s = time.monotonic()
    board.run(f"systemctl reload {NAME}")
    board.until(f"journalctl -u {NAME} -o cat | grep 'serves imagenette'")
    figures.put(reloaded_s=time.monotonic() - begun_s)
    assert board.property_of("MainPID", NAME) == before
    board.answers()
    begun_s = time.monotonic()
    board.run(f"systemctl stop {NAME}")
    figures.put(stopped_s=time.monotonic() - begun_s)
    assert board.property_of("Result", NAME) == "success"
    assert "DRAINING" in board.journal()
    done = board.try_script("mdp-agent health")
    assert (done.returncode, done.stdout) == (3, "")
    assert "no agent is on port 7500" in done.stderr


def test_it_starts_with_the_machine(board: AgentBoard, figures: Figures) -> None:
    board.install()
    begun_s = time.monotonic()
    board.restart()
    board.until_ready()
    figures.put(booted_s=time.monotonic() - begun_s)
    board.answers()


def test_audit_log_and_pushed_bundles(board: AgentBoard) -> None:
    options = f"--audit /var/log/{NAME}/audit.jsonl --allow-push /var/lib/{NAME}"
    board.install(options)
    board.answers()
    board.run("mdp bundle push /srv/second --fleet /root/fleet.toml")
    owners = board.run(f"stat -c %u /var/lib/{NAME}/ /var/log/{NAME}/audit.jsonl").split()
    assert all(int(owner) in DYNAMIC_USERS for owner in owners), owners
    assert "push" in board.run(f"cat /var/log/{NAME}/audit.jsonl")
    board.run("ln -sfn second /srv/next && mv -T /srv/next /srv/bundle")
    board.run(f"systemctl restart {NAME}")
    assert "bundle imagenette" in board.journal().splitlines()[-2]
    board.answers()


def test_uninstall_says_what_stays(board: AgentBoard) -> None:
    board.install(f"--audit /var/log/{NAME}/audit.jsonl --allow-push /var/lib/{NAME}")
    board.run(f"echo MDP_SOURCE= > /etc/default/{NAME}")
    places = [f"/var/{kind}{sub}/{NAME}" for kind in ("lib", "log") for sub in ("", "/private")]
    places.append(f"/etc/default/{NAME}")
    said = board.run(f"mdp-agent uninstall --device {DEVICE} 2>&1")
    assert [f"mdp-agent: {place}: stays" in said for place in places] == [True] * 5, said
    board.run(" && ".join(f"test -e {place}" for place in places))
    assert board.property_of("LoadState", NAME) == "not-found"
    said = board.run(f"mdp-agent uninstall --purge --device {DEVICE} 2>&1")
    assert [f"mdp-agent: {place}: removed" in said for place in places] == [True] * 5, said
    board.run(" && ".join(f"! test -e {place}" for place in places))
    board.refuses(f"mdp-agent uninstall --purge --device {DEVICE}", "there is none")


def test_an_upgrade_of_the_package_and_its_way_back(board: AgentBoard) -> None:
    board.install()
    versions = "/opt/mdp/bin/pip list --format=json"
    pip = "pip install --quiet --no-index --no-deps --force-reinstall"
    for folder, major in (("later", "9"), ("now", "0")):
        before = board.property_of("MainPID", NAME)
        board.run(f"{pip} /{folder}/*.whl")
        found = {one["name"]: one["version"] for one in json.loads(board.run(versions))}
        assert found["mdp-edge"].startswith(f"{major}.")
        board.answers()
        assert board.property_of("MainPID", NAME) == before
        assert "restarted" in board.install()
        board.answers()
        assert "runs as before" in board.install()


def test_a_taken_port(board: AgentBoard) -> None:
    hold = (
        "systemd-run --quiet --unit=holder python3 -c 'import socket, time; "
        's = socket.create_server(("127.0.0.1", 7500)); time.sleep(600)\''
    )
    taken = "grep -i :1D4C /proc/net/tcp"
    board.run(hold)
    board.until(taken)
    try:
        expected = f"{NAME} does not start: cannot listen on tcp://127.0.0.1:7500: in use"
        board.refuses(INSTALL, re.escape(expected) + "; the unit is removed")
        board.run(f"! test -e {UNIT}; ! systemctl is-enabled {NAME} 2> /dev/null")
        # One that was installed before tries for some minutes, and then ends.
        board.run("systemctl stop holder")
        board.install()
        board.run(f"systemctl stop {NAME}; {hold}")
        board.until(taken)
        board.drop_in("RestartSec=50ms\\n[Unit]\\nStartLimitBurst=3")
        assert board.try_script(f"systemctl start {NAME}").returncode == 1
        board.until(f"test $(systemctl show -p ActiveState --value {NAME}) = failed")
        assert 2 <= int(board.property_of("NRestarts", NAME)) <= 3
        board.run("systemctl stop holder")
        # Also after that.
        assert "started" in board.install()
    finally:
        board.try_script("systemctl stop holder")


def test_what_cannot_work_is_not_tried_again(board: AgentBoard) -> None:
    board.install()
    board.run("chmod 0700 /etc/mdp/clients")
    try:
        assert board.try_script(f"systemctl restart {NAME}").returncode == 1
        assert (board.property_of("Result", NAME), board.property_of("NRestarts", NAME)) == (
            "exit-code",
            "0",
        )
        assert "'/etc/mdp/clients' is not readable" in board.journal()
        board.refuses(INSTALL, "--clients: /etc/mdp/clients: expected rights for others to read")
    finally:
        board.run("chmod 0755 /etc/mdp/clients")
    assert "started" in board.install()
    # A bundle that has no part for this device.
    other = INSTALL.replace(f"--device {DEVICE}", "--device fridge")
    board.refuses(other, "no assignment for device 'fridge'")
    board.run("! test -e /etc/systemd/system/mdp-agent-fridge.service")
    board.run("cp -r /srv/first /srv/foreign; sed -i s/n100/n101/g /srv/foreign/manifest.json")
    board.run("ln -sfn foreign /srv/next && mv -T /srv/next /srv/bundle")
    board.refuses(INSTALL, f"no assignment for device '{DEVICE}'")
    assert board.try_script(f"systemctl restart {NAME}").returncode == 1
    assert (board.property_of("Result", NAME), board.property_of("NRestarts", NAME)) == (
        "exit-code",
        "0",
    )


def test_a_key_that_cannot_be_read(board: AgentBoard) -> None:
    board.run(f"mkdir -p /etc/other; cp /etc/mdp/{DEVICE}.* /etc/other/")
    board.run("chmod 0644 /etc/other/n100.secret")
    other = INSTALL.replace(f"/etc/mdp/{DEVICE}.secret", "/etc/other/n100.secret")
    board.refuses(other, "expected mode 0600, got 0644: others may read this secret key")
    board.run(f"! test -e {UNIT}; chmod 0600 /etc/other/n100.secret")
    board.install(command=other)
    board.run(f"rm /etc/other/n100.secret; ! systemctl restart {NAME}")
    board.refuses(other, "/etc/other/n100.secret: cannot be read: No such file or directory")


def test_a_replaced_unit_that_does_not_start_is_taken_back(board: AgentBoard) -> None:
    board.install()
    before = board.run(f"cat {UNIT}")
    said = "; the former unit is back and runs$"
    board.refuses(f"{INSTALL} --replace --bind tcp://192.0.2.1:7500", said)
    assert board.run(f"cat {UNIT}") == before
    board.until_ready()
    board.answers()


def test_memory_is_bounded(board: AgentBoard) -> None:
    board.install()
    limit = int(board.property_of("MemoryMax", NAME))
    assert 300 * 2**20 < limit < 500 * 2**20
    assert board.property_of("LimitCORE", NAME) == "0"
    group = board.property_of("ControlGroup", NAME)
    version_1 = f"/sys/fs/cgroup/memory{group}/memory.limit_in_bytes"
    found = board.try_script(
        f"cat {version_1} /sys/fs/cgroup{group}/memory.max 2> /dev/null"
    ).stdout
    if not found:
        pytest.skip("this container's systemd is given no control group of memory")
    assert int(found) == limit
    said = r"does not start: systemctl .*; the former unit is back and runs$"
    board.refuses(f"{INSTALL} --replace --memory-max 30M", said)
    # Of control groups of version 1, systemd does not learn why.
    assert re.search("OOM killer|status=9/KILL", board.journal())
    board.until_ready()


def test_how_exposed_units_are(board: AgentBoard, figures: Figures) -> None:
    board.install(f"--audit /var/log/{NAME}/audit.jsonl --allow-push /var/lib/{NAME}")
    units = [UNIT, *(f"/deploy/mdp-{name}.service" for name in ("gateway", "mqtt", "watch"))]
    for unit in units:
        board.run(f"systemd-analyze verify --man=no {unit} 2>&1 | grep . && exit 1; true")
        rated = f"systemd-analyze security --offline=yes --threshold={MOST_EXPOSED} --no-pager"
        said = board.run(f"{rated} {unit}")
        (score,) = re.findall(r"Overall exposure level for \S+: ([\d.]+)", said)
        if unit == UNIT:
            figures.put(exposure=float(score))


def test_units_of_clients(board: AgentBoard) -> None:
    """Gateway, watch and MQTT, as their files say."""
    board.run("mkdir -p /srv/pictures && cp /srv/p.png /srv/pictures/")
    board.install("--source folder:/srv/pictures")
    board.run(
        "rm -f /etc/mdp/fleet.toml; mdp fleet new --bundle /srv/bundle --keys /etc/mdp "
        f"--key /etc/mdp/client.secret --device {DEVICE}=tcp://127.0.0.1:7500 "
        "--out /etc/mdp/fleet.toml"
    )
    board.run("cp /deploy/*.service /etc/systemd/system/; systemctl daemon-reload")
    board.run("echo 'OPTIONS=--json --out /var/log/mdp-watch/seen.jsonl' > /etc/default/mdp-watch")
    board.run("printf 'OPTIONS=--broker 127.0.0.1\\n' > /etc/default/mdp-mqtt")
    names = "mdp-gateway mdp-watch mdp-mqtt"
    board.run(f"systemctl enable --now {names}")
    try:
        model = "http://127.0.0.1:8080/v2/models/cifar10"
        ask = (
            f"from urllib.request import urlopen; body = open('/srv/p.png', 'rb').read(); "
            f"print(urlopen('{model}/classify?deadline_ms=20000', body).read().decode())"
        )
        board.until("python3 -c \"import socket; socket.create_connection(('127.0.0.1', 8080))\"")
        assert json.loads(board.run(f'python3 -c "{ask}"'))["used"] == [DEVICE]
        board.until("grep -q label /var/log/mdp-watch/seen.jsonl")
        board.until("journalctl -u mdp-mqtt -o cat | grep -i 'refused'")
        board.run(f"systemctl is-active {names}")
        board.run(f"systemctl stop {names}")
        for name in names.split():
            assert board.property_of("Result", name) == "success", board.journal(name)
    finally:
        board.run(f"systemctl disable --now {names}; rm /etc/systemd/system/mdp-[gmw]*.service")
