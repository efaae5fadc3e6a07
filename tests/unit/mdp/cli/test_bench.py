"""Sums of `mdp bench`."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from mdp.cli.bench import WARM_UP_REQUESTS, flat, noise_picture, percentiles, run_bench
from mdp.errors import DeadlineExceeded, MDPError, PictureError
from mdp.requests.prediction import MemberTiming, Prediction


def prediction(
    latency_ms: float, *compute_ms: float, mode: Any = "stacked", stage: Any = "all"
) -> Prediction:
    return Prediction(
        label="red",
        probability=1.0,
        top=(("red", 1.0),),
        mode=mode,
        used=tuple(f"d{k}" for k in range(len(compute_ms))),
        missing={} if len(compute_ms) > 1 else {"d1": "overloaded: 16 requests wait already"},
        missing_codes={} if len(compute_ms) > 1 else {"d1": "overloaded"},
        expected_accuracy=None,
        latency_ms=latency_ms,
        deadline_ms=100.0,
        stage=stage,
        members=tuple(
            MemberTiming(device=f"d{k}", k=k, queue_ms=0.0, compute_ms=each, network_ms=0.0)
            for k, each in enumerate(compute_ms)
        ),
    )


class FakeClient:
    """Answers in a fixed order, and counts; its first call takes `first_ms`."""

    def __init__(self, answers: list[Prediction | MDPError], first_ms: float = 1.0) -> None:
        self.answers = answers
        self.first_ms = first_ms
        self.warmed_up = 0
        self.in_flight = 0

    def classify(self, picture: object, *, deadline_ms: float) -> Prediction:
        if not self.warmed_up and deadline_ms < self.first_ms:
            raise DeadlineExceeded("late", {"d0": "late"})
        self.warmed_up += 1
        return prediction(1.0, 1.0)

    def stream(
        self, pictures: Iterable[object], *, deadline_ms: float, in_flight: int, errors: str
    ) -> Iterator[Prediction | MDPError]:
        assert errors == "yield"
        self.in_flight = in_flight
        for _, answer in zip(list(pictures), self.answers, strict=True):
            yield answer


def test_percentiles_interpolate() -> None:
    assert percentiles([1.0, 2.0, 3.0, 4.0], (50, 99)) == pytest.approx({"p50": 2.5, "p99": 3.97})
    assert percentiles([7.0], (50, 90, 99)) == {"p50": 7.0, "p90": 7.0, "p99": 7.0}


def run(client: Any, requests: int, in_flight: int = 1) -> dict[str, Any]:
    return run_bench(
        client, [noise_picture(8)], requests=requests, deadline_ms=100.0, in_flight=in_flight
    )


def test_a_run_is_summed_up() -> None:
    client = FakeClient(
        [
            prediction(10.0, 4.0, 6.0),
            DeadlineExceeded("late", {"d0": "late"}, {"d0": "late"}),
            prediction(20.0, 5.0, mode="single"),
            prediction(30.0, 10.0, 2.0),
            # A cascade's first stage was sure: no member failed to answer.
            prediction(20.0, 5.0, stage="first"),
        ]
    )
    outcome = run(client, requests=5)
    assert client.warmed_up == WARM_UP_REQUESTS
    assert client.in_flight == 1
    assert outcome["scenario"] == "single-stream"
    assert (outcome["requests"], outcome["answered"], outcome["partial"]) == (5, 4, 1)
    assert outcome["unanswered"] == {"d0": {"late": 1}}
    assert outcome["missing"] == {"d1": {"overloaded": 1}}
    assert outcome["past_deadline"] == 0
    assert outcome["latency_ms"]["p50"] == 20.0
    assert outcome["latency_ms"]["max"] == 30.0
    assert outcome["overhead_ms"]["p50"] == 15.0
    assert outcome["modes"] == {"stacked": 3, "single": 1}
    assert outcome["stages"] == {"all": 3, "first": 1}
    assert outcome["throughput_per_s"] > 0


def test_a_run_without_any_answer_is_summed_up_too() -> None:
    codes = {"d1": "too_late", "d0": "late"}
    error = DeadlineExceeded("late", {"d1": "too_late: 9 ms", "d0": "late"}, codes)
    outcome = run(FakeClient([error] * 2), requests=2, in_flight=3)
    assert outcome["scenario"] == "stream-3"
    assert (outcome["answered"], outcome["throughput_per_s"]) == (0, 0.0)
    assert outcome["unanswered"] == {"d0": {"late": 2}, "d1": {"too_late": 2}}
    assert outcome["latency_ms"] == dict.fromkeys(("p50", "p90", "p99", "max"))
    figures = dict(flat(outcome))
    assert figures["latency_ms.max"] == figures["overhead_ms.p99"] == "-"
    assert figures["unanswered.d1.too_late"] == "2"


def test_answers_after_their_deadline_are_counted() -> None:
    outcome = run(FakeClient([prediction(ms, 4.0, 6.0) for ms in (99.9, 100.1)]), requests=2)
    assert (outcome["answered"], outcome["past_deadline"]) == (2, 1)


def test_a_picture_that_cannot_be_read_ends_the_run() -> None:
    broken = PictureError("11.png: no picture")
    with pytest.raises(PictureError, match=r"^11\.png: no picture$"):
        run(FakeClient([prediction(10.0, 4.0, 6.0), broken]), requests=2)


def test_a_first_call_that_would_miss_the_deadline_does_not_end_the_run() -> None:
    client = FakeClient([prediction(10.0, 4.0, 6.0)] * 2, first_ms=500.0)
    outcome = run(client, requests=2)
    assert (client.warmed_up, outcome["answered"]) == (WARM_UP_REQUESTS, 2)
