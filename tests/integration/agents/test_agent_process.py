"""An agent from its start to its end: states, refusals to start, draining."""

import itertools
import json
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from devices.cli.main import main
from mdp.formats.bundle import MANIFEST, Bundle, model_path
from mdp.protocol.messages import Failure
from mdp.testing.agents import ANY_PORT
from mdp.testing.bundles import colour_picture
from mdp.testing.processes import PATIENCE_S, until
from tests.support.bundles import change_assignment, relist
from tests.support.command_lines import run_here
from tests.support.fakes import StrangePeer
from tests.support.fleet import BIN, PLENTY_MS, Fleet, answers_until
from tests.support.serving import Held, replies, request, serving

pytestmark = pytest.mark.usefixtures("no_leaks")

RED = colour_picture("red")
CUDA = "CUDAExecutionProvider"


def run_agent(*args: object) -> subprocess.CompletedProcess[str]:
    return run_here(main, "mdp-agent", "run", *args)


def assert_refusal(done: subprocess.CompletedProcess[str], expected: str, code: int = 2) -> None:
    """Assert the exit code, one line on stderr, and no event of a life that never began."""
    assert done.returncode == code, done.stderr
    assert re.match(rf"mdp-agent: .*{expected}", done.stderr), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "READY" not in done.stdout


def change_first(folder: Path, **changes: object) -> None:
    """Change the first assignment, and list its model's file as it is now."""
    change_assignment(folder, **changes)
    relist(folder, model_path(0))


def test_events_from_start_to_end(fleet: Fleet) -> None:
    agent = fleet.start("alpha")
    options = ["--bundle", fleet.bundle, "--device", "beta", "--bind", agent.address]
    assert_refusal(run_agent(*options), f"cannot listen on {agent.address}: in use", code=5)
    assert agent.terminate() == 0
    agent.wait_for("DRAINING")
    events = ["LISTENING", "WARMING", "READY", "DRAINING"]
    assert [event["event"] for event in agent.events] == events
    assert {event["device"] for event in agent.events} == {"alpha"}
    assert re.fullmatch(r"tcp://127\.0\.0\.1:[1-9]\d*", agent.address)
    assert len({event["address"] for event in agent.events}) == 1
    assert agent.stderr == ""


def test_without_json_events_are_written_to_stderr_until_ctrl_c(fleet: Fleet) -> None:
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
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "")
    digest = Bundle.open(fleet.bundle).digest[:12]
    expected = [
        r"listening on tcp://0\.0\.0\.0:\d+",
        r"WARNING: tcp://0\.0\.0\.0:\d+ is plain text: anyone on the network path can read and "
        "forge messages",
        "WARMING",
        f"READY: bundle colours, digest {digest}, k 1, provider CPUExecutionProvider",
        "DRAINING",
    ]
    for line, event in zip([*told, err], expected, strict=True):
        assert re.fullmatch(rf"20\d\d-\d\d-\d\dT[\d:.]+Z mdp-agent beta: {event}\n", line)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--device", "delta"], r"no assignment for device 'delta' \(there are: alpha, beta, gam"),
        (["--device", "alpha", "--bind", "7500"], r"--bind: expected tcp://HOST:PORT, got '7500'"),
        (
            ["--device", "alpha", "--bind", "tcp://127.0.0.1:99999"],
            r"--bind: expected tcp://HOST:PORT, got 'tcp://127\.0\.0\.1:99999'",
        ),
        (["--device", "alpha", "--cpus", "two"], "--cpus: expected numbers of cores as in 0,2-3"),
        (["--device", "alpha", "--cpus", "9998"], r"--cpus 9998: expected some of the cores \d"),
        (["--device", "alpha", "--bundle", "no"], "no: expected a bundle's folder, or one of "),
        (
            ["--device", "alpha", "--source", "folder:/no/folder"],
            "--source folder:/no/folder: expected a folder",
        ),
        (
            ["--device", "alpha", "--source", "http://me:s3cret@door/"],
            "--source: expected folder:PATH, video:FILE, camera:NUMBER",
        ),
    ],
)
def test_bad_options_end_in_one_line(fleet: Fleet, options: list[str], expected: str) -> None:
    done = run_agent("--bundle", fleet.bundle, "--json", *options)
    assert_refusal(done, expected)
    assert "s3cret" not in done.stderr


def test_an_address_that_is_not_there_yet_has_an_exit_code_of_its_own(fleet: Fleet) -> None:
    bind = ["--bind", "tcp://192.0.2.1:7500", "--insecure"]
    done = run_agent("--bundle", fleet.bundle, "--device", "alpha", *bind)
    assert_refusal(done, r"cannot listen on tcp://192\.0\.2\.1:7500: ", code=5)


def test_usage_errors_end_with_2(fleet: Fleet) -> None:
    for options in ([], ["--device", "alpha", "--threads", "0"], ["--nonsense"]):
        done = run_agent("--bundle", fleet.bundle, *options)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


def test_a_bundle_that_cannot_be_served_ends_the_start_in_one_line(fleet: Fleet) -> None:
    """In a process of its own, which takes signals before it loads anything."""
    where = ["--bundle", str(fleet.bundle), "--device", "alpha", "--bind", ANY_PORT, "--json"]
    command = [str(BIN / "mdp-agent"), "run", *where]
    change_first(fleet.bundle, provider=CUDA)
    expected = [rf"the plan asks for {CUDA}, this device has .*--allow-fallback"]
    path = fleet.bundle / model_path(0)
    for said in (*expected, r"0/model\.onnx: expected sha256 [0-9a-f]{64}, found"):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert_refusal(done, said)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 255
        path.write_bytes(data)


def test_an_allowed_fallback_serves_and_every_status_names_it(fleet: Fleet) -> None:
    submodel = json.loads((fleet.bundle / MANIFEST).read_text())["plan"]["assignments"][0]
    in_fp16 = submodel["submodel"] | {"precision": "fp16"}
    change_first(fleet.bundle, runtime="openvino", submodel=in_fp16)
    fleet.start("alpha", "--allow-fallback")
    with fleet.client() as client:
        answer = client.classify(RED, deadline_ms=PLENTY_MS)
        assert answer.used == ("alpha",)
        status = client.status(timeout_s=PATIENCE_S)[0]
    assert status.provider == "CPUExecutionProvider"
    assert status.reason == "runs on CPUExecutionProvider, not as planned"
    assert status.usable


def test_the_status_names_the_state_of_a_starting_agent(fleet: Fleet, gate: Path) -> None:
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


def test_an_agent_can_be_stopped_while_it_loads(fleet: Fleet, gate: Path) -> None:
    options = ["--hold", "load", "--gate", gate]
    agent = fleet.start("alpha", *options, odd=True, wait_for="LISTENING")
    assert agent.terminate() == 0
    assert agent.stderr == ""


def test_a_computation_that_hangs_does_not_keep_the_agent_alive(fleet: Fleet, gate: Path) -> None:
    agent = fleet.start("alpha", "--hold", "run", "--gate", gate, "--drain-s", 0.2, odd=True)
    with StrangePeer(agent.address) as peer:
        for number in (1, 2):
            peer.send(request(Bundle.open(fleet.bundle), number))
        until(lambda: (gate / "run-1").exists(), "the first is computed")
        assert agent.terminate() == 0
        # The second never got its turn, and is told so.
        failure = peer.receive().message
    assert isinstance(failure, Failure)
    assert (failure.request_id, failure.code) == (2, "draining")
    assert not (gate / "run").exists()


def test_a_burst_of_short_computations_does_not_fill_the_queue(fleet: Fleet) -> None:
    bundle, ticks = Bundle.open(fleet.bundle), itertools.count()
    # By this clock everything is short, however busy the machine.
    with (
        serving(bundle, Held(), clock=lambda: next(ticks) * 1e-6) as (_, address),
        StrangePeer(address) as peer,
    ):
        peer.send(request(bundle, 0))
        # From the first one on the agent knows how long it takes.
        assert replies(peer, 1) == {0: "answered"}
        for number in range(1, 200):
            peer.send(request(bundle, number))
        assert replies(peer, 199) == dict.fromkeys(range(1, 200), "answered")


def test_an_agent_serves_on_when_its_events_are_not_read(fleet: Fleet) -> None:
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
