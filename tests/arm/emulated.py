"""The real agent on 64-bit ARM, emulated: `make test-arm`. Not collected by `make test`.

It serves the bundle that comes along beside the agent of this machine; the same crops go to both
through keys and TCP, and their logits are compared.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdp.client.sync import Client
from mdp.files import write_json
from mdp.formats.keys import new_keys
from mdp.protocol.messages import Failure, Status, StatusRequest, encode
from mdp.testing.agents import AgentProcess
from mdp.testing.processes import until
from mdp.transport import new_pair
from mdp.transport.outage import NOT_ACCEPTED
from tests.arm.prepare import EMULATOR, PROCESSOR, Arm, prepare
from tests.support.fleet import BIN, PLENTY_MS, ROOT
from tests.support.two_agents import (
    DEVICES,
    PICTURES,
    Pair,
    likeness,
    pictures,
    reference_bundle,
)

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
    """What was measured; `python -m benchmarks.keep arm` puts it into the results and the page."""
    rows: list[dict[str, Any]] = []
    yield rows
    write_json(FIGURES, {"processor": PROCESSOR, "rows": rows})


CASES = [(device, precision) for precision in TOLERANCE for device in DEVICES]


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def pair(
    request: pytest.FixtureRequest, arm: Arm, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Pair, str]]:
    device, precision = request.param
    folder = tmp_path_factory.mktemp("arm")
    bundle = reference_bundle(folder / "bundle", precision)
    made = Pair(bundle, device, folder, PATIENT_S)
    commands = {
        "here": [str(BIN / "mdp-agent")],
        "arm": arm.command("-c", "from devices.cli.main import main; main()"),
    }
    with ExitStack() as stack:
        for name, command in commands.items():
            began_s = time.monotonic()
            agent = AgentProcess(
                device,
                [*command, *made.options(name)],
                folder / f"{name}.log",
                patience_s=PATIENT_S,
            )
            stack.callback(agent.close)
            made.agents[name] = agent.wait_for("READY")
            made.start_s[name] = time.monotonic() - began_s
        yield made, precision


def test_the_other_agent_is_one_for_arm(pair: tuple[Pair, str], arm: Arm) -> None:
    made, _ = pair
    process = Path(f"/proc/{made.agents['arm'].process.pid}")
    assert (process / "exe").readlink().name == EMULATOR
    loaded = {line.split()[-1] for line in (process / "maps").read_text().splitlines()}
    (runtime,) = [name for name in loaded if "onnxruntime_pybind11_state" in name]
    for file in (Path(runtime), arm.system / "usr/bin/python3.11"):
        machine = file.read_bytes()[:20][_E_MACHINE]
        assert int.from_bytes(machine, "little") == _EM_AARCH64
    here = Path(f"/proc/{made.agents['here'].process.pid}/exe").readlink()
    assert here.name != EMULATOR


def test_its_logits_are_those_of_this_machine(
    pair: tuple[Pair, str], figures: list[dict[str, Any]]
) -> None:
    made, precision = pair
    here, there = made.logits("here"), made.logits("arm")
    assert len(here) == PICTURES
    alike = likeness(here, there)
    row = {
        "device": made.device,
        "precision": precision,
        "pictures": len(here),
        **asdict(alike),
        "start_s": dict(made.start_s),
    }
    figures.append(row)
    assert alike.largest_difference <= TOLERANCE[precision]
    if precision == "fp32":
        assert alike.same_label == len(here)
    # Pictures that all look alike to the model would prove nothing.
    assert alike.largest_logit > 10 * TOLERANCE["fp32"]
    assert any(not np.array_equal(here[0].bag, other.bag) for other in here[1:])


def test_a_client_gets_the_same_answers(pair: tuple[Pair, str]) -> None:
    made, precision = pair
    answers = {}
    for where in made.agents:
        with Client.connect(made.fleet(where), timeout_s=PATIENT_S) as client:
            answers[where] = [client.classify(p, deadline_ms=PLENTY_MS) for p in pictures()]
    for here, there in zip(answers["here"], answers["arm"], strict=True):
        assert there.used == (made.device,)
        assert there.mode == "single"
        if precision == "fp32":
            assert there.label == here.label
            assert there.probability == pytest.approx(here.probability, abs=1e-3)


def test_it_knows_its_clients(pair: tuple[Pair, str]) -> None:
    made, _ = pair
    if not (made.folder / "stranger.secret").exists():
        new_keys(made.folder, "stranger", new_pair)
    with Client(made.fleet("arm"), key=made.folder / "stranger.secret") as client:
        until(lambda: client.status(timeout_s=0.1)[0].state == "REFUSED", "a stranger is refused")
        (status,) = client.status(timeout_s=0.1)
    assert status.reason == NOT_ACCEPTED
    with Client.connect(made.fleet("arm"), timeout_s=PATIENT_S) as client:
        (status,) = client.status(timeout_s=PATIENT_S)
    assert (status.state, status.encrypted) == ("READY", True)


def test_it_drains_on_sigterm(pair: tuple[Pair, str]) -> None:
    made, _ = pair
    agent, crops = made.agents["arm"], made.crops()[:4]
    with made.peer("arm") as peer:
        for number, pixels in enumerate(crops):
            peer.send(encode(made.infer(number), pixels.tobytes()))
        # The agent takes messages in their order: once it tells how it is, it has taken them all.
        peer.send(encode(StatusRequest(request_id=len(crops))))
        replies = [peer.receive(PATIENT_S).message]
        while not isinstance(replies[-1], Status):
            replies.append(peer.receive(PATIENT_S).message)
        agent.signal(signal.SIGTERM)
        while len(replies) < len(crops) + 1:
            replies.append(peer.receive(PATIENT_S).message)
    said = {reply.request_id: reply for reply in replies if not isinstance(reply, Status)}
    assert sorted(said) == list(range(len(crops)))
    late = [reply for reply in said.values() if isinstance(reply, Failure)]
    # After its five seconds, which an emulated agent may need for two of them, it says so.
    assert {reply.code for reply in late} <= {"draining"}
    assert len(late) < len(crops)
    agent.wait_for("DRAINING")
    assert agent.process.wait(PATIENT_S) == 0
