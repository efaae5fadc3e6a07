"""An agent from its start to its end: states, refusals to start, draining."""

import asyncio
import itertools
import json
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

import mdp
from devices.agent.bundles import LoadableBundle
from devices.agent.server import Agent
from devices.cli.main import main
from mdp.client.sync import Client
from mdp.formats.bundle import MANIFEST, Bundle, file_entry, model_path
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels
from mdp.protocol.messages import Failure, Infer, Result, encode
from mdp.testing.agents import ANY_PORT
from mdp.testing.bundles import SIZES, colour_picture, write_bundle
from mdp.testing.processes import PATIENCE_S, until
from mdp.transport import Router
from tests.support.command_lines import run_here
from tests.support.fakes import StrangePeer
from tests.support.fleet import BIN, PLENTY_MS, Fleet, answers_until

pytestmark = pytest.mark.usefixtures("no_leaks")

RED = colour_picture("red")
CUDA = "CUDAExecutionProvider"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path, write_bundle(tmp_path / "bundle")) as fleet:
        yield fleet


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "gate"
    path.mkdir()
    return path


def run_agent(*args: object) -> subprocess.CompletedProcess[str]:
    return run_here(main, "mdp-agent", "run", *args)


def refused(done: subprocess.CompletedProcess[str], expected: str) -> None:
    """Assert exit code 2, one line on stderr, and no event of a life that never began."""
    assert done.returncode == 2, done.stderr
    assert re.match(rf"mdp-agent: .*{expected}", done.stderr), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "READY" not in done.stdout


def change_manifest(folder: Path, **changes: object) -> None:
    """Change the first assignment, or the files' entries."""
    path = folder / MANIFEST
    content = json.loads(path.read_text())
    content["plan"]["assignments"][0].update(changes)
    entry = msgspec.to_builtins(file_entry(folder / model_path(0)))
    content["files"][model_path(0)] = entry
    path.write_text(json.dumps(content))


def test_events_from_start_to_end(fleet: Fleet) -> None:
    agent = fleet.start("alpha")
    assert agent.terminate() == 0
    agent.wait_for("DRAINING")
    assert [event["event"] for event in agent.events] == [
        "LISTENING",
        "WARMING",
        "READY",
        "DRAINING",
    ]
    assert {event["device"] for event in agent.events} == {"alpha"}
    assert re.fullmatch(r"tcp://127\.0\.0\.1:[1-9]\d*", agent.address)
    assert len({event["address"] for event in agent.events}) == 1
    assert agent.stderr == ""


def test_ctrl_c_is_a_way_to_end(fleet: Fleet) -> None:
    agent = fleet.start("alpha")
    agent.signal(signal.SIGINT)
    assert agent.process.wait(PATIENCE_S) == 0
    assert agent.stderr == ""


def test_people_are_told_on_stderr(fleet: Fleet) -> None:
    command = [str(BIN / "mdp-agent"), "run", "--bundle", str(fleet.bundle), "--device", "beta"]
    with subprocess.Popen(
        [*command, "--bind", "tcp://0.0.0.0:0", "--insecure"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        told = [process.stderr.readline()]
        while "READY" not in told[-1]:
            told.append(process.stderr.readline())
            assert told[-1], told
        process.terminate()
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert out == ""
    assert re.fullmatch(r"mdp-agent beta: listening on tcp://0\.0\.0\.0:\d+\n", told[0])
    assert re.fullmatch(
        r"mdp-agent beta: WARNING: tcp://0\.0\.0\.0:\d+ is plain text: anyone on the network "
        r"path can read and forge messages\n",
        told[1],
    )
    assert err == "mdp-agent beta: DRAINING\n"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--device", "delta"], r"no assignment for device 'delta' \(there are: alpha, beta, gam"),
        (["--device", "alpha", "--bind", "7500"], r"--bind: expected tcp://HOST:PORT, got '7500'"),
        (
            ["--device", "alpha", "--bind", "tcp://127.0.0.1:99999"],
            r"--bind: expected tcp://HOST:PORT, got 'tcp://127\.0\.0\.1:99999'",
        ),
        (
            ["--device", "alpha", "--bind", "tcp://192.0.2.1:7500", "--insecure"],
            r"cannot listen on tcp://192\.0\.2\.1:7500: ",
        ),
    ],
)
def test_bad_options_end_in_one_line(fleet: Fleet, options: list[str], expected: str) -> None:
    refused(run_agent("--bundle", fleet.bundle, "--json", *options), expected)


def test_usage_errors_end_with_2(fleet: Fleet) -> None:
    for options in ([], ["--device", "alpha", "--threads", "0"], ["--nonsense"]):
        done = run_agent("--bundle", fleet.bundle, *options)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


def test_a_port_in_use_is_named(fleet: Fleet) -> None:
    address = fleet.start("alpha").address
    options = ["--bundle", fleet.bundle, "--device", "beta", "--bind", address]
    refused(run_agent(*options), f"cannot listen on {address}: in use")


def test_a_missing_bundle_is_named(tmp_path: Path) -> None:
    options = ["--bundle", tmp_path / "nowhere", "--device", "alpha", "--bind", ANY_PORT]
    refused(run_agent(*options), "nowhere: expected a bundle folder with a manifest.json")


def start_alone(fleet: Fleet, *options: str) -> subprocess.CompletedProcess[str]:
    """An agent in a process of its own, whose signals it takes before it loads anything."""
    where = ["--bundle", str(fleet.bundle), "--device", "alpha", "--bind", ANY_PORT, "--json"]
    command = [str(BIN / "mdp-agent"), "run", *where, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_a_corrupt_manifest_is_named(fleet: Fleet) -> None:
    path = fleet.bundle / MANIFEST
    path.write_bytes(path.read_bytes()[:200])
    refused(start_alone(fleet), r"manifest\.json: Input data was truncated")


def test_a_model_of_another_hash_is_named(fleet: Fleet) -> None:
    path = fleet.bundle / model_path(0)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    refused(start_alone(fleet), r"0/model\.onnx: expected sha256 [0-9a-f]{64}, found")


def test_a_missing_model_is_named(fleet: Fleet) -> None:
    (fleet.bundle / model_path(0)).unlink()
    refused(start_alone(fleet), r"0/model\.onnx: missing, but listed in manifest\.json")


def test_a_model_that_is_none_is_named(fleet: Fleet) -> None:
    (fleet.bundle / model_path(0)).write_bytes(b"I am not a model")
    change_manifest(fleet.bundle)
    refused(start_alone(fleet), r"0/model\.onnx: onnxruntime cannot load it: ")


def test_a_model_of_another_size_is_named(fleet: Fleet) -> None:
    model = (fleet.bundle / model_path(1)).read_bytes()
    (fleet.bundle / model_path(0)).write_bytes(model)
    change_manifest(fleet.bundle)
    refused(start_alone(fleet), r"expected one input 'images' of uint8 \[N, 16, 16, 3\]")


def test_a_provider_that_is_not_there_is_refused(fleet: Fleet) -> None:
    change_manifest(fleet.bundle, provider=CUDA)
    refused(start_alone(fleet), rf"the plan asks for {CUDA}, this device has .*--allow-fallback")


def test_a_fallback_is_accepted_when_told_and_said_in_every_status(fleet: Fleet) -> None:
    change_manifest(fleet.bundle, provider=CUDA)
    fleet.start("alpha", "--allow-fallback")
    with fleet.client() as client:
        answer = client.classify(RED, deadline_ms=PLENTY_MS)
        assert answer.used == ("alpha",)
        status = client.status(timeout_s=PATIENCE_S)[0]
    assert status.provider == "CPUExecutionProvider"
    assert status.reason == "runs on CPUExecutionProvider, not as planned"
    assert status.usable


def test_another_runtime_or_precision_than_planned_is_refused(fleet: Fleet) -> None:
    submodel = json.loads((fleet.bundle / MANIFEST).read_text())["plan"]["assignments"][0]
    in_fp16 = submodel["submodel"] | {"precision": "fp16"}
    change_manifest(fleet.bundle, runtime="openvino", submodel=in_fp16)
    expected = "the plan asks for openvino in fp16, openvino has fp32, bf16, int8-static; --allow-"
    refused(start_alone(fleet), expected)
    fleet.start("alpha", "--allow-fallback")
    with fleet.client() as client:
        status = client.status(timeout_s=PATIENCE_S)[0]
    assert status.provider == "CPUExecutionProvider"
    assert status.reason == "runs on CPUExecutionProvider, not as planned"


def test_an_agent_says_how_it_is_while_it_loads_and_warms_up(fleet: Fleet, gate: Path) -> None:
    agent = fleet.start(
        "alpha", "--hold", "load", "warm_up", "--gate", gate, odd=True, wait_for="LISTENING"
    )
    fleet.start("beta")
    with fleet.client() as client:
        for state, step in (("STARTING", "load"), ("WARMING", "warm_up")):
            assert client.status(timeout_s=PATIENCE_S)[0].state == state
            answer = client.classify(RED, deadline_ms=PLENTY_MS)
            assert answer.used == ("beta",)
            assert answer.missing["alpha"] == f"not_ready: {state}"
            (gate / step).touch()
            agent.wait_for("WARMING" if state == "STARTING" else "READY")
        status = client.status(timeout_s=PATIENCE_S)[0]
        # The client had heard how it was, and did not ask it in vain.
        assert (status.state, status.counts["not_ready"]) == ("READY", 0)
        assert status.provider == "OddExecutionProvider"
        # It is taken back once the client has heard so by itself.
        answers_until(client, RED, lambda answer: answer.used == ("alpha", "beta"), PLENTY_MS)


@pytest.mark.parametrize("step", ["load", "warm_up"])
def test_an_agent_can_be_stopped_while_it_loads(fleet: Fleet, gate: Path, step: str) -> None:
    agent = fleet.start(
        "alpha", "--hold", step, "--gate", gate, odd=True,
        wait_for="LISTENING" if step == "load" else "WARMING",
    )  # fmt: skip
    assert agent.terminate() == 0
    assert agent.stderr == ""


def test_what_was_accepted_is_answered_before_the_end(fleet: Fleet, gate: Path) -> None:
    agent = fleet.start("alpha", "--hold", "run", "--gate", gate, odd=True)

    async def ask() -> tuple[mdp.Prediction, BaseException]:
        async with mdp.AsyncClient.connect(fleet.write(), timeout_s=PATIENCE_S) as client:
            accepted = asyncio.create_task(client.classify(RED, deadline_ms=PLENTY_MS))
            while not (gate / "run-1").exists():
                await asyncio.sleep(0.005)
            agent.signal(signal.SIGTERM)
            while (await client.status(timeout_s=PATIENCE_S))[0].state != "DRAINING":
                await asyncio.sleep(0.005)
            with pytest.raises(mdp.QuorumNotMet) as refused:
                await client.classify(RED, deadline_ms=PLENTY_MS)
            assert not accepted.done()
            (gate / "run").touch()
            return await accepted, refused.value

    answer, error = asyncio.run(ask())
    assert (answer.label, answer.used) == ("red", ("alpha",))
    assert isinstance(error, mdp.QuorumNotMet)
    assert error.outcomes["alpha"] == "draining: this agent is about to stop"
    assert agent.process.wait(PATIENCE_S) == 0
    assert agent.stderr == ""


def test_a_computation_that_hangs_does_not_keep_the_agent_alive(fleet: Fleet, gate: Path) -> None:
    agent = fleet.start("alpha", "--hold", "run", "--gate", gate, "--drain-s", 0.2, odd=True)
    infer = Infer(
        request_id=1,
        digest=Bundle.open(fleet.bundle).digest,
        k=0,
        budget_ms=PLENTY_MS,
        image_size=SIZES[0],
        encoding="raw",
    )
    with StrangePeer(agent.address) as peer:
        for request_id in (1, 2):
            request = msgspec.structs.replace(infer, request_id=request_id)
            peer.send(encode(request, bytes(SIZES[0] ** 2 * 3)))
        until(lambda: (gate / "run-1").exists(), "the first is computed")
        assert agent.terminate() == 0
        # The second never got its turn, and is told so.
        failure = peer.receive().message
    assert isinstance(failure, Failure)
    assert (failure.request_id, failure.code) == (2, "draining")
    assert not (gate / "run").exists()


class Quick:
    """A runtime that knows its answer."""

    provider = "QuickExecutionProvider"
    fallback = False

    def warm_up(self) -> None:
        """Nothing to warm up."""

    def run(self, pixels: Pixels) -> Contribution:
        """No logits `[1, 3]` to speak of."""
        return Contribution(np.zeros((1, 3), np.float32), np.zeros((1, 3), np.float32))


def test_a_burst_of_short_computations_does_not_fill_the_queue(fleet: Fleet) -> None:
    bundle = Bundle.open(fleet.bundle)
    # By this clock everything is short, however busy the machine.
    ticks = itertools.count()
    with Router(ANY_PORT) as router, StrangePeer(router.address) as peer:
        source = LoadableBundle(bundle=bundle, assignment=bundle.assignment("alpha"), load=Quick)
        agent = Agent(source, router, clock=lambda: next(ticks) * 1e-6)
        serving = threading.Thread(target=agent.serve)
        serving.start()
        until(lambda: agent.state == "READY", "the agent is ready")
        for request_id in range(200):
            infer = Infer(
                request_id=request_id,
                digest=bundle.digest,
                k=0,
                budget_ms=PLENTY_MS,
                image_size=SIZES[0],
                encoding="raw",
            )
            peer.send(encode(infer, bytes(SIZES[0] ** 2 * 3)))
            if request_id == 0:
                # From the first one on the agent knows how long it takes.
                assert isinstance(peer.receive().message, Result)
        replies = [peer.receive().message for _ in range(199)]
        agent.stop()
        serving.join(PATIENCE_S)
        assert not serving.is_alive()
    answered = [reply.request_id for reply in replies if isinstance(reply, Result)]
    assert answered == list(range(1, 200))


def test_an_agent_serves_on_when_nobody_reads_its_events(fleet: Fleet) -> None:
    agent = fleet.start("alpha", wait_for="LISTENING")
    assert agent.process.stdout is not None
    agent.process.stdout.close()
    with fleet.client() as client:
        until(lambda: client.status()[0].usable, "the agent is ready")
        assert client.classify(RED, deadline_ms=PLENTY_MS).used == ("alpha",)
    assert agent.terminate() == 0
    assert agent.stderr == ""


def ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not ipv6(), reason="this machine has no IPv6 loopback")
def test_ipv6(fleet: Fleet) -> None:
    agent = fleet.start("alpha", bind="tcp://[::1]:0")
    assert agent.address.startswith("tcp://[::1]:")
    with fleet.client() as client:
        assert client.classify(RED, deadline_ms=PLENTY_MS).used == ("alpha",)
        assert client.status(timeout_s=PATIENCE_S)[0].state == "READY"


def test_no_agent_is_reachable(tmp_path: Path, fleet: Fleet) -> None:
    address = fleet.start("alpha").address
    fleet.agents["alpha"].kill()
    fleet.write(alpha=address)
    with Client.connect(tmp_path / "fleet.toml", timeout_s=0.2) as client:
        with pytest.raises(mdp.QuorumNotMet, match="alpha: unreachable"):
            client.classify(RED, deadline_ms=PLENTY_MS)
        assert client.status(timeout_s=0.2)[0].state == "UNREACHABLE"
