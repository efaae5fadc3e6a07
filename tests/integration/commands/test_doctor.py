"""`mdp doctor` on fleets with one fault each, as docs/how-to/doctor.md shows it."""

import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mdp.testing.agents import AgentFleet
from tests.integration.commands.test_command_line import here
from tests.support.fleet import ROOT

BUNDLES = ROOT / "examples" / "bundles"
PAGE = ROOT / "docs" / "how-to" / "doctor.md"
#: Device -> its address on the page.
SHOWN = {
    "laptop-cpu": "tcp://10.0.0.6:7500",
    "n100": "tcp://10.0.0.8:7500",
    "raspberry-pi-5": "tcp://10.0.0.7:7500",
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentFleet]:
    """Three agents with keys of their own."""
    folder = tmp_path_factory.mktemp("doctor")
    with AgentFleet(folder, BUNDLES / "cifar10", keys=True) as fleet:
        yield fleet.start_all()


def doctor(fleet: AgentFleet, **addresses: str) -> str:
    """Output of the command about this fleet, with the page's addresses."""
    toml = fleet.write(**addresses)
    code, out, err = here("doctor", "--fleet", toml)
    assert (code, err) == (3, "")
    places = {name: agent.address for name, agent in fleet.agents.items()} | addresses
    for name, address in places.items():
        out = out.replace(address, SHOWN[name])
    # The page leaves out how long a status took, and the files that are as they should be.
    kept = [
        line for line in out.splitlines() if not re.match(r"ok +(network|.*\.(onnx|json)):", line)
    ]
    return "\n".join(kept)


def on_page(text: str) -> None:
    # Digests change with the bundles.
    shown, text = (re.sub(r"\b[0-9a-f]{12}\b", "DIGEST", one) for one in (PAGE.read_text(), text))
    assert f"```\n{text}\n```" in shown, text


def test_another_key(fleet: AgentFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = fleet.public_keys
    monkeypatch.setitem(keys, "n100", keys["laptop-cpu"])
    on_page(doctor(fleet))


def test_another_bundle(fleet: AgentFleet) -> None:
    told = fleet.agents["raspberry-pi-5"]
    try:
        fleet.start("raspberry-pi-5", bundle=BUNDLES / "imagenette")
        on_page(doctor(fleet))
    finally:
        fleet.agents["raspberry-pi-5"].kill()
        fleet.agents["raspberry-pi-5"] = told


def test_frozen(fleet: AgentFleet) -> None:
    agent = fleet.agents["laptop-cpu"]
    agent.stop()
    try:
        on_page(doctor(fleet))
    finally:
        agent.signal(signal.SIGCONT)


def test_nobody_there(fleet: AgentFleet, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    on_page(doctor(fleet, **{"laptop-cpu": address}))
