"""A bundle is rolled out to all agents or to none, and a first one to agents that have none."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mdp.cli.main import main as mdp_main
from mdp.errors import TransferError
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import read_fleet
from mdp.formats.keys import new_keys
from mdp.teach.rollout import FleetRollout
from mdp.testing.agents import ANY_PORT, AgentProcess
from mdp.testing.bundles import DEVICES, write_bundle
from mdp.testing.processes import until
from mdp.transport import new_pair
from tests.support.command_lines import run_here
from tests.support.fleet import BIN, Fleet
from tests.support.web.gateway import gateway

TOKEN = "teacher-0123456789abc"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Agents that serve one bundle, and another one that can be pushed."""
    write_bundle(tmp_path / "one")
    write_bundle(tmp_path / "two", bag_scale=9.0)
    (tmp_path / "client.limits").write_text("push = true\n")
    with Fleet(tmp_path, tmp_path / "one", keys=True) as fleet:
        yield fleet


def start(fleet: Fleet, *narrow: str) -> Path:
    for name in DEVICES:
        most = ("--max-push-mb", 0.001) if name in narrow else ()
        pushed = ("--allow-push", fleet.folder / f"pushed-{name}", "--grace-s", 0)
        fleet.start(name, *pushed, *most, wait_for=None)
    for name in DEVICES:
        fleet.agents[name].wait_for("READY")
    return fleet.write()


def serves(file: Path) -> set[str]:
    told = json.loads(
        run_here(mdp_main, "mdp", "bundle", "status", "--fleet", file, "--json").stdout
    )
    return {device["serves"]["digest"] for device in told["devices"]}


def test_all_serve_it_and_go_back(fleet: Fleet) -> None:
    file, told = start(fleet), list[tuple[str, float]]()
    one, two = (Bundle.open(fleet.folder / name) for name in ("one", "two"))
    rollout = FleetRollout(file, None)
    done = rollout.push(fleet.folder / "two", lambda device, share: told.append((device, share)))
    assert done == [*DEVICES]
    assert [device for device, share in told if share == 1.0] == [*DEVICES]
    assert serves(file) == {two.digest}
    assert read_fleet(file)[1].digest == two.digest
    folders = [fleet.folder / name for name in ("nowhere", "two", "one")]
    assert rollout.roll_back(folders, lambda device, share: None).digest == one.digest
    assert serves(file) == {one.digest}
    assert read_fleet(file)[1].digest == one.digest


def test_where_one_does_not_take_it_the_others_go_back(fleet: Fleet) -> None:
    last = DEVICES[-1]
    file = start(fleet, last)
    one = Bundle.open(fleet.folder / "one")
    before = file.read_bytes()
    with pytest.raises(TransferError, match=f"^{last}: "):
        FleetRollout(file, None).push(fleet.folder / "two", lambda device, share: None)
    assert serves(file) == {one.digest}
    assert file.read_bytes() == before
    # The others could go forth again, and the last one not: nothing is changed.
    with pytest.raises(TransferError, match=f"^{last}: keeps no previous version"):
        FleetRollout(file, None).roll_back([fleet.folder / "two"], lambda device, share: None)
    assert serves(file) == {one.digest}


def test_a_fleet_without_a_bundle_is_served_from_its_first_one_on(tmp_path: Path) -> None:
    names = DEVICES[:2]
    (tmp_path / "clients").mkdir()
    for name in ("client", *names):
        new_keys(tmp_path, name, new_pair)
    (tmp_path / "client.public").rename(tmp_path / "clients" / "client.public")
    (tmp_path / "clients" / "client.limits").write_text("push = true\n")
    (tmp_path / "teachers").touch(0o600)
    (tmp_path / "teachers").write_text(f"{TOKEN}\n")
    bundle = write_bundle(tmp_path / "bundle", devices=names, sizes=(16, 16))
    file = tmp_path / "fleet.toml"
    with ExitStack() as stack:
        devices: list[object] = []
        for name in names:
            command = [
                BIN / "mdp-agent", "run", "--json", "--device", name, "--bind", ANY_PORT,
                "--key", tmp_path / f"{name}.secret", "--clients", tmp_path / "clients",
                "--allow-push", tmp_path / f"pushed-{name}",
            ]  # fmt: skip
            agent = stack.enter_context(AgentProcess(name, command, tmp_path / f"{name}.log"))
            devices += ["--device", f"{name}={agent.wait_for('READY').address}"]
        keys = ("--keys", tmp_path, "--key", tmp_path / "client.secret", "--out", file)
        assert run_here(mdp_main, "mdp", "fleet", "new", *devices, *keys).returncode == 0
        teach = ("--teach", tmp_path / "scenes", "--teach-tokens", tmp_path / "teachers")
        served = stack.enter_context(gateway("--fleet", file, *teach))
        assert served.ask("/fleets").json == []
        assert served.ask("/v2/health/ready").status == 503
        assert served.ask("/v2/models/taught").status == 404
        told = served.ask("/teach/state", headers={"Authorization": f"Bearer {TOKEN}"}).json
        assert (told["cameras"], told["classes"], told["served"]) == ([*names], [], [])
        assert FleetRollout(file, None).push(bundle, lambda device, share: None) == [*names]
        until(lambda: served.ask("/v2/health/ready").status == 200, "it is served")
        assert [one["name"] for one in served.ask("/fleets").json] == ["taught"]
        assert served.ask("/v2/models/taught/ready").status == 200
