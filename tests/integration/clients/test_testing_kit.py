"""mdp.testing does what docs/how-to/testing.md says, and what it makes is what it says it is."""

import re
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import mdp
from mdp.protocol.messages import Failure
from mdp.testing import LineProcess, fake_fleet
from mdp.testing.bundles import colour_model
from mdp.testing.processes import MOST_OF_LOG
from tests.support.fakes import StrangePeer
from tests.support.fleet import PLENTY_MS, ROOT

pytestmark = pytest.mark.usefixtures("no_leaks")

PAGE = next((ROOT / "docs").rglob("testing.md"))
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
PICTURE = np.zeros((40, 40, 3), dtype=np.uint8)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_page_s_examples_hold(number: int) -> None:
    exec(compile(BLOCKS[number], f"{PAGE.name}, example {number}", "exec"), {})


def test_of_a_log_without_an_end_a_part_is_read(tmp_path: Path) -> None:
    """/dev/full, which a test may log to, gives zeros for ever."""
    log = tmp_path / "log"
    log.symlink_to("/dev/full")
    with (
        LineProcess("program", [sys.executable, "-c", ""], log) as process,
        pytest.raises(AssertionError, match="program: expected a line, ended with 0"),
    ):
        process.line()
    assert len(process.stderr) == MOST_OF_LOG


def test_a_model_made_without_onnx_is_what_onnx_would_write() -> None:
    content = colour_model(16, 2.0, 4.0)
    model = onnx.load_from_string(content)
    onnx.checker.check_model(model, full_check=True)
    assert model.SerializeToString() == content


def test_a_fake_member_s_answers_delays_and_errors() -> None:
    with fake_fleet(["cat", "dog"], members=1) as fleet, mdp.Client.connect(fleet.path) as client:
        (only,) = fleet.members
        only.answer([0.0, 1.0])
        answer = client.classify(PICTURE, deadline_ms=PLENTY_MS)
        assert answer.label == "dog"
        assert answer.probability == pytest.approx(1 / (1 + np.exp(-1.5)), abs=1e-3)
        only.delay(30)
        assert client.classify(PICTURE, deadline_ms=PLENTY_MS).latency_ms >= 30
        with StrangePeer(only.address) as stranger:
            stranger.send([b"junk"])
            refused = stranger.receive().message
            assert isinstance(refused, Failure)
            assert refused.code == "bad_message"
        only.answer(lambda crop: "horse")
        with pytest.raises(mdp.QuorumNotMet, match="expected one of cat, dog, got 'horse'"):
            client.classify(PICTURE, deadline_ms=PLENTY_MS)
        only.silence()
        with pytest.raises(mdp.DeadlineExceeded):
            client.classify(PICTURE, deadline_ms=100)
        assert only.requests == 4
        assert only.last_crop is not None
        assert only.last_crop.shape == (32, 32, 3)
        with pytest.raises(ValueError, match="expected a logit for each of 2 labels"):
            only.answer([1.0])
        with pytest.raises(ValueError, match=r"expected one of bad_message, .*, got 'busy'"):
            only.fail("busy")  # type: ignore[arg-type]


def test_a_process_that_ends_or_is_silent_is_named(tmp_path: Path) -> None:
    said = "import sys; print('here', flush=True); print(input()); sys.exit('no more of this')"
    log = tmp_path / "log"
    with LineProcess("it", [sys.executable, "-c", said], log, patience_s=30.0) as process:
        assert process.line() == "here"
        with pytest.raises(AssertionError, match="it: expected anything within 0 s"):
            process.line("anything", timeout_s=0.0)
        assert process.ask("back") == "back"
        expected = "it: expected anything, ended with 1: no more of this"
        with pytest.raises(AssertionError, match=expected):
            process.line("anything")
