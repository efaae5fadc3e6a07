"""Three agents that are well: every way to ask them."""

import asyncio
import io
import threading
from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("healthy")
    with Fleet(folder, write_bundle(folder / "bundle")) as fleet:
        fleet.start_all()
        yield fleet


def complete(answer: Prediction, label: str, mode: str = "stacked") -> bool:
    assert (answer.label, answer.mode) == (label, mode)
    assert answer.used == DEVICES
    assert answer.missing == {}
    assert answer.expected_accuracy == getattr(subset_accuracy((0, 1, 2)), mode)
    assert answer.latency_ms <= answer.deadline_ms
    return True


@pytest.mark.parametrize("fusion", ["stacked", "boosted", "bagged"])
def test_every_mode_on_request(fleet: Fleet, fusion: Fusion) -> None:
    with fleet.client(fusion) as client:
        for label in LABELS:
            answer = client.classify(colour_picture(label), deadline_ms=PLENTY_MS)
            assert complete(answer, label, fusion)
        assert client.counters == {"late": 0, "duplicate": 0, "malformed": 0}


def test_the_timings_of_every_member(fleet: Fleet) -> None:
    with fleet.client() as client:
        answer = client.classify(colour_picture("red"), deadline_ms=PLENTY_MS)
    assert [(m.device, m.k) for m in answer.members] == [(d, k) for k, d in enumerate(DEVICES)]
    for member in answer.members:
        assert member.compute_ms > 0
        assert member.queue_ms >= 0
        assert member.queue_ms + member.compute_ms <= answer.latency_ms


def test_every_kind_of_picture(fleet: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "green.png"
    Image.fromarray(colour_picture("green")).save(path)
    with fleet.client() as client, Image.open(path) as opened:
        for picture in (path, str(path), opened, colour_picture("green")):
            assert complete(client.classify(picture, deadline_ms=PLENTY_MS), "green")


def test_pictures_that_cannot_be_used_raise_and_the_client_goes_on(
    fleet: Fleet, tmp_path: Path
) -> None:
    (tmp_path / "text.jpg").write_text("I am not a picture")
    with fleet.client() as client:
        with pytest.raises(mdp.PictureError, match=r"text\.jpg: expected a picture"):
            client.classify(tmp_path / "text.jpg", deadline_ms=PLENTY_MS)
        with pytest.raises(
            mdp.PictureError, match=r"expected a uint8 array \[H, W\], .* got float64"
        ):
            client.classify(np.zeros((3, 3)), deadline_ms=PLENTY_MS)  # type: ignore[arg-type]
        for bad in (0, -1, float("nan"), float("inf")):
            with pytest.raises(mdp.InputError, match="deadline_ms: expected more than 0"):
                client.classify(colour_picture("red"), deadline_ms=bad)
        file = io.BytesIO()
        Image.fromarray(colour_picture("red")).save(file, "PNG")
        file.seek(0)
        for picture in (colour_picture("red"), file, file.getvalue()):
            assert complete(client.classify(picture, deadline_ms=PLENTY_MS), "red")


@pytest.mark.parametrize("in_flight", [1, 4])
def test_a_broken_picture_takes_its_own_place_in_a_stream(
    fleet: Fleet, tmp_path: Path, in_flight: int
) -> None:
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


@pytest.mark.parametrize("in_flight", [1, 2, 7, 40])
def test_a_stream_answers_in_order(fleet: Fleet, in_flight: int) -> None:
    labels = LABELS * 5
    taken: list[str] = []
    given = 0

    def pictures() -> Iterator[np.ndarray]:
        for label in labels:
            taken.append(label)
            assert len(taken) - given <= in_flight
            yield colour_picture(label)

    with fleet.client() as client:
        answers = client.stream(pictures(), deadline_ms=PLENTY_MS, in_flight=in_flight)
        for label, answer in zip(labels, answers, strict=True):
            given += 1
            assert isinstance(answer, Prediction)
            assert complete(answer, label)
    assert taken == labels


def test_a_stream_keeps_as_many_under_way_as_asked(fleet: Fleet) -> None:
    taken: list[str] = []

    def pictures() -> Iterator[np.ndarray]:
        for label in LABELS * 3:
            taken.append(label)
            yield colour_picture(label)

    with fleet.client() as client:
        stream = client.stream(pictures(), deadline_ms=PLENTY_MS, in_flight=4)
        assert taken == [], "nothing is asked before somebody wants an answer"
        next(stream)
        assert len(taken) == 4
        next(stream)
        assert len(taken) == 5


def test_an_empty_stream_and_one_that_is_left(fleet: Fleet) -> None:
    with fleet.client() as client:
        assert list(client.stream([], deadline_ms=PLENTY_MS)) == []
        pictures = [colour_picture(label) for label in LABELS]
        for _ in client.stream(pictures, deadline_ms=PLENTY_MS, in_flight=3):
            break
        answer = client.classify(colour_picture("blue"), deadline_ms=PLENTY_MS)
        assert complete(answer, "blue")


def test_bad_arguments_of_a_stream_are_said_at_once(fleet: Fleet) -> None:
    with fleet.client() as client:
        with pytest.raises(mdp.InputError, match="in_flight: expected a whole number"):
            client.stream([], in_flight=0)
        with pytest.raises(mdp.InputError, match="deadline_ms"):
            client.stream([], deadline_ms=0)


def test_threads_take_turns(fleet: Fleet) -> None:
    wrong: list[object] = []

    def work(client: mdp.Client, label: str) -> None:
        for _ in range(10):
            answer = client.classify(colour_picture(label), deadline_ms=PLENTY_MS)
            if (answer.label, answer.missing) != (label, {}):
                wrong.append(answer)

    with fleet.client() as client:
        threads = [threading.Thread(target=work, args=(client, label)) for label in LABELS * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_streams_in_two_threads_get_their_own_answers(fleet: Fleet) -> None:
    labels: dict[str, list[str]] = {}

    def work(client: mdp.Client, label: str) -> None:
        pictures = [colour_picture(label)] * 10
        answers = client.stream(pictures, deadline_ms=PLENTY_MS, in_flight=3)
        labels[label] = [p.label for p in answers if isinstance(p, Prediction)]

    with fleet.client() as client:
        threads = [threading.Thread(target=work, args=(client, label)) for label in LABELS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert labels == {label: [label] * 10 for label in LABELS}


def test_several_clients_at_once(fleet: Fleet) -> None:
    with fleet.client() as one, fleet.client("bagged") as two:
        for label in LABELS:
            assert complete(one.classify(colour_picture(label), deadline_ms=PLENTY_MS), label)
            answer = two.classify(colour_picture(label), deadline_ms=PLENTY_MS)
            assert complete(answer, label, "bagged")


def test_status_of_all(fleet: Fleet) -> None:
    with fleet.client() as client:
        client.classify(colour_picture("red"), deadline_ms=PLENTY_MS)
        statuses = client.status(timeout_s=PATIENCE_S)
    assert [status.device for status in statuses] == list(DEVICES)
    for status in statuses:
        assert (status.state, status.bundle, status.reason) == ("READY", "colours", "")
        assert status.provider == "CPUExecutionProvider"
        assert status.usable
        assert status.counts["answered"] > 0
        assert status.address == fleet.agents[status.device].address


def test_a_closed_client_says_so_and_closes_twice(fleet: Fleet) -> None:
    with fleet.client() as client:
        pass
    client.close()
    with pytest.raises(mdp.InputError, match="this client is closed"):
        client.classify(colour_picture("red"))
    with pytest.raises(mdp.InputError, match="this client is closed"):
        client.status()


def test_gather(fleet: Fleet) -> None:
    async def ask() -> list[Prediction]:
        async with mdp.AsyncClient.connect(fleet.write(), timeout_s=PATIENCE_S) as client:
            pictures = [colour_picture(label) for label in LABELS * 5]
            return await asyncio.gather(
                *[client.classify(picture, deadline_ms=PLENTY_MS) for picture in pictures]
            )

    answers = asyncio.run(ask())
    assert all(complete(a, label) for a, label in zip(answers, LABELS * 5, strict=True))


def test_async_modes_status_and_stream(fleet: Fleet) -> None:
    async def ask() -> list[str]:
        path = fleet.write()
        async with mdp.AsyncClient.connect(path, fusion="boosted", timeout_s=PATIENCE_S) as client:
            answer = await client.classify(colour_picture("red"), deadline_ms=PLENTY_MS)
            assert complete(answer, "red", "boosted")
            statuses = await client.status(timeout_s=PATIENCE_S)
            assert [status.state for status in statuses] == ["READY"] * 3
            pictures = [colour_picture(label) for label in LABELS * 4]
            stream = client.stream(pictures, deadline_ms=PLENTY_MS, in_flight=3)
            labels = [answer.label async for answer in stream]
            with pytest.raises(mdp.InputError, match="in_flight"):
                await anext(client.stream(pictures, in_flight=0))
            with pytest.raises(mdp.InputError, match="deadline_ms"):
                await client.classify(pictures[0], deadline_ms=-1)
            return labels

    assert asyncio.run(ask()) == LABELS * 4


def test_an_async_stream_that_fails_leaves_nothing_behind(
    fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "text.png").write_text("text")
    pictures = [tmp_path / "text.png"] * 4

    async def ask() -> None:
        async with mdp.AsyncClient.connect(fleet.write(), timeout_s=PATIENCE_S) as client:
            with pytest.raises(mdp.PictureError):
                async for _ in client.stream(pictures, deadline_ms=PLENTY_MS, in_flight=4):
                    pass
            assert len(asyncio.all_tasks()) == 1

    asyncio.run(ask())
    assert caplog.records == [], "asyncio had something to complain about"


def test_a_cancelled_call_does_not_disturb_the_next(fleet: Fleet) -> None:
    async def ask() -> Prediction:
        async with mdp.AsyncClient.connect(fleet.write(), timeout_s=PATIENCE_S) as client:
            first = asyncio.create_task(client.classify(colour_picture("blue")))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            return await client.classify(colour_picture("green"), deadline_ms=PLENTY_MS)

    assert complete(asyncio.run(ask()), "green")


def test_large_frames_travel(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle", devices=("alpha",), sizes=(1024,))
    with Fleet(tmp_path, bundle) as fleet:
        fleet.start_all("alpha")
        with fleet.client() as client:
            picture = colour_picture("green", 1024, 1024)
            for _ in range(5):
                answer = client.classify(picture, deadline_ms=PLENTY_MS)
                assert (answer.label, answer.mode) == ("green", "single")
