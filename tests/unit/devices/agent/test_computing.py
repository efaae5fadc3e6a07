"""Requests computed one or several at a time, by a runtime that does as it is told. No sockets."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from devices.agent import executor as computing
from devices.agent.bundles import Candidate, Service, Shelf
from devices.agent.counters import Ledger
from devices.agent.executor import TOLERATED_FAILURES, Computing, apart, together
from devices.agent.jobs import Job
from devices.agent.replies import Replies
from mdp.errors import AgentError
from mdp.formats.bundle import Bundle
from mdp.formats.plan import Encoding
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels
from mdp.protocol.messages import Buffer, Failure, Infer, Message, Result, contribution_of, decode
from mdp.testing.bundles import SIZES, write_bundle

SIZE = SIZES[0]


class Recorder:
    """Stands for the router: keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Message, list[Buffer]]] = []

    def send(self, route: bytes, frames: list[Buffer]) -> bool:
        envelope = decode(frames)
        self.sent.append((route, envelope.message, list(envelope.buffers)))
        return True


class Runtime:
    """Answers with the mean of each picture; raises what `raises` makes of the batch."""

    provider = "ToldExecutionProvider"
    fallback = False

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.raises: Callable[[Pixels], Exception | None] = lambda pixels: None
        self.rows = 0

    def warm_up(self) -> None:
        """Nothing to warm up."""

    def run(self, pixels: Pixels) -> Contribution:
        self.sizes.append(len(pixels))
        error = self.raises(pixels)
        if error is not None:
            raise error
        means = pixels.mean(axis=(1, 2, 3), dtype=np.float32)[:, None].repeat(3, axis=1)
        return Contribution(means[self.rows :], means[self.rows :] + 1)


class Desk:
    """What is computed, answered, counted and given up."""

    def __init__(self, bundle: Bundle) -> None:
        self.now_s = 0.0
        self.router, self.ledger, self.runtime = Recorder(), Ledger(), Runtime()
        router: Any = self.router
        self.service = Service(
            candidate=Candidate(bundle=bundle, assignment=bundle.assignment("alpha"), load=Runtime),
            runtime=self.runtime,
        )
        self.shelf = Shelf()
        self.shelf.put(self.service, now_s=0.0)
        self.given_up: list[Service] = []
        self.computing = Computing(
            self.shelf,
            Replies(router, self.ledger),
            self.ledger,
            clock=self.clock,
            give_up=self.given_up.append,
        )

    def clock(self) -> float:
        self.now_s += 0.5
        return self.now_s

    def job(
        self,
        number: int,
        pixels: bytes | None = None,
        encoding: Encoding = "raw",
        deadline_s: float = 1e9,
        digest: str | None = None,
    ) -> Job:
        """A request whose picture is all `number`."""
        return Job(
            peer=b"p%d" % number,
            client=str(number),
            infer=Infer(
                request_id=number,
                digest=digest or self.service.digest,
                k=0,
                budget_ms=1.0,
                image_size=SIZE,
                encoding=encoding,
            ),
            pixels=bytes([number]) * SIZE**2 * 3 if pixels is None else pixels,
            arrived_s=-1.0 * number,
            deadline_s=deadline_s,
        )

    @property
    def results(self) -> dict[int, Result]:
        sent = [message for _, message, _ in self.router.sent]
        return {message.request_id: message for message in sent if isinstance(message, Result)}

    @property
    def failures(self) -> dict[int, tuple[str, str]]:
        sent = [message for _, message, _ in self.router.sent]
        failed = [message for message in sent if isinstance(message, Failure)]
        return {message.request_id: (message.code, message.text) for message in failed}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle.open(write_bundle(tmp_path_factory.mktemp("computing") / "bundle"))


@pytest.fixture
def desk(bundle: Bundle) -> Desk:
    return Desk(bundle)


def jpeg(side: int = SIZE) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), (9, 9, 9)).save(buffer, "JPEG")
    return buffer.getvalue()


def test_each_of_several_gets_its_own_answer_and_times(desk: Desk) -> None:
    jobs = [desk.job(number) for number in (1, 2, 3)]
    assert desk.computing.run(jobs)[:2] == (3, 0.5)
    assert desk.runtime.sizes == [3]
    assert [route for route, _, _ in desk.router.sent] == [b"p1", b"p2", b"p3"]
    for number, (_, message, buffers) in enumerate(desk.router.sent, start=1):
        assert isinstance(message, Result)
        contribution = contribution_of(buffers[0], 3)
        np.testing.assert_array_equal(contribution.heads, [[number] * 3, [number + 1] * 3])
        # It came `number` seconds before 0, and computing began at 0.5.
        assert message.queue_ms == (number + 0.5) * 1e3
        assert message.compute_ms == 500.0
    assert desk.ledger.counts["answered"] == desk.service.answered == 3


def test_one_bad_picture_fails_alone(desk: Desk) -> None:
    jobs = [desk.job(1), desk.job(2, b"no jpeg", "jpeg"), desk.job(3, jpeg(), "jpeg")]
    pictures, took_s, *_ = desk.computing.run(jobs)
    assert pictures == 2
    assert took_s is not None
    assert desk.runtime.sizes == [2]
    assert desk.results.keys() == {1, 3}
    assert desk.failures.keys() == {2}
    assert desk.failures[2][0] == "bad_message"
    assert desk.service.failures == 0, "the model is not to blame"


def test_decoding_is_told_apart_from_computing(desk: Desk) -> None:
    jobs = [desk.job(1), desk.job(2, b"no jpeg", "jpeg"), desk.job(3, jpeg(), "jpeg")]
    # Each reading of this clock takes half a second.
    assert desk.computing.run(jobs) == (2, 1.5, [0.0, 0.5, 0.5], 1.5)
    desk.runtime.raises = lambda pixels: RuntimeError("on fire")
    assert desk.computing.run([desk.job(3, jpeg(), "jpeg")]) == (1, None, [0.5], 1.0)


def test_nothing_is_computed_for_bad_pictures_only(desk: Desk) -> None:
    assert desk.computing.run([desk.job(1, b"no jpeg", "jpeg")])[:2] == (0, None)
    assert desk.runtime.sizes == []


def test_no_memory_for_a_picture_is_its_failure(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = computing.pixels_for

    def scarce(job: Job) -> Pixels:
        if job.infer.request_id == 1:
            raise MemoryError
        return whole(job)

    monkeypatch.setattr(computing, "pixels_for", scarce)
    desk.computing.run([desk.job(1), desk.job(2)])
    assert desk.failures == {1: ("failed", "no memory for the picture")}
    assert desk.results.keys() == {2}


def test_of_a_batch_that_fails_each_is_tried_alone(desk: Desk) -> None:
    def on_twos(pixels: Pixels) -> Exception | None:
        return RuntimeError("a two") if 2 in pixels else None

    desk.runtime.raises = on_twos
    assert desk.computing.run([desk.job(number) for number in (1, 2, 3)])[:2] == (3, None)
    assert desk.runtime.sizes == [3, 1, 1, 1]
    assert desk.results.keys() == {1, 3}
    assert desk.failures == {2: ("failed", "RuntimeError: a two")}
    assert desk.service.failures == 0, "the one after it succeeded"
    assert desk.given_up == []


def test_whoever_has_no_time_left_is_not_tried_again(desk: Desk) -> None:
    desk.runtime.raises = lambda pixels: MemoryError() if len(pixels) > 1 else None
    desk.computing.run([desk.job(1, deadline_s=0.9), desk.job(2)])
    assert desk.failures == {
        1: ("too_late", "computed with others, that failed, and no time was left")
    }
    assert desk.results.keys() == {2}


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("std::bad_alloc")], ids=repr)
def test_a_model_that_runs_out_of_memory_fails_that_request(desk: Desk, error: Exception) -> None:
    desk.runtime.raises = lambda pixels: error if 1 in pixels else None
    assert desk.computing.run([desk.job(1)])[:2] == (1, None)
    assert desk.failures[1] == ("failed", f"{type(error).__name__}: {error}".strip())
    assert desk.computing.reason == f"{type(error).__name__}: {error}".strip()
    desk.computing.run([desk.job(2)])
    assert desk.computing.reason == ""


def test_it_is_given_up_before_its_last_failure_is_told(desk: Desk) -> None:
    desk.runtime.raises = lambda pixels: RuntimeError("on fire")
    told_by_then: list[int] = []
    desk.computing._give_up = lambda service: told_by_then.append(len(desk.router.sent))
    for number in range(1, TOLERATED_FAILURES + 1):
        desk.computing.run([desk.job(number)])
    assert told_by_then == [TOLERATED_FAILURES - 1]
    assert len(desk.router.sent) == TOLERATED_FAILURES


def test_a_bundle_that_fails_in_a_row_is_given_up_once(desk: Desk) -> None:
    desk.runtime.raises = lambda pixels: RuntimeError("broken")
    for number in range(1, TOLERATED_FAILURES + 2):
        assert desk.given_up == [desk.service] * (number > TOLERATED_FAILURES)
        desk.computing.run([desk.job(number)])
    assert desk.given_up == [desk.service]


def test_logits_of_another_number_of_pictures_are_nobody_s(desk: Desk) -> None:
    desk.runtime.rows = 1
    desk.computing.run([desk.job(1), desk.job(2)])
    assert desk.results == {}
    expected = "AgentError: expected logits of 1 pictures, got 0 and 0"
    assert desk.failures == {1: ("failed", expected), 2: ("failed", expected)}


def test_a_bundle_that_was_taken_down_meanwhile_is_named(desk: Desk) -> None:
    assert desk.computing.run([desk.job(1, digest="0" * 64)])[:2] == (1, None)
    assert desk.failures[1][0] == "wrong_bundle"


def test_a_single_crop_is_not_copied() -> None:
    crop = np.zeros((4, 4, 3), np.uint8)
    assert np.shares_memory(together([crop]), crop)
    assert together([crop, crop + 1]).shape == (2, 4, 4, 3)


def test_one_answer_alone_is_not_taken_apart() -> None:
    contribution = Contribution(np.zeros((1, 3), np.float32), np.ones((1, 3), np.float32))
    assert apart(contribution, 1) == [contribution]


def test_heads_that_disagree_about_the_number_are_refused() -> None:
    contribution = Contribution(np.zeros((2, 3), np.float32), np.zeros((1, 3), np.float32))
    with pytest.raises(AgentError, match=r"^expected logits of 2 pictures, got 2 and 1$"):
        apart(contribution, 2)


def test_nothing_in_serving_or_asking_reads_a_clock_that_may_jump() -> None:
    """Deadlines, queues and graces count on the monotonic clock alone."""
    root = Path(computing.__file__).parents[2]
    wall = ("time.time(", "time_ns(", "datetime.now", "utcnow", "localtime", "gmtime")
    files = [*root.glob("mdp/**/*.py"), *root.glob("devices/**/*.py")]
    users = {file.name for file in files if any(call in file.read_text() for call in wall)}
    # Keys expire by date, the audit log has dates, and the probe writes one into a profile.
    assert users == {"audit.py", "watch.py", "probe.py"}
