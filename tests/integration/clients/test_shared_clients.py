"""One client for many: threads, streams that are left, arrays that are filled anew."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest

import mdp
from mdp.errors import InferenceError
from mdp.pictures.crop import Pixels
from mdp.testing import fake_fleet

pytestmark = pytest.mark.usefixtures("no_leaks")
PICTURE = np.zeros((48, 64, 3), dtype=np.uint8)
DEADLINE_MS = 20_000.0


def test_threads_are_told_at_once_that_nobody_can_answer() -> None:
    """Where nothing else is under way, nothing but other threads' calls can end a wait."""
    told: Counter[str] = Counter()
    with fake_fleet(members=2) as fleet, mdp.Client.connect(fleet.path) as client:
        client.leave_out("device-0", "device-1")

        def ask() -> None:
            for _ in range(100):
                try:
                    client.classify(PICTURE, deadline_ms=DEADLINE_MS)
                except Exception as error:
                    told[type(error).__name__] += 1

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            client.reload()
        for thread in threads:
            thread.join()
        assert told == {"QuorumNotMet": 600}


def test_an_array_may_be_filled_anew_once_its_call_is_begun() -> None:
    """A camera's buffer of the member's own size, which is sent as it is."""
    buffer = np.zeros((32, 32, 3), dtype=np.uint8)

    def frames(count: int) -> Iterator[Pixels]:
        for number in range(count):
            buffer[:] = 255 * (number % 2)
            yield buffer

    with fake_fleet(labels=["black", "white"], members=1) as fleet:
        fleet.members[0].answer(lambda crop: "white" if crop.mean() > 128 else "black")
        fleet.members[0].delay(10)
        with mdp.Client.connect(fleet.path) as client:
            answers = client.stream(frames(24), in_flight=16, deadline_ms=DEADLINE_MS)
            assert [one.label for one in answers] == ["black", "white"] * 12


def test_a_stream_that_is_left_asks_nobody_any_more() -> None:
    with fake_fleet(members=2) as fleet:
        for member in fleet.members:
            member.delay(50)
        with mdp.Client.connect(fleet.path) as client:
            for _ in client.stream([PICTURE] * 40, in_flight=40, deadline_ms=DEADLINE_MS):
                break
            asked = fleet.members[0].requests
            client.classify(PICTURE, deadline_ms=DEADLINE_MS)
            # Those that were on their way are answered; all others were given up.
            assert fleet.members[0].requests - asked < 10


@pytest.mark.parametrize("number", [np.float64, np.float32, np.int64, Fraction])
def test_numbers_of_other_libraries_are_deadlines(number: type) -> None:
    deadline_ms = number(20_000)
    with fake_fleet(members=1) as fleet, mdp.Client.connect(fleet.path) as client:
        assert client.classify(PICTURE, deadline_ms=deadline_ms).deadline_ms == DEADLINE_MS
        (answer,) = client.stream([PICTURE], deadline_ms=deadline_ms)
        assert isinstance(answer.deadline_ms, float)


def test_a_first_call_does_not_wait_for_one_that_is_away_until_its_end() -> None:
    async def ask() -> mdp.Prediction:
        client = mdp.AsyncClient(fleet.path)
        try:
            return await client.classify(PICTURE, deadline_ms=4000.0)
        finally:
            await client.aclose()

    with fake_fleet(members=3) as fleet:
        fleet.members[2].stop()
        answer = asyncio.run(ask())
    assert set(answer.used) == {"device-0", "device-1"}


def test_an_error_is_whole_in_another_process() -> None:
    import copy
    import pickle

    with fake_fleet(members=1) as fleet, mdp.Client.connect(fleet.path) as client:
        client.leave_out("device-0")
        with pytest.raises(InferenceError) as told:
            client.classify(PICTURE)
    for again in (pickle.loads(pickle.dumps(told.value)), copy.copy(told.value)):
        assert (type(again), str(again)) == (type(told.value), str(told.value))
        assert (again.outcomes, again.codes) == (told.value.outcomes, told.value.codes)
