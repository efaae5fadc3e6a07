"""An item that was called different is called good on the page: real agents then know better."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from mdp.client.sync import Client
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import read_devices, read_fleet
from mdp.line.kept import RECORD
from mdp.teach.teacher import WAITING
from mdp.testing.folder_cameras import FolderCameras
from mdp.testing.processes import until
from partitioner.cli.main import main as partition_main
from tests.support.command_lines import run_here
from tests.support.fleet import PLENTY_MS, Fleet
from tests.support.inspection import CAMERAS, PARTS, block, write_scenes
from tests.support.web.browser import browser, why_no_browser
from tests.support.web.gateway import Gateway, Reply, gateway

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
TEACHER = "teacher-0123456789abc"
GOOD = 40
#: For heads on a busy machine.
LEARN_S = 300.0


class Room:
    """Four agents, a gateway's folders, and what is kept of a line."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.kept, self.items = folder, folder / "kept", folder / "items"
        parts = Bundle.open(PARTS).manifest.plan.assignments
        #: Device -> its camera, whose names the good scenes' pictures have.
        self.cameras = {part.device: str(part.camera) for part in parts}
        self.random = np.random.default_rng(11)
        (folder / "teachers").touch(0o600)
        (folder / "teachers").write_text(f"{TEACHER}\n")

    @property
    def fleet(self) -> Path:
        return self.folder / "fleet.toml"

    def options(self) -> tuple[object, ...]:
        return (
            "--fleet", self.fleet, "--deadline-ms", PLENTY_MS, "--teach", self.folder / "scenes",
            "--teach-tokens", self.folder / "teachers", "--teach-kept", self.kept,
            "--teach-inspect", self.items,
        )  # fmt: skip

    def keep(self, item: str, **answer: object) -> Path:
        """Keep an item as the line does: each camera sees a mark that no class names."""
        folder = self.kept / item
        folder.mkdir(parents=True)
        for device in self.cameras:
            (folder / f"{device}.jpg").write_bytes(block(self.random, patched=True))
        record = {
            "item": item, "time": "2026-11-25T22:00:00+00:00", "why_kept": "different",
            "answer": {"class": "square_nut", "probability": 0.9, "anomaly": 3.0, **answer},
        }  # fmt: skip
        (folder / RECORD).write_text(json.dumps(record))
        return folder


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    room = Room(tmp_path_factory.mktemp("room"))
    folder = room.folder
    write_scenes(room.items / "good", GOOD)
    write_scenes(room.items / "defects", 8, patched=range(8), seed=3)
    made = run_here(
        partition_main, "mdp-partition", "inspect", "--bundle", PARTS, "--data",
        room.items / "good", "--rate", 4, "--out", folder / "bundle",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    (folder / "client.limits").write_text("record = true\npush = true\nmask = true\n")
    cameras = FolderCameras(folder, room.cameras)
    cameras.put({device: block(room.random) for device in room.cameras})
    with Fleet(folder, folder / "bundle", keys=True) as fleet:
        for device in room.cameras:
            fleet.start(
                device, *cameras.source(device), "--allow-record", "--grace-s", 0,
                "--allow-push", folder / f"pushed-{device}", wait_for=None,
            )  # fmt: skip
        for device in room.cameras:
            fleet.agents[device].wait_for("READY")
        fleet.write()
        yield room


@pytest.fixture(scope="module")
def served(room: Room) -> Iterator[Gateway]:
    with gateway(*room.options()) as found:
        yield found


def ask(served: Gateway, path: str, content: object = None, method: str = "GET") -> Reply:
    body = None if content is None else json.dumps(content).encode()
    return served.ask(
        f"/teach/{path}", body, method=method, headers={"Authorization": f"Bearer {TEACHER}"}
    )


def state(served: Gateway) -> Any:
    return ask(served, "state").json


def test_items_that_teach_nothing_good_stay(room: Room, served: Gateway) -> None:
    moved, half = "raspberry-pi-5-2", "raspberry-pi-5-3"
    room.keep("1", suspects={moved: "moved"})
    (room.keep("2") / f"{half}.jpg").unlink()
    for item, told in (
        ("1", f"item 1: {moved}: finds every item different, the others do not: camera moved"),
        ("2", f"item 2: expected a picture of each camera, found none of {half}"),
    ):
        reply = ask(served, f"good/{item}", method="PUT")
        assert reply.status == 400
        assert reply.json["error"].startswith(told)
        assert ask(served, f"kept/{item}", method="DELETE").status == 200
    assert ask(served, "good/3", method="PUT").status == 404
    assert served.ask("/teach/good/1", method="PUT").status == 401
    assert len(list((room.items / "good").iterdir())) == GOOD
    told = state(served)["heads"]
    assert (told["teachable"], told["good"], told["waits"]) == (True, GOOD, False)


def test_one_good_item_is_learnt_by_all_boards(room: Room, served: Gateway) -> None:
    before = read_fleet(room.fleet)[1]
    room.keep("17")
    until(lambda: state(served)["kept"]["total"] == 1, "it is kept")
    assert ask(served, "good/17", method="PUT").status == 200
    assert not (room.kept / "17").exists()
    (scene,) = (room.items / "good").glob("2026-*")
    assert {path.stem for path in scene.iterdir()} == {*CAMERAS}
    wait_for_heads(room)
    told = state(served)
    assert told["heads"]["error"] == told["rollout"]["error"] == ""
    assert told["rollout"]["state"] == "done"
    after = read_fleet(room.fleet)[1]
    facts, table = after.manifest.inspection, after.fusion_weights().anomaly
    assert facts
    assert table
    # At the rate of before, with the defects that measure beside the good ones.
    assert (facts.good, facts.rate, table.good) == (GOOD + 1, 0.04, GOOD + 1)
    assert (facts.defects, table.defective) == ("defects", 4)
    assert after.fusion_weights().anomaly != before.fusion_weights().anomaly
    assert after.manifest.name == before.manifest.name
    assert after.manifest.evaluation == before.manifest.evaluation
    with Client.connect(room.fleet, timeout_s=PLENTY_MS / 1e3) as client:
        answer = client.look(deadline_ms=PLENTY_MS)
    # What answers is what was pushed.
    assert answer.bundle == after.digest
    assert answer.normal is not None
    assert ask(served, "rollout", {"action": "rollback"}, "PUT").status == 200
    until(lambda: state(served)["rollout"]["state"] == "done", "they go back")
    bundle = room.fleet.parent / read_devices(room.fleet).bundle
    assert Bundle.open(bundle).digest == before.digest


def wait_for_heads(room: Room) -> None:
    """Wait until all good items are learnt and pushed, without asking who learns."""
    waiting = room.folder / "scenes.builds" / WAITING
    until(lambda: not waiting.exists(), "boards have learnt", LEARN_S)


@pytest.mark.skipif(why_no_browser() != "", reason=why_no_browser())
def test_one_key_on_the_page(room: Room, served: Gateway, tmp_path: Path) -> None:
    before = read_fleet(room.fleet)[1]
    room.keep("21")
    own = {"raspberry-pi-5-1": {"class": "square_nut", "probability": 0.9, "anomaly": 2.34}}
    room.keep("22", anomaly=9.0, devices=own)
    with browser(tmp_path) as page:
        page.emulate()
        page.open(f"{served.url}/teach")
        page.wait_for("dialog[open]", "needs a token")
        page.type("#token", f"{TEACHER}\n")
        # The most different first.
        page.wait_for("#item-name", "^Item 22$")
        page.wait_for("#item-pictures", "differs by 2.3 decades")
        count = len(list((room.items / "good").iterdir()))
        page.press("#item", "g")
        page.wait_for("#undo-text", "^Item 22 is a good one$")
        page.wait_for("#item-name", "^Item 21$")
        page.wait_for("#heads-text", f"{count + 1} good items")
        wait_for_heads(room)
        page.wait_for("#heads-text", f"All boards have learnt from {count + 1} good items")
        assert page.text("#heads-error") == ""
        page.wait_for("#rollout-text", "^All 4 boards serve ")
    after = read_fleet(room.fleet)[1]
    assert after.digest != before.digest
    assert after.manifest.inspection
    assert after.manifest.inspection.good == count + 1
