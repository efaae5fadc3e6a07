"""`mdp gateway`: what it refuses before it listens."""

import socket
from pathlib import Path

import pytest

from mdp.cli import gateway, main
from mdp.testing.bundles import DEVICES, write_bundle
from tests.support.command_lines import run_here


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    write_bundle(tmp_path / "bundle")
    entries = "".join(
        f'[[devices]]\ndevice = "{name}"\naddress = "tcp://127.0.0.1:{9000 + k}"\nk = {k}\n'
        for k, name in enumerate(DEVICES)
    )
    path = tmp_path / "fleet.toml"
    path.write_text(f'bundle = "bundle"\n{entries}')
    return path


def refusal(*words: object) -> str:
    done = run_here(main.main, "mdp", "gateway", *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    return done.stderr


def test_the_extra_that_it_needs(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "missing", lambda modules: "starlette")
    assert refusal("--fleet", fleet) == (
        "mdp: starlette is not installed; the gateway needs it: "
        "pip install '.[gateway]' in a checkout of MDP\n"
    )


def test_other_machines_only_with_tokens_and_tls(fleet: Path, tmp_path: Path) -> None:
    beyond = ("--fleet", fleet, "--bind", "0.0.0.0:8080")
    assert "expected --tokens, --certificate and --private-key" in refusal(*beyond)
    pem = tmp_path / "cert.pem"
    pem.write_text("no certificate")
    assert "expected both" in refusal(*beyond, "--certificate", pem)
    wanted = ("--certificate", pem, "--private-key", pem)
    assert "tokens: cannot be read" in refusal(*beyond, *wanted, "--tokens", tmp_path / "tokens")
    assert "both PEM" in refusal("--fleet", fleet, *wanted)
    assert "expected a PEM file, found none" in refusal(
        "--fleet", fleet, "--certificate", tmp_path / "x", "--private-key", pem
    )


def test_addresses_and_deadlines_that_are_none(fleet: Path) -> None:
    assert "expected HOST:PORT" in refusal("--fleet", fleet, "--bind", "8080")
    assert "--deadline-ms: expected more than 0" in refusal("--fleet", fleet, "--deadline-ms", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        assert refusal("--fleet", fleet, "--bind", place) == (
            f"mdp: --bind {place}: Address already in use\n"
        )


def test_names_of_fleets(fleet: Path, tmp_path: Path) -> None:
    twice = refusal("--fleet", fleet, "--fleet", fleet)
    assert "another fleet is called 'colours' already: expected --fleet NAME=FILE" in twice
    assert "expected NAME=FILE, NAME being" in refusal("--fleet", f"a/b={fleet}")
    assert "absent.toml: cannot be read" in refusal("--fleet", tmp_path / "absent.toml")
    assert gateway.parse_fleets([f"porch={fleet}", str(fleet)]) == {
        "porch": fleet,
        "colours": fleet,
    }


def test_teaching_that_lacks_something(fleet: Path, tmp_path: Path) -> None:
    teach = ("--fleet", fleet, "--teach", tmp_path / "scenes")
    assert refusal(*teach) == (
        "mdp: --teach: expected --teach-tokens: a file of tokens for those who may teach\n"
    )
    tokens = tmp_path / "tokens"
    assert "tokens: cannot be read" in refusal(*teach, "--teach-tokens", tokens)
    tokens.touch(0o600)
    tokens.write_text("0123456789abcdef\n")
    several = ("--fleet", f"other={fleet}", "--teach-tokens", tokens)
    assert refusal(*teach, *several) == "mdp: --teach: expected one --fleet, got 2\n"
    assert refusal(*teach, "--teach-tokens", tokens, "--workers", 2) == (
        "mdp: --teach: expected no --workers beside it: what is taught may have no bundle yet\n"
    )
    gone = tmp_path / "gone.toml"
    assert refusal(*teach, "--teach-tokens", tokens, "--teach-config", gone) == (
        f"mdp: --teach-config {gone}: expected a file of settings\n"
    )
    expected = f"{tokens}: expected a folder or nothing, found a file\n"
    kept = (*teach, "--teach-tokens", tokens, "--teach-kept", tokens)
    assert refusal(*kept) == f"mdp: --teach-kept {expected}"
    items = (*teach, "--teach-tokens", tokens, "--teach-inspect", tokens)
    assert refusal(*items) == f"mdp: --teach-inspect {expected}"
    where = ("--fleet", fleet, "--teach", tokens, "--teach-tokens", tokens)
    assert refusal(*where) == f"mdp: --teach {expected}"
    for option in ("--teach-tokens", "--teach-kept", "--teach-config", "--teach-inspect"):
        expected = f"mdp: {option}: expected --teach FOLDER beside it\n"
        assert refusal("--fleet", fleet, option, tokens) == expected


@pytest.mark.parametrize("count", ["0", "9", "two"])
def test_a_number_of_workers_that_is_none(fleet: Path, count: str) -> None:
    assert "--workers" in refusal("--fleet", fleet, "--workers", count)


def test_only_a_fleet_that_is_taught_needs_no_bundle(fleet: Path) -> None:
    fleet.write_text(fleet.read_text().replace('bundle = "bundle"\n', ""))
    assert "key `bundle`: expected a bundle folder" in refusal("--fleet", fleet)
    assert gateway.parse_fleets([str(fleet)], taught=True) == {"taught": fleet}
