"""`mdp keys`: who is let in, and what is refused without asking an agent."""

import json
from pathlib import Path

import pytest

from mdp.cli import main as cli
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import new_fleet
from mdp.formats.keys import load_public, new_keys
from mdp.testing.bundles import write_bundle
from mdp.transport import new_pair
from tests.support.command_lines import run_here

NAMES = ("alpha", "client", "other")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """fleet.toml with keys, plain.toml without, and keys/."""
    for name in NAMES:
        new_keys(tmp_path / "keys", name, new_pair)
    bundle = Bundle.open(write_bundle(tmp_path / "bundle"))

    def public(name: str) -> str:
        return load_public(tmp_path / "keys" / f"{name}.public")

    keyed, key = tmp_path / "fleet.toml", tmp_path / "keys" / "client.secret"
    new_fleet(bundle, ["alpha=tcp://127.0.0.1:1"], keyed, public_key=public, key=key)
    new_fleet(bundle, ["alpha=tcp://127.0.0.1:1"], tmp_path / "plain.toml")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("rotate --fleet plain.toml", "expected `key`, this client's secret key file"),
        ("rotate --fleet fleet.toml --public keys/other.public", "expected --device with it"),
        ("rotate --fleet fleet.toml --device beta", "has no such device (there are: alpha)"),
        ("rotate --fleet fleet.toml --device alpha", "expected --public, its new public key file"),
        (
            "rotate --fleet fleet.toml --device alpha --public keys/alpha.public",
            "expected one other `key` in fleet.toml, is this one",
        ),
        (
            "rotate --fleet plain.toml --device alpha --public keys/other.public",
            "expected one other `key` in plain.toml, is none",
        ),
        (
            "rotate --fleet fleet.toml --device alpha --public keys/other.secret",
            "expected a public key file, this is a secret one",
        ),
        (
            "allow --public keys/other.secret --clients new",
            "expected a public key file, this is a secret one",
        ),
        ("allow --public nowhere.public --clients new", "nowhere.public: cannot be read"),
        ("revoke --name nobody --clients keys", "(there are: alpha, client, other)"),
        ("revoke --name alpha --clients keys/alpha.public", "expected a folder"),
    ],
)
def test_what_is_refused_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: str, expected: str
) -> None:
    monkeypatch.chdir(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = run_here(cli.main, "mdp", "keys", *words.split())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert expected in done.stderr
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_client_is_let_in_with_rights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    words = "keys allow --public keys/client.public --clients clients"
    done = run_here(cli.main, "mdp", *words.split(), "--push")
    assert (done.returncode, done.stdout) == (0, "clients/client.public: may ask, push\n")
    done = run_here(cli.main, "mdp", *words.split(), "--record", "--json")
    told = {"client": "client", "path": "clients", "rights": ["record", "push"]}
    assert json.loads(done.stdout) == told
    assert (folder / "clients/client.limits").read_text() == "push = true\nrecord = true\n"
    assert load_public(folder / "clients/client.public") == load_public(
        folder / "keys/client.public"
    )
