"""Keys rotated and revoked under real agents: no call fails, and a revoked key is cut at once."""

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from mdp.client.base import Options
from mdp.client.cameras import FleetCameras
from mdp.client.sync import Client
from mdp.errors import InferenceError
from mdp.formats.fleet import read_fleet
from mdp.formats.keys import fingerprint
from mdp.testing.bundles import colour_picture, write_bundle
from mdp.testing.processes import PATIENCE_S, until
from mdp.transport.admission.access import REVOKED
from tests.integration.commands.test_command_line import here
from tests.integration.faults.test_strangers import reasons, write
from tests.support.faults.strangers import Keys
from tests.support.fleet import PLENTY_MS, Fleet, answers_until

pytestmark = pytest.mark.usefixtures("no_leaks")

RED = colour_picture("red")
BOTH = ("alpha", "beta")


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys")


@pytest.fixture
def guarded(tmp_path: Path, keys: Keys) -> Iterator[Fleet]:
    """Alpha and beta, which let the office in."""
    clients = keys.allow(tmp_path / "clients", "office")
    bundle = write_bundle(tmp_path / "bundle", devices=BOTH, sizes=(16, 12))
    with Fleet(tmp_path, bundle) as fleet:
        for name in BOTH:
            keys.pair(name)
            options = ["--key", keys.secret(name), "--clients", clients]
            audit = ["--audit", tmp_path / f"{name}.audit"]
            fleet.start(name, *options, *audit, wait_for=None)
        for agent in fleet.agents.values():
            agent.wait_for("READY")
        known = {name: keys.pair(name).public for name in BOTH}
        write(fleet, tmp_path, known, keys.secret("office"))
        yield fleet


def _has_line(audit: Path, line: tuple[str, str, str]) -> bool:
    return line in reasons(audit)


def whole(client: Client) -> bool:
    return client.classify(RED, deadline_ms=PLENTY_MS).used == BOTH


def test_whoever_waits_for_cameras_notices_that_it_was_let_in(
    guarded: Fleet, keys: Keys, tmp_path: Path
) -> None:
    """As `mdp status --wait` and the page that teaches do, over one connection."""
    keys.pair("page")
    known = {name: keys.pair(name).public for name in BOTH}
    path = write(guarded, tmp_path, known, keys.secret("page"))
    fleet, _ = read_fleet(path)
    with FleetCameras(fleet, Options(fleet=path, timeout_s=PATIENCE_S)) as cameras:
        refused = "the agent does not accept this client's key"
        until(lambda: cameras.take().missing == dict.fromkeys(BOTH, refused), "both refuse")
        shutil.copy(keys.folder / "page.public", tmp_path / "clients")
        for agent in guarded.agents.values():
            agent.wait_for("2 clients allowed")
        allowed = "no_frame: this agent's camera is not recorded (--allow-record)"
        until(lambda: cameras.take().missing == dict.fromkeys(BOTH, allowed), "both know the key")


def test_a_clients_key_is_rotated(guarded: Fleet, keys: Keys, tmp_path: Path) -> None:
    toml, clients = tmp_path / "fleet.toml", tmp_path / "clients"
    rotate = ("keys", "rotate", "--fleet", toml)
    with (
        Client.connect(toml, timeout_s=PATIENCE_S) as client,
        Client.connect(toml, timeout_s=PATIENCE_S) as thief,
    ):
        assert whole(thief)
        code, out, _ = here(*rotate)
        assert code == 0
        assert "copy office-2.public into every agent's --clients" in out
        # Not allowed yet: nothing changes, and the old key serves.
        before = toml.read_text()
        code, out, err = here(*rotate)
        assert (code, out) == (3, "")
        assert "unchanged, as the new key gets no answer (alpha: the agent does not accept" in err
        assert toml.read_text() == before
        # Agents take the new file up without a signal.
        shutil.copy(keys.folder / "office-2.public", clients)
        for agent in guarded.agents.values():
            agent.wait_for("2 clients allowed")
            assert whole(client)
        code, out, _ = here(*rotate, "--json")
        assert code == 0
        assert json.loads(out)["next"][0].endswith("office-2.secret, which is the `key` now")
        assert whole(client)
        client.reload(timeout_s=PATIENCE_S)
        assert whole(client)

        assert here("keys", "revoke", "--name", "nobody", "--clients", clients)[0] == 2
        code, out, _ = here("keys", "revoke", "--name", "office", "--clients", clients)
        assert (code, out.splitlines()[-1]) == (0, "  still allowed: office-2")
        revoked = ("revoke", fingerprint(keys.pair("office").public), REVOKED)
        for name, agent in guarded.agents.items():
            agent.wait_for("1 clients allowed")
            audit = tmp_path / f"{name}.audit"
            until(partial(_has_line, audit, revoked), "its connections are ended")
        with pytest.raises(InferenceError):
            thief.classify(RED, deadline_ms=PLENTY_MS)
        assert whole(client)


def test_a_devices_key_is_rotated(guarded: Fleet, keys: Keys, tmp_path: Path) -> None:
    toml = tmp_path / "fleet.toml"
    rotate = ("keys", "rotate", "--fleet", toml, "--device", "alpha")
    new = keys.pair("alpha-2").public
    with Client.connect(toml, timeout_s=PATIENCE_S) as client:
        assert here(*rotate)[0] == 2
        first = here(*rotate, "--public", keys.folder / "alpha-2.public")
        assert (first[0], first[2]) == (0, "")
        assert here(*rotate, "--public", keys.folder / "alpha-2.public")[0] == 2
        client.reload(timeout_s=PATIENCE_S)
        # The agent has its old key: that one stays.
        code, _, err = here(*rotate)
        assert code == 3
        assert "alpha: the agent's key is another one" in err
        assert whole(client)
        guarded.agents["alpha"].kill()
        options = ["--key", keys.secret("alpha-2"), "--clients", tmp_path / "clients"]
        guarded.restart("alpha", *options)
        # Every call on the way is answered, if need be by beta alone.
        answers = answers_until(client, RED, lambda answer: answer.used == BOTH, PLENTY_MS)
        assert all("beta" in answer.used for answer in answers)
        assert here(*rotate)[0] == 0
        assert read_fleet(toml)[0].devices[0].keys == [new]
        client.reload(timeout_s=PATIENCE_S)
        assert whole(client)
