"""The real agent on 64-bit ARM, emulated: `make test-arm`. Not collected by `make test`.

It serves the bundle that comes along beside the agent of this machine; the same crops go to both
through keys and TCP, and their logits are compared.
"""

import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdp.client.sync import Client
from mdp.files import write_json
from mdp.formats.keys import new_keys
from mdp.protocol.messages import Failure, Status, StatusRequest, encode
from mdp.testing.processes import until
from mdp.transport import new_pair
from mdp.transport.outage import NOT_ACCEPTED
from tests.support.fleet import BIN, PLENTY_MS, ROOT
from tests.support.two_agents import DEVICES, PICTURES, Side, likeness, pictures, reference_bundle
from tools.arm import EMULATOR, PROCESSOR, Arm, prepare

#: Largest difference of a logit that different instructions may make; int8 activations may fall to
#: the other side of a step where fp32 rounds differently, once a layer.
TOLERANCE = {"fp32": 1e-4, "int8": 0.1}
#: Emulated, everything takes tens of times as long.
PATIENT_S = 600.0
pytestmark = pytest.mark.timeout(2 * PATIENT_S)
#: ELF's number of the architecture (elf.h), and where it stands.
_EM_AARCH64, _E_MACHINE = 183, slice(18, 20)
FIGURES = ROOT / "runs" / "arm.json"


@pytest.fixture(scope="session")
def arm() -> Arm:
    return prepare()


@pytest.fixture(scope="session")
def figures() -> Iterator[list[dict[str, Any]]]:
    """Measured figures; `python -m benchmarks.keep arm` puts them into the results and the page."""
    rows: list[dict[str, Any]] = []
    yield rows
    write_json(FIGURES, {"processor": PROCESSOR, "rows": rows})


CASES = [(device, precision) for precision in TOLERANCE for device in DEVICES]


@dataclass(frozen=True)
class Both:
    """The same sub-model here and emulated."""

    here: Side
    arm: Side
    precision: str


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def both(
    request: pytest.FixtureRequest, arm: Arm, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    device, precision = request.param
    folder = tmp_path_factory.mktemp("arm")
    bundle = reference_bundle(folder / "bundle", precision)
    with (
        Side(folder / "here", bundle, device, PATIENT_S) as here,
        Side(folder / "arm", bundle, device, PATIENT_S) as there,
    ):
        here.begin(str(BIN / "mdp-agent"))
        there.begin(*arm.command("-c", "from devices.cli.main import main; main()"))
        yield Both(here, there, precision)


def test_the_other_agent_is_one_for_arm(both: Both, arm: Arm) -> None:
    process = Path(f"/proc/{both.arm.agent.process.pid}")
    assert (process / "exe").readlink().name == EMULATOR
    loaded = {line.split()[-1] for line in (process / "maps").read_text().splitlines()}
    (runtime,) = [name for name in loaded if "onnxruntime_pybind11_state" in name]
    for file in (Path(runtime), arm.system / "usr/bin/python3.11"):
        machine = file.read_bytes()[:20][_E_MACHINE]
        assert int.from_bytes(machine, "little") == _EM_AARCH64
    here = Path(f"/proc/{both.here.agent.process.pid}/exe").readlink()
    assert here.name != EMULATOR


def test_logits_and_answers_match_this_machine(both: Both, figures: list[dict[str, Any]]) -> None:
    here, there = both.here.logits(), both.arm.logits()
    assert len(here) == PICTURES
    alike = likeness(here, there)
    row = {
        "device": both.arm.assignment.device,
        "precision": both.precision,
        "pictures": len(here),
        **asdict(alike),
        "start_s": {"here": both.here.start_s, "arm": both.arm.start_s},
    }
    figures.append(row)
    assert alike.largest_difference <= TOLERANCE[both.precision]
    if both.precision == "fp32":
        assert alike.same_label == len(here)
    # Pictures that all look alike to the model would prove nothing.
    assert alike.largest_logit > 10 * TOLERANCE["fp32"]
    assert any(not np.array_equal(here[0].bag, other.bag) for other in here[1:])
    with both.here.client() as one, both.arm.client() as other:
        for picture in pictures():
            wanted, got = (c.classify(picture, deadline_ms=PLENTY_MS) for c in (one, other))
            assert (got.used, got.mode) == ((row["device"],), "single")
            if both.precision == "fp32":
                assert got.label == wanted.label
                assert got.probability == pytest.approx(wanted.probability, abs=1e-3)
        (status,) = other.status(timeout_s=PATIENT_S)
        assert (status.state, status.encrypted) == ("READY", True)


def test_it_refuses_another_key(both: Both) -> None:
    if not (both.arm.folder / "stranger.secret").exists():
        new_keys(both.arm.folder, "stranger", new_pair)
    with Client(both.arm.write(), key=both.arm.folder / "stranger.secret") as client:
        until(lambda: client.status(timeout_s=0.1)[0].state == "REFUSED", "it is refused")
        assert client.status(timeout_s=0.1)[0].reason == NOT_ACCEPTED


def test_it_drains_on_sigterm(both: Both) -> None:
    agent, requests = both.arm.agent, both.arm.requests()[:4]
    with both.arm.peer() as peer:
        # The agent takes messages in their order: with its status, it has taken them all.
        for frames in (*requests, encode(StatusRequest(request_id=len(requests)))):
            peer.send(frames)
        replies = [peer.receive(PATIENT_S).message]
        while not isinstance(replies[-1], Status):
            replies.append(peer.receive(PATIENT_S).message)
        agent.signal(signal.SIGTERM)
        while len(replies) < len(requests) + 1:
            replies.append(peer.receive(PATIENT_S).message)
    said = {reply.request_id: reply for reply in replies if not isinstance(reply, Status)}
    assert sorted(said) == list(range(len(requests)))
    # After five seconds, which it may need for two of them emulated, it refuses the others.
    late = [reply for reply in said.values() if isinstance(reply, Failure)]
    assert {reply.code for reply in late} <= {"draining"}
    assert len(late) < len(requests)
    agent.wait_for("DRAINING")
    assert agent.process.wait(PATIENT_S) == 0
