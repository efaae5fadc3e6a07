"""Calls of the demo that have no answer at first."""

from collections.abc import Iterator

import pytest

from mdp.demo.scenes import MOST_CALLS, DemoFailed, RepeatedCalls
from mdp.errors import DeadlineExceeded
from mdp.requests.prediction import Prediction
from tests.unit.mdp.gateway.test_devices import answer


def calls_that_fail(times: int) -> Iterator[Prediction | DeadlineExceeded]:
    for _ in range(times):
        yield DeadlineExceeded("no answer within 500 ms (alpha: late)", {"alpha": "late"})
    yield answer("alpha")


@pytest.mark.parametrize("failures", range(MOST_CALLS))
def test_a_call_without_an_answer_is_made_again_and_counted(failures: int) -> None:
    outcomes, calls = calls_that_fail(failures), RepeatedCalls(500)

    def call() -> Prediction:
        outcome = next(outcomes)
        if isinstance(outcome, DeadlineExceeded):
            raise outcome
        return outcome

    assert calls.answer(call).used == ("alpha",)
    assert calls.count == failures


def test_what_never_answers_ends_the_demo_with_what_to_do() -> None:
    made = 0

    def call() -> Prediction:
        nonlocal made
        made += 1
        raise DeadlineExceeded("no answer within 500 ms (alpha: late)", {"alpha": "late"})

    with pytest.raises(DemoFailed) as failed:
        RepeatedCalls(500).answer(call)
    assert made == MOST_CALLS
    assert str(failed.value) == (
        "no answer within 500 ms (alpha: late), 4 times in a row; on a machine with other work "
        "give --deadline-ms 2000"
    )
