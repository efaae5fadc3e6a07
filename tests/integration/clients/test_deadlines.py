"""No call outlasts its deadline, whatever keeps the client itself: pictures, threads, statuses."""

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import mdp
from mdp.client.crops import QUICK_PIXELS
from mdp.requests.prediction import Prediction
from mdp.testing.bundles import DEVICES, colour_picture, write_bundle
from mdp.testing.processes import PATIENCE_S, until
from tests.support.fleet import PLENTY_MS, Fleet

pytestmark = pytest.mark.usefixtures("no_leaks")

RED = colour_picture("red")
NOT_ASKED = dict.fromkeys(DEVICES, "not asked: no time left")
NOT_DECODED = "no answer within 100 ms: the picture was not decoded by then"
ALL_ABANDONED = "4 others are being decoded, 4 of them for calls that have ended"


@pytest.fixture
def slow_fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Alpha computes only once `gate/run` exists; the others are well."""
    (tmp_path / "gate").mkdir()
    with Fleet(tmp_path, write_bundle(tmp_path / "bundle")) as fleet:
        yield fleet.start_all(
            "beta", "gamma", odd=("alpha", "--hold", "run", "--gate", tmp_path / "gate")
        )


@contextmanager
def endless_picture(folder: Path) -> Iterator[Path]:
    """A file whose readers wait until the end of the block."""
    path = folder / "endless.png"
    os.mkfifo(path)
    try:
        yield path
    finally:
        # Whoever waits for a writer gets one; with it goes the last one, and the file ends.
        writer = os.open(path, os.O_RDWR)
        path.unlink()
        os.close(writer)


@pytest.mark.timeout(60)
def test_a_call_whose_picture_is_not_decoded_in_time_ends(fleet: Fleet, tmp_path: Path) -> None:
    with fleet.client() as client, endless_picture(tmp_path) as endless:
        for _ in range(4):
            with pytest.raises(mdp.DeadlineExceeded, match=NOT_DECODED) as info:
                client.classify(endless, deadline_ms=100.0)
            assert info.value.outcomes == NOT_ASKED
        # No device is blamed for it.
        assert client.classify(RED, deadline_ms=PLENTY_MS).used == DEVICES
        answers = list(client.stream([endless, RED], deadline_ms=100.0, errors="yield"))
        assert isinstance(answers[0], mdp.DeadlineExceeded)
        # Each of the four goes on, and there are threads for no more.
        assert str(answers[0]) == f"{NOT_DECODED}: {ALL_ABANDONED}"
        assert len(answers) == 2


@pytest.mark.timeout(60)
def test_a_hanging_decoder_blocks_no_array(fleet: Fleet, tmp_path: Path) -> None:
    large = np.repeat(np.repeat(RED, 100, axis=0), 100, axis=1)
    assert large.size > 3 * QUICK_PIXELS

    async def ask(endless: Path) -> None:
        async with mdp.AsyncClient.connect(fleet.write(), timeout_s=PATIENCE_S) as client:
            calls = [client.classify(endless, deadline_ms=100.0) for _ in range(40)]
            errors = await asyncio.gather(*calls, return_exceptions=True)
            told = Counter(map(str, errors))
            assert isinstance(errors[0], mdp.DeadlineExceeded)
            assert errors[0].outcomes == NOT_ASKED
            assert told == {NOT_DECODED: 4, f"{NOT_DECODED}: {ALL_ABANDONED}": 36}
            for picture in (RED, large):
                assert (await client.classify(picture, deadline_ms=PLENTY_MS)).used == DEVICES

    with endless_picture(tmp_path) as endless:
        # Ends though the decoders do not.
        asyncio.run(ask(endless))


def in_thread(work: object) -> threading.Thread:
    assert callable(work)
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_call_is_under_way_beside_another_thread_s_and_ends_before_it(
    slow_fleet: Fleet, tmp_path: Path
) -> None:
    longer: list[Prediction] = []
    with slow_fleet.client() as client:
        first = in_thread(lambda: longer.append(client.classify(RED, deadline_ms=PLENTY_MS)))
        until(lambda: (tmp_path / "gate" / "run-1").exists(), "the other call is under way")
        # It is begun, answered and decided in the other one's turn.
        answer = client.classify(RED, deadline_ms=800.0)
        assert answer.used == DEVICES[1:]
        assert answer.missing == {"alpha": "late"}
        assert first.is_alive()
        (tmp_path / "gate" / "run").touch()
        first.join(PATIENCE_S)
    assert [answer.used for answer in longer] == [DEVICES]


def test_a_stream_waits_for_no_other_thread(slow_fleet: Fleet, tmp_path: Path) -> None:
    longer: list[Prediction] = []
    with slow_fleet.client() as client:
        stream = client.stream([RED] * 2, deadline_ms=800.0, in_flight=2)
        next(stream)
        first = in_thread(lambda: longer.append(client.classify(RED, deadline_ms=PLENTY_MS)))
        # The second picture is under way since before; its answer comes in the other's turn.
        second = next(stream)
        assert isinstance(second, Prediction)
        assert second.missing == {"alpha": "late"}
        assert first.is_alive()
        (tmp_path / "gate" / "run").touch()
        first.join(PATIENCE_S)
    assert len(longer) == 1


def test_asking_for_a_status_does_not_hold_up_the_calls_under_way(slow_fleet: Fleet) -> None:
    with slow_fleet.client() as client:
        stream = client.stream([RED] * 2, deadline_ms=600.0, in_flight=2)
        next(stream)
        slow_fleet.agents["gamma"].stop()
        statuses = client.status(timeout_s=2.5)
        assert statuses[2].state in ("SILENT", "UNREACHABLE")
        second = next(stream)
        assert isinstance(second, Prediction)
        # Decided while the status was waited for, and not two seconds later.
        assert second.latency_ms < 2000.0
        assert second.missing["alpha"] == "late"
