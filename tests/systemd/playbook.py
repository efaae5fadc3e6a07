"""The Ansible role on two boards with systemd: `make systemd`. Not collected by `make test`."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mdp.formats.bundle import Bundle
from mdp.registry.connection import connect
from mdp.registry.reference import parse_reference
from mdp.registry.transfer import push_to_registry
from tests.support.figures import Figures
from tests.support.registries import PROGRAM, real_registry, reason_against
from tests.systemd.boards import WHEELS, Board, boot_board, engines_of
from tools.engine import ROOT
from tools.prepare import MissingError, run
from tools.systemd import Prepared, prepare

# Not of fixtures: a Debian is made as quickly as network and machine allow.
pytestmark = pytest.mark.timeout(7200, func_only=True)
DEVICES = ("n100", "laptop-cpu")
PLAYBOOK = ROOT / "deploy" / "ansible" / "agents.yml"
BUNDLE = ROOT / "examples" / "bundles" / "cifar10"
OTHER_BUNDLE = ROOT / "examples" / "bundles" / "imagenette"


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


class Shelf:
    """Two boards, and what this machine has of them."""

    def __init__(self, prepared: Prepared, boards: dict[str, Board], folder: Path) -> None:
        self.boards, self.folder, self._podman = boards, folder, prepared.podman
        self._wheel = prepared.wheel

    def play(self, **variables: object) -> subprocess.CompletedProcess[str]:
        """Run ansible-playbook."""
        podman = self._podman
        extra = " ".join(podman.command()[1:])
        hosts = [
            f"{device} ansible_host={board.name} mdp_device={device}"
            for device, board in self.boards.items()
        ]
        inventory = self.folder / "boards.ini"
        inventory.write_text("[boards]\n" + "\n".join(hosts) + "\n")
        values = {
            "ansible_connection": "containers.podman.podman",
            "ansible_podman_extra_args": extra,
            "ansible_python_interpreter": "/usr/bin/python3",
            "ansible_become": False,
            "mdp_wheel": self._wheel,
            "mdp_bundle": self.folder / "cifar10",
            "mdp_clients": self.folder / "clients",
            "mdp_public_keys": self.folder / "keys",
            "mdp_pip_options": f"--no-index --find-links {WHEELS}",
            **variables,
        }
        words = ["-e", json.dumps({name: _plain(value) for name, value in values.items()})]
        settings = {"ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCAL_TEMP": str(self.folder / "tmp")}
        return subprocess.run(
            ["ansible-playbook", "-i", str(inventory), str(PLAYBOOK), *words],
            env=podman.environment | settings,
            capture_output=True,
            text=True,
            timeout=3600,
        )

    def pids(self) -> list[str]:
        """The agents' processes."""
        return [
            board.property_of("MainPID", f"mdp-agent-{name}") for name, board in self.boards.items()
        ]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    if shutil.which("ansible-playbook") is None:
        pytest.skip("ansible-playbook is not installed")
    folder = tmp_path_factory.mktemp("shelf")
    try:
        prepared = prepare()
        registry = folder / "registry"
        mounts = registry_mounts(registry)
        with boot_board(prepared, mounts) as first, boot_board(prepared, mounts) as second:
            shutil.copytree(BUNDLE, folder / "cifar10")
            first.run("pip install --quiet --no-index --no-deps --force-reinstall /now/*.whl")
            first.run("mdp keys new --out /root --name client")
            (folder / "clients").mkdir()
            public = first.run("cat /root/client.public")
            (folder / "clients" / "client.public").write_text(f"{public}\n")
            yield Shelf(prepared, dict(zip(DEVICES, (first, second), strict=True)), folder)
    except MissingError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def figures(shelf: Shelf) -> Iterator[Figures]:
    said = run(["ansible", "--version"]).partition("\n")[0]
    engines = engines_of(shelf.boards[DEVICES[0]]) | {"ansible-core": said.split()[-1].strip("]")}
    with Figures("playbook", engines) as made:
        yield made


def registry_mounts(folder: Path) -> list[str]:
    """A registry's program and store for boards without a network: each has the same at hand."""
    if reason_against():
        return []
    with real_registry(folder) as host:
        to = parse_reference(f"oci://{host}/shelf/imagenette:1")
        push_to_registry(Bundle.open(OTHER_BUNDLE), connect(to, insecure=True))
    settings = folder / "config.yml"
    store = re.sub("rootdirectory: .*", "rootdirectory: /registry/store", settings.read_text())
    settings.write_text(store.replace("127.0.0.1:0", "127.0.0.1:5000"))
    program = shutil.which(PROGRAM)
    return [f"{folder}:/registry", f"{program}:{program}"]


def count_changed(done: subprocess.CompletedProcess[str]) -> list[int]:
    """The number of tasks that changed something, by board."""
    assert done.returncode == 0, done.stdout + done.stderr
    return [int(number) for number in re.findall(r"ok=\d+\s+changed=(\d+)", done.stdout)]


def test_two_boards(shelf: Shelf, figures: Figures) -> None:
    # The first board whose agent does not start keeps the others as they are.
    done = shelf.play(mdp_port="80")
    assert done.returncode != 0
    assert "expected a port from 1024" in done.stdout
    assert "TASK [mdp_agent : READY]" not in done.stdout
    assert shelf.boards[DEVICES[1]].try_script("test -e /srv/mdp").returncode == 1
    begun_s = time.monotonic()
    first = count_changed(shelf.play())
    figures.put(boards=len(DEVICES), played_s=time.monotonic() - begun_s)
    assert len(first) == 2
    assert min(first) > 0
    for device, board in shelf.boards.items():
        assert board.run("mdp-agent health") == f"READY {device}"
        assert (shelf.folder / "keys" / f"{device}.public").exists()
    before = shelf.pids()
    begun_s = time.monotonic()
    assert count_changed(shelf.play()) == [0, 0]
    figures.put(again_s=time.monotonic() - begun_s)
    assert shelf.pids() == before, "nothing was interrupted"
    # A client whose key is taken away here is no client there.
    (shelf.folder / "clients" / "former.public").write_bytes(
        (shelf.folder / "clients" / "client.public").read_bytes()
    )
    assert min(count_changed(shelf.play())) > 0
    (shelf.folder / "clients" / "former.public").unlink()
    assert min(count_changed(shelf.play())) > 0
    for board in shelf.boards.values():
        assert board.run("ls /etc/mdp/clients") == "client.public"
    before = shelf.pids()
    # Another bundle restarts each.
    manifest = shelf.folder / "cifar10" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"airplane", b"aeroplan"))
    assert count_changed(shelf.play()) == [2, 2]
    assert not set(shelf.pids()) & set(before)


def test_boards_pull_their_parts_from_a_registry(shelf: Shelf) -> None:
    if why := reason_against():
        pytest.skip(why)
    for board in shelf.boards.values():
        board.run(f"systemd-run --quiet --unit=registry {PROGRAM} serve /registry/config.yml")
        board.until("python3 -c \"import socket; socket.create_connection(('127.0.0.1', 5000))\"")
    pulled = {
        "mdp_bundle": "oci://127.0.0.1:5000/shelf/imagenette:1",
        "mdp_pull_options": ["--insecure"],
    }
    assert min(count_changed(shelf.play(**pulled))) > 0
    for k, (device, board) in enumerate(zip(DEVICES, shelf.boards.values(), strict=True)):
        assert board.run("mdp-agent health") == f"READY {device}"
        found = board.run("cd /srv/mdp/imagenette && ls submodels")
        assert found == str(1 - k), "the place of the device in the plan"
    before = shelf.pids()
    assert count_changed(shelf.play(**pulled)) == [0, 0]
    assert shelf.pids() == before
    # Gone, the play says so, and the agents serve on.
    for board in shelf.boards.values():
        board.run("systemctl stop registry")
    done = shelf.play(**pulled)
    assert done.returncode != 0
    assert "mdp: 127.0.0.1:5000: Connection refused" in done.stdout
    assert shelf.pids() == before
