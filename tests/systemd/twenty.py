"""The Ansible role on twenty boards with systemd: `make twenty-boards`. Not of `make test`."""

import shutil
import time
from pathlib import Path

import pytest

from tests.support.figures import Figures
from tests.systemd.boards import engines_of
from tests.systemd.playbook import DEVICES, count_changed, make_shelf
from tools.prepare import MissingError, run

# Not of fixtures: a Debian is made as quickly as network and machine allow.
pytestmark = pytest.mark.timeout(7200, func_only=True)
COUNT = 20


def test_twenty_boards(tmp_path: Path) -> None:
    if shutil.which("ansible-playbook") is None:
        pytest.skip("ansible-playbook is not installed")
    # Several boards of a device, as replicas are.
    devices = {f"board-{n:02}": DEVICES[n % len(DEVICES)] for n in range(COUNT)}
    begun_s = time.monotonic()
    try:
        with make_shelf(devices, tmp_path) as shelf:
            booted_s = time.monotonic() - begun_s
            said = run(["ansible", "--version"]).partition("\n")[0]
            first = next(iter(shelf.boards.values()))
            engines = engines_of(first) | {"ansible-core": said.split()[-1].strip("]")}
            with Figures("twenty", engines) as figures:
                begun_s = time.monotonic()
                changed = count_changed(shelf.play())
                played_s = time.monotonic() - begun_s
                assert len(changed) == COUNT
                assert min(changed) > 0
                for name, board in shelf.boards.items():
                    assert board.run("mdp-agent health") == f"READY {devices[name]}"
                before = shelf.pids()
                begun_s = time.monotonic()
                assert count_changed(shelf.play()) == [0] * COUNT
                again_s = time.monotonic() - begun_s
                assert shelf.pids() == before, "nothing was interrupted"
                # Another bundle restarts each, and all serve it.
                manifest = shelf.folder / "cifar10" / "manifest.json"
                manifest.write_bytes(manifest.read_bytes().replace(b"airplane", b"aeroplan"))
                begun_s = time.monotonic()
                assert count_changed(shelf.play()) == [2] * COUNT
                bundle_s = time.monotonic() - begun_s
                assert not set(shelf.pids()) & set(before)
                for name, board in shelf.boards.items():
                    assert board.run("mdp-agent health") == f"READY {devices[name]}"
                figures.put(
                    boards=COUNT, booted_s=booted_s, played_s=played_s, again_s=again_s,
                    bundle_s=bundle_s,
                )  # fmt: skip
    except MissingError as error:
        pytest.skip(str(error))
