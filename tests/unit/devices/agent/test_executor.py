"""Requests computed one or several at a time, by a runtime that does as it is told. No sockets."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from devices.agent.bundles import LoadableBundle, LoadedRung, ServedBundle
from devices.agent.counters import Counters
from devices.agent.executor import TOLERATED_FAILURES, Executor, split_batch, stack_batch
from devices.agent.jobs import PictureJob
from devices.agent.lifecycle import Lifecycle
from devices.agent.replies import Replies
from mdp.errors import AgentError
from mdp.formats.bundle import Bundle
from mdp.formats.plan import Encoding
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels
from mdp.protocol.messages import (
    Buffer,
    Failure,
    Infer,
    Message,
    Result,
    contribution_of,
    decode,
    rung_answers_key,
)
from mdp.testing.bundles import SIZES, write_bundle

SIZE = SIZES[0]


class Recorder:
    """Stands for the router: keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Message, list[Buffer]]] = []
        #: Called before each message is kept.
        self.before_send: Callable[[], None] = lambda: None

    def send(self, route: bytes, frames: list[Buffer]) -> bool:
        self.before_send()
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
    """An executor, what it sends, and what it counts."""

    def __init__(self, bundle: Bundle) -> None:
        self.now_s = 0.0
        self.router, self.counters, self.runtime = Recorder(), Counters(), Runtime()
        router: Any = self.router
        self.events: list[str] = []
        source = LoadableBundle(
            bundle=bundle, assignment=bundle.assignment("alpha"), load=lambda: self.runtime
        )
        self.lifecycle = Lifecycle(
            source, self.counters, report=self.events.append, clock=lambda: 0.0
        )
        self.served = ServedBundle(source=source, runtime=self.runtime)
        self.lifecycle.install(self.served)
        self.lifecycle.enter("READY")
        replies = Replies(router, self.counters, self.events.append)
        self.executor = Executor(self.lifecycle, replies, self.counters, self.clock)

    def clock(self) -> float:
        self.now_s += 0.5
        return self.now_s

    def job(
        self,
        number: int,
        pixels: bytes | None = None,
        encoding: Encoding = "raw",
        deadline_s: float = 1e9,
        traceparent: str = "",
    ) -> PictureJob:
        """A request whose picture is all `number`."""
        infer = Infer(
            request_id=number,
            digest=self.served.digest,
            k=0,
            budget_ms=1.0,
            image_size=SIZE,
            encoding=encoding,
        )
        return PictureJob(
            route=b"p%d" % number,
            client=str(number),
            request_id=number,
            served=self.served,
            arrived_s=-1.0 * number,
            deadline_s=deadline_s,
            traceparent=traceparent,
            infer=infer,
            buffer=bytes([number]) * SIZE**2 * 3 if pixels is None else pixels,
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
    assert desk.executor.run(jobs)[:2] == (3, 0.5)
    assert desk.runtime.sizes == [3]
    assert [route for route, _, _ in desk.router.sent] == [b"p1", b"p2", b"p3"]
    for number, (_, message, buffers) in enumerate(desk.router.sent, start=1):
        assert isinstance(message, Result)
        contribution = contribution_of(buffers[0], 3)
        np.testing.assert_array_equal(contribution.heads, [[number] * 3, [number + 1] * 3])
        # It came `number` seconds before 0, and computing began at 0.5.
        assert message.queue_ms == (number + 0.5) * 1e3
        assert message.compute_ms == 500.0
    assert desk.counters.counts["answered"] == desk.served.answered == 3


def test_one_bad_picture_fails_alone(desk: Desk) -> None:
    jobs = [desk.job(1), desk.job(2, b"no jpeg", "jpeg"), desk.job(3, jpeg(), "jpeg")]
    pictures, took_s, *_ = desk.executor.run(jobs)
    assert pictures == 2
    assert took_s is not None
    assert desk.runtime.sizes == [2]
    assert desk.results.keys() == {1, 3}
    assert desk.failures.keys() == {2}
    assert desk.failures[2][0] == "bad_message"
    assert desk.served.failures == 0, "the model is not to blame"


def test_a_failure_of_a_sampled_trace_is_reported(desk: Desk) -> None:
    desk.events.clear()
    for number, flags in ((1, "01"), (2, "00")):
        traceparent = f"00-{'a' * 32}-{'b' * 16}-{flags}"
        desk.executor.run([desk.job(number, b"no JPEG", "jpeg", traceparent=traceparent)])
    (line,) = desk.events
    assert line.startswith(f"trace {'a' * 32} not answered: bad_message: ")


def test_decoding_is_told_apart_from_computing(desk: Desk) -> None:
    jobs = [desk.job(1), desk.job(2, b"no jpeg", "jpeg"), desk.job(3, jpeg(), "jpeg")]
    # Each reading of this clock takes half a second.
    assert desk.executor.run(jobs) == (2, 1.5, [0.0, 0.5, 0.5], 1.5)
    desk.runtime.raises = lambda pixels: RuntimeError("on fire")
    assert desk.executor.run([desk.job(3, jpeg(), "jpeg")]) == (1, None, [0.5], 1.0)


def test_nothing_is_computed_for_bad_pictures_only(desk: Desk) -> None:
    assert desk.executor.run([desk.job(1, b"no jpeg", "jpeg")])[:2] == (0, None)
    assert desk.runtime.sizes == []


def test_no_memory_for_a_picture(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = PictureJob.pixels

    def scarce(job: PictureJob) -> Pixels:
        if job.request_id == 1:
            raise MemoryError
        return pixels(job)

    monkeypatch.setattr(PictureJob, "pixels", scarce)
    desk.executor.run([desk.job(1), desk.job(2)])
    assert desk.failures == {1: ("failed", "no memory for the picture")}
    assert desk.results.keys() == {2}


def test_of_a_batch_that_fails_each_is_tried_alone(desk: Desk) -> None:
    def on_twos(pixels: Pixels) -> Exception | None:
        return RuntimeError("a two") if 2 in pixels else None

    desk.runtime.raises = on_twos
    assert desk.executor.run([desk.job(number) for number in (1, 2, 3)])[:2] == (3, None)
    assert desk.runtime.sizes == [3, 1, 1, 1]
    assert desk.results.keys() == {1, 3}
    assert desk.failures == {2: ("failed", "RuntimeError: a two")}
    assert desk.served.failures == 0, "the one after it succeeded"
    assert desk.lifecycle.state == "READY"


def test_whoever_has_no_time_left_is_not_tried_again(desk: Desk) -> None:
    desk.runtime.raises = lambda pixels: MemoryError() if len(pixels) > 1 else None
    desk.executor.run([desk.job(1, deadline_s=0.9), desk.job(2)])
    assert desk.failures == {
        1: ("too_late", "computed in a batch that failed, and no time was left")
    }
    assert desk.results.keys() == {2}


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("std::bad_alloc")], ids=repr)
def test_a_model_that_runs_out_of_memory_fails_that_request(desk: Desk, error: Exception) -> None:
    desk.runtime.raises = lambda pixels: error if 1 in pixels else None
    assert desk.executor.run([desk.job(1)])[:2] == (1, None)
    assert desk.failures[1] == ("failed", f"{type(error).__name__}: {error}".strip())
    assert desk.lifecycle.failure == f"{type(error).__name__}: {error}".strip()
    desk.executor.run([desk.job(2)])
    assert desk.lifecycle.failure == ""


def test_a_bundle_is_withdrawn_once_and_before_its_last_failure_is_sent(desk: Desk) -> None:
    desk.runtime.raises = lambda pixels: RuntimeError("on fire")
    sent_before: list[int] = []
    desk.lifecycle._report = lambda event: sent_before.append(len(desk.router.sent))
    for number in range(1, TOLERATED_FAILURES + 1):
        assert desk.lifecycle.state == "READY"
        desk.executor.run([desk.job(number)])
    assert desk.lifecycle.state == "FAILED"
    assert sent_before == [TOLERATED_FAILURES - 1]
    # What was admitted before fails without being computed.
    desk.runtime.sizes.clear()
    assert desk.executor.run([desk.job(9)])[:2] == (1, None)
    assert desk.failures[9] == ("failed", "RuntimeError: on fire")
    assert (desk.runtime.sizes, len(sent_before)) == ([], 1)


def test_logits_of_another_number_of_pictures_are_nobody_s(desk: Desk) -> None:
    desk.runtime.rows = 1
    desk.executor.run([desk.job(1), desk.job(2)])
    assert desk.results == {}
    expected = "AgentError: expected logits of 1 pictures, got 0 and 0"
    assert desk.failures == {1: ("failed", expected), 2: ("failed", expected)}


def test_a_single_crop_is_not_copied() -> None:
    crop = np.zeros((4, 4, 3), np.uint8)
    assert np.shares_memory(stack_batch([crop]), crop)
    assert stack_batch([crop, crop + 1]).shape == (2, 4, 4, 3)


def test_one_answer_alone_is_not_taken_apart() -> None:
    contribution = Contribution(np.zeros((1, 3), np.float32), np.ones((1, 3), np.float32))
    assert split_batch(contribution, 1) == [contribution]


def test_heads_that_disagree_about_the_number_are_refused() -> None:
    contribution = Contribution(np.zeros((2, 3), np.float32), np.zeros((1, 3), np.float32))
    with pytest.raises(AgentError, match=r"^expected logits of 2 pictures, got 2 and 1$"):
        split_batch(contribution, 2)


def test_nothing_in_serving_or_asking_reads_a_clock_that_may_jump() -> None:
    """Deadlines, queues and graces count on the monotonic clock alone."""
    root = Path(__file__).parents[4]
    wall = ("time.time(", "time_ns(", "datetime.now", "utcnow", "localtime", "gmtime")
    files = [*root.glob("mdp/**/*.py"), *root.glob("devices/**/*.py")]
    users = {file.name for file in files if any(call in file.read_text() for call in wall)}
    # Keys and certificates expire by date, an agent's events and its audit log have dates, the
    # probe writes one into a profile, the gateway's page tells when a fault was, lines about
    # cameras when they were looked at, spans have dates, and scenes and bundles that are taught are
    # named by theirs.
    assert users == {
        "answers.py", "certificate.py", "events.py", "fleets.py", "probe.py", "recorder.py",
        "review.py", "teacher.py", "tracing.py", "watch.py",
    }  # fmt: skip


def test_a_reply_names_the_rung_that_ran(desk: Desk) -> None:
    below = Runtime()
    desk.served.lower = [LoadedRung(2, below, {1: 0.1})]
    desk.executor.run([desk.job(1)])
    desk.executor.run([desk.job(2), desk.job(3)], 1)
    assert [desk.results[number].rung for number in (1, 2, 3)] == [0, 2, 2]
    assert (desk.runtime.sizes, below.sizes) == ([1], [2])
    counts = desk.counters.counts
    assert (counts["answered"], counts[rung_answers_key(2)]) == (3, 2)


def test_a_bundle_with_fewer_rungs_than_the_queue_knows_runs_at_its_lowest(desk: Desk) -> None:
    desk.executor.run([desk.job(1)], 3)
    assert desk.results[1].rung == 0


def test_scores_and_maps_of_a_batch_are_each_pictures_own() -> None:
    logits = np.arange(6, dtype=np.float32).reshape(2, 3)
    maps = np.arange(512, dtype=np.uint32).reshape(2, 16, 16).astype(np.uint8)
    whole = Contribution(None, logits, np.array([0.5, 2.5], dtype=np.float32), maps)
    first, second = split_batch(whole, 2)
    assert (first.anomaly, second.anomaly) == (0.5, 2.5)
    assert second.anomaly_map is not None
    assert (second.anomaly_map == maps[1]).all()
    assert (second.bag == logits[1]).all()


def test_an_answer_is_counted_before_its_client_can_read_it(desk: Desk) -> None:
    """A client may request the agent's status as soon as it has the answer."""
    desk.served.lower = [LoadedRung(2, Runtime(), {1: 0.1})]
    counted: list[tuple[int, int]] = []

    def keep_counts() -> None:
        counts = desk.counters.counts
        counted.append((counts["answered"], counts.get(rung_answers_key(2), 0)))

    desk.router.before_send = keep_counts
    desk.executor.run([desk.job(1), desk.job(2)], 1)
    desk.executor.run([desk.job(3)])
    assert counted == [(1, 1), (2, 2), (3, 2)]
