"""Every way to call three healthy agents."""

import asyncio
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mdp
from mdp.fusion.fuse import Fusion
from mdp.pictures.crop import Picture
from mdp.requests.prediction import Prediction
from mdp.testing.bundles import DEVICES, LABELS, colour_picture, subset_accuracy, write_bundle
from mdp.testing.processes import PATIENCE_S
from tests.support.fleet import PLENTY_MS, Fleet

pytestmark = pytest.mark.usefixtures("no_leaks")


def complete(answer: Prediction, label: str, mode: str = "stacked") -> bool:
    assert (answer.label, answer.mode) == (label, mode)
    assert answer.used == DEVICES
    assert answer.missing == {}
    assert answer.expected_accuracy == getattr(subset_accuracy((0, 1, 2)), mode)
    assert answer.latency_ms <= answer.deadline_ms
    return True


@pytest.mark.parametrize("fusion", ["stacked", "boosted", "bagged"])
def test_every_mode_on_request_with_timings_and_status(fleet: Fleet, fusion: Fusion) -> None:
    with fleet.client(fusion) as client:
        for label in LABELS:
            answer = client.classify(colour_picture(label), deadline_ms=PLENTY_MS)
            assert complete(answer, label, fusion)
        assert client.counters == {"late": 0, "duplicate": 0, "malformed": 0}
        statuses = client.status(timeout_s=PATIENCE_S)
    assert [(m.device, m.k) for m in answer.members] == [(d, k) for k, d in enumerate(DEVICES)]
    for member in answer.members:
        assert member.compute_ms > 0
        assert 0 <= member.queue_ms <= answer.latency_ms - member.compute_ms
    assert [status.device for status in statuses] == list(DEVICES)
    for status in statuses:
        assert (status.state, status.bundle, status.reason) == ("READY", "colours", "")
        assert (status.provider, status.usable) == ("CPUExecutionProvider", True)
        assert status.counts["answered"] > 0
        assert status.address == fleet.agents[status.device].address


def test_every_kind_of_picture_and_wrong_ones(fleet: Fleet, tmp_path: Path) -> None:
    path, text = tmp_path / "green.png", tmp_path / "text.jpg"
    Image.fromarray(colour_picture("green")).save(path)
    text.write_text("I am not a picture")
    file = io.BytesIO(path.read_bytes())
    wrong: list[tuple[Any, str]] = [
        (text, r"text\.jpg: expected a picture"),
        (np.zeros((3, 3)), r"expected a uint8 array \[H, W\], .* got float64"),
    ]
    with fleet.client() as client, Image.open(path) as opened:
        for picture in (path, str(path), opened, colour_picture("green"), file, file.getvalue()):
            assert complete(client.classify(picture, deadline_ms=PLENTY_MS), "green")
        for bad, said in wrong:
            with pytest.raises(mdp.PictureError, match=said):
                client.classify(bad, deadline_ms=PLENTY_MS)
        for deadline_ms in (0, -1, float("nan"), float("inf")):
            with pytest.raises(mdp.InputError, match="deadline_ms: expected more than 0"):
                client.classify(colour_picture("red"), deadline_ms=deadline_ms)
        assert complete(client.classify(colour_picture("red"), deadline_ms=PLENTY_MS), "red")


@pytest.mark.parametrize("in_flight", [1, 4])
def test_a_stream_continues_past_a_bad_file(fleet: Fleet, tmp_path: Path, in_flight: int) -> None:
    text = tmp_path / "text.jpg"
    text.write_text("I am not a picture")
    pictures: list[Picture] = [
        colour_picture("red"),
        text,
        tmp_path / "gone.jpg",
        colour_picture("blue"),
    ]
    with fleet.client() as client:
        outcomes = list(
            client.stream(pictures, deadline_ms=PLENTY_MS, in_flight=in_flight, errors="yield")
        )
        said = [o.label if isinstance(o, Prediction) else type(o).__name__ for o in outcomes]
        assert said == ["red", "PictureError", "PictureError", "blue"]
        stream = client.stream(pictures, deadline_ms=PLENTY_MS, in_flight=in_flight)
        assert next(stream).label == "red"
        with pytest.raises(mdp.PictureError, match=r"text\.jpg: expected a picture"):
            next(stream)


@pytest.mark.parametrize("in_flight", [1, 4, 40])
def test_a_stream_answers_in_order_with_so_many_in_flight(fleet: Fleet, in_flight: int) -> None:
    labels = LABELS * 5
    taken: list[str] = []

    def pictures() -> Iterator[np.ndarray]:
        for label in labels:
            taken.append(label)
            yield colour_picture(label)

    with fleet.client() as client:
        with pytest.raises(mdp.InputError, match="in_flight: expected a whole number"):
            client.stream([], in_flight=0)
        with pytest.raises(mdp.InputError, match="deadline_ms"):
            client.stream([], deadline_ms=0)
        assert list(client.stream([], deadline_ms=PLENTY_MS)) == []
        stream = client.stream(pictures(), deadline_ms=PLENTY_MS, in_flight=in_flight)
        assert taken == [], "nothing is asked before an answer is wanted"
        for number, label in enumerate(labels):
            assert complete(next(stream), label)
            assert len(taken) == min(number + in_flight, len(labels))
        # A stream that is left does not disturb the next call.
        next(client.stream(pictures(), deadline_ms=PLENTY_MS, in_flight=in_flight))
        assert complete(client.classify(colour_picture("blue"), deadline_ms=PLENTY_MS), "blue")


def test_threads_with_calls_streams_and_clients_get_their_own_answers(fleet: Fleet) -> None:
    got: list[tuple[str, str]] = []

    def work(client: mdp.Client, label: str, mode: str) -> None:
        pictures = [colour_picture(label)] * 10
        single = (client.classify(picture, deadline_ms=PLENTY_MS) for picture in pictures)
        for answer in (*single, *client.stream(pictures, deadline_ms=PLENTY_MS, in_flight=3)):
            assert complete(answer, label, mode)
            got.append((label, mode))

    with fleet.client() as one, fleet.client("bagged") as two:
        threads = [
            threading.Thread(target=work, args=(client, label, mode))
            for label in LABELS
            for client, mode in ((one, "stacked"), (two, "bagged"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in threads)
    wanted = [(label, mode) for label in LABELS for mode in ("bagged", "stacked")]
    assert sorted(got) == sorted(wanted * 20)


def test_an_async_client(fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    labels, text = LABELS * 5, tmp_path / "text.png"
    text.write_text("text")
    pictures = [colour_picture(label) for label in labels]

    async def ask() -> None:
        path = fleet.write()
        async with mdp.AsyncClient.connect(path, fusion="boosted", timeout_s=PATIENCE_S) as client:
            first = asyncio.create_task(client.classify(colour_picture("blue")))
            await asyncio.sleep(0)
            first.cancel()
            calls = [client.classify(picture, deadline_ms=PLENTY_MS) for picture in pictures]
            answers = await asyncio.gather(*calls)
            stream = client.stream(pictures, deadline_ms=PLENTY_MS, in_flight=3)
            answers += [answer async for answer in stream]
            for answer, label in zip(answers, labels * 2, strict=True):
                assert complete(answer, label, "boosted")
            statuses = await client.status(timeout_s=PATIENCE_S)
            assert [status.state for status in statuses] == ["READY"] * 3
            with pytest.raises(mdp.InputError, match="in_flight"):
                await anext(client.stream(pictures, in_flight=0))
            with pytest.raises(mdp.InputError, match="deadline_ms"):
                await client.classify(pictures[0], deadline_ms=-1)
            with pytest.raises(mdp.PictureError):
                async for _ in client.stream([text] * 4, deadline_ms=PLENTY_MS, in_flight=4):
                    pass
            assert len(asyncio.all_tasks()) == 1

    asyncio.run(ask())
    assert caplog.records == [], "asyncio reported an error"


def test_large_frames_travel(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle", devices=("alpha",), sizes=(1024,))
    with Fleet(tmp_path, bundle) as fleet:
        fleet.start_all("alpha")
        with fleet.client() as client:
            picture = colour_picture("green", 1024, 1024)
            for _ in range(5):
                answer = client.classify(picture, deadline_ms=PLENTY_MS)
                assert (answer.label, answer.mode) == ("green", "single")
