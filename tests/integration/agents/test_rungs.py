"""Real agents that answer a burst by lower rungs, with real models that take their time."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from devices.cli.main import main
from mdp import Prediction
from mdp.client.sync import Client
from mdp.formats.bundle import Bundle, model_path
from mdp.protocol.messages import rung_answers_key
from mdp.testing.bundles import DEVICES, colour_model, colour_picture, write_bundle
from mdp.testing.processes import PATIENCE_S
from tests.support.bundles import relist
from tests.support.command_lines import run_here
from tests.support.fleet import PLENTY_MS, Fleet

pytestmark = pytest.mark.usefixtures("no_leaks")

RED = colour_picture("red")
BURST = 48


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Agents whose top rungs take some ten milliseconds, and their lowest a quarter of that."""
    write_bundle(tmp_path / "bundle", rungs=2, work=12)
    with Fleet(tmp_path, tmp_path / "bundle") as fleet:
        yield fleet.start_all()


def rungs(answer: Prediction) -> tuple[int, ...]:
    return tuple(member.rung for member in answer.members)


def count_lowered(client: Client) -> int:
    """Number of answers that the agents have given by lower rungs."""
    statuses = client.status(timeout_s=PATIENCE_S)
    return sum((status.counts or {}).get(rung_answers_key(1), 0) for status in statuses)


def test_a_burst_is_answered_by_lower_rungs_and_calls_alone_by_the_top(fleet: Fleet) -> None:
    bundle = Bundle.open(fleet.bundle)
    with fleet.client() as client:
        calm = [client.classify(RED, deadline_ms=PLENTY_MS) for _ in range(3)]
        assert [rungs(answer) for answer in calm] == [(0, 0, 0)] * 3
        assert count_lowered(client) == 0
        # At the top some six would be well in time.
        deadline_ms = 10 * max(member.compute_ms for one in calm for member in one.members)
        burst = client.classify_many(
            [RED] * BURST, deadline_ms=deadline_ms, in_flight=BURST, errors="yield"
        )
        answers = [answer for answer in burst if isinstance(answer, Prediction)]
        assert any(1 in rungs(answer) for answer in answers)
        for answer in answers:
            assert answer.label == "red"
            members = tuple(member.k for member in answer.members)
            expected = bundle.expected_accuracy(members, "stacked", rungs(answer))
            assert answer.expected_accuracy == expected
        assert count_lowered(client) >= sum(sum(rungs(answer)) for answer in answers)
        # Afterwards those that are asked are at the top again.
        assert set(rungs(client.classify(RED, deadline_ms=PLENTY_MS))) == {0}


def test_an_agent_says_how_quick_its_rungs_are(fleet: Fleet) -> None:
    for agent in fleet.agents.values():
        said = [event["event"] for event in agent.events]
        assert any(
            re.fullmatch(r"1 pictures at once take [\d.]+ ms, at rung 1 [\d.]+", one)
            for one in said
        ), said


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ("of other classes", r"rung-1\.onnx: expected an output .* with 3 classes"),
        ("altered", r"rung-1\.onnx: expected \d+ bytes, found"),
        ("gone", r"rung-1\.onnx: missing, but listed in manifest\.json"),
    ],
)
def test_a_rung_that_cannot_be_served_ends_the_start_in_one_line(
    tmp_path: Path, broken: str, expected: str
) -> None:
    folder = write_bundle(tmp_path / "bundle", rungs=2)
    path = folder / model_path(0, 1)
    if broken == "gone":
        path.unlink()
    else:
        path.write_bytes(colour_model(16, 1.0, 1.0, num_classes=4))
    if broken == "of other classes":
        relist(folder, model_path(0, 1))
    done = run_here(main, "mdp-agent", "run", "--bundle", folder, "--device", DEVICES[0], "--json")
    assert done.returncode == 2, done.stderr
    assert re.match(rf"mdp-agent: .*{expected}", done.stderr), done.stderr
    assert done.stderr.count("\n") == 1
    assert "READY" not in done.stdout
