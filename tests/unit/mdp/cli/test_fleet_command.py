"""`mdp fleet add|replace|remove`: a fourth board, a broken one, one that leaves."""

import json
from pathlib import Path

import pytest

from mdp.cli import main as cli
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import new_fleet, read_devices, read_fleet
from mdp.formats.keys import new_keys
from mdp.testing.bundles import write_bundle
from mdp.transport import new_pair
from tests.support.command_lines import run_here

NAMES = ("alpha", "beta", "gamma")
NO_BUNDLE_YET = "without a bundle yet: `mdp bundle push` names one"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    for name in (*NAMES, "gamma-attic", "client"):
        new_keys(tmp_path / "keys", name, new_pair)
    return tmp_path / "keys"


@pytest.fixture
def toml(tmp_path: Path, keys: Path) -> Path:
    bundle = Bundle.open(write_bundle(tmp_path / "bundle"))
    path = tmp_path / "fleet.toml"
    devices = [f"{name}=tcp://10.0.0.{k}:7500" for k, name in enumerate(NAMES)]

    def public(name: str) -> str:
        return read_key(keys, name)

    new_fleet(bundle, devices, path, public_key=public, key=keys / "client.secret")
    return path


def read_key(keys: Path, name: str) -> str:
    return (keys / f"{name}.public").read_text().split('"')[3]


def fleet(*words: object) -> tuple[int, str, str]:
    done = run_here(cli.main, "mdp", "fleet", *words)
    return done.returncode, done.stdout, done.stderr


def test_a_replica_comes_a_board_is_replaced_and_one_leaves(toml: Path, keys: Path) -> None:
    before = toml.read_text()
    add = ("add", "--fleet", toml, "--device", "gamma/attic=tcp://h:1", "--keys", keys)
    code, out, err = fleet(*add, "--dry-run")
    assert (code, err, toml.read_text()) == (0, "", before)
    assert '+device = "gamma/attic"\n' in out
    code, out, err = fleet(*add)
    assert (code, err) == (0, "")
    assert "sub-model 2 is also served by gamma\n" in out
    assert "run its agent with --device gamma\n" in out
    push = f"mdp bundle push {toml.parent}/bundle gamma/attic --fleet {toml}"
    assert f"  or, if its agent serves another bundle with --allow-push: {push}\n" in out
    assert read_fleet(toml)[0].members()[2] == ["gamma", "gamma/attic"]

    other = new_keys(keys / "second", "beta", new_pair).public
    code, out, err = fleet(
        "replace", "--fleet", toml, "--device", "beta=tcp://h:2", "--keys", keys / "second"
    )
    assert (code, err) == (0, "")
    beta = read_fleet(toml)[0].devices[1]
    assert (beta.device, beta.address, beta.keys) == ("beta", "tcp://h:2", [other])
    moved = fleet("replace", "--fleet", toml, "--device", "beta=tcp://h:3")
    assert "its key is as before" in moved[1]

    assert fleet("remove", "--fleet", toml, "--device", "gamma/attic")[0] == 0
    refused = fleet("remove", "--fleet", toml, "--device", "gamma")
    assert refused == (
        4,
        "",
        "mdp: gamma is the only device of its sub-model: with every device, 89.0% of 100 pictures "
        "are answered right, 100.0% before: expected --anyway, or first a device that takes its "
        "place\n",
    )
    code, out, _ = fleet("remove", "--fleet", toml, "--device", "gamma", "--force", "--json")
    told = json.loads(out)
    assert (code, told["written"], told["expected_accuracy"]) == (0, True, [1.0, 0.89])
    assert list(read_fleet(toml)[0].members()) == [0, 1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "add --device pi=tcp://h:1",
            "--device pi=tcp://h:1: the bundle has no device of that name; it helps most as "
            "gamma/pi=tcp://h:1: without gamma answers are right on 89.0%",
        ),
        ("add --device gamma=tcp://h:1 --keys KEYS", "has it already"),
        ("add --device gamma/attic=tcp://10.0.0.1:7500 --keys KEYS", "beta is at tcp://10.0.0.1"),
        ("add --device gamma/attic=tcp://h:1", "expected --keys, with gamma-attic.public in it"),
        ("add --device gamma/attic", "expected NAME=tcp://HOST:PORT"),
        ("add --device gamma/cellar=tcp://h:1 --keys KEYS", "gamma-cellar.public: cannot be read"),
        ("replace --device pi=tcp://h:1", "has no such device (there are: alpha, beta, gamma)"),
        ("replace --device beta", "expected NAME=tcp://HOST:PORT"),
        ("replace --device beta=http://h:1", "expected tcp://HOST:PORT"),
        ("replace --device beta=tcp://10.0.0.0:7500", "alpha is at tcp://10.0.0.0:7500"),
        ("remove --device pi", "has no such device (there are: alpha, beta, gamma)"),
    ],
)
def test_what_is_refused_changes_nothing(toml: Path, keys: Path, words: str, expected: str) -> None:
    before = toml.read_text()
    code, out, err = fleet(*words.replace("KEYS", str(keys)).split(), "--fleet", toml)
    assert (code, out) == (2, "")
    assert expected in err
    assert err.count("\n") == 1
    assert toml.read_text() == before


def test_before_there_is_a_bundle_cameras_can_be_recorded_alone(tmp_path: Path, keys: Path) -> None:
    path = tmp_path / "cameras.toml"
    devices = [word for n in NAMES[:2] for word in ("--device", f"{n}=tcp://127.0.0.1:{len(n)}")]
    code, out, err = fleet(
        "new", *devices, "--keys", keys, "--key", keys / "client.secret", "--out", path
    )
    assert (code, out, err) == (0, f"{path}: 2 devices, {NO_BUNDLE_YET}\n", "")
    again = fleet(
        "new", *devices[:2], "--keys", keys, "--key", keys / "client.secret", "--out", path
    )
    exists = "exists already: expected another name, or remove it first\n"
    assert again == (2, "", f"mdp: {path}: {exists}")
    other = fleet(
        "new",
        *devices[:2],
        "--keys",
        keys,
        "--key",
        keys / "client.secret",
        "--out",
        tmp_path / "other.toml",
    )
    assert other[1] == f"{tmp_path}/other.toml: 1 device, {NO_BUNDLE_YET}\n"
    known = read_devices(path)
    assert (known.bundle, [entry.device for entry in known.devices]) == ("", ["alpha", "beta"])
    look = run_here(cli.main, "mdp", "look", "--fleet", path)
    only = (
        "a fleet without one is for `mdp record`, `mdp status`, `mdp doctor` and `mdp bundle "
        "push`, which names one"
    )
    expected = f"mdp: {path}: key `bundle`: expected a bundle folder: {only}\n"
    assert (look.returncode, look.stderr) == (2, expected)
    # Pictures are sent with keys only.
    code, _, err = fleet("new", *devices, "--out", tmp_path / "plain.toml")
    assert (code, err.startswith("mdp: --bundle: expected a bundle folder, or --keys and")) == (
        2,
        True,
    )
    assert not (tmp_path / "plain.toml").exists()
