"""Several cameras, one scene, with real agents: a covered camera, old frames, wrong clocks."""

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from mdp.cli.main import main as mdp_main
from mdp.mqtt.messages import health_payload
from mdp.testing.bundles import DEVICES, LABELS, write_bundle
from mdp.testing.processes import PATIENCE_S, until
from tests.support.command_lines import run_here
from tests.support.faults.stage import Stage, with_cameras
from tests.support.fleet import PLENTY_MS, Fleet
from tests.support.web.gateway import Gateway, gateway

pytestmark = pytest.mark.usefixtures("no_leaks")

#: An agent on a machine whose clocks are off: the wall clock is an hour ahead, the other counts
#: from elsewhere and a twentieth too fast.
WRONG_CLOCKS = (
    "import time; wall, since = time.time, time.monotonic;"
    "time.time = lambda: wall() + 3600; time.monotonic = lambda: 1e6 + 1.05 * since();"
    "from devices.cli.main import main; main()"
)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A bundle of three cameras and no agents yet."""
    bundle = with_cameras(write_bundle(tmp_path / "bundle", bag_scale=12.0))
    with Fleet(tmp_path, bundle) as fleet:
        yield fleet


def start(fleet: Fleet, stage: Stage) -> None:
    for camera in DEVICES[:-1]:
        fleet.start(camera, *stage.source(camera), wait_for=None)
    program = (sys.executable, "-c", WRONG_CLOCKS, "run", "--json")
    fleet.start(DEVICES[-1], *stage.source(DEVICES[-1]), program=program, wait_for=None)
    for camera in DEVICES:
        fleet.agents[camera].wait_for("READY")


def check_cleared(fleet: Fleet, look: Callable[[int], Mapping[str, str]]) -> None:
    """A camera that agrees again is no suspect of anybody: its agent is told by a further look."""
    turns = itertools.count()
    until(lambda: not look(next(turns)), "beta is well again")

    def is_told() -> bool:
        look(next(turns))
        with fleet.client() as other:
            answer = other.look(deadline_ms=PLENTY_MS)
            statuses = other.status(timeout_s=PATIENCE_S)
        assert (answer.expected_accuracy is None) == bool(answer.suspects)
        return not answer.suspects and all(one.suspect is None for one in statuses)

    until(is_told, "a client that has just begun suspects none")


def suspects_of(served: Gateway) -> dict[str, str]:
    """Device -> why the gateway's page shows its camera as a suspect."""
    (shown,) = served.ask("/fleets").json
    return {one["name"]: one["suspect"] for one in shown["devices"] if one["suspect"]}


def test_a_covered_camera_is_shown_and_an_old_frame_is_not_fused(
    tmp_path: Path, fleet: Fleet
) -> None:
    stage = Stage(tmp_path, DEVICES)
    stage.show_all("red")
    start(fleet, stage)
    with fleet.client() as client:

        def suspects(turn: int, covered: str = "") -> dict[str, str]:
            label = LABELS[turn % len(LABELS)]
            stage.show({one: "black" if one == covered else label for one in DEVICES})
            stage.wait_for_frames(client)
            answer = client.look(deadline_ms=PLENTY_MS)
            # Whatever the clocks of gamma's machine say.
            assert all(abs(m.frame_age_ms or 0) < 60_000 for m in answer.members)
            return {**answer.suspects}

        assert not any(suspects(turn) for turn in range(10))
        needed = next((turn for turn in range(50) if suspects(turn, "beta")), None)
        assert needed is not None
        assert suspects(needed + 1, "beta") == {"beta": "disagrees"}
        reasons = {one.device: one.reason for one in client.status(timeout_s=PATIENCE_S)}
        assert reasons == {
            **dict.fromkeys(DEVICES, ""),
            "beta": "camera: disagrees with the others: camera covered, turned or moved?",
        }
        # The latest look has told the agent, which tells everybody: the first look of another
        # client, a gateway that has never looked, and what is published of the device.
        file = fleet.folder / "fleet.toml"
        line, *more = run_here(
            mdp_main, "mdp", "look", "--fleet", file, "--deadline-ms", f"{PLENTY_MS:g}"
        ).stdout.splitlines()
        assert ", accuracy unknown with a suspected camera, " in line
        assert f"  {reasons['beta'].replace('camera: ', 'beta: ', 1)}" in more
        with fleet.client() as other:
            statuses = other.status(timeout_s=PATIENCE_S)
            told = [health_payload(status, 1.0)["suspect"] for status in statuses]
            assert told == [None, "disagrees", None]
        shown = run_here(mdp_main, "mdp", "status", "--fleet", file).stdout
        said = [line for line in shown.splitlines() if "a client's looks disagree" in line]
        assert [line.split()[0] for line in said] == ["beta"]
        with gateway("--fleet", file) as served:
            until(lambda: suspects_of(served) == {"beta": "disagrees"}, "the page's suspects")
            check_cleared(fleet, suspects)
            until(lambda: suspects_of(served) == {}, "the page suspects none")
        # No further frame of one camera: it gets old, and is left out.
        for file in stage.folders["gamma"].iterdir():
            file.unlink()

        def is_left_out() -> bool:
            answer = client.look(deadline_ms=PLENTY_MS, within_ms=1e8)
            return (answer.missing_codes, answer.used) == ({"gamma": "apart"}, ("alpha", "beta"))

        until(is_left_out, "the old frame is not fused")


def test_two_agents_with_one_camera_are_named(tmp_path: Path, fleet: Fleet) -> None:
    stage = Stage(tmp_path, DEVICES)
    stage.show_all("red")
    for camera in ("alpha", "beta"):
        fleet.start(camera, *stage.source("alpha"), wait_for=None)
    for camera in ("alpha", "beta"):
        fleet.agents[camera].wait_for("READY")
    shown = run_here(mdp_main, "mdp", "status", "--json", "--fleet", fleet.write()).stdout
    source = f"folder:{stage.folders['alpha']}"
    for camera, other in (("alpha", "beta"), ("beta", "alpha")):
        claimed = f"{source} is camera {camera}, and camera {other} of {other}: expected a source"
        assert claimed in shown
    found = run_here(mdp_main, "mdp", "doctor", "--fleet", fleet.folder / "fleet.toml")
    assert found.returncode == 3
    wrong = [line for line in found.stdout.splitlines() if line.startswith("PROBLEM ")]
    names = [line.split(":")[0].removeprefix("PROBLEM ") for line in wrong]
    assert names == ["alpha", "beta"]
