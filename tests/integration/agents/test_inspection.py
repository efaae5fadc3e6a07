"""Agents with anomaly heads: differences found by looks, a blind side, maps, items of a line."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from mdp.cli.answers import describe
from mdp.cli.main import main as mdp_main
from mdp.client.sync import Client
from mdp.errors import InputError
from mdp.formats.bundle import Bundle
from mdp.fusion.anomaly_table import MAP_BYTES, MAP_LIMIT
from mdp.requests.prediction import Prediction
from mdp.testing.agents import AgentFleet
from mdp.testing.bundles import write_bundle
from mdp.testing.folder_cameras import FolderCameras
from mdp.testing.processes import LineProcess, until
from partitioner.cli.main import main as partition_main
from tests.support.command_lines import run_here
from tests.support.fleet import BIN, PLENTY_MS
from tests.support.inspection import CAMERAS, PARTS, block, write_scenes
from tests.support.web.browser import browser, why_no_browser
from tests.support.web.gateway import gateway

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_leaks")]


class Station:
    """Four agents and what their cameras see."""

    def __init__(self, fleet: AgentFleet, cameras: FolderCameras) -> None:
        self.fleet, self.cameras = fleet, cameras
        plan = Bundle.open(fleet.bundle).manifest.plan
        #: Camera -> device.
        self.devices = {part.camera: part.device for part in plan.assignments}

    def put(self, *patched: str) -> None:
        """Put an item before all cameras, with a patch that those named see."""
        # The same pictures whatever was shown before.
        random = np.random.default_rng([7, *map(len, patched)])
        self.cameras.put({
            device: block(random, patched=camera in patched)
            for camera, device in self.devices.items()
        })  # fmt: skip

    def look(self, client: Client, *patched: str, maps: bool = False) -> Prediction:
        self.put(*patched)
        self.cameras.wait_for_frames(client)
        return client.look(deadline_ms=PLENTY_MS, maps=maps)


@pytest.fixture(scope="module")
def station(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Station]:
    folder = tmp_path_factory.mktemp("station")
    good = write_scenes(folder / "good", 60)
    defects = write_scenes(folder / "defects", 16, patched=range(16), seed=3)
    made = run_here(
        partition_main, "mdp-partition", "inspect", "--bundle", PARTS, "--data", good, "--defects",
        defects, "--rate", 2, "--out", folder / "bundle", "--json",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["inspection"]["good"] == 60
    devices = [part.device for part in Bundle.open(PARTS).manifest.plan.assignments]
    cameras = FolderCameras(folder, devices)
    with AgentFleet(folder, folder / "bundle") as fleet:
        found = Station(fleet, cameras)
        found.put()
        for device in devices:
            fleet.start(device, *cameras.source(device), wait_for=None)
        for device in devices:
            fleet.agents[device].wait_for("READY")
        yield found


def test_what_one_camera_sees_makes_the_item_different(station: Station) -> None:
    with station.fleet.client() as client:
        fine = station.look(client)
        assert (fine.normal, fine.blind_sides, len(fine.used)) == (True, (), 4)
        assert fine.anomaly is not None
        assert fine.anomaly <= 0
        assert fine.good_rejected == pytest.approx(1 / 61, abs=1e-4)
        assert {member.anomaly_map for member in fine.members} == {None}
        worn = station.look(client, "left", maps=True)
    assert worn.normal is False
    assert worn.anomaly is not None
    assert worn.anomaly > 0
    assert worn.verdict.startswith("different: ")
    own = {member.device: member.anomaly or 0.0 for member in worn.members}
    assert max(own, key=lambda device: own[device]) == station.devices["left"]
    cells = {member.device: member.anomaly_map for member in worn.members}
    assert {len(one or b"") for one in cells.values()} == {MAP_BYTES}
    left = np.frombuffer(cells[station.devices["left"]] or b"", np.uint8).reshape(16, 16)
    row, column = np.unravel_index(left.argmax(), left.shape)
    # The patch lies from 92 to 116 of 160 pixels down, and from 80 to 104 across.
    assert left.max() > MAP_LIMIT
    assert 7 <= row <= 13
    assert 6 <= column <= 12


def test_commands_show_it(station: Station) -> None:
    with station.fleet.client() as client:
        station.look(client, "back")
    fleet = ("--fleet", station.fleet.folder / "fleet.toml", "--deadline-ms", PLENTY_MS)
    shown = run_here(mdp_main, "mdp", "look", *fleet, "--maps")
    assert shown.returncode == 0, shown.stderr
    assert "differs from the good ones" in shown.stdout
    assert f"most at {station.devices['back']}" in shown.stdout
    assert shown.stdout.count("\n    |") == 4 * 16
    plain = json.loads(run_here(mdp_main, "mdp", "look", *fleet, "--json").stdout)
    assert plain["normal"] is False
    assert plain["members"][0]["anomaly_map"] is None


#: As of a gateway that teaches, whose picture of one camera is refused.
TEACHES = """
const before = window.fetch;
window.asked = [];
window.fetch = async (path, ...more) => {
  window.asked.push(`${path}`);
  const picture = `${path}`.match(/^teach.cameras.(.*)$/);
  if (picture) {
    if (picture[1].endsWith("-1")) return new Response("{}", { status: 403 });
    const canvas = new OffscreenCanvas(40, 30);
    canvas.getContext("2d").fillRect(0, 0, 40, 30);
    return new Response(await canvas.convertToBlob());
  }
  const response = await before(path, ...more);
  if (`${path}` !== "events") return response;
  const taught = new TransformStream({
    transform: (part, out) => out.enqueue(part.replaceAll('"teaches":false', '"teaches":true')),
  });
  const body = response.body.pipeThrough(new TextDecoderStream()).pipeThrough(taught);
  return new Response(body.pipeThrough(new TextEncoderStream()));
};
"""
#: Of each map: device, text, whether a picture is behind it, and the most opaque cell's place.
MAPS = """
return [...document.querySelectorAll("#maps li")].map((node) => {
  const data = node.querySelector("canvas").getContext("2d").getImageData(0, 0, 16, 16).data;
  const shares = [...data].filter((_, place) => place % 4 === 3);
  const image = node.querySelector("img");
  return [node.dataset.name, node.innerText, !image.hidden && image.naturalWidth === 40,
          shares.indexOf(Math.max(...shares)), Math.max(...shares)];
});
"""


@pytest.mark.skipif(why_no_browser() != "", reason=why_no_browser())
def test_maps_on_the_page_are_the_strangest_first(station: Station, tmp_path: Path) -> None:
    station.put("right")
    fleet = station.fleet.write()
    with gateway("--fleet", fleet, "--deadline-ms", PLENTY_MS) as served, browser(tmp_path) as page:
        page.before_load(TEACHES)
        page.emulate()
        page.open(served.url)
        page.wait_for("#count", "4 of 4")
        page.run("document.querySelector('#cameras').click()")
        page.wait_for("#maps li.differs", r"decades, differs")
        until(lambda: sum(one[2] for one in page.run(MAPS)) == 3, "pictures are behind three maps")
        maps = page.run(MAPS)
        asked = page.run("return window.asked")
        roles = {(node["role"], node["name"]) for node in page.tree()}
        page.run("document.querySelector('#cameras').click()")
        assert page.run("return document.querySelector('#maps').hidden")
    assert any(path.endswith("/watch?maps=1") for path in asked)
    # Once refused, pictures are not asked for again.
    assert sum(path.startswith("teach/") for path in asked) == 4
    worst, others = maps[0], maps[1:]
    assert worst[0] == station.devices["right"]
    # The patch lies from 92 to 116 of 160 pixels down, and from 80 to 104 across.
    row, column = divmod(worst[3], 16)
    assert (7 <= row <= 13, 6 <= column <= 12) == (True, True)
    assert worst[4] > max(one[4] for one in others)
    assert {one[0] for one in maps} == {*station.devices.values()}
    assert {one[0]: one[2] for one in maps}["raspberry-pi-5-1"] is False
    told = f"Map of {worst[0]}: strangest in row {row + 1} and column {column + 1} of 16"
    assert ("image", told) in roles or ("img", told) in roles


def test_items_of_a_line_that_differ_do_not_pass(station: Station, tmp_path: Path) -> None:
    fleet = station.fleet.folder / "fleet.toml"
    command = [
        BIN / "mdp", "watch", "--fleet", fleet, "--json", "--trigger", "interval", "--every",
        "50ms", "--deadline-ms", PLENTY_MS, "--verdict-ms", PLENTY_MS, "--sure", 0, "--different",
        "any",
    ]  # fmt: skip
    with station.fleet.client() as client:
        station.look(client, "right")
    with LineProcess("mdp watch", command, tmp_path / "watch.log") as process:
        record = json.loads(process.line("a record"))
    assert (record["passed"], record["decision"]) == (False, "different")
    assert station.devices["right"] in record["different"]["seen"]
    assert record["answer"]["normal"] is False
    assert record["answer"]["devices"][station.devices["right"]]["anomaly"] > 0


def test_a_missing_camera_is_a_blind_side(station: Station) -> None:
    gone = station.devices["left"]
    with station.fleet.client() as client:
        station.look(client)
        client.leave_out(gone)
        found = station.look(client, "left")
        whole = station.look(client)
    assert found.normal
    assert found.blind_sides == whole.blind_sides == (gone,)
    assert found.defects_missed is not None
    # Of the defects a quarter is before this camera alone.
    assert 0.0 < found.defects_missed <= 0.5
    least, most = found.defects_missed_least, found.defects_missed_most
    assert least is not None
    assert most is not None
    assert least < found.defects_missed < most


def test_a_camera_that_has_moved_is_said_as_such(station: Station) -> None:
    random, told = np.random.default_rng(0), list[Prediction]()
    moved = station.devices["top"]
    with station.fleet.client() as client:
        while len(told) < 24 and not (told and told[-1].suspects):
            # No two alike: looks at an item that stands still do not count.
            station.cameras.put(
                {
                    device: block(random, shift=24 if device == moved else place)
                    for device, place in zip(
                        station.devices.values(), random.integers(-2, 3, 4).tolist(), strict=True
                    )
                }
            )
            station.cameras.wait_for_frames(client)
            told.append(client.look(deadline_ms=PLENTY_MS))
    *before, found = told
    # A fifth of the items may have a fault on one side: fewer looks tell nothing.
    assert 8 <= len(told) <= 20
    assert {(one.normal, one.blind_sides) for one in before} == {(False, ())}
    assert (found.suspects, found.normal) == ({moved: "moved"}, True)
    assert found.blind_sides == (moved,)
    assert "camera" in describe("look", found)


@pytest.mark.parametrize(
    ("count", "patched", "told"),
    [
        (12, (), "expected at least 20 good scenes to learn how they differ, got 12"),
        (40, (7,), "1 of 40 good scenes differ from all the others as defects do: s007: move them"),
    ],
)
def test_good_scenes_that_teach_nothing_are_refused_in_a_line(
    count: int, patched: tuple[int, ...], told: str, tmp_path: Path
) -> None:
    good, out = write_scenes(tmp_path / "good", count, patched=patched), tmp_path / "out"
    made = run_here(
        partition_main, "mdp-partition", "inspect", "--bundle", PARTS, "--data", good, "--out", out
    )
    assert made.returncode == 2
    last = made.stderr.splitlines()[-1]
    assert last.startswith(f"mdp-partition: --data {good}: {told}")
    assert not list(tmp_path.glob("out*"))


def test_maps_need_anomaly_heads(tmp_path: Path) -> None:
    cameras = FolderCameras(tmp_path, ["alpha"])
    cameras.put({"alpha": block(np.random.default_rng(0))})
    with AgentFleet(tmp_path, write_bundle(tmp_path / "bundle")) as fleet:
        fleet.start("alpha", *cameras.source("alpha"))
        with fleet.client() as client, pytest.raises(InputError, match="has no anomaly heads"):
            client.look(maps=True)
        path = fleet.folder / "fleet.toml"
        shown = run_here(mdp_main, "mdp", "look", "--fleet", path, "--maps")
        assert shown.returncode == 2
        assert "has no anomaly heads: mdp-partition inspect adds them" in shown.stderr
        line = run_here(
            mdp_main, "mdp", "watch", "--fleet", path, "--trigger", "interval", "--different", 2
        )
        assert line.returncode == 2
        assert "--different 2: expected a bundle with anomaly heads" in line.stderr
        with gateway("--fleet", path) as served:
            name = Bundle.open(fleet.bundle).manifest.name
            asked = served.ask(f"/v2/models/{name}/look?maps=1")
        assert asked.status == 400
        assert "has no anomaly heads: mdp-partition inspect adds them" in asked.json["error"]


def test_cameras_are_those_of_the_bundle(station: Station) -> None:
    assert {*station.devices} == {*CAMERAS}
